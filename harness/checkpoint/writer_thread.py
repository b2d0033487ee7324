"""A background thread that runs slow file jobs (writing, marking, deleting checkpoints) one after the other.

Why: a write may take minutes or fail; the training loop must neither block on it nor crash.
How: a job is a function that returns a list of events. An unexpected exception in a job is raised in the training loop
at its next `drain_events`. The thread is a daemon, so a crashing process does not wait for the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Generic, TypeVar, final

EventT = TypeVar("EventT")


@final
class WriterThread(Generic[EventT]):
    def __init__(self, name: str = "checkpoint writer") -> None:
        self._jobs: SimpleQueue[Callable[[], list[EventT]] | None] = SimpleQueue()
        self._results: deque[EventT | BaseException] = deque()
        self._num_open = 0
        self._changed = Condition()
        Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job: Callable[[], list[EventT]]) -> None:
        """Queue a job; jobs run in the order of submission."""
        with self._changed:
            self._num_open += 1
        self._jobs.put(job)

    def drain_events(self) -> Iterator[EventT]:
        """Yield the events of finished jobs since the last call; raise what a job raised."""
        while self._results:
            result = self._results.popleft()
            if isinstance(result, BaseException):
                raise result
            yield result

    def wait(self, within_s: float | None = None) -> bool:
        """Block until all submitted jobs are done; False if they are not after `within_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open == 0, timeout=within_s)

    def close(self) -> None:
        """Let the thread end after the submitted jobs. Does not join it: after a crash other ranks may never answer."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._results.extend(job())
            except BaseException as error:
                self._results.append(error)
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()
