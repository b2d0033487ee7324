"""Copies a list of gradients into one buffer, chunk by chunk, as FSDP's reduce-scatter expects them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.grad_norm import WIDE_BLOCK
from harness.kernels.multi_tensor import PIECE, distances, entry, piece, sent


def join_gradients(gradients: Sequence[Tensor], widths: Sequence[int], place: Tensor) -> None:
    """Fill the rows of `place` [chunks, sum of widths] with pieces of contiguous tensors of one type, side by side: of
    each as many numbers a row as its width says, and where it ends, zeros."""
    counts, begins = (each.numel() for each in gradients), accumulate((0, *widths[:-1]))
    strides = (place.stride(0),) * len(gradients)
    rows = tuple(counts), tuple(widths), tuple(begins), strides, distances(gradients, gradients[0])
    table = sent(rows, tuple(widths), gradients[0], place)
    _join[(table.num_programs, len(place))](gradients[0], place, *table.arguments, WIDE_BLOCK)


@triton.jit
def _join(base, place, table, num_tensors, room: tl.constexpr, unit: tl.constexpr, block: tl.constexpr):
    number, begin = piece(table, num_tensors, room)
    count = entry(table, 1, number, num_tensors, unit)
    width = entry(table, 2, number, num_tensors, unit)
    column = entry(table, 3, number, num_tensors, unit)
    stride = entry(table, 4, number, num_tensors, unit)
    tensor = base + entry(table, 5, number, num_tensors, unit)
    chunk = tl.program_id(1)
    row = place + chunk * stride + column
    for first in range(begin, tl.minimum(begin + PIECE, width), block):
        within = first + tl.arange(0, block)
        source = chunk * width + within
        numbers = tl.load(tensor + source, mask=(within < width) & (source < count), other=0.0)
        tl.store(row + within, numbers.to(tl.float32), mask=within < width)
