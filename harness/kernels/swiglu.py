"""SwiGLU that is rounded to fp8, by rows and transposed, where it is computed; its gradients likewise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Numbers of which one program finds the largest."""
TILE_ROWS, TILE_COLUMNS = tl.constexpr(64), tl.constexpr(64)
"""Of a matrix that is written both ways."""
LARGEST_SCALE = 2.0**100
"""As everywhere (`harness.fp8.meters`)."""
NUM_WARPS = 8
"""That share such a tile: with fewer there is no room for it in registers."""


def round_product(
    gate: Tensor, up: Tensor, scale: Tensor, largest: Tensor | None, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in fp8, by rows and transposed; `largest`, if there is one, is raised to its largest absolute
    value."""
    rows, columns = (torch.empty(shape, dtype=dtype, device=gate.device) for shape in (gate.shape, gate.shape[::-1]))
    outputs = rows.view(torch.uint8), columns.view(torch.uint8)
    _round_product[_tiles(gate)](
        gate, up, *outputs, scale, largest, *gate.shape, _name(dtype), _limit(dtype), num_warps=NUM_WARPS
    )
    return rows, columns


def round_slopes(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    scales: Sequence[Tensor],
    largest: Sequence[Tensor | None],
    *,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The gradients of gate and of up from the one of silu(gate) * up, each as `round_product` has it."""
    both = [torch.empty(shape, dtype=dtype, device=gate.device) for shape in (gate.shape, gate.shape[::-1]) * 2]
    outputs = [each.view(torch.uint8) for each in both]
    inputs = (gradient, gate, up)
    _round_slopes[_tiles(gate)](
        *inputs, *outputs, *scales, *largest, *gate.shape, _name(dtype), _limit(dtype), num_warps=NUM_WARPS
    )
    return (both[0], both[1]), (both[2], both[3])


def scale_for_product(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """The scale [] that makes the largest number of silu(gate) * up the largest of fp8."""
    largest = _room_for_largest(gate, 1)
    _largest_product[(largest.shape[1],)](gate, up, largest, gate.numel(), BLOCK)
    return _scales(largest, limit)[0]


def scales_for_slopes(gradient: Tensor, gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """The same [2] of the gradients of gate and up."""
    largest = _room_for_largest(gate, 2)
    _largest_slopes[(largest.shape[1],)](gradient, gate, up, largest, gate.numel(), BLOCK)
    return _scales(largest, limit)


def _room_for_largest(values: Tensor, count: int) -> Tensor:
    """Each program has a place of its own: where they all raised one number, they stood in a queue for it."""
    return torch.empty(count, triton.cdiv(values.numel(), BLOCK), dtype=torch.float32, device=values.device)


def _scales(largest: Tensor, limit: float) -> Tensor:
    most = largest.amax(dim=1)
    scales = torch.empty_like(most)
    _scale_of[(len(most),)](most, scales, limit, LARGEST_SCALE)
    return scales


def _tiles(matrix: Tensor) -> tuple[int, int]:
    height, width = matrix.shape
    return triton.cdiv(width, TILE_COLUMNS.value), triton.cdiv(height, TILE_ROWS.value)


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
def _largest_product(gate, up, largest, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    product = _product(tl.load(gate + at, mask=inside, other=0.0), tl.load(up + at, mask=inside, other=0.0))
    tl.store(largest + tl.program_id(0), tl.max(tl.abs(product)))


@triton.jit
def _largest_slopes(gradient, gate, up, largest, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    slope, turned = tl.load(gradient + at, mask=inside, other=0.0), tl.load(gate + at, mask=inside, other=0.0)
    of_gate, of_up = _slopes(slope, turned, tl.load(up + at, mask=inside, other=0.0))
    tl.store(largest + tl.program_id(0), tl.max(tl.abs(of_gate)))
    tl.store(largest + tl.num_programs(0) + tl.program_id(0), tl.max(tl.abs(of_up)))


@triton.jit
def _scale_of(largest, scales, limit: tl.constexpr, most: tl.constexpr):
    place = tl.program_id(0)
    value = tl.load(largest + place)
    tl.store(scales + place, tl.where(value > 0, tl.minimum(limit / value, most), 1.0))


@triton.jit
def _round_product(gate, up, rows, columns, scale, largest, height, width, dtype: tl.constexpr, limit: tl.constexpr):
    at, inside = _tile(height, width)
    product = _product(tl.load(gate + at, mask=inside, other=0.0), tl.load(up + at, mask=inside, other=0.0))
    _write_rounded(product, rows, columns, scale, largest, height, width, dtype, limit)


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
    height,
    width,
    dtype: tl.constexpr,
    limit: tl.constexpr,
):
    at, inside = _tile(height, width)
    slope, turned = tl.load(gradient + at, mask=inside, other=0.0), tl.load(gate + at, mask=inside, other=0.0)
    of_gate, of_up = _slopes(slope, turned, tl.load(up + at, mask=inside, other=0.0))
    _write_rounded(of_gate, gate_rows, gate_columns, gate_scale, gate_largest, height, width, dtype, limit)
    _write_rounded(of_up, up_rows, up_columns, up_scale, up_largest, height, width, dtype, limit)


@triton.jit
def _tile(height, width):
    """Where this program's tile lies in a matrix, and what of it is inside."""
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    return row.to(tl.int64) * width + column, (row < height) & (column < width)


@triton.jit
def _write_rounded(tile, rows, columns, scale, largest, height, width, dtype: tl.constexpr, limit: tl.constexpr):
    """This program's tile of a matrix, in fp8, both ways."""
    if largest is not None:
        most = tl.max(tl.abs(tile))
        if most > tl.load(largest):  # few are: not all programs have to queue for one number
            tl.atomic_max(largest, most)
    scaled = tl.clamp(tile * tl.load(scale), -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    rounded = scaled.to(dtype).to(tl.uint8, bitcast=True)
    at, inside = _tile(height, width)
    tl.store(rows + at, rounded, mask=inside)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :]
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[:, None]
    inside = (row < height) & (column < width)
    tl.store(columns + column.to(tl.int64) * height + row, tl.trans(rounded), mask=inside)
