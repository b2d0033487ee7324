"""Python's collector of garbage while a run trains: at iterations that all ranks share, and at no others.

Why: left to itself it walks every object there is whenever enough new ones were made, for a sixth of a second and more,
and at another moment on every rank. A device whose host is not that far ahead runs dry, and all other ranks wait.
How: it rests while a run trains. After the first iterations, when all is imported and compiled, what exists is set
aside for good (`gc.freeze`); what is made later is little, and is looked through every so many iterations. It is a
safeguard: twenty iterations of the default run left nothing behind that only a collector could free.
"""

from __future__ import annotations

import gc
from types import TracebackType

NUM_FIRST = 3
"""Iterations after which everything that lasts exists."""
EVERY = 100
"""Iterations from one look to the next."""


class GcSchedule:
    """At rest from its beginning to its end, but for turns."""

    def __init__(self) -> None:
        self._was_on = True
        self._num_turns = 0

    def __enter__(self) -> GcSchedule:
        self._was_on = gc.isenabled()
        gc.disable()
        return self

    def turn(self) -> None:
        """At the end of an iteration: look for garbage if it is time."""
        self._num_turns += 1
        if self._num_turns == NUM_FIRST:
            gc.collect()
            gc.freeze()
        elif self._num_turns % EVERY == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._was_on:
            gc.enable()
