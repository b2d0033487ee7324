"""A digest and the norm of this rank's weights after every update, and whether the weights changed between two updates.

Why: a flipped bit in a weight is copied to all ranks by the next all-gather, and training continues from it. The digest
of the weights that an update reads, compared with that of the weights that the update before left, shows it at once and
names the rank.
How: the digest is the sum of the weights' bit patterns modulo 2**32. Any single flipped bit changes it, and the sum of
the digests of all shards does not depend on the number of ranks. The update kernel computes it in its own pass over the
weights (`harness.kernels.adamw`); torch's kernel needs a pass before and one after. All values stay on the device.
Left out: the order of the weights; two weights that are exchanged leave the digest as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from harness.distributed.torch_private.foreach import foreach_norm

DIGEST_MASK = 2**32 - 1
FEW_ELEMENTS = 2**14
"""Shards up to this size are joined before they are summed: on their own each would take longer to call than to sum."""


class UpdateSums(NamedTuple):
    """Sums over the weights that one update read and wrote."""

    before: Tensor
    """Sum of the bit patterns that it read, modulo 2**32; int64."""
    after: Tensor
    """Sum of the bit patterns that it left; equal to `before` if the update was skipped."""
    square: Tensor
    """Sum of the squared weights that it left."""

    @classmethod
    def combine(cls, parts: Sequence[UpdateSums]) -> UpdateSums:
        before, after, square = (torch.stack(column).sum() for column in zip(*parts, strict=True))
        return cls(before & DIGEST_MASK, after & DIGEST_MASK, square)


@dataclass(slots=True)
class WeightDigest:
    """Digest, squared norm and change of this rank's weights, on the device."""

    total: Tensor
    """Sum of the bit patterns after the last update, modulo 2**32; int64."""
    square: Tensor
    """Sum of the squared weights after the last update."""
    changed: Tensor
    """1 if the last update read other weights than the update before it left, else 0."""

    @classmethod
    def start(cls, device: torch.device) -> WeightDigest:
        """A digest that `on_restore` has yet to fill."""
        total = torch.zeros((), dtype=torch.int64, device=device)
        return cls(total, *(torch.zeros((), dtype=torch.float32, device=device) for _ in range(2)))

    def on_restore(self, sums: UpdateSums) -> None:
        """The weights were initialized, loaded or restored."""
        self.on_update(sums)
        self.changed.zero_()

    def on_update(self, sums: UpdateSums) -> None:
        """An update read and wrote the weights; a skipped one only read them."""
        self.changed.copy_(sums.before != self.total)
        self.total.copy_(sums.after)
        self.square.copy_(sums.square)

    def on_rescaled(self, before: UpdateSums, after: UpdateSums) -> None:
        """Some of the weights were scaled on purpose after an update; the sums are over these weights."""
        self.total.copy_((self.total + after.after - before.after) & DIGEST_MASK)
        self.square.add_(after.square - before.square)


def sum_weights(weights: Sequence[Tensor]) -> UpdateSums:
    """The sums of an update that writes nothing."""
    total = sum_bits(weights)
    return UpdateSums(total, total, _sum_squares(weights))


def sum_bits(weights: Sequence[Tensor]) -> Tensor:
    """Sum of the bit patterns of fp32 tensors, modulo 2**32; int64.

    Each tensor is summed in int32, which wraps around: on a CPU a sum in int64 takes up to ten times as long.
    """
    flat = [weight.detach().flatten() for weight in weights]
    parts = [weight for weight in flat if len(weight) > FEW_ELEMENTS]
    if len(parts) < len(flat):
        parts.append(torch.cat([weight for weight in flat if len(weight) <= FEW_ELEMENTS]))
    sums = [part.view(torch.int32).sum(dtype=torch.int32) for part in parts]
    return torch.stack(sums).sum(dtype=torch.int64) & DIGEST_MASK


def _sum_squares(weights: Sequence[Tensor]) -> Tensor:
    return torch.stack(foreach_norm([weight.detach() for weight in weights], 2, dtype=torch.float32)).square().sum()
