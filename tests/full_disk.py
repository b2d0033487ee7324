"""A small disk that a test can fill: a tmpfs, which needs the right to mount."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.stalled import DETACH, may_mount

__all__ = ["fill", "may_mount", "small_disk"]
BLOCK_BYTES = 4096


@contextmanager
def small_disk(path: Path, *, num_bytes: int = 1 << 20) -> Iterator[Path]:
    """Mount an empty disk of this size at a new directory."""
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"small", str(path).encode(), b"tmpfs", 0, f"size={num_bytes}".encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    try:
        yield path
    finally:
        libc.umount2(str(path).encode(), DETACH)


def fill(disk: Path) -> None:
    """Leave no room on a disk."""
    with suppress(OSError), (disk / "fill").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(BLOCK_BYTES))
