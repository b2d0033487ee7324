"""Sends blocks of host memory between ranks in chunks, at a limited rate, over gloo.

Why: a snapshot of gigabytes in one message would take as much memory again in gloo's buffers, and the whole link.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 16 << 20
NOTE_BYTES = 64
CONNECT_ATTEMPTS = 4
"""Of gloo, for one pair of ranks (measured, torch 2.13)."""

LinkGroup = dist.ProcessGroup | None
"""The ranks whose links are tested; None: the default group."""


@final
@dataclass(frozen=True, slots=True)
class Neighbours:
    """Where a rank sends its block, and whose block it receives."""

    to: int
    source: int


def exchange_notes(note: bytes, neighbours: Neighbours, group: dist.ProcessGroup) -> bytes:
    """Send up to `NOTE_BYTES` bytes to one neighbour and receive the note of the other; zeros are stripped."""
    assert len(note) <= NOTE_BYTES
    outgoing = torch.zeros(NOTE_BYTES, dtype=torch.uint8)
    outgoing[: len(note)] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
    incoming = torch.zeros_like(outgoing)
    exchange_blocks(outgoing, incoming, neighbours, group)
    return bytes(incoming.tolist()).rstrip(b"\0")  # sync: none, in host memory


def exchange_blocks(
    outgoing: Tensor,
    incoming: Tensor,
    neighbours: Neighbours,
    group: dist.ProcessGroup,
    *,
    max_bytes_per_s: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Send a block to one neighbour while the block of the other arrives. All ranks' blocks have the same size."""
    assert outgoing.numel() == incoming.numel()
    begun_s = time.monotonic()
    for start in range(0, outgoing.numel(), chunk_bytes):
        end = min(start + chunk_bytes, outgoing.numel())
        arriving = dist.irecv(incoming[start:end], src=neighbours.source, group=group)
        leaving = dist.isend(outgoing[start:end], dst=neighbours.to, group=group)
        assert arriving is not None and leaving is not None, "this rank belongs to the group"  # noqa: PT018
        arriving.wait()
        leaving.wait()
        if max_bytes_per_s is not None:
            time.sleep(max(0.0, begun_s + end / max_bytes_per_s - time.monotonic()))


def send_block(block: Tensor, to: int, group: dist.ProcessGroup, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Send a block to a rank that calls `receive_block`."""
    for start in range(0, block.numel(), chunk_bytes):
        dist.send(block[start : start + chunk_bytes], dst=to, group=group)


def receive_block(block: Tensor, source: int, group: dist.ProcessGroup, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Receive a block of the same size from a rank that calls `send_block`."""
    for start in range(0, block.numel(), chunk_bytes):
        dist.recv(block[start : start + chunk_bytes], src=source, group=group)


def new_link_group(within_s: float, device: torch.device) -> LinkGroup:
    """The group over which `swap_blocks` tests links. Collective: all ranks must call.

    On a host it is a gloo group of its own: a pair of ranks that failed stays broken in its group, and the others must
    still be able to agree on the result. On GPUs it is the default group, whose objects travel over gloo anyway.
    The timeout of the group limits each attempt to connect; exchanges have their own.
    """
    if device.type == "cuda":
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=within_s / CONNECT_ATTEMPTS))
    return group


def swap_blocks(outgoing: Tensor, incoming: Tensor, peer: int, group: LinkGroup, *, deadline_s: float) -> None:
    """Send a block to a rank while its block arrives; both call.

    Raises an error if it has not arrived at `deadline_s`, a time of `time.monotonic`.
    """
    operations = [dist.P2POp(dist.isend, outgoing, peer, group), dist.P2POp(dist.irecv, incoming, peer, group)]
    for work in dist.batch_isend_irecv(operations):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no time is left")
        if outgoing.device.type == "cpu":
            work.wait(timedelta(seconds=left_s))
            continue
        while not work.is_completed():  # `wait` would only make the stream wait
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nothing arrived within {left_s:.1f} s")
