"""Copies a list of gradients into one buffer, chunk by chunk, as FSDP's reduce-scatter expects them.

The same pass can add up the squares of what it copies. Why: each rank's gradient norm before the reduction is needed in
every step, and a pass of its own would read the fp32 copy once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.multi_tensor import PIECE, Table, find_piece, load_entry, make_table, offsets_from


def chunk_cat(gradients: Sequence[Tensor], widths: Sequence[int], out: Tensor) -> None:
    """Split contiguous tensors of one dtype into chunks and concatenate the i-th chunks in row i of `out`.

    `out` is [chunks, sum of widths]. Each tensor contributes `widths` values to a row; past its end, zeros.
    """
    table = _make_table(gradients, widths, out)
    _chunk_cat[(table.num_programs, len(out))](gradients[0], out, *table.arguments)


def chunk_cat_and_square(
    gradients: Sequence[Tensor], widths: Sequence[int], out: Tensor, reserve_sums: Callable[[int], Tensor]
) -> None:
    """`chunk_cat`, and add the sum of squares of the gradients to partial sums, in fp32.

    `reserve_sums`: takes the number of programs, returns at least that many partial sums. Each program adds to its own,
    so the order of additions is fixed, and one launch may follow another without a reduction in between.
    A NaN, an infinite value and a square that overflows fp32 make their partial sum NaN or infinite.
    """
    table = _make_table(gradients, widths, out)
    grid = table.num_programs, len(out)
    _chunk_cat_and_square[grid](gradients[0], out, reserve_sums(grid[0] * grid[1]), *table.arguments)


def _make_table(gradients: Sequence[Tensor], widths: Sequence[int], out: Tensor) -> Table:
    """Rows: count, width, first column in a row of `out`, length of that row, offset of each gradient."""
    counts, begins = (gradient.numel() for gradient in gradients), accumulate((0, *widths[:-1]))
    strides = (out.stride(0),) * len(gradients)
    rows = tuple(counts), tuple(widths), tuple(begins), strides, offsets_from(gradients, gradients[0])
    return make_table(rows, tuple(widths), gradients[0], out)


@triton.jit
def _copy_piece(base, out, table, num_tensors, max_tensors: tl.constexpr, unit: tl.constexpr):
    """Copy the piece of this program; returns its values in fp32, and zeros past its end."""
    number, begin = find_piece(table, num_tensors, max_tensors)
    count = load_entry(table, 1, number, num_tensors, unit)
    width = load_entry(table, 2, number, num_tensors, unit)
    column = load_entry(table, 3, number, num_tensors, unit)
    stride = load_entry(table, 4, number, num_tensors, unit)
    tensor = base + load_entry(table, 5, number, num_tensors, unit)
    chunk = tl.program_id(1)
    within = begin + tl.arange(0, PIECE)
    source = chunk * width + within
    values = tl.load(tensor + source, mask=(within < width) & (source < count), other=0.0).to(tl.float32)
    tl.store(out + chunk * stride + column + within, values, mask=within < width)
    return values


@triton.jit
def _chunk_cat(base, out, table, num_tensors, max_tensors: tl.constexpr, unit: tl.constexpr):
    _copy_piece(base, out, table, num_tensors, max_tensors, unit)


@triton.jit
def _chunk_cat_and_square(base, out, sums, table, num_tensors, max_tensors: tl.constexpr, unit: tl.constexpr):
    """The partial sum is loaded first, so that the copy does not wait for it."""
    place = sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    before = tl.load(place)
    values = _copy_piece(base, out, table, num_tensors, max_tensors, unit)
    tl.store(place, before + tl.sum(values * values))
