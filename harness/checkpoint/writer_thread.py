"""The clerk: a thread beside training that does the slow things with files, one after the other.

Why: a disk may take minutes, and may refuse; the loop must not wait for the one nor fall over the other.
How: jobs are functions that return what they have to tell. The thread dies with the process: after a crash nobody waits
for a disk. An exception that a job did not expect is raised where the loop next asks for news.
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
    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], list[EventT]] | None] = SimpleQueue()
        self._results: deque[EventT | BaseException] = deque()
        self._num_open = 0
        self._changed = Condition()
        Thread(target=self._work, name="checkpoint clerk", daemon=True).start()

    def submit(self, job: Callable[[], list[EventT]]) -> None:
        """Have something done after all that was given before."""
        with self._changed:
            self._num_open += 1
        self._jobs.put(job)

    def drain_events(self) -> Iterator[EventT]:
        """What the jobs that are done have told since the last time."""
        while self._results:
            told = self._results.popleft()
            if isinstance(told, BaseException):
                raise told
            yield told

    def wait(self) -> None:
        """Until everything that was given is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0)

    def close(self) -> None:
        """Leave when all is done, without being waited for: after a crash the others may never answer."""
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
