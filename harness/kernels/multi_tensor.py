"""One kernel launch over a list of tensors: a table on the device holds their addresses and sizes.

Why: a model has hundreds of parameters, most of them small. One launch per parameter costs the host more time than the
device, and each launch ends with idle multiprocessors.
How: tensors are cut into pieces, one per program. A program counts in the table how many tensors end before its piece,
which gives its tensor and its offset. Addresses are offsets from the first tensor, in units of a vectorized load, so
that the compiler may vectorize. Each program writes its partial sums to its own place, and the partial sums of a tensor
are added in a fixed order. Most tensors have the address of the step before, so tables are cached.
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
"""Values per program. AdamW over 1.26B parameters takes 8.5 ms, and 8.8 ms with pieces eight times as large."""
BLOCK = 1024
"""Values per iteration of a program."""
MAX_CACHED_TABLES = 1024
"""Cached tables; a step in which every gradient has moved needs one per block and one per optimizer group."""
VECTOR_BYTES = 16
"""Size of a vectorized load of a thread."""
NO_TENSOR = tl.constexpr(2**62)
"""Table entry past the last tensor."""


class Table(NamedTuple):
    """A table on the device with one column per tensor."""

    rows: Tensor
    """Row 0: the number of programs up to the end of the tensor. Further rows: what a kernel needs, in units."""
    num_programs: int
    unit: int
    """All sizes and offsets are multiples of this many values: those of a vectorized load, or 1."""

    @property
    def num_tensors(self) -> int:
        return self.rows.shape[1]

    @property
    def arguments(self) -> tuple[Tensor, int, int, int]:
        """The arguments that every kernel takes."""
        return self.rows, self.num_tensors, triton.next_power_of_2(self.num_tensors), self.unit


def build_table(*lists: Sequence[Tensor]) -> Table:
    """Row 1: the number of values of each tensor. Then one row per list: offsets from the first list's first tensor.

    All tensors are contiguous and in fp32; tensors at the same position of each list have the same size.
    """
    counts = tuple(tensor.numel() for tensor in lists[0])
    assert all(len(tensors) == len(counts) for tensors in lists), "the lists differ in length"
    assert lists[0][0].dtype is torch.float32, "tensors must be fp32"
    offsets = (offsets_from(tensors, lists[0][0]) for tensors in lists)
    return make_table((counts, *offsets), counts, lists[0][0])


def offsets_from(tensors: Sequence[Tensor], base: Tensor) -> tuple[int, ...]:
    """Offsets of tensors from `base`, in values; all contiguous and of one dtype."""
    dtype, begin, size = base.dtype, base.data_ptr(), base.dtype.itemsize
    assert all(tensor.dtype is dtype and tensor.is_contiguous() for tensor in tensors), "contiguous, of one dtype"
    return tuple((tensor.data_ptr() - begin) // size for tensor in tensors)


def make_table(rows: tuple[tuple[int, ...], ...], widths: tuple[int, ...], base: Tensor, *others: Tensor) -> Table:
    """A table with these rows; `widths`: the values of each tensor that programs share.

    `others`: further tensors that are addressed by offsets of these rows, so their alignment counts.
    """
    device = base.device
    is_aligned = all(tensor.data_ptr() % VECTOR_BYTES == 0 for tensor in (base, *others))
    unit = VECTOR_BYTES // base.dtype.itemsize if is_aligned else 1
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _cached_table(rows, widths, unit, device, stream)


@lru_cache(maxsize=MAX_CACHED_TABLES)
def _cached_table(
    rows: tuple[tuple[int, ...], ...], widths: tuple[int, ...], unit: int, device: torch.device, _stream: int
) -> Table:
    """Cached per stream: another stream would not wait for the copy to the device."""
    ends = tuple(accumulate(triton.cdiv(width, PIECE.value) for width in widths))
    if any(number % unit for row in rows for number in row):
        unit = 1
    table = torch.tensor((ends, *([number // unit for number in row] for row in rows)), dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return Table(table, ends[-1], unit)


def empty_sums(table: Table, width: int) -> Tensor:
    """Space for partial sums: one row per program."""
    return torch.empty(table.num_programs, width, dtype=torch.float32, device=table.rows.device)


class PartialUpdateSums(NamedTuple):
    """Partial sums over the values that a kernel updates, one column per program."""

    bits: Tensor
    """int32, [2, programs]: sums of bit patterns before and after."""
    squares: Tensor
    """fp32, [programs, 1]: sums of squares after."""

    def add_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sums before and after (int64, modulo 2**32), and the sum of squares."""
        before, after = self.bits.sum(dim=1)
        return before, after, self.squares.sum()


def empty_update_sums(table: Table) -> PartialUpdateSums:
    bits = torch.empty(2, table.num_programs, dtype=torch.int32, device=table.rows.device)
    return PartialUpdateSums(bits, empty_sums(table, 1))


def reduce_sums(sums: Tensor, table: Table) -> Tensor:
    """[tensors, width]: the sum of each tensor, from the partial sums of its programs."""
    width = sums.shape[1]
    out = torch.empty(table.num_tensors, width, dtype=torch.float32, device=sums.device)
    _reduce_sums[(table.num_tensors, width)](sums, out, table.rows, width, BLOCK)
    return out


@triton.jit
def find_piece(table, num_tensors, max_tensors: tl.constexpr):
    """The index of this program's tensor, and the offset of its piece."""
    program, at = tl.program_id(0), tl.arange(0, max_tensors)
    ends = tl.load(table + at, mask=at < num_tensors, other=NO_TENSOR)
    number = tl.sum((ends <= program).to(tl.int32))
    before = tl.load(table + number - 1, mask=number > 0, other=0)
    return number, (program - before) * PIECE


@triton.jit
def load_entry(table, row: tl.constexpr, number, num_tensors, unit: tl.constexpr):
    """A table entry of a tensor, in values."""
    return tl.load(table + row * num_tensors + number) * unit


@triton.jit
def store_update_sums(bits, squares, before, after, square):
    """Write the partial sums of this program (`PartialUpdateSums`)."""
    out = bits + tl.program_id(0)
    tl.store(out, tl.sum(before))
    tl.store(out + tl.num_programs(0), tl.sum(after))
    tl.store(squares + tl.program_id(0), tl.sum(square))


@triton.jit
def _reduce_sums(sums, out, ends, width, block: tl.constexpr):
    number, column = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(ends + number - 1, mask=number > 0, other=0), tl.load(ends + number)
    total = tl.zeros((block,), tl.float32)
    for first in range(begin, end, block):
        at = first + tl.arange(0, block)
        total += tl.load(sums + at * width + column, mask=at < end, other=0.0)
    tl.store(out + number * width + column, tl.sum(total))
