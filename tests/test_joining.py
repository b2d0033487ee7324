"""Gradients side by side: laid out as by torch's own operator, and their squares for whoever wants them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness import joining

SHAPES = [(5,), (7, 3), (1, 4), (4100, 2), (8, 64)]


def gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def rooms(tensors: list[Tensor], num_chunks: int) -> tuple[Tensor, Tensor]:
    width = sum(-(-tensor.shape[0] // num_chunks) * tensor[:1].numel() for tensor in tensors)
    own, theirs = torch.full((num_chunks, width), 9.0), torch.empty(num_chunks, width)
    torch._chunk_cat(tensors, 0, num_chunks, out=theirs)
    return own, theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_chunks", [1, 2, 4, 9])
def test_they_lie_where_torch_lays_them(num_chunks: int, dtype: torch.dtype) -> None:
    tensors = gradients(dtype)
    own, theirs = rooms(tensors, num_chunks)
    joining.join(tensors, 0, num_chunks, own)
    assert torch.equal(own, theirs)


def test_fsdps_operator_is_this_one_and_squares_are_taken_once() -> None:
    joining.install()
    tensors = gradients(torch.bfloat16)
    own, theirs = rooms(tensors, 2)
    squares = torch.ones(())
    joining.want_squares(own, squares)
    for _ in range(2):
        torch.ops.fsdp.chunk_cat(tensors, 0, 2, out=own)
    assert torch.equal(own, theirs)
    expected = 1 + sum(tensor.double().square().sum().item() for tensor in tensors)
    assert squares.item() == pytest.approx(expected, rel=1e-5)
    assert not joining.are_wanted(own)


def test_squares_that_nobody_took_are_still_wanted() -> None:
    room = torch.empty(3)
    joining.want_squares(room, torch.zeros(()))
    assert joining.are_wanted(room)
    assert not joining.are_wanted(room)


def test_a_number_that_is_none_shows() -> None:
    tensors = gradients(torch.bfloat16)
    tensors[1][0, 0] = torch.nan
    own, _ = rooms(tensors, 2)
    squares = torch.zeros(())
    joining.want_squares(own, squares)
    joining.join(tensors, 0, 2, own)
    assert squares.isnan()
