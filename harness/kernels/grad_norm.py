"""Gradients: of the loss, those of a block side by side for their reduction, and their norms.

Why: compiled, the loss reads a row of logits three times before it writes its gradient; torch's kernel that joins
gradients moves half of what memory could, and the one that multiplies by a number of the device a quarter; norms of
many tensors take it a launch for some of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.multi_tensor import PIECE, added_up, entry, piece, room_for_sums, table_of

WIDE_BLOCK = 2048
"""Numbers at once where little is done with each: a whole piece."""


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of each tensor; all contiguous and in fp32."""
    table = table_of(tensors)
    sums = room_for_sums(table, 1)
    _sum_squares[(table.num_programs,)](tensors[0], sums, *table.arguments, WIDE_BLOCK)
    return added_up(sums, table).view(-1)


@triton.jit
def _sum_squares(base, sums, table, num_tensors, room: tl.constexpr, unit: tl.constexpr, block: tl.constexpr):
    number, begin = piece(table, num_tensors, room)
    count = entry(table, 1, number, num_tensors, unit)
    tensor = base + entry(table, 2, number, num_tensors, unit)
    squares = tl.zeros((block,), tl.float32)
    for first in range(begin, tl.minimum(begin + PIECE, count), block):
        at = first + tl.arange(0, block)
        value = tl.load(tensor + at, mask=at < count, other=0.0)
        squares += value * value
    tl.store(sums + tl.program_id(0), tl.sum(squares))
