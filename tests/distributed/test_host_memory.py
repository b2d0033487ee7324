"""Pinned blocks are aligned, registered once and handed out in separate pieces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from harness.core.memory_limits import resident_bytes
from harness.distributed import host_memory
from harness.distributed.host_memory import PinnedBlock, align_up


def test_pieces_begin_at_multiples_of_64_bytes() -> None:
    assert [align_up(num_bytes) for num_bytes in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


@pytest.mark.parametrize("num_bytes", [0, 192])
def test_a_pinned_block_is_registered_once_and_released_once(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake driver that records its calls; needs no GPU."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(host_memory, "_call_cudart", lambda *arguments: calls.append(arguments))
    block = PinnedBlock(num_bytes)
    block.release()
    block.pin()
    block.pin()
    address = block._bytes.data_ptr()
    assert calls == [("cudaHostRegister", address, max(num_bytes, 1), 0)]
    assert block._unlock is not None
    assert not block._unlock.atexit, "the driver may be gone by then"
    block.release()
    block.release()
    assert calls[1:] == [("cudaHostUnregister", address)]
    assert len(calls) == 2


def test_the_pages_of_a_private_block_are_allocated_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 64 * 2**20
    resident: list[int] = []
    monkeypatch.setattr(host_memory, "_call_cudart", lambda *_: resident.append(resident_bytes(os.getpid())))
    block = PinnedBlock(num_bytes)
    before = resident_bytes(os.getpid())
    block.pin()
    assert resident[0] - before > 0.9 * num_bytes
    block.release()


def test_allocating_pages_keeps_the_content_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "block").write_bytes(b"kept" * 4096)
    block = PinnedBlock(4 * 4096, file=tmp_path / "block")
    block.allocate_pages()
    assert bytes(block.view) == b"kept" * 4096


def test_a_block_hands_out_separate_aligned_pieces() -> None:
    block = PinnedBlock(64 * 3)
    pieces = [
        block.like(torch.empty(2, 3)),
        block.like(torch.empty(0)),
        block.like(torch.tensor(5)),
        block.like(torch.empty(4)),
    ]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [piece.flatten().tolist() for piece in pieces] == [[0.0] * 6, [], [2], [3.0] * 4]
    assert [piece.untyped_storage().nbytes() for piece in pieces] == [24, 0, 8, 16], (
        "saved without the rest of the block"
    )
    assert all(piece.data_ptr() % 8 == 0 for piece in pieces)
