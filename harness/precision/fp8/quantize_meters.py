"""Meters of fp8 quantization: amax, scale and underflow counts of each tensor, on the device.

How: a meter is a small tensor with one row per role. The operators add to it, `harness.precision.fp8.layers` reads it.
Counting underflow is another pass over the values, so it is done only in a probed step, and for large matrices over a
sample of rows.
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

MAX_SCALE = 2.0**100
MANTISSA_BITS = 23
"""Of fp32; with a zero mantissa a value is a power of two."""
SAMPLE_SIZE = 2**20
"""Values of a matrix that are sampled, up to twice that: an underflow share of 1e-3 is measured to about 5%."""


class TensorRole(IntEnum):
    """The rows of a meter."""

    activations = 0
    weights = 1
    gradients = 2


class Column(IntEnum):
    """The columns of a meter."""

    amax = 0
    """Largest absolute value since the meter was cleared; recipe `delayed` only."""
    scale = 1
    """The smallest scale of all micro-batches: the one that the largest value was quantized by."""
    underflows = 2
    """Nonzero values that became zero, estimated from the sampled rows."""
    nonzeros = 3
    """Nonzero values, estimated likewise."""
    last_scale = 4
    """The scale of the last step. A kernel quantizes by it before it knows the amax; most often it still fits."""


METER = (len(TensorRole), 8)
"""Padded, so that each row begins at a multiple of 16 bytes: a compiled graph clones inputs that are not aligned."""

SCALE_EXPONENTS = range(-32, 96, 2)
"""Lower edges of the histogram bins for the exponents of scales."""


@dataclass(slots=True)
class Probe:
    """Options of the operators for the current step, on the host, so that a compiled graph does not depend on them."""

    count_underflow: bool = False
    """Count values that underflow."""
    prime_scales: bool = False
    """The delayed scales are not known yet: compute scales from the tensors themselves."""


PROBE = Probe()


@contextmanager
def probing(*, count_underflow: bool, prime_scales: bool) -> Iterator[None]:
    """Set the operators' options while the block runs."""
    PROBE.count_underflow, PROBE.prime_scales = count_underflow, prime_scales
    try:
        yield
    finally:
        PROBE.count_underflow = PROBE.prime_scales = False


def fp8_dtype(role: int, recipe: str) -> torch.dtype:
    """E5M2 for gradients, which need range more than precision, unless they have block scales; else E4M3."""
    return GRADIENT if role == TensorRole.gradients and recipe != Fp8Recipe.block else FORWARD


def compute_amax(values: Tensor) -> Tensor:
    """The largest absolute value; by rows first, which a compiler can fuse with the kernel that computes the rows."""
    return values.abs().amax(dim=-1).amax().float()


def compute_scale(amax: Tensor, limit: float | Tensor, *, step: int = 1) -> Tensor:
    """The largest power of two that keeps `amax` within `limit`, its exponent a multiple of `step`: 1, 2 or 4.

    An infinite amax gives scale 0, which turns the whole GEMM into NaN, so that it is detected.
    """
    scale = torch.where(amax > 0, (limit / amax).clamp(max=MAX_SCALE), 1.0)
    exponent = (scale.view(torch.int32) >> MANTISSA_BITS) + 1  # one more, and it is 128 where the scale is 2
    return (((exponent & -step) - 1).clamp(min=0) << MANTISSA_BITS).view(torch.float32)


def sample_stride(values: Tensor) -> int:
    """One row in this many is sampled; a power of two, so that scaled counts add up exactly in fp32."""
    return 1 << max(1, values.numel() // SAMPLE_SIZE).bit_length() - 1


def sample_rows(values: Tensor) -> Tensor:
    """The sampled rows; they start at half a stride, since row 0 may be the first token of every sequence."""
    stride = sample_stride(values)
    return values[stride // 2 :: stride]


def record_underflow(row: Tensor, before: Tensor, after: Tensor, scale: Tensor, *, every: int) -> None:
    """Add the underflow and nonzero counts of the sampled rows to a meter's row; each row stands for `every`."""
    quantized_bytes = after.view(torch.uint8)
    if before.is_cuda:
        from harness.kernels.fp8_quantize import count_underflow

        count_underflow(before, quantized_bytes, scale, row, every=every)
        return
    row[Column.scale] = torch.where(row[Column.scale] > 0, torch.minimum(row[Column.scale], scale), scale)
    num_before, num_after = before.count_nonzero(), (quantized_bytes & 0x7F).count_nonzero()
    row[Column.underflows] += (num_before - num_after) * every
    row[Column.nonzeros] += num_before * every


def last_scale_slot(meter: Tensor | None, role: TensorRole, like: Tensor) -> Tensor:
    """The place of the last scale, which receives the next one; without a meter, 0, which forces requantization."""
    return like.new_zeros((), dtype=torch.float32) if meter is None else meter.data[role, Column.last_scale]
