"""Copies a list of gradients into one buffer, chunk by chunk, as FSDP's reduce-scatter expects them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.grad_norm import WIDE_BLOCK
from harness.kernels.multi_tensor import PIECE, find_piece, load_entry, make_table, offsets_from


def chunk_cat(gradients: Sequence[Tensor], widths: Sequence[int], out: Tensor) -> None:
    """Split contiguous tensors of one dtype into chunks and concatenate the i-th chunks in row i of `out`.

    `out` is [chunks, sum of widths]. Each tensor contributes `widths` values to a row; past its end, zeros.
    """
    counts, begins = (gradient.numel() for gradient in gradients), accumulate((0, *widths[:-1]))
    strides = (out.stride(0),) * len(gradients)
    rows = tuple(counts), tuple(widths), tuple(begins), strides, offsets_from(gradients, gradients[0])
    table = make_table(rows, tuple(widths), gradients[0], out)
    _chunk_cat[(table.num_programs, len(out))](gradients[0], out, *table.arguments, WIDE_BLOCK)


@triton.jit
def _chunk_cat(base, out, table, num_tensors, max_tensors: tl.constexpr, unit: tl.constexpr, block: tl.constexpr):
    number, begin = find_piece(table, num_tensors, max_tensors)
    count = load_entry(table, 1, number, num_tensors, unit)
    width = load_entry(table, 2, number, num_tensors, unit)
    column = load_entry(table, 3, number, num_tensors, unit)
    stride = load_entry(table, 4, number, num_tensors, unit)
    tensor = base + load_entry(table, 5, number, num_tensors, unit)
    chunk = tl.program_id(1)
    row = out + chunk * stride + column
    for first in range(begin, tl.minimum(begin + PIECE, width), block):
        within = first + tl.arange(0, block)
        source = chunk * width + within
        values = tl.load(tensor + source, mask=(within < width) & (source < count), other=0.0)
        tl.store(row + within, values.to(tl.float32), mask=within < width)
