"""Gradients: of the loss, those of a block side by side for their reduction, and their norms.

Why: compiled, the loss reads a row of logits three times before it writes its gradient; torch's kernel that joins
gradients moves half of what memory could, and the one that multiplies by a number of the device a quarter; norms of
many tensors take it a launch for some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.multi_tensor import BLOCK, PIECE, added_up, distances, entry, piece, room_for_sums, sent, table_of

WIDE_BLOCK = 2048
"""Numbers at once where little is done with each: a whole piece."""
LOGITS_BLOCK, LOGITS_WARPS = 8192, 16
"""The same of one token's logits, and the warps that share it."""


def join_gradients(gradients: Sequence[Tensor], widths: Sequence[int], place: Tensor) -> None:
    """Fill the rows of `place` [chunks, sum of widths] with pieces of contiguous tensors of one type, side by side: of
    each as many numbers a row as its width says, and where it ends, zeros."""
    counts, begins = (each.numel() for each in gradients), accumulate((0, *widths[:-1]))
    strides = (place.stride(0),) * len(gradients)
    rows = tuple(counts), tuple(widths), tuple(begins), strides, distances(gradients, gradients[0])
    table = sent(rows, tuple(widths), gradients[0], place)
    _join[(table.num_programs, len(place))](gradients[0], place, *table.arguments, WIDE_BLOCK)


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of each tensor; all contiguous and in fp32."""
    table = table_of(tensors)
    sums = room_for_sums(table, 1)
    _sum_squares[(table.num_programs,)](tensors[0], sums, *table.arguments, WIDE_BLOCK)
    return added_up(sums, table).view(-1)


def differentiate_loss(
    logits: Tensor, targets: Tensor, seed: Tensor, *, multiplier: float, z_loss: float, ignored: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row of `logits` [T, V], contiguous, and its z term; the logits become their gradient.

    As `harness.model.loss` has it: of seed * (losses + z terms), where logits count times `multiplier`.
    """
    losses, partitions = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    terms = torch.stack([seed, torch.full_like(seed, multiplier), torch.full_like(seed, z_loss)])
    width = logits.shape[1]
    _differentiate_loss[(len(logits),)](
        logits, targets, terms, losses, partitions, width, ignored, LOGITS_BLOCK, num_warps=LOGITS_WARPS
    )
    return losses, partitions


def scaled(values: Tensor, factor: Tensor) -> Tensor:
    """A contiguous tensor times one number of the device; torch does it number by number, at a quarter of the rate."""
    made = torch.empty_like(values)
    count = values.numel()
    _scale[(triton.cdiv(count, BLOCK),)](values, factor, made, count, BLOCK)
    return made


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


@triton.jit
def _differentiate_loss(logits, targets, terms, losses, squares, width, ignored, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seed, multiplier, z_loss = tl.load(terms), tl.load(terms + 1), tl.load(terms + 2)
    target = tl.load(targets + row)
    counts = target != ignored
    begin = logits + row * width
    aimed = tl.load(begin + tl.where(counts, target, 0)).to(tl.float32) * multiplier
    most, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        value = tl.load(begin + at, mask=at < width, other=float("-inf")).to(tl.float32) * multiplier
        raised = tl.maximum(most, tl.max(value), propagate_nan=tl.PropagateNan.ALL)
        total = total * tl.exp(most - raised) + tl.sum(tl.exp(value - raised))
        most = raised
    partition = most + tl.log(total)
    tl.store(losses + row, tl.where(counts, partition - aimed, 0.0))
    tl.store(squares + row, tl.where(counts, z_loss * partition * partition, 0.0))
    slope = seed * multiplier
    of_partition = tl.where(counts, slope * (1 + 2 * z_loss * partition), 0.0)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        value = tl.load(begin + at, mask=at < width, other=float("-inf")).to(tl.float32) * multiplier
        gradient = tl.exp(value - partition) * of_partition - tl.where(at == target, slope, 0.0)
        tl.store(begin + at, gradient, mask=at < width)


@triton.jit
def _scale(values, factor, made, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(values + at, mask=at < count).to(tl.float32) * tl.load(factor)
    tl.store(made + at, value, mask=at < count)
