"""Stochastic rounding of AdamW's moments to bf16, with noise that is a pure function of seed, name, step and element.

Why: bf16 has 8 bits of precision. A moment that changes by less than 1/256 of itself per step would stay as it is if
it were rounded to the nearest number; rounded up with the probability of the distance, it is right on average.
How: a hash of (seed and parameter name, number of the update, index of the element in the whole tensor) gives 16 random
bits for each moment. There is no generator state: ranks need none of each other's noise, and a run computes the same
bits on any number of ranks and after a resume, a rewind or a skipped update. The Triton kernel
(`harness.kernels.adamw`) computes the same hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

GOLDEN = 0x9E3779B9 - 2**32
"""2**32 / the golden ratio, as int32: spreads consecutive numbers over all bits."""
MULTIPLIER1, MULTIPLIER2 = 0x7FEB352D, 0x846CA68B - 2**32
"""Of the 32-bit hash `lowbias32`, as int32."""
NOISE_BITS = 16
"""Bits of fp32 that bf16 lacks."""
EXPONENT = 0x7F800000


class RoundingNoise(NamedTuple):
    """What determines the noise of the parameters of a group, besides the number of the update."""

    seeds: Tensor
    """One number per parameter, from the seed of the run and the name of the parameter; int32."""
    begins: Tensor
    """Index in the whole tensor of the first element of this rank's shard, modulo 2**32; int32."""

    def keys(self, steps: Sequence[Tensor]) -> Tensor:
        """The key of each parameter for its update with these numbers; int32."""
        return mix(self.seeds + torch.stack(list(steps)).to(torch.int32) * GOLDEN)


def make_noise(seed: int, names: Sequence[str], begins: Sequence[int], device: torch.device) -> RoundingNoise:
    """The noise of these parameters; `begins`: see `RoundingNoise`."""
    seeds = [as_int32(crc32(f"{seed} {name}".encode())) for name in names]
    numbers = torch.tensor([seeds, [as_int32(begin) for begin in begins]], dtype=torch.int32, device=device)
    return RoundingNoise(*numbers.unbind())


def as_int32(number: int) -> int:
    """The int32 with the lowest 32 bits of a number."""
    return (number + 2**31) % 2**32 - 2**31


def mix(values: Tensor) -> Tensor:
    """A hash of each int32; products wrap around."""
    values = (values ^ ((values >> 16) & 0xFFFF)) * MULTIPLIER1
    values = (values ^ ((values >> 15) & 0x1FFFF)) * MULTIPLIER2
    return values ^ ((values >> 16) & 0xFFFF)


def element_noise(key: Tensor, begin: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """16 random bits for each element of a shard, for the first and for the second moment; int32."""
    index = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view(like.shape)
    bits = mix((index + begin) ^ key)
    return bits & 0xFFFF, (bits >> NOISE_BITS) & 0xFFFF


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 up in magnitude if its lowest 16 bits and the noise carry, else down. NaN and Inf stay."""
    bits = values.view(torch.int32)
    is_finite = (bits & EXPONENT) != EXPONENT
    rounded = torch.where(is_finite, (bits + noise) & ~0xFFFF, bits)
    return rounded.view(torch.float32).to(torch.bfloat16)
