"""To load torch or MLflow: libraries that make hundreds of thousands of objects, nearly all of which stay to the end.

Why: Python's collector walks them all several times while they are made, once more in every rank that is forked, where
to look at memory is to copy it, and a last time at the exit: a third of the CPU that a launcher takes besides its run.
How: it rests while they are loaded, and never looks at them again (`gc.freeze`). What is made later is collected as
ever. Only where Triton is among them, they are let go at the exit: it would complain of each that it finds then.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Where imports stand that take long."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@atexit.register
def _let_go() -> None:
    if "triton" in sys.modules:
        gc.unfreeze()
