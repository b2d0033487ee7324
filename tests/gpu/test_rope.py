"""Heads that are split and turned in one pass, and joined and turned back in another, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.precision.fused_qkv import apply_rope
from tests.gpu.where import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS

SIZES = [
    # sequences, their length, heads of queries, of keys, numbers of a head
    (1, 7, 3, 1, 8),
    (2, 650, 3, 1, 8),
    *([(3, 5, 16, 8, 128)] if IS_INTERPRETED else [(3, 50, 4, 2, 16), (2, 33, 12, 12, 64), (3, 1001, 16, 8, 128)]),
]
"""Rows that fill no whole program, and programs that reach from one sequence into the next."""
DTYPES = [torch.bfloat16, torch.float32, *([] if IS_INTERPRETED else [torch.float16])]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)


def tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = numbers(length, head_dim // 2)
    return angles.cos(), angles.sin()


def given(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    num_rows, length, num_queries, num_keys, head_dim = size
    widths = [heads * head_dim for heads in (num_queries, num_keys, num_keys)]
    return numbers(num_rows * length, sum(widths), dtype=dtype), *tables(length, head_dim), widths


def split_plainly(joint: Tensor, cos: Tensor, sin: Tensor, widths: list[int]) -> list[Tensor]:
    length, half = cos.shape
    query, key, value = joint.split_with_sizes(widths, dim=1)
    turned = [
        apply_rope(part.reshape(-1, length, part.shape[1] // (2 * half), 2 * half), cos, sin) for part in (query, key)
    ]
    return [*(part.flatten(2).flatten(0, 1) for part in turned), value]


def assert_same(own: Tensor, expected: Tensor) -> None:
    """To the bit, but that bf16 and fp16 are cut off instead of rounded where they are interpreted."""
    last_digit = torch.finfo(own.dtype).eps if IS_INTERPRETED and own.dtype is not torch.float32 else 0.0
    torch.testing.assert_close(own, expected, rtol=last_digit, atol=0.0, equal_nan=True)
    assert own.is_contiguous()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, interpreted: it is told to meet them
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_heads_are_split_and_turned_as_in_plain_torch(size: tuple[int, ...], dtype: torch.dtype) -> None:
    from harness.kernels.rope import split_and_rotate

    joint, cos, sin, widths = given(size, dtype)
    joint[3, 1], joint[4, -1], joint[5, -2] = torch.nan, torch.inf, torch.nan
    own = split_and_rotate(joint, cos, sin, widths=widths)
    for made, expected in zip(own, split_plainly(joint, cos, sin, widths), strict=True):
        assert_same(made, expected)
    assert [int((~made.isfinite()).sum()) for made in own] == [2, 0, 2], "each only where it belongs"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_are_joined_and_turned_back_as_in_plain_torch(size: tuple[int, ...], dtype: torch.dtype) -> None:
    from harness.kernels.rope import split_and_rotate, unrotate_and_join

    joint, cos, sin, widths = given(size, dtype)
    query, key, value = slopes = [numbers(len(joint), width, dtype=dtype) for width in widths]
    own = unrotate_and_join(query, key, value, cos, sin)
    made = split_plainly(joint.requires_grad_(), cos, sin, widths)
    (expected,) = torch.autograd.grad(made, joint, slopes)
    assert_same(own, expected)
    back = unrotate_and_join(*split_and_rotate(joint.detach(), cos, sin, widths=widths), cos, sin)
    torch.testing.assert_close(back, joint.detach(), rtol=0.0, atol=8 * torch.finfo(dtype).eps)
