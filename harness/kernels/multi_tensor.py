"""Lists of tensors that go through one launch: a table on the device says where they lie.

Why: a model has hundreds of parameters, most of them small. A launch for each costs the host more than the device, and
at the end of every one of them the device waits for its last programs.
How: tensors are cut into pieces, and a program takes one. It counts in the table how many tensors end before its own
piece, so it knows which is its own and where it begins. Where a tensor lies is told as its distance from the first one,
in units of what a thread loads at once: so the compiler knows that it may. What a program adds up has a place of its
own, and all places of a tensor are added up in one order. Most tensors are where they were in the step before: tables
that were sent once are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = tl.constexpr(2048)
"""Numbers of a tensor that one program takes; of 1.26B parameters AdamW takes 8.5 ms, and 8.8 with eight times that."""
BLOCK = 1024
"""Of these, how many at once."""
NUM_KEPT = 1024
"""Tables; a step with every gradient at a new place makes one a block, and one for each group of the optimizer."""
AT_ONCE = 16
"""Bytes that a thread loads where it may."""
NEVER = tl.constexpr(2**62)
"""The end of a tensor that does not exist."""


class Table(NamedTuple):
    """On the device; a column for each tensor."""

    rows: Tensor
    """How many programs there are up to its end; then whatever a kernel needs of it, in units."""
    num_programs: int
    unit: int
    """Numbers that all sizes and distances are multiples of: as many as a thread loads at once, or one."""

    @property
    def num_tensors(self) -> int:
        return self.rows.shape[1]

    @property
    def arguments(self) -> tuple[Tensor, int, int, int]:
        """As every kernel takes it."""
        return self.rows, self.num_tensors, triton.next_power_of_2(self.num_tensors), self.unit


def table_of(*lists: Sequence[Tensor]) -> Table:
    """Rows after the first: how many numbers each tensor has, then where it lies in each of the lists, from the first
    tensor of the first one on.

    All are contiguous and in fp32, and the first of each list have the same size, and so on.
    """
    counts = tuple(tensor.numel() for tensor in lists[0])
    assert all(len(tensors) == len(counts) for tensors in lists), "lists of different lengths"
    assert lists[0][0].dtype is torch.float32, "in fp32"
    places = (distances(tensors, lists[0][0]) for tensors in lists)
    return sent((counts, *places), counts, lists[0][0])


def distances(tensors: Sequence[Tensor], base: Tensor) -> tuple[int, ...]:
    """Numbers from one tensor to others; all contiguous and of one type."""
    dtype, begin, size = base.dtype, base.data_ptr(), base.dtype.itemsize
    assert all(each.dtype is dtype and each.is_contiguous() for each in tensors), "contiguous, of one type"
    return tuple((each.data_ptr() - begin) // size for each in tensors)


def sent(rows: tuple[tuple[int, ...], ...], widths: tuple[int, ...], base: Tensor, *others: Tensor) -> Table:
    """A table with these rows; programs share the numbers of each tensor that `widths` tells.

    `others`: what is read or written besides, by distances of the same rows.
    """
    device = base.device
    is_aligned = all(each.data_ptr() % AT_ONCE == 0 for each in (base, *others))
    unit = AT_ONCE // base.dtype.itemsize if is_aligned else 1
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _sent(rows, widths, unit, device, stream)


@lru_cache(maxsize=NUM_KEPT)
def _sent(
    rows: tuple[tuple[int, ...], ...], widths: tuple[int, ...], unit: int, device: torch.device, _stream: int
) -> Table:
    """For one stream: another would not wait until it is there."""
    ends = tuple(accumulate(triton.cdiv(width, PIECE.value) for width in widths))
    if any(number % unit for row in rows for number in row):
        unit = 1
    table = torch.tensor((ends, *([number // unit for number in row] for row in rows)), dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return Table(table, ends[-1], unit)


def room_for_sums(table: Table, width: int) -> Tensor:
    """What programs add up: a row for each."""
    return torch.empty(table.num_programs, width, dtype=torch.float32, device=table.rows.device)


def added_up(sums: Tensor, table: Table) -> Tensor:
    """Tensors x what was added up of each, from the sums of their programs."""
    width = sums.shape[1]
    made = torch.empty(table.num_tensors, width, dtype=torch.float32, device=sums.device)
    _add_up[(table.num_tensors, width)](sums, made, table.rows, width, BLOCK)
    return made


@triton.jit
def piece(table, num_tensors, room: tl.constexpr):
    """Which tensor this program has a piece of, and the piece's first number."""
    program, at = tl.program_id(0), tl.arange(0, room)
    ends = tl.load(table + at, mask=at < num_tensors, other=NEVER)
    number = tl.sum((ends <= program).to(tl.int32))
    before = tl.load(table + number - 1, mask=number > 0, other=0)
    return number, (program - before) * PIECE


@triton.jit
def entry(table, row: tl.constexpr, number, num_tensors, unit: tl.constexpr):
    """What the table says of a tensor, in numbers."""
    return tl.load(table + row * num_tensors + number) * unit


@triton.jit
def _add_up(sums, made, ends, width, block: tl.constexpr):
    number, column = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(ends + number - 1, mask=number > 0, other=0), tl.load(ends + number)
    total = tl.zeros((block,), tl.float32)
    for first in range(begin, end, block):
        at = first + tl.arange(0, block)
        total += tl.load(sums + at * width + column, mask=at < end, other=0.0)
    tl.store(made + number * width + column, tl.sum(total))
