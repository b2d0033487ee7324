"""Sums of squares of many gradients in one launch.

Why: torch's foreach norm launches one kernel per few tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.multi_tensor import PIECE, build_table, empty_sums, find_piece, load_entry, reduce_sums

WIDE_BLOCK = 2048
"""Values per iteration for kernels that do little per value: a whole piece."""


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each tensor; all contiguous and in fp32."""
    table = build_table(tensors)
    sums = empty_sums(table, 1)
    _sum_squares[(table.num_programs,)](tensors[0], sums, *table.arguments, WIDE_BLOCK)
    return reduce_sums(sums, table).view(-1)


@triton.jit
def _sum_squares(base, sums, table, num_tensors, max_tensors: tl.constexpr, unit: tl.constexpr, block: tl.constexpr):
    number, begin = find_piece(table, num_tensors, max_tensors)
    count = load_entry(table, 1, number, num_tensors, unit)
    tensor = base + load_entry(table, 2, number, num_tensors, unit)
    squares = tl.zeros((block,), tl.float32)
    for first in range(begin, tl.minimum(begin + PIECE, count), block):
        at = first + tl.arange(0, block)
        value = tl.load(tensor + at, mask=at < count, other=0.0)
        squares += value * value
    tl.store(sums + tl.program_id(0), tl.sum(squares))
