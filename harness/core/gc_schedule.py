"""Runs Python's garbage collection at fixed iterations, the same on every rank, and never between them.

Why: automatic collection traverses every object, for a sixth of a second and more, at a different moment on every rank.
If the host is not that far ahead of its device, the device runs out of queued work and all other ranks wait.
How: automatic collection is off while a run trains. After the first iterations, when everything is imported and
compiled, `gc.freeze` excludes all existing objects. The few objects created later are collected every `EVERY`
iterations. That is a safeguard: twenty iterations of the default run left nothing that only garbage collection could
free.
"""

from __future__ import annotations

import gc
from types import TracebackType

NUM_FIRST = 3
"""Iterations after which the long-lived objects exist."""
EVERY = 100
"""Iterations between collections."""


class GcSchedule:
    """Context in which garbage is collected only by `end_iteration`."""

    def __init__(self) -> None:
        self._was_on = True
        self._num_iterations = 0

    def __enter__(self) -> GcSchedule:
        self._was_on = gc.isenabled()
        gc.disable()
        return self

    def end_iteration(self) -> None:
        """Collect garbage if this iteration is due."""
        self._num_iterations += 1
        if self._num_iterations == NUM_FIRST:
            gc.collect()
            gc.freeze()
        elif self._num_iterations % EVERY == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._was_on:
            gc.enable()
