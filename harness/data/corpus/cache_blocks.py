"""The files of one object in the cache of a machine: its content by blocks, their hashes, and when they were last used.

    NAME            the content, a sparse file of the size of the object
    NAME.blocks     SHA-256 of each block; zeros: the block is not there
    NAME.used       time of the last use of each block, a double; zeros: not known

    replaced        the object was replaced while a run read it: some blocks may have the new content

A process locks the hash of a block in NAME.blocks: shared while it reads the block, exclusively while it fetches or
frees it. The locks belong to an open file, so the kernel releases them when a process is killed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

DIGEST_BYTES = 32
NO_DIGEST = bytes(DIGEST_BYTES)
TIME = struct.Struct("<d")
BLOCKS = ".blocks"
USED = ".used"
SOURCE = "source.txt"
"""First line: the URL; second line: bytes of a block."""

REPLACED = "replaced"

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 0x01, 0x02


def digests_file(path: Path) -> Path:
    return path.with_name(path.name + BLOCKS)


def used_file(path: Path) -> Path:
    return path.with_name(path.name + USED)


def forget_replaced(folder: Path) -> None:
    """Forget the blocks of an object that was replaced while a run read it, and has its former version again."""
    if (folder / REPLACED).exists():
        for digests in folder.glob(f"*{BLOCKS}"):
            os.truncate(digests, 0)
        (folder / REPLACED).unlink(missing_ok=True)


def write_source(folder: Path, url: str, block_bytes: int) -> None:
    """Write what the folder holds, unless it is there. Readers never see a part, and a full disk leaves none."""
    path, text = folder / SOURCE, f"{url}\n{block_bytes}\n"
    with suppress(OSError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == text:
            return
    scratch = folder / f".{SOURCE}.{os.getpid()}"
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def lock_block(descriptor: int, block: int, *, shared: bool = False) -> None:
    """Lock a block against other open files, in this process and in others; waits. Changes a lock that it has.

    A shared lock must be released before an exclusive one is taken: two readers would wait for each other.
    """
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _request(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, block))


def try_lock_block(descriptor: int, block: int) -> bool:
    """Lock a block exclusively, unless somebody else has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, block))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def share_blocks(descriptor: int, blocks: Sequence[int]) -> None:
    """Lock blocks, in ascending order, against being freed or fetched; waits. One call locks adjacent blocks."""
    first = 0
    for place, block in enumerate(blocks):
        if place + 1 == len(blocks) or blocks[place + 1] != block + 1:
            count = place + 1 - first
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _request(fcntl.F_RDLCK, blocks[first], count))
            first = place + 1


def unlock_block(descriptor: int, block: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, block))


def unlock_all(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, 0, 0))


def _request(kind: int, block: int, count: int = 1) -> bytes:
    """A request for `count` blocks; 0: for all from this one on."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, DIGEST_BYTES * block, DIGEST_BYTES * count, 0)


def read_digest(descriptor: int, block: int) -> bytes:
    return os.pread(descriptor, DIGEST_BYTES, DIGEST_BYTES * block)


def write_digest(descriptor: int, block: int, digest: bytes) -> None:
    write_all(descriptor, digest, DIGEST_BYTES * block)


def write_all(descriptor: int, content: bytes, offset: int) -> None:
    """Write all of this content at an offset. One call of the system may write a part, as on a disk that becomes full;
    the next one then raises the error."""
    left = memoryview(content)
    while left:
        num_written = os.pwrite(descriptor, left, offset)
        left, offset = left[num_written:], offset + num_written


def mark_used(path: Path, blocks: Iterable[int], now: float) -> None:
    """Record a use of these blocks."""
    descriptor = os.open(used_file(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for block in blocks:
            write_all(descriptor, TIME.pack(now), TIME.size * block)
    finally:
        os.close(descriptor)


def read_used(path: Path, num_blocks: int) -> list[float]:
    """Time of the last use of each block; 0 if it is not known."""
    try:
        content = used_file(path).read_bytes()[: TIME.size * num_blocks]
    except FileNotFoundError:
        content = b""
    times = [time for (time,) in TIME.iter_unpack(content[: len(content) // TIME.size * TIME.size])]
    return times + [0.0] * (num_blocks - len(times))


def last_use(path: Path, block: int) -> float:
    """Time of the last use of one block; 0 if it is not known."""
    try:
        with used_file(path).open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), TIME.size, TIME.size * block)
    except FileNotFoundError:
        content = b""
    return float(TIME.unpack(content)[0]) if len(content) == TIME.size else 0.0


def free_range(descriptor: int, start: int, length: int) -> None:
    """Give the space of a part of a file back to the file system; it reads as zeros."""
    mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    if _libc.fallocate(descriptor, mode, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def can_free_ranges(directory: Path) -> bool:
    """Whether the file system of a directory can give back a part of a file. Asks for a hole in a file without content,
    so that it also answers on a full disk."""
    probe = directory / f".free-{os.getpid()}"
    descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(descriptor, 65536)
        free_range(descriptor, 0, 65536)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)
    return True


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.restype = ctypes.c_int
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return libc


_libc = _load_libc()
