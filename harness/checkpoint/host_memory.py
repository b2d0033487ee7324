"""Measures free host memory, and allocates pinned blocks that a GPU can copy into asynchronously.

Why: a ring that does not fit must be rejected before the first step, with its numbers, instead of being OOM-killed
hours later. On a cluster the limit is the job's cgroup, not the machine.
How: free memory is the minimum of the kernel's MemAvailable and the headroom of every cgroup above this process.
A block is registered with the CUDA driver and does not come from torch's pinned allocator, which rounds up to a power
of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final
from weakref import finalize

import torch

ALIGNMENT_BYTES = 64


def free_bytes(root: Path = Path("/")) -> int:
    """Memory still available to this process on this machine; `root` is where /proc and /sys are."""
    return min([_available_bytes(root), *_allowed_bytes(root)])


def _available_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _allowed_bytes(root: Path) -> Iterator[int]:
    """Headroom of each cgroup from this process's up to the root, for cgroup v2 and v1."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                yield from _cgroup_headroom(
                    root / "sys/fs/cgroup", group, "memory.max", "memory.current", "inactive_file"
                )
            elif "memory" in controllers.split(","):
                top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
                yield from _cgroup_headroom(top, group, *names, "total_inactive_file")


def _cgroup_headroom(top: Path, group: str, limit: str, usage: str, cache: str) -> Iterator[int]:
    """Limit minus usage of a cgroup and of each one above it; inactive file cache counts as free. In a container the
    root may be its own group. "No limit" is "max" in v2, and in v1 a number beyond any machine's memory."""
    own = top / group.lstrip("/")
    for path in [own, *own.parents]:
        if not path.is_relative_to(top):
            return
        with suppress(OSError, ValueError):
            allowed = int((path / limit).read_text())
            stat = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
            yield allowed - int((path / usage).read_text()) + int(stat.get(cache, 0))


def align_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@final
class PinnedBlock:
    """A fixed-size block of host memory, pinned if a GPU copies into it, handed out tensor by tensor."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self._bytes = torch.empty(max(num_bytes, 1), dtype=torch.uint8)
        self._buffer = memoryview(self._bytes.numpy())  # type: ignore[arg-type]
        self._used = 0
        self._unlock: finalize[..., Any] | None = None
        if pinned:
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

    def release(self) -> None:
        """Unpin the memory; nothing may be copied into it afterwards. May be called more than once."""
        if self._unlock is not None:
            self._unlock()


def _call_cudart(function: str, *arguments: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(getattr(runtime, function)(*arguments)))
