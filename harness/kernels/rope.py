"""Splits a fused QKV output into queries, keys and values and applies RoPE on the way; and the reverse for gradients.

Why: compiled RoPE reaches two thirds of memory bandwidth, and the gradients of queries, keys and values must be
concatenated before one GEMM can read them. Here each direction is one pass.
How: a program takes a few heads of a few rows, both halves of each head, so every value is read once and written once,
16 bytes at a time. The heads of a program are all queries, all keys or all values, in whole groups, so only rows are
masked. Products are rounded before they are added, as in torch: the result is bit-equal.
Left out: heads whose half is not a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Values of either half of the heads per program."""
NUM_WARPS = 8
"""Warps per program: each thread has one 16-byte load per half, and occupancy is full."""
MAX_HEADS = 8
"""Heads of a row per program: 2 KiB contiguous for bf16 heads of 128 values."""


def split_and_rotate(
    fused_qkv: Tensor, cos: Tensor, sin: Tensor, *, widths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split `fused_qkv` [T, sum of widths] into queries, keys and values, and apply RoPE to the first two.

    A row's position is its index modulo S, which divides T; `cos` and `sin` are [S, head_dim / 2] in fp32. Everything
    is contiguous.
    """
    query, key, value = (fused_qkv.new_empty(len(fused_qkv), width) for width in widths)
    _move(fused_qkv, cos, sin, (query, key, value), is_backward=False)
    return query, key, value


def unrotate_and_join(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `fused_qkv` from those of queries, keys and values: undo RoPE on two of them, concatenate."""
    fused_qkv = query.new_empty(len(query), sum(part.shape[1] for part in (query, key, value)))
    _move(fused_qkv, cos, sin, (query, key, value), is_backward=True)
    return fused_qkv


def _move(
    fused_qkv: Tensor, cos: Tensor, sin: Tensor, parts: tuple[Tensor, Tensor, Tensor], *, is_backward: bool
) -> None:
    (height, width), (length, half) = fused_qkv.shape, cos.shape
    assert half == triton.next_power_of_2(half), "half a head must be a power of two"
    assert all(tensor.is_contiguous() for tensor in (fused_qkv, cos, sin, *parts)), "tensors must be contiguous"
    num_queries, num_keys = (part.shape[1] // (2 * half) for part in parts[:2])
    assert width == (num_queries + 2 * num_keys) * 2 * half, "widths must be whole heads, with as many keys as values"
    common = math.gcd(num_queries, num_keys)
    group = min(common & -common, MAX_HEADS)  # the largest power of two that divides both
    num_rows = max(TILE // (group * half), 1)
    grid = (triton.cdiv(height, num_rows) * ((num_queries + 2 * num_keys) // group),)
    sizes = (height, length, num_queries, num_keys, half, group, num_rows)
    _move_heads[grid](fused_qkv, cos, sin, *parts, *sizes, is_backward, num_warps=NUM_WARPS, enable_fp_fusion=False)


@triton.jit
def _move_heads(
    fused_qkv,
    cos,
    sin,
    query,
    key,
    value,
    height,
    length,
    num_queries: tl.constexpr,
    num_keys: tl.constexpr,
    half: tl.constexpr,
    group: tl.constexpr,
    num_rows: tl.constexpr,
    is_backward: tl.constexpr,
):
    num_heads: tl.constexpr = num_queries + 2 * num_keys
    row, head = _first_row_and_head(num_heads, group, num_rows)
    fused = fused_qkv + _head_offsets(row, head, num_heads, half, group, num_rows)
    inside, angles = _angle_offsets(row, height, length, half, group, num_rows)
    if head < num_queries:
        split = query + _head_offsets(row, head, num_queries, half, group, num_rows)
        _rotate(fused, split, cos + angles, sin + angles, inside, half, is_backward)
    elif head < num_queries + num_keys:
        split = key + _head_offsets(row, head - num_queries, num_keys, half, group, num_rows)
        _rotate(fused, split, cos + angles, sin + angles, inside, half, is_backward)
    else:
        split = value + _head_offsets(row, head - num_queries - num_keys, num_keys, half, group, num_rows)
        _copy(fused, split, inside, half, is_backward)


@triton.jit
def _first_row_and_head(num_heads: tl.constexpr, group: tl.constexpr, num_rows: tl.constexpr):
    """The first row and head of this program; neighbouring programs take the same rows."""
    num_groups: tl.constexpr = num_heads // group
    return tl.program_id(0) // num_groups * num_rows, tl.program_id(0) % num_groups * group


@triton.jit
def _head_offsets(row, head, num_heads: tl.constexpr, half: tl.constexpr, group: tl.constexpr, num_rows: tl.constexpr):
    """Offsets [num_rows, group, half] of the first halves of this program's heads in a matrix of `num_heads` heads."""
    row_steps = tl.arange(0, num_rows)[:, None, None] * num_heads
    head_steps = tl.arange(0, group)[None, :, None]
    begin = (row.to(tl.int64) * num_heads + head) * (2 * half)
    return begin + (row_steps + head_steps) * (2 * half) + tl.arange(0, half)[None, None, :]


@triton.jit
def _angle_offsets(row, height, length, half: tl.constexpr, group: tl.constexpr, num_rows: tl.constexpr):
    """The mask of this program's rows that are inside, and the offsets of their angles, equal for all heads."""
    number = row + tl.arange(0, num_rows)[:, None, None]
    at = number % length * half + tl.arange(0, half)[None, None, :]
    return number < height, tl.broadcast_to(at, (num_rows, group, half))


@triton.jit
def _rotate(fused, split, cos, sin, inside, half: tl.constexpr, is_backward: tl.constexpr):
    """Rotate both halves of heads from the fused to the split layout; backward, rotate back in the other direction."""
    source, target = (split, fused) if is_backward else (fused, split)
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + half, mask=inside).to(tl.float32)
    cosine, sine = tl.load(cos, mask=inside), tl.load(sin, mask=inside)
    if is_backward:
        sine = -sine
    tl.store(target, first * cosine - second * sine, mask=inside)
    tl.store(target + half, second * cosine + first * sine, mask=inside)


@triton.jit
def _copy(fused, split, inside, half: tl.constexpr, is_backward: tl.constexpr):
    """The same without rotation, for values."""
    source, target = (split, fused) if is_backward else (fused, split)
    first, second = tl.load(source, mask=inside), tl.load(source + half, mask=inside)
    tl.store(target, first, mask=inside)
    tl.store(target + half, second, mask=inside)
