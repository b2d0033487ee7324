"""Retries reads that failed with an I/O error, for a bounded time, with exponential backoff.

How: the pauses are a fixed series and do not depend on a clock. Ranks that make the same attempts and see the same
outcomes therefore wait equally long and give up together. An attempt on several ranks must fail on all of them with the
same error (`collectives.together`, `collectives.from_first`).
Left out: reads that never return. The launcher detects a hung process (`launch.local.supervisor`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar, final

from harness.config.errors import StorageError
from harness.core.stderr_lines import print_warning

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

T = TypeVar("T")


@final
class IoRetry:
    """A retry budget: all attempts made through one instance share its `retry_s` seconds of pauses."""

    def __init__(self, retry_s: float) -> None:
        self._pauses = pauses(retry_s)

    def call(self, attempt: Callable[[], T]) -> T:
        """Return the result of the first attempt that succeeds; raise the last error once the budget is used up."""
        while True:
            try:
                return attempt()
            except StorageError as error:
                pause_s = next(self._pauses, None)
                if pause_s is None:
                    raise
                print_warning(f"{error}; trying again in {pause_s:g} s")
            time.sleep(pause_s)


def pauses(retry_s: float) -> Iterator[float]:
    """Yield the seconds to wait before each retry: 1, 2, 4, ... up to 30, `retry_s` in total."""
    pause_s = FIRST_PAUSE_S
    while retry_s > 0:
        pause_s = min(pause_s, retry_s)
        yield pause_s
        retry_s -= pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
