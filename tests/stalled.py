"""A file system that stalls: every request waits until the test releases it.

How: FUSE without a library. The server is a thread that reads requests from /dev/fuse and answers none of them until
`release`; then every name is an empty file and every directory is empty. A stalled call blocks in the kernel, as on a
network file system whose server is down. It needs root and /dev/fuse; `can_stall` checks for both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Self

LOOKUP, FORGET, GETATTR, OPEN, INIT, OPENDIR, READDIR, RELEASEDIR, BATCH_FORGET = 1, 2, 3, 14, 26, 27, 28, 29, 42
ROOT_NODE, FILE_NODE = 1, 2
REQUEST = struct.Struct("<IIQQIIII")
ANSWER = struct.Struct("<IiQ")
DETACH = 2


def can_stall() -> bool:
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK) and may_mount()


def may_mount() -> bool:
    capabilities = next(line for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line)
    return bool(int(capabilities.split()[1], 16) & (1 << 21))


@contextmanager
def unreachable(path: Path) -> Iterator[Path]:
    """Mount a file system whose server is gone: every call fails with ENOTCONN."""
    path.mkdir()
    libc, descriptor = ctypes.CDLL(None, use_errno=True), os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"unreachable", str(path).encode(), b"fuse", 0, options) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    os.close(descriptor)
    try:
        yield path
    finally:
        libc.umount2(str(path).encode(), DETACH)


class Stalled:
    """A context manager that mounts the file system at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_held = 0
        """Number of requests that were held back."""
        self._released = Event()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __enter__(self) -> Self:
        self.path.mkdir()
        self._descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._descriptor},rootmode=40000,user_id=0,group_id=0".encode()
        if self._libc.mount(b"stalled", str(self.path).encode(), b"fuse", 0, options) != 0:
            raise OSError(ctypes.get_errno(), "mount")
        Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._libc.umount2(str(self.path).encode(), DETACH)
        os.close(self._descriptor)

    def release(self) -> None:
        """Answer held and all later requests."""
        self._released.set()

    def _serve(self) -> None:
        held: list[bytes] = []
        Thread(target=self._answer_held, args=(held,), daemon=True).start()
        while True:
            try:
                request = os.read(self._descriptor, 1 << 18)
            except OSError:
                return
            opcode = REQUEST.unpack_from(request)[1]
            if opcode == INIT or self._released.is_set():
                self._answer(request)
            elif opcode not in (FORGET, BATCH_FORGET):
                self.num_held += 1
                held.append(request)

    def _answer_held(self, held: list[bytes]) -> None:
        self._released.wait()
        for request in held:
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = REQUEST.unpack_from(request)
        if opcode in (FORGET, BATCH_FORGET):
            return
        body = _body(opcode, node)
        error = -errno.ENOSYS if body is None else 0
        answer = ANSWER.pack(ANSWER.size + len(body or b""), error, unique) + (body or b"")
        try:
            os.write(self._descriptor, answer)
        except OSError:
            return  # the process that sent the request is gone


def _body(opcode: int, node: int) -> bytes | None:
    match opcode:
        case 26:
            return struct.pack("<IIIIHHII", 7, 31, 0, 0, 0, 0, 1 << 16, 1) + bytes(36)
        case 3:
            return struct.pack("<QII", 0, 0, 0) + _attributes(node)
        case 1:
            return struct.pack("<QQQQII", FILE_NODE, 0, 0, 0, 0, 0) + _attributes(FILE_NODE)
        case 27:
            return struct.pack("<QII", 0, 0, 0)
        case 28 | 29:
            return b""
        case _:
            return None


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT_NODE else stat.S_IFREG | 0o644
    return struct.pack("<6Q10I", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
