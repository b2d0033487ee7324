"""Retries of reads that failed with an I/O error, for a bounded time and with growing pauses.

How: the pauses are a fixed series, not measured by a clock, so ranks that make the same attempts together and see the
same outcomes also wait alike and give up alike. An attempt on several ranks must fail on all of them with the same
error (`parallel.together`, `parallel.from_first`).
Left out: reads that never return. The launcher finds a process that hangs (`launch.local.supervisor`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar, final

from harness.config.errors import StorageError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

T = TypeVar("T")


@final
class IoRetry:
    """The retries that are left; `retry_s` is shared by all attempts that are made through one of these."""

    def __init__(self, retry_s: float) -> None:
        self._pauses = pauses(retry_s)

    def through(self, attempt: Callable[[], T]) -> T:
        """The result of the first attempt that succeeds; the last error once the time is used up."""
        while True:
            try:
                return attempt()
            except StorageError as error:
                pause_s = next(self._pauses, None)
                if pause_s is None:
                    raise
                print(f"warning: {error}; trying again in {pause_s:g} s", file=sys.stderr, flush=True)
            time.sleep(pause_s)


def pauses(retry_s: float) -> Iterator[float]:
    """Seconds to wait before each retry; `retry_s` in sum."""
    pause_s = FIRST_PAUSE_S
    while retry_s > 0:
        pause_s = min(pause_s, retry_s)
        yield pause_s
        retry_s -= pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
