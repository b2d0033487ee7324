"""Quantization to fp8 by rows and transposed in one pass, by the scale that fits the amax; and underflow counts.

How: a program quantizes one tile and stores the tile's amax in its own place, since atomic updates of one place would
serialize. A matrix is quantized by the last step's scale; then the amax is known, and with it the scale that fits.
Scales are powers of two, so it is mostly the same. If not, a second pass quantizes again. The host does not wait to
know: the second pass is always launched, and mostly does nothing. The result does not depend on the last scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Values of a row per program, where underflow is counted."""
TILE_ROWS, TILE_COLUMNS = tl.constexpr(64), tl.constexpr(64)
"""Tile of a matrix that is written in both layouts."""
NUM_WARPS = 8
"""Warps per tile; with 4, the gradients of SwiGLU take a third longer."""
MAX_REQUANTIZE_PROGRAMS = 1024
"""The second pass has at most this many programs, which share all tiles."""
AMAX_BLOCK, AMAX_WARPS = 4096, 16
"""Tiles whose amax is reduced per iteration, and the warps that do it."""
MAX_SCALE = 2.0**100
"""The same as in `harness.precision.fp8.quantize_meters`."""


class QuantizedTiles(NamedTuple):
    """A matrix in fp8, with the amax of each tile."""

    rows: Tensor
    columns: Tensor
    """The transpose; empty where a kernel does not write it."""
    amax: Tensor
    """The amax of each tile before quantization."""
    scale_inv: Tensor
    """1 / scale [1]."""

    @property
    def layouts(self) -> tuple[Tensor, Tensor]:
        """Rows and columns as bytes, which every version of Triton accepts."""
        return self.rows.view(torch.uint8), self.columns.view(torch.uint8)


def quantize_matrix(values: Tensor, last_scale: Tensor, *, dtype: torch.dtype, step: int) -> QuantizedTiles:
    """Quantize by the scale that fits the amax, and write it into `last_scale`.

    It is a power of two whose exponent is a multiple of `step`.
    """
    tiles = empty_tiles(values, dtype)
    tensors, rest = (values, *tiles.layouts, last_scale), (*values.shape, triton_dtype(dtype), max_value(dtype))
    _quantize_matrix[tiles.amax.shape](*tensors, tiles.amax, None, *rest, num_warps=NUM_WARPS, num_stages=1)
    requantize = fit_scales([tiles], [last_scale], dtype, step)
    _quantize_matrix[requantize_grid(tiles)](*tensors, None, requantize, *rest, num_warps=NUM_WARPS, num_stages=1)
    return tiles


def update_amax(place: Tensor, tiles: QuantizedTiles) -> None:
    """Raise the amax in `place` to that of a matrix."""
    _update_amax[(1,)](tiles.amax, place, len(tiles.amax), AMAX_BLOCK, num_warps=AMAX_WARPS)


def fit_scales(matrices: Sequence[QuantizedTiles], scales: Sequence[Tensor], dtype: torch.dtype, step: int) -> Tensor:
    """Set each scale, and its inverse, to the one that fits the amax; return 1 for each that was different before."""
    requantize = torch.empty(len(matrices), dtype=torch.int32, device=matrices[0].rows.device)
    for tiles, scale, is_stale in zip(matrices, scales, requantize, strict=True):
        bounds = len(tiles.amax), max_value(dtype), MAX_SCALE, step
        places = scale, tiles.scale_inv, is_stale
        _fit_scale[(1,)](tiles.amax, *places, *bounds, AMAX_BLOCK, num_warps=AMAX_WARPS)
    return requantize


def empty_tiles(matrix: Tensor, dtype: torch.dtype, *, transpose: bool = True) -> QuantizedTiles:
    """Uninitialized output for a matrix."""
    height, width = matrix.shape
    rows, columns = (
        torch.empty(shape, dtype=dtype, device=matrix.device)
        for shape in ((height, width), (width, height) if transpose else (0,))
    )
    num_tiles = triton.cdiv(width, TILE_COLUMNS.value) * triton.cdiv(height, TILE_ROWS.value)
    amax, scale_inv = (torch.empty(count, dtype=torch.float32, device=matrix.device) for count in (num_tiles, 1))
    return QuantizedTiles(rows, columns, amax, scale_inv)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float8e4nv if dtype is torch.float8_e4m3fn else tl.float8e5


def max_value(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def requantize_grid(tiles: QuantizedTiles) -> tuple[int]:
    """The grid of the second pass."""
    return (min(MAX_REQUANTIZE_PROGRAMS, len(tiles.amax)),)


def count_underflow(before: Tensor, after: Tensor, scale: Tensor, row: Tensor, *, every: int) -> None:
    """Add the underflow and nonzero counts of sampled rows to a meter's row; `after`: fp8 as bytes.

    Both matrices have contiguous columns. The meter's row has the columns of
    `harness.precision.fp8.quantize_meters.Column`.
    """
    height, width = before.shape
    grid = (height, triton.cdiv(width, BLOCK))
    counts = empty_counts(row)
    _count_underflow[grid](before, after, scale, row, counts, width, before.stride(0), after.stride(0), BLOCK)
    add_counts(counts, [row], every=every)


def empty_counts(like: Tensor, num_rows: int = 1) -> Tensor:
    """Zero underflow and nonzero counts of so many rows of a meter. They are integers, so that atomic sums are exact in
    any order; a meter's own fp32 sums are not, beyond 2**24 sampled values."""
    return torch.zeros(num_rows, 2, dtype=torch.int32, device=like.device)


def add_counts(counts: Tensor, rows: Sequence[Tensor], *, every: int) -> None:
    """Add the counts of one matrix to the rows of its meters; each counted value stands for `every`."""
    for of_row, row in zip(counts, rows, strict=True):
        row[2:4].add_(of_row, alpha=every)


@triton.jit
def _count_underflow(before, after, scale, row, counts, width, before_stride, after_stride, block: tl.constexpr):
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    line = tl.program_id(0).to(tl.int64)
    values = tl.load(before + line * before_stride + at, mask=inside, other=0.0)
    quantized = tl.load(after + line * after_stride + at, mask=inside, other=0)
    count_zeros(row, counts, values, (quantized & 0x7F) == 0, scale)


@triton.jit
def count_zeros(row, counts, values, is_zero, scale):
    """Add the counts of a piece of a row, and record the scale in the meter's row."""
    is_nonzero = values != 0
    tl.atomic_add(counts, tl.sum((is_nonzero & is_zero).to(tl.int32)))
    tl.atomic_add(counts + 1, tl.sum(is_nonzero.to(tl.int32)))
    if tl.program_id(0) + tl.program_id(1) == 0:
        recorded, current = tl.load(row + 1), tl.load(scale)
        tl.store(row + 1, tl.where(recorded > 0, tl.minimum(recorded, current), current))


@triton.jit
def _quantize_matrix(
    values, rows, columns, scale, amax, requantize, height, width, dtype: tl.constexpr, limit: tl.constexpr
):
    if requantize is None:
        _quantize_tile(tl.program_id(0), values, rows, columns, scale, amax, height, width, dtype, limit)
    else:
        for number in range(tl.program_id(0), num_tiles_to_requantize(requantize, height, width), tl.num_programs(0)):
            _quantize_tile(number, values, rows, columns, scale, None, height, width, dtype, limit)


@triton.jit
def _quantize_tile(number, values, rows, columns, scale, amax, height, width, dtype: tl.constexpr, limit: tl.constexpr):
    at, inside = tile_at(number, height, width)
    tile = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    write_quantized(number, tile, rows, columns, scale, amax, height, width, dtype, limit)


@triton.jit
def num_tiles_to_requantize(requantize, height, width):
    """The tiles of the second pass: all if the last scale did not fit, else none."""
    return tl.where(tl.load(requantize) != 0, tl.cdiv(width, TILE_COLUMNS) * tl.cdiv(height, TILE_ROWS), 0)


@triton.jit
def _corner(number, width):
    """The first row and column of a tile; tiles are numbered by rows."""
    num_across = tl.cdiv(width, TILE_COLUMNS)
    return number // num_across * TILE_ROWS, number % num_across * TILE_COLUMNS


@triton.jit
def tile_at(number, height, width):
    """Offsets of a tile in a matrix, and the mask of those inside."""
    first_row, first_column = _corner(number, width)
    row, column = first_row + tl.arange(0, TILE_ROWS)[:, None], first_column + tl.arange(0, TILE_COLUMNS)[None, :]
    return row.to(tl.int64) * width + column, (row < height) & (column < width)


@triton.jit
def write_quantized(number, tile, rows, columns, scale, amax, height, width, dtype: tl.constexpr, limit: tl.constexpr):
    """Quantize a tile and write it in both layouts; store its amax if requested."""
    if amax is not None:
        tl.store(amax + number, tl.max(tl.abs(tile)))
    quantized = quantize_tile(tile, tl.load(scale), dtype, limit)
    at, inside = tile_at(number, height, width)
    tl.store(rows + at, quantized, mask=inside)
    write_columns(number, quantized, columns, height, width)


@triton.jit
def quantize_tile(tile, scale, dtype: tl.constexpr, limit: tl.constexpr):
    """The bytes of a tile in fp8."""
    scaled = tl.clamp(tile * scale, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(dtype).to(tl.uint8, bitcast=True)


@triton.jit
def write_columns(number, quantized, columns, height, width):
    """Write a quantized tile into the transpose."""
    first_row, first_column = _corner(number, width)
    row, column = first_row + tl.arange(0, TILE_ROWS)[None, :], first_column + tl.arange(0, TILE_COLUMNS)[:, None]
    inside = (row < height) & (column < width)
    tl.store(columns + column.to(tl.int64) * height + row, tl.trans(quantized), mask=inside)


@triton.jit
def _update_amax(tiles, place, count, block: tl.constexpr):
    tl.store(place, tl.maximum(tl.load(place), _amax_of_tiles(tiles, count, block)))


@triton.jit
def _fit_scale(
    tiles,
    scale,
    scale_inv,
    is_stale,
    count,
    limit: tl.constexpr,
    most: tl.constexpr,
    step: tl.constexpr,
    block: tl.constexpr,
):
    """The same rule as `harness.precision.fp8.quantize_meters.compute_scale`."""
    amax = _amax_of_tiles(tiles, count, block)
    fitting = tl.where(amax > 0, tl.minimum(tl.div_rn(tl.full((), limit, tl.float32), amax), most), 1.0)
    exponent = (fitting.to(tl.int32, bitcast=True) >> 23) + 1
    power = (tl.maximum((exponent & -step) - 1, 0) << 23).to(tl.float32, bitcast=True)
    tl.store(is_stale, (power != tl.load(scale)).to(tl.int32))
    tl.store(scale, power)
    tl.store(scale_inv, 1 / power)


@triton.jit
def _amax_of_tiles(tiles, count, block: tl.constexpr):
    most = tl.zeros((block,), tl.float32)
    for first in range(0, count, block):
        at = first + tl.arange(0, block)
        most = tl.maximum(most, tl.load(tiles + at, mask=at < count, other=0.0))
    return tl.max(most)
