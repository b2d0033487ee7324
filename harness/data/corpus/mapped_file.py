"""Read-only memory maps of files that keep no file descriptor open.

Why: Python's `mmap` duplicates the descriptor and keeps it for the life of the map (before Python 3.13), so a corpus of
a few hundred Megatron pairs exhausts the usual limit of 1,024 descriptors.
How: libc maps the file and the descriptor is closed at once; the kernel keeps the map. The map is removed when the last
array that views it is freed. The remaining limit is the kernel's number of maps (vm.max_map_count, 65,530 by default).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MAP_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file as a read-only array; an empty file gives an empty array."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, num_bytes).atexit = False
    content: NDArray[np.uint8] = np.frombuffer(memoryview(memory), dtype=np.uint8)
    content.flags.writeable = False
    return content


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.restype = ctypes.c_int
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


_libc = _load_libc()
