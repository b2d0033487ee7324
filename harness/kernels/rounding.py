"""What became zero in fp8, counted in one pass instead of eight."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers that one program takes at once."""


def note_rounded(before: Tensor, after: Tensor, scale: Tensor, row: Tensor, *, every: int) -> None:
    """Add to a row of a meter what rounding made of the rows of a matrix; `after`: fp8 as plain bytes.

    Of both the columns lie side by side. The meter's row has the columns of `harness.fp8.meters.Column`, by number.
    """
    height, width = before.shape
    grid = (height, triton.cdiv(width, BLOCK))
    _note_rounded[grid](before, after, scale, row, width, before.stride(0), after.stride(0), every, BLOCK)


@triton.jit
def _note_rounded(before, after, scale, row, width, before_stride, after_stride, every, block: tl.constexpr):
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    line = tl.program_id(0).to(tl.int64)
    values = tl.load(before + line * before_stride + at, mask=inside, other=0.0)
    numbers = tl.load(after + line * after_stride + at, mask=inside, other=0)
    num_before, num_after = tl.sum((values != 0).to(tl.int32)), tl.sum(((numbers & 0x7F) != 0).to(tl.int32))
    tl.atomic_add(row + 2, ((num_before - num_after) * every).to(tl.float32))
    tl.atomic_add(row + 3, (num_before * every).to(tl.float32))
    if tl.program_id(0) + tl.program_id(1) == 0:
        known, now = tl.load(row + 1), tl.load(scale)
        tl.store(row + 1, tl.where(known > 0, tl.minimum(known, now), now))
