"""Imports torch or MLflow with garbage collection off, and freezes the objects that they create.

Why: these libraries create hundreds of thousands of objects, nearly all of which live until exit. The garbage collector
traverses all of them several times during the import, again in every forked rank (which copies the memory pages), and
once more at exit. Together that was a third of the launcher's own CPU time.
How: collection is off during the import, and `gc.freeze` excludes the objects from later collections. Objects created
later are collected as usual. If Triton was imported, the objects are unfrozen at exit: it prints a complaint about
each of its objects that is still frozen then.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Context for slow imports: garbage collection is off inside, and everything created is frozen after."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@atexit.register
def _unfreeze_for_triton() -> None:
    if "triton" in sys.modules:
        gc.unfreeze()
