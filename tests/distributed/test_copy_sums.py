"""Requests for sums of squares of copied gradients, and the reduce-scatter that makes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.distributed.copy_sums import CopySums, SumRequest, request_sums, take_request
from harness.distributed.reduce_scatter import CommStats, MeasuredReduceScatter

CPU = torch.device("cpu")


def test_partial_sums_grow_and_start_again_when_taken() -> None:
    sums = CopySums()
    assert sums.take() is None
    sums.reserve(2, CPU).add_(1.0)
    assert sums.reserve(1, CPU).tolist() == [1, 1]
    assert sums.reserve(4, CPU).tolist() == [1, 1, 0, 0]
    assert sums.take() == 2
    assert sums.take() == 0
    assert sums.reserve(1, CPU).tolist() == [0, 0, 0, 0]


def test_a_request_is_for_the_next_copy_into_its_buffer() -> None:
    first, second, sums = torch.zeros(6), torch.zeros(6), CopySums()
    request = request_sums(first, sums)
    assert take_request(first.view(2, -1)) is request
    assert take_request(first.view(2, -1)) is None, "taken"
    request_sums(first, sums)
    assert take_request(second) is None
    assert take_request(first) is None, "only the next copy"
    request_sums(first, sums)
    newer = request_sums(second, sums)
    assert take_request(second) is newer
    request_sums(torch.zeros(6), sums)
    assert take_request(first) is None, "the buffer is gone"


def reduce_once(scatter: MeasuredReduceScatter, gradient: Tensor, *, answer: bool) -> None:
    """What FSDP does if the shard axis has size 1: allocate, copy, allocate."""
    buffer = scatter.allocate(gradient.shape, dtype=torch.float32, device=CPU)
    request: SumRequest | None = take_request(buffer) if answer else None
    buffer.copy_(gradient)
    if request is not None:
        request.sums.reserve(1, CPU).add_(gradient.square().sum())
        request.is_answered = True
    scatter.allocate(gradient.shape, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("is_modified", [False, True])
def test_each_gradient_is_measured_once(is_modified: bool) -> None:
    """By the copy if it answers, else in a pass of its own. A modified gradient is measured after the change."""
    stats = CommStats(torch.zeros(()), measures_gradients=True, is_sharded=False)
    before = [lambda gradient: gradient.mul_(2.0)] if is_modified else []
    scatter = MeasuredReduceScatter(stats, before_measuring=before)
    for number, answer in enumerate((True, False, True, True)):
        reduce_once(scatter, torch.tensor([2.0**number, 0.0]), answer=answer)
    in_own_pass = 4.0 * (1 + 4 + 16 + 64) if is_modified else 4.0
    assert stats.square_sum == in_own_pass
    assert stats.take_square_sum() == (in_own_pass if is_modified else 1 + 4 + 16 + 64)
    assert stats.take_square_sum() == 0
