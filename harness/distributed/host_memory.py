"""Allocates pinned blocks of host memory that a GPU can copy into asynchronously.

A block is registered with the CUDA driver and does not come from torch's pinned allocator, which rounds up to a power
of two. It is private memory of the process, or a file in a tmpfs that other processes of the machine can read.
Registering memory that has no pages yet is slow: the driver allocates them in small pages, one by one. So a private
block asks for huge pages, and its pages are allocated before (`allocate_pages`), in a background thread if need be.
`harness.core.memory_limits` measures what is free.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, final
from weakref import finalize

import torch

ALIGNMENT_BYTES = 64


def align_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@final
class PinnedBlock:
    """A fixed-size block of host memory, handed out tensor by tensor. `pin` it if a GPU copies into it."""

    def __init__(self, num_bytes: int, *, file: Path | None = None) -> None:
        """With `file`, the block is that file; an existing file of the same size keeps its content."""
        size = max(num_bytes, 1)
        self._buffer = memoryview(map_private(size) if file is None else map_block(file, size))
        self._bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._has_pages = file is not None
        self._used = 0
        self._unlock: finalize[..., Any] | None = None

    def allocate_pages(self) -> None:
        """Allocate the memory now, not at the first write; the content of a private block is lost. Other threads run
        meanwhile."""
        if not self._has_pages:
            self._bytes[:: mmap.PAGESIZE] = 0
            self._has_pages = True

    def pin(self) -> None:
        """Register the block with the CUDA driver. May be called more than once; call before the block is used."""
        if self._unlock is None:
            self.allocate_pages()
            address = self._bytes.data_ptr()
            _call_cudart("cudaHostRegister", address, self._bytes.numel(), 0)
            self._unlock = finalize(self, _call_cudart, "cudaHostUnregister", address)
            self._unlock.atexit = False

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The next piece of the block as a tensor like this one. It has its own storage, so DCP saves it without a
        copy."""
        if tensor.numel() == 0:
            return torch.empty_like(tensor, device="cpu")
        piece = torch.frombuffer(self._buffer, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += align_up(tensor.nbytes)
        return piece.view(tensor.shape)

    @property
    def content(self) -> torch.Tensor:
        """All bytes of the block."""
        return self._bytes

    @property
    def view(self) -> memoryview:
        """All bytes of the block, for hashing."""
        return self._buffer

    def release(self) -> None:
        """Unpin the memory; nothing may be copied into it afterwards. May be called more than once."""
        if self._unlock is not None:
            self._unlock()


def map_private(num_bytes: int) -> mmap.mmap:
    """Map private memory, in huge pages if the kernel has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def map_block(path: Path, num_bytes: int) -> mmap.mmap:
    """Map a file of this size into memory, and create it if needed.

    All its pages are allocated here, so that a full tmpfs raises `OSError` now; a write into a missing page would kill
    the process with SIGBUS.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size != num_bytes:
            os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _call_cudart(function: str, *arguments: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(getattr(runtime, function)(*arguments)))
