"""Retries reads that failed with an I/O error, for a bounded time, with exponential backoff.

How: the pauses are a fixed series and do not depend on a clock. Ranks that make the same attempts and see the same
outcomes therefore wait equally long and give up together. An attempt on several ranks must fail on all of them with the
same error (`collectives.gather_results`, `collectives.run_on_rank_zero`). A stop request ends the retries, because a
cluster kills a job that takes longer to stop than its grace period.
Left out: reads that never return. The launcher detects a hung process (`launch.local.supervisor`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar, final

from harness.config.errors import StorageError
from harness.core.stderr_lines import print_warning

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
LOOK_EVERY_S = 1.0
"""Seconds between two looks for a stop request during a pause."""

T = TypeVar("T")
StopCheck = Callable[[], bool]
"""Tells whether a stop was requested."""


class StoppedError(Exception):
    """A stop was requested during the retries. Not an `OSError`: nothing else is tried, and the run ends."""

    def __init__(self, error: StorageError) -> None:
        super().__init__(error)
        self.error = error


@final
class IoRetry:
    """A retry budget: all attempts made through one instance share its `retry_s` seconds of pauses."""

    def __init__(self, retry_s: float, *, is_stopping: StopCheck = lambda: False) -> None:
        """`is_stopping` returns the same on all ranks that retry together."""
        self._pauses, self._is_stopping = pauses(retry_s), is_stopping

    def call(self, attempt: Callable[[], T]) -> T:
        """Return the result of the first attempt that succeeds; raise the last error once the budget is used up.

        Raises `StoppedError` soon after a stop request, instead of another attempt.
        """
        while True:
            try:
                return attempt()
            except StorageError as error:
                pause_s = next(self._pauses, None)
                if pause_s is None:
                    raise
                print_warning(f"{error}; trying again in {pause_s:g} s")
                if self._is_stopped_within(pause_s):
                    raise StoppedError(error) from None

    def _is_stopped_within(self, pause_s: float) -> bool:
        """Wait for so many seconds, or until a stop is requested."""
        while not (is_stopping := self._is_stopping()) and pause_s > 0:
            part_s = min(pause_s, LOOK_EVERY_S)
            time.sleep(part_s)
            pause_s -= part_s
        return is_stopping


def pauses(retry_s: float) -> Iterator[float]:
    """Yield the seconds to wait before each retry: 1, 2, 4, ... up to 30, `retry_s` in total."""
    pause_s = FIRST_PAUSE_S
    while retry_s > 0:
        pause_s = min(pause_s, retry_s)
        yield pause_s
        retry_s -= pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
