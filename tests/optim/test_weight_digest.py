"""Tests of the digest of the weights: every flipped bit changes it, and a change between two updates is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.optim.weight_digest import DIGEST_MASK, FEW_ELEMENTS, UpdateSums, WeightDigest, sum_bits, sum_weights


def weights() -> list[Tensor]:
    return [torch.linspace(-1, 1, 50), torch.linspace(3, 4, 50)]


def digest_of(tensors: list[Tensor]) -> WeightDigest:
    digest = WeightDigest.start(torch.device("cpu"))
    digest.on_restore(sum_weights(tensors))
    return digest


@pytest.mark.parametrize("bit", range(32))
def test_any_flipped_bit_changes_the_digest(bit: int) -> None:
    tensors = weights()
    before = digest_of(tensors).total
    assert before == digest_of(weights()).total
    tensors[1].view(torch.int32)[7] ^= -(2**31) if bit == 31 else 1 << bit
    after = digest_of(tensors).total
    assert after != before
    assert 0 <= after <= DIGEST_MASK


def test_the_digest_does_not_depend_on_the_shards() -> None:
    first, second = weights()
    shards = [[first[:20], second[:7]], [first[20:], second[7:]]]
    parts = sum(int(digest_of(shard).total) for shard in shards)
    assert parts & DIGEST_MASK == digest_of([first, second]).total


def test_the_digest_does_not_depend_on_which_shards_are_joined() -> None:
    long, short, empty = torch.linspace(-1, 1, FEW_ELEMENTS + 1), torch.linspace(3, 4, 24), torch.empty(0, 8)
    total = sum(int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in (long, short)) & DIGEST_MASK
    assert sum_bits([short.view(4, 6), long, empty]) == sum_bits([long, short]) == total
    assert sum_bits([empty]) == 0


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 1000, FEW_ELEMENTS - 1, 3 * FEW_ELEMENTS + 5])
def test_a_sum_that_leaves_32_bits_wraps_around(length: int) -> None:
    tensor = torch.linspace(2, 900, length)
    assert int(sum_bits([tensor])) == sum(tensor.view(torch.int32).tolist()) & DIGEST_MASK
    assert int(sum_bits([-tensor])) == sum((-tensor).view(torch.int32).tolist()) & DIGEST_MASK


def test_sums_are_those_of_the_weights() -> None:
    tensors = weights()
    sums = UpdateSums.combine([sum_weights(tensors[:1]), sum_weights(tensors[1:])])
    assert sums.before == sums.after == sum_bits(tensors)
    assert float(sums.square) == pytest.approx(sum(float(tensor.square().sum()) for tensor in tensors))


def test_weights_that_differ_from_those_of_the_last_update_have_changed() -> None:
    tensors = weights()
    digest, sums = digest_of(tensors), sum_weights(tensors)
    assert digest.changed == 0, "restored weights have not changed"
    digest.on_update(sums._replace(after=sums.after + 3))
    assert (int(digest.changed), int(digest.total)) == (0, int(sums.after) + 3)
    digest.on_update(sums._replace(before=sums.after + 4, after=sums.after + 9))
    assert (int(digest.changed), int(digest.total)) == (1, int(sums.after) + 9), "the update read other weights"
    digest.on_update(sums._replace(before=sums.after + 9, after=sums.after + 9))
    assert digest.changed == 0, "said once: a skipped update continues from what it read"
