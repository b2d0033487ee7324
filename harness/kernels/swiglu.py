"""SwiGLU that is rounded to fp8, by rows and transposed, where it is computed; its gradients likewise.

How: a program takes a tile, and leaves the tile's largest number in a place of its own: where all raised one number,
they stood in a queue for it. Where scales are to fit the tensor, it is rounded by a guess, most often that of the last
step, and then the scale that fits is known. As scales are powers of two, that is the guess most of the time; if it is
not, the tensor is rounded again. Nobody waits to hear which: the second pass is always launched, and mostly does
nothing. What comes out is the same, whatever the guess was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = tl.constexpr(64), tl.constexpr(64)
"""Of a matrix that is written both ways."""
NUM_WARPS = 8
"""That share such a tile: with fewer there is no room for it in registers."""
NUM_AGAIN = 1024
"""Programs of the second pass, at most, which share all tiles."""
LARGEST_BLOCK, LARGEST_WARPS = 4096, 16
"""Tiles whose largest numbers are compared at once, and the warps that do."""
LARGEST_SCALE = 2.0**100
"""As everywhere (`harness.fp8.meters`)."""


class Matrix(NamedTuple):
    """In fp8."""

    rows: Tensor
    columns: Tensor
    """Transposed."""
    largest: Tensor
    """The largest absolute value of each tile, before it was rounded."""


def round_product(gate: Tensor, up: Tensor, scale: Tensor, *, dtype: torch.dtype, fits: bool) -> Matrix:
    """silu(gate) * up; where the scale is to fit, `scale` is a guess, and becomes the one that was used."""
    made = _room(gate, dtype)
    tensors = gate, up, made.rows.view(torch.uint8), made.columns.view(torch.uint8), scale
    rest = *gate.shape, _name(dtype), _limit(dtype)
    _round_product[made.largest.shape](*tensors, made.largest, None, *rest, num_warps=NUM_WARPS, num_stages=1)
    if fits:
        again = _fit([made], [scale], dtype)
        _round_product[(min(NUM_AGAIN, len(made.largest)),)](
            *tensors, None, again, *rest, num_warps=NUM_WARPS, num_stages=1
        )
    return made


def round_slopes(
    gradient: Tensor, gate: Tensor, up: Tensor, scales: Sequence[Tensor], *, dtype: torch.dtype, fits: bool
) -> tuple[Matrix, Matrix]:
    """The gradients of gate and of up from the one of silu(gate) * up, each as `round_product` has it."""
    both = _room(gate, dtype), _room(gate, dtype)
    sides = [side.view(torch.uint8) for made in both for side in (made.rows, made.columns)]
    tensors, largest = (gradient, gate, up, *sides, *scales), [made.largest for made in both]
    rest = *gate.shape, _name(dtype), _limit(dtype)
    _round_slopes[largest[0].shape](*tensors, *largest, None, *rest, num_warps=NUM_WARPS, num_stages=1)
    if fits:
        again = _fit(both, scales, dtype)
        _round_slopes[(min(NUM_AGAIN, len(largest[0])),)](
            *tensors, None, None, again, *rest, num_warps=NUM_WARPS, num_stages=1
        )
    return both


def raise_to_largest(place: Tensor, made: Matrix) -> None:
    """Raise a number to the largest absolute value of a matrix."""
    tiles = made.largest
    _raise_to_largest[(1,)](tiles, place, len(tiles), LARGEST_BLOCK, num_warps=LARGEST_WARPS)


def _fit(every: Sequence[Matrix], scales: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Make each scale the one that fits; and say which was another before."""
    again = torch.empty(len(every), dtype=torch.int32, device=every[0].rows.device)
    for made, scale, is_wrong in zip(every, scales, again, strict=True):
        bounds = len(made.largest), _limit(dtype), LARGEST_SCALE
        _fit_scale[(1,)](made.largest, scale, is_wrong, *bounds, LARGEST_BLOCK, num_warps=LARGEST_WARPS)
    return again


def _room(matrix: Tensor, dtype: torch.dtype) -> Matrix:
    height, width = matrix.shape
    rows, columns = (
        torch.empty(shape, dtype=dtype, device=matrix.device) for shape in ((height, width), (width, height))
    )
    num_tiles = triton.cdiv(width, TILE_COLUMNS.value) * triton.cdiv(height, TILE_ROWS.value)
    return Matrix(rows, columns, torch.empty(num_tiles, dtype=torch.float32, device=matrix.device))


def _name(dtype: torch.dtype) -> tl.dtype:
    return tl.float8e4nv if dtype is torch.float8_e4m3fn else tl.float8e5


def _limit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


@triton.jit
def _product(gate, up):
    """silu(gate) * up as bf16 has it."""
    turned = gate.to(tl.float32)
    return (turned * tl.sigmoid(turned) * up.to(tl.float32)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _slopes(gradient, gate, up):
    """The gradients of gate and up from that of their product, as bf16 has them."""
    slope, turned = gradient.to(tl.float32), gate.to(tl.float32)
    share = tl.sigmoid(turned)
    of_gate = slope * up.to(tl.float32) * share * (1 + turned * (1 - share))
    return of_gate.to(tl.bfloat16).to(tl.float32), (slope * turned * share).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _round_product(
    gate, up, rows, columns, scale, largest, again, height, width, dtype: tl.constexpr, limit: tl.constexpr
):
    end = _num_tiles(height, width)
    if again is not None:
        end = tl.where(tl.load(again) != 0, end, 0)
    for number in range(tl.program_id(0), end, tl.num_programs(0)):
        at, inside = _tile(number, height, width)
        product = _product(tl.load(gate + at, mask=inside, other=0.0), tl.load(up + at, mask=inside, other=0.0))
        _write_rounded(number, product, rows, columns, scale, largest, height, width, dtype, limit)


@triton.jit
def _round_slopes(
    gradient,
    gate,
    up,
    gate_rows,
    gate_columns,
    up_rows,
    up_columns,
    gate_scale,
    up_scale,
    gate_largest,
    up_largest,
    again,
    height,
    width,
    dtype: tl.constexpr,
    limit: tl.constexpr,
):
    end = _num_tiles(height, width)
    if again is not None:
        end = tl.where((tl.load(again) | tl.load(again + 1)) != 0, end, 0)
    for number in range(tl.program_id(0), end, tl.num_programs(0)):
        at, inside = _tile(number, height, width)
        slope, turned = tl.load(gradient + at, mask=inside, other=0.0), tl.load(gate + at, mask=inside, other=0.0)
        of_gate, of_up = _slopes(slope, turned, tl.load(up + at, mask=inside, other=0.0))
        _write_rounded(number, of_gate, gate_rows, gate_columns, gate_scale, gate_largest, height, width, dtype, limit)
        _write_rounded(number, of_up, up_rows, up_columns, up_scale, up_largest, height, width, dtype, limit)


@triton.jit
def _num_tiles(height, width):
    return tl.cdiv(width, TILE_COLUMNS) * tl.cdiv(height, TILE_ROWS)


@triton.jit
def _corner(number, width):
    """The first row and the first column of a tile; tiles of the same rows follow each other."""
    num_across = tl.cdiv(width, TILE_COLUMNS)
    return number // num_across * TILE_ROWS, number % num_across * TILE_COLUMNS


@triton.jit
def _tile(number, height, width):
    """Where a tile lies in a matrix, and what of it is inside."""
    first_row, first_column = _corner(number, width)
    row, column = first_row + tl.arange(0, TILE_ROWS)[:, None], first_column + tl.arange(0, TILE_COLUMNS)[None, :]
    return row.to(tl.int64) * width + column, (row < height) & (column < width)


@triton.jit
def _write_rounded(
    number, tile, rows, columns, scale, largest, height, width, dtype: tl.constexpr, limit: tl.constexpr
):
    """A tile of a matrix, in fp8, both ways."""
    if largest is not None:
        tl.store(largest + number, tl.max(tl.abs(tile)))
    scaled = tl.clamp(tile * tl.load(scale), -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    rounded = scaled.to(dtype).to(tl.uint8, bitcast=True)
    at, inside = _tile(number, height, width)
    tl.store(rows + at, rounded, mask=inside)
    first_row, first_column = _corner(number, width)
    row, column = first_row + tl.arange(0, TILE_ROWS)[None, :], first_column + tl.arange(0, TILE_COLUMNS)[:, None]
    inside = (row < height) & (column < width)
    tl.store(columns + column.to(tl.int64) * height + row, tl.trans(rounded), mask=inside)


@triton.jit
def _raise_to_largest(tiles, place, count, block: tl.constexpr):
    tl.store(place, tl.maximum(tl.load(place), _largest_of(tiles, count, block)))


@triton.jit
def _fit_scale(tiles, scale, is_wrong, count, limit: tl.constexpr, most: tl.constexpr, block: tl.constexpr):
    largest = _largest_of(tiles, count, block)
    fitting = tl.where(largest > 0, tl.minimum(tl.div_rn(tl.full((), limit, tl.float32), largest), most), 1.0)
    power = (fitting.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(is_wrong, (power != tl.load(scale)).to(tl.int32))
    tl.store(scale, power)


@triton.jit
def _largest_of(tiles, count, block: tl.constexpr):
    most = tl.zeros((block,), tl.float32)
    for first in range(0, count, block):
        at = first + tl.arange(0, block)
        most = tl.maximum(most, tl.load(tiles + at, mask=at < count, other=0.0))
    return tl.max(most)
