"""What rounding to fp8 leaves behind: a tensor's largest number, its scale, and how many of its numbers became zero.

How: a meter is a small tensor on the device, one row a role; the operators add to it, `harness.precision.fp8.layers`
reads it. Counting is another pass over the numbers: done only in a step that is probed, and of large matrices over a
few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from harness.config.precision import Fp8Recipe
from harness.precision.fp8.formats import FORWARD, GRADIENT

LARGEST_SCALE = 2.0**100
MANTISSA_BITS = 23
"""Of a number in fp32; without them it is a power of two."""
SAMPLE = 2**20
"""Numbers of a matrix that are looked at, or up to twice that: a share of one in a thousand is told to a twentieth of
itself."""


class Role(IntEnum):
    """The rows of a meter."""

    activations = 0
    weights = 1
    gradients = 2


class Column(IntEnum):
    """The columns of a meter."""

    largest = 0
    """Largest absolute value, since the meter was cleared; where scales are remembered, else they are made for it."""
    scale = 1
    """The smallest of all micro-batches: the one that the largest value was rounded by."""
    zeros = 2
    """Numbers that were not zero and became it, by the rows that were looked at."""
    nonzeros = 3
    """Numbers that were not zero, likewise."""
    guess = 4
    """Where a kernel rounds before it knows the scale: the last one, and most often the next."""


METER = (len(Role), 8)
"""Wider than its columns, so that each begins at a multiple of 16 bytes: others a compiled graph takes copies of."""

SCALE_EXPONENTS = range(-32, 96, 2)
"""Where the bins begin that the exponents of scales are counted in."""


@dataclass(slots=True)
class Probe:
    """What the operators do besides; the host's, so that a compiled graph need not change with it."""

    counts: bool = False
    """Count what becomes zero."""
    primes: bool = False
    """Scales that are remembered are not known yet: take those of the tensors themselves."""


PROBE = Probe()


@contextmanager
def probing(*, counts: bool, primes: bool) -> Iterator[None]:
    """What the operators do meanwhile."""
    PROBE.counts, PROBE.primes = counts, primes
    try:
        yield
    finally:
        PROBE.counts = PROBE.primes = False


def dtype_of(role: int, recipe: str) -> torch.dtype:
    """Gradients need range more than digits, unless few of them share a scale."""
    return GRADIENT if role == Role.gradients and recipe != Fp8Recipe.block else FORWARD


def largest_of(values: Tensor) -> Tensor:
    """The largest absolute value; row by row first, which a compiler can join to whatever made the rows."""
    return values.abs().amax(dim=-1).amax().float()


def scale_of(largest: Tensor, limit: float | Tensor, *, step: int = 1) -> Tensor:
    """The power of two that brings the largest number nearest to the largest of fp8, its exponent a multiple of `step`:
    1, 2 or 4. An infinity makes NaN of the whole product, and is seen."""
    scale = torch.where(largest > 0, (limit / largest).clamp(max=LARGEST_SCALE), 1.0)
    exponent = (scale.view(torch.int32) >> MANTISSA_BITS) + 1  # one more, and it is 128 where the scale is 2
    return (((exponent & -step) - 1).clamp(min=0) << MANTISSA_BITS).view(torch.float32)


def stride_of(values: Tensor) -> int:
    """Every how many rows of a matrix one is looked at: a power of two, so that what they stand for adds up exactly."""
    return 1 << max(1, values.numel() // SAMPLE).bit_length() - 1


def sample_of(values: Tensor) -> Tensor:
    """The rows that are looked at; not the first, which may be the first token of every sequence."""
    stride = stride_of(values)
    return values[stride // 2 :: stride]


def note(row: Tensor, before: Tensor, after: Tensor, scale: Tensor, *, every: int) -> None:
    """What rounding made of the rows that are looked at, of which each stands for as many as `every` says."""
    numbers = after.view(torch.uint8)
    if before.is_cuda:
        from harness.kernels.fp8_quantize import note_rounded

        note_rounded(before, numbers, scale, row, every=every)
        return
    row[Column.scale] = torch.where(row[Column.scale] > 0, torch.minimum(row[Column.scale], scale), scale)
    num_before, num_after = before.count_nonzero(), (numbers & 0x7F).count_nonzero()
    row[Column.zeros] += (num_before - num_after) * every
    row[Column.nonzeros] += num_before * every


def guess_in(meter: Tensor | None, role: Role, like: Tensor) -> Tensor:
    """Where the last scale is, and the next one is put; a zero, which never fits, where nobody takes notes."""
    return like.new_zeros((), dtype=torch.float32) if meter is None else meter.data[role, Column.guess]
