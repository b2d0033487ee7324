"""Files that cannot be read, also for root: a context without the capability to ignore the mode of a file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
VERSION_3 = 0x20080522
"""Version of the structures of capget and capset, with two words for each set."""


@contextmanager
def obeying_modes() -> Iterator[None]:
    """Let this thread obey the modes of files, as every user but root must."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    before = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    call(libc.capget, header, before)
    without = (ctypes.c_uint32 * 6)(*before)
    without[0] &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    call(libc.capset, header, without)
    try:
        yield
    finally:
        call(libc.capset, header, before)


def call(function: ctypes._NamedFuncPointer, *arguments: object) -> None:
    if function(*arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
