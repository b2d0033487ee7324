"""Rounding to fp8, by rows and transposed in one pass, by the scale that fits; and what became zero in it.

How: a program takes a tile, and leaves the tile's largest number in a place of its own: where all raised one number,
they stood in a queue for it. A matrix is rounded by a guess, most often the scale of the last step, and then the one
that fits is known. As scales are powers of two, that is the guess most of the time; if it is not, the matrix is rounded
again. Nobody waits to hear which: the second pass is always launched, and mostly does nothing. What comes out is the
same, whatever the guess was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers of a row that one program looks at."""
TILE_ROWS, TILE_COLUMNS = tl.constexpr(64), tl.constexpr(64)
"""Of a matrix that is written both ways."""
NUM_WARPS = 8
"""That share such a tile; with four the gradients of SwiGLU take a third longer."""
NUM_AGAIN = 1024
"""Programs of the second pass, at most, which share all tiles."""
LARGEST_BLOCK, LARGEST_WARPS = 4096, 16
"""Tiles whose largest numbers are compared at once, and the warps that do."""
LARGEST_SCALE = 2.0**100
"""As everywhere (`harness.precision.fp8.meters`)."""


class Matrix(NamedTuple):
    """In fp8."""

    rows: Tensor
    columns: Tensor
    """Transposed."""
    largest: Tensor
    """The largest absolute value of each tile, before it was rounded."""
    inverse: Tensor
    """One over its scale [1]."""

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """As plain bytes, which every version of Triton takes."""
        return self.rows.view(torch.uint8), self.columns.view(torch.uint8)


def round_matrix(values: Tensor, guess: Tensor, *, dtype: torch.dtype, step: int) -> Matrix:
    """By the scale that fits, which `guess` becomes: a power of two whose exponent is a multiple of `step`."""
    made = room_for(values, dtype)
    tensors, rest = (values, *made.sides, guess), (*values.shape, name_of(dtype), limit_of(dtype))
    _round_matrix[made.largest.shape](*tensors, made.largest, None, *rest, num_warps=NUM_WARPS, num_stages=1)
    again = fit([made], [guess], dtype, step)
    _round_matrix[programs_again(made)](*tensors, None, again, *rest, num_warps=NUM_WARPS, num_stages=1)
    return made


def raise_to_largest(place: Tensor, made: Matrix) -> None:
    """Raise a number to the largest absolute value of a matrix."""
    tiles = made.largest
    _raise_to_largest[(1,)](tiles, place, len(tiles), LARGEST_BLOCK, num_warps=LARGEST_WARPS)


def fit(every: Sequence[Matrix], scales: Sequence[Tensor], dtype: torch.dtype, step: int) -> Tensor:
    """Make each scale the one that fits, and its inverse with it; and say which was another before."""
    again = torch.empty(len(every), dtype=torch.int32, device=every[0].rows.device)
    for made, scale, is_wrong in zip(every, scales, again, strict=True):
        bounds = len(made.largest), limit_of(dtype), LARGEST_SCALE, step
        places = scale, made.inverse, is_wrong
        _fit_scale[(1,)](made.largest, *places, *bounds, LARGEST_BLOCK, num_warps=LARGEST_WARPS)
    return again


def room_for(matrix: Tensor, dtype: torch.dtype) -> Matrix:
    height, width = matrix.shape
    rows, columns = (
        torch.empty(shape, dtype=dtype, device=matrix.device) for shape in ((height, width), (width, height))
    )
    num_tiles = triton.cdiv(width, TILE_COLUMNS.value) * triton.cdiv(height, TILE_ROWS.value)
    largest, inverse = (torch.empty(count, dtype=torch.float32, device=matrix.device) for count in (num_tiles, 1))
    return Matrix(rows, columns, largest, inverse)


def name_of(dtype: torch.dtype) -> tl.dtype:
    return tl.float8e4nv if dtype is torch.float8_e4m3fn else tl.float8e5


def limit_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def programs_again(made: Matrix) -> tuple[int]:
    """Of the second pass."""
    return (min(NUM_AGAIN, len(made.largest)),)


def note_rounded(before: Tensor, after: Tensor, scale: Tensor, row: Tensor, *, every: int) -> None:
    """Add to a row of a meter what rounding made of the rows of a matrix; `after`: fp8 as plain bytes.

    Of both the columns lie side by side. The meter's row has the columns of `harness.precision.fp8.meters.Column`, by
    number.
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
    add_to_meter(row, values, (numbers & 0x7F) == 0, scale, every)


@triton.jit
def add_to_meter(row, values, became_zero, scale, every):
    """What rounding made of a piece of a row, where each number stands for as many as `every` says: a power of two, so
    that sums are exact, whoever adds first."""
    is_number = values != 0
    tl.atomic_add(row + 2, (tl.sum((is_number & became_zero).to(tl.int32)) * every).to(tl.float32))
    tl.atomic_add(row + 3, (tl.sum(is_number.to(tl.int32)) * every).to(tl.float32))
    if tl.program_id(0) + tl.program_id(1) == 0:
        known, now = tl.load(row + 1), tl.load(scale)
        tl.store(row + 1, tl.where(known > 0, tl.minimum(known, now), now))


@triton.jit
def _round_matrix(
    values, rows, columns, scale, largest, again, height, width, dtype: tl.constexpr, limit: tl.constexpr
):
    if again is None:
        _round_tile(tl.program_id(0), values, rows, columns, scale, largest, height, width, dtype, limit)
    else:
        for number in range(tl.program_id(0), num_tiles_again(again, height, width), tl.num_programs(0)):
            _round_tile(number, values, rows, columns, scale, None, height, width, dtype, limit)


@triton.jit
def _round_tile(number, values, rows, columns, scale, largest, height, width, dtype: tl.constexpr, limit: tl.constexpr):
    at, inside = tile_at(number, height, width)
    tile = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    write_rounded(number, tile, rows, columns, scale, largest, height, width, dtype, limit)


@triton.jit
def num_tiles_again(again, height, width):
    """Of the second pass: all where the guess was wrong, else none."""
    return tl.where(tl.load(again) != 0, tl.cdiv(width, TILE_COLUMNS) * tl.cdiv(height, TILE_ROWS), 0)


@triton.jit
def _corner(number, width):
    """The first row and the first column of a tile; tiles of the same rows follow each other."""
    num_across = tl.cdiv(width, TILE_COLUMNS)
    return number // num_across * TILE_ROWS, number % num_across * TILE_COLUMNS


@triton.jit
def tile_at(number, height, width):
    """Where a tile lies in a matrix, and what of it is inside."""
    first_row, first_column = _corner(number, width)
    row, column = first_row + tl.arange(0, TILE_ROWS)[:, None], first_column + tl.arange(0, TILE_COLUMNS)[None, :]
    return row.to(tl.int64) * width + column, (row < height) & (column < width)


@triton.jit
def write_rounded(number, tile, rows, columns, scale, largest, height, width, dtype: tl.constexpr, limit: tl.constexpr):
    """A tile of a matrix, in fp8, both ways."""
    if largest is not None:
        tl.store(largest + number, tl.max(tl.abs(tile)))
    scaled = tl.clamp(tile * tl.load(scale), -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    rounded = scaled.to(dtype).to(tl.uint8, bitcast=True)
    at, inside = tile_at(number, height, width)
    tl.store(rows + at, rounded, mask=inside)
    first_row, first_column = _corner(number, width)
    row, column = first_row + tl.arange(0, TILE_ROWS)[None, :], first_column + tl.arange(0, TILE_COLUMNS)[:, None]
    inside = (row < height) & (column < width)
    tl.store(columns + column.to(tl.int64) * height + row, tl.trans(rounded), mask=inside)


@triton.jit
def _raise_to_largest(tiles, place, count, block: tl.constexpr):
    tl.store(place, tl.maximum(tl.load(place), _largest_of(tiles, count, block)))


@triton.jit
def _fit_scale(
    tiles,
    scale,
    inverse,
    is_wrong,
    count,
    limit: tl.constexpr,
    most: tl.constexpr,
    step: tl.constexpr,
    block: tl.constexpr,
):
    """As `harness.precision.fp8.meters.scale_of` has it."""
    largest = _largest_of(tiles, count, block)
    fitting = tl.where(largest > 0, tl.minimum(tl.div_rn(tl.full((), limit, tl.float32), largest), most), 1.0)
    exponent = (fitting.to(tl.int32, bitcast=True) >> 23) + 1
    power = (tl.maximum((exponent & -step) - 1, 0) << 23).to(tl.float32, bitcast=True)
    tl.store(is_wrong, (power != tl.load(scale)).to(tl.int32))
    tl.store(scale, power)
    tl.store(inverse, 1 / power)


@triton.jit
def _largest_of(tiles, count, block: tl.constexpr):
    most = tl.zeros((block,), tl.float32)
    for first in range(0, count, block):
        at = first + tl.arange(0, block)
        most = tl.maximum(most, tl.load(tiles + at, mask=at < count, other=0.0))
    return tl.max(most)
