"""What became zero in fp8, counted in one pass instead of eight."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers that one program takes at once."""


def note_rounded(values: Tensor, rounded: Tensor, scale: Tensor, row: Tensor, *, stride: int) -> None:
    """Add to a row of a meter what rounding did to every `stride`-th row of a matrix; `rounded`: fp8 as plain bytes.

    The first one is number `stride // 2`. The meter's row has the columns of `harness.fp8.meters.Column`, by number.
    """
    height, width = values.shape
    grid = (triton.cdiv(height - stride // 2, stride), triton.cdiv(width, BLOCK))
    _note_rounded[grid](values, rounded, scale, row, width, stride, BLOCK)


@triton.jit
def _note_rounded(values, rounded, scale, row, width, stride, block: tl.constexpr):
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    begin = (tl.program_id(0).to(tl.int64) * stride + stride // 2) * width
    before = tl.sum((tl.load(values + begin + at, mask=inside, other=0.0) != 0).to(tl.int32))
    after = tl.sum(((tl.load(rounded + begin + at, mask=inside, other=0) & 0x7F) != 0).to(tl.int32))
    tl.atomic_add(row + 2, ((before - after) * stride).to(tl.float32))
    tl.atomic_add(row + 3, (before * stride).to(tl.float32))
    if tl.program_id(0) + tl.program_id(1) == 0:
        known, now = tl.load(row + 1), tl.load(scale)
        tl.store(row + 1, tl.where(known > 0, tl.minimum(known, now), now))
