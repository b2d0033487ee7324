"""Queries, keys and values out of the one product that made them, turned by their positions on the way; and back.

Why: compiled, queries and keys are turned at two thirds of the rate of memory, and their gradients, which come apart,
must lie side by side before one product can take them. Here either way is one pass.
How: a program takes a few heads of a few rows, both halves of each, so that every number is read once and written once,
16 bytes at a time. The heads of a program are all queries, all keys or all values, and they come in whole groups, so
only rows are masked. Products are rounded before they are added up, as in torch: not a bit differs from what it makes.
Left out: heads whose half is no power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Numbers of either half that one program takes."""
NUM_WARPS = 8
"""That share them: of either half a thread has one load of 16 bytes, and a device as many threads as it can hold."""
MOST_HEADS = 8
"""That a program takes of a row: in bf16 and of 128 numbers, 2 KiB in one piece."""


def split_rotated(joint: Tensor, cos: Tensor, sin: Tensor, *, widths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, of `widths`, that lie side by side in `joint` [T, their sum]; the first two turned.

    A row's position is its number modulo S, which divides T; `cos` and `sin` [S, head_dim / 2], in fp32, have its
    angles. Everything is contiguous.
    """
    query, key, value = (joint.new_empty(len(joint), width) for width in widths)
    _move(joint, cos, sin, (query, key, value), is_back=False)
    return query, key, value


def joined_unrotated(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Side by side again, the first two turned back: the gradient of `joint` from those of what it was split into."""
    joint = query.new_empty(len(query), sum(each.shape[1] for each in (query, key, value)))
    _move(joint, cos, sin, (query, key, value), is_back=True)
    return joint


def _move(joint: Tensor, cos: Tensor, sin: Tensor, parts: tuple[Tensor, Tensor, Tensor], *, is_back: bool) -> None:
    (height, width), (length, half) = joint.shape, cos.shape
    assert half == triton.next_power_of_2(half), "half a head must be a power of two"
    assert all(each.is_contiguous() for each in (joint, cos, sin, *parts)), "only contiguous tensors"
    num_queries, num_keys = (part.shape[1] // (2 * half) for part in parts[:2])
    assert width == (num_queries + 2 * num_keys) * 2 * half, "whole heads, and as many keys as values"
    common = math.gcd(num_queries, num_keys)
    group = min(common & -common, MOST_HEADS)  # the largest power of two that divides both
    num_rows = max(TILE // (group * half), 1)
    grid = (triton.cdiv(height, num_rows) * ((num_queries + 2 * num_keys) // group),)
    sizes = (height, length, num_queries, num_keys, half, group, num_rows)
    _move_heads[grid](joint, cos, sin, *parts, *sizes, is_back, num_warps=NUM_WARPS, enable_fp_fusion=False)


@triton.jit
def _move_heads(
    joint,
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
    is_back: tl.constexpr,
):
    num_heads: tl.constexpr = num_queries + 2 * num_keys
    row, head = _place(num_heads, group, num_rows)
    together = joint + _heads_at(row, head, num_heads, half, group, num_rows)
    inside, angles = _angles_at(row, height, length, half, group, num_rows)
    if head < num_queries:
        apart = query + _heads_at(row, head, num_queries, half, group, num_rows)
        _turn(together, apart, cos + angles, sin + angles, inside, half, is_back)
    elif head < num_queries + num_keys:
        apart = key + _heads_at(row, head - num_queries, num_keys, half, group, num_rows)
        _turn(together, apart, cos + angles, sin + angles, inside, half, is_back)
    else:
        apart = value + _heads_at(row, head - num_queries - num_keys, num_keys, half, group, num_rows)
        _copy(together, apart, inside, half, is_back)


@triton.jit
def _place(num_heads: tl.constexpr, group: tl.constexpr, num_rows: tl.constexpr):
    """The first row and the first head of this program; its neighbours take the same rows."""
    num_groups: tl.constexpr = num_heads // group
    return tl.program_id(0) // num_groups * num_rows, tl.program_id(0) % num_groups * group


@triton.jit
def _heads_at(row, head, num_heads: tl.constexpr, half: tl.constexpr, group: tl.constexpr, num_rows: tl.constexpr):
    """Where the first halves of this program's heads lie in a matrix of `num_heads` [num_rows, group, half]."""
    rows_on = tl.arange(0, num_rows)[:, None, None] * num_heads
    heads_on = tl.arange(0, group)[None, :, None]
    begin = (row.to(tl.int64) * num_heads + head) * (2 * half)
    return begin + (rows_on + heads_on) * (2 * half) + tl.arange(0, half)[None, None, :]


@triton.jit
def _angles_at(row, height, length, half: tl.constexpr, group: tl.constexpr, num_rows: tl.constexpr):
    """What of this program's rows is inside, and where in the tables their angles lie; alike for all heads."""
    number = row + tl.arange(0, num_rows)[:, None, None]
    at = number % length * half + tl.arange(0, half)[None, None, :]
    return number < height, tl.broadcast_to(at, (num_rows, group, half))


@triton.jit
def _turn(together, apart, cos, sin, inside, half: tl.constexpr, is_back: tl.constexpr):
    """Both halves of heads from where they are together to where they are apart, by their angles; or back."""
    source, target = (apart, together) if is_back else (together, apart)
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + half, mask=inside).to(tl.float32)
    cosine, sine = tl.load(cos, mask=inside), tl.load(sin, mask=inside)
    if is_back:
        sine = -sine
    tl.store(target, first * cosine - second * sine, mask=inside)
    tl.store(target + half, second * cosine + first * sine, mask=inside)


@triton.jit
def _copy(together, apart, inside, half: tl.constexpr, is_back: tl.constexpr):
    """The same of heads that are not turned."""
    source, target = (apart, together) if is_back else (together, apart)
    first, second = tl.load(source, mask=inside), tl.load(source + half, mask=inside)
    tl.store(target, first, mask=inside)
    tl.store(target + half, second, mask=inside)
