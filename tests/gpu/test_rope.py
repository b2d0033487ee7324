"""The RoPE kernels against plain torch: split and rotate, and the reverse for gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.precision.fused_qkv import apply_rope
from tests.gpu.kernel_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS

SIZES = [
    # sequences, sequence length, query heads, key heads, head_dim
    (1, 7, 3, 1, 8),
    (2, 650, 3, 1, 8),
    *([(3, 5, 16, 8, 128)] if IS_INTERPRETED else [(3, 50, 4, 2, 16), (2, 33, 12, 12, 64), (3, 1001, 16, 8, 128)]),
]
"""Rows that do not fill a whole program, and programs that span two sequences."""
DTYPES = [torch.bfloat16, torch.float32, *([] if IS_INTERPRETED else [torch.float16])]


def random_values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)


def rope_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = random_values(length, head_dim // 2)
    return angles.cos(), angles.sin()


def make_inputs(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    num_rows, length, num_queries, num_keys, head_dim = size
    widths = [heads * head_dim for heads in (num_queries, num_keys, num_keys)]
    return random_values(num_rows * length, sum(widths), dtype=dtype), *rope_tables(length, head_dim), widths


def split_in_torch(fused: Tensor, cos: Tensor, sin: Tensor, widths: list[int]) -> list[Tensor]:
    length, half = cos.shape
    query, key, value = fused.split_with_sizes(widths, dim=1)
    rotated = [
        apply_rope(part.reshape(-1, length, part.shape[1] // (2 * half), 2 * half), cos, sin) for part in (query, key)
    ]
    return [*(part.flatten(2).flatten(0, 1) for part in rotated), value]


def assert_same(own: Tensor, expected: Tensor) -> None:
    """Bit-equal, except that the interpreter truncates bf16 and fp16."""
    last_digit = torch.finfo(own.dtype).eps if IS_INTERPRETED and own.dtype is not torch.float32 else 0.0
    torch.testing.assert_close(own, expected, rtol=last_digit, atol=0.0, equal_nan=True)
    assert own.is_contiguous()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_split_and_rotate_matches_torch(size: tuple[int, ...], dtype: torch.dtype) -> None:
    from harness.kernels.rope import split_and_rotate

    fused, cos, sin, widths = make_inputs(size, dtype)
    fused[3, 1], fused[4, -1], fused[5, -2] = torch.nan, torch.inf, torch.nan
    own = split_and_rotate(fused, cos, sin, widths=widths)
    for output, expected in zip(own, split_in_torch(fused, cos, sin, widths), strict=True):
        assert_same(output, expected)
    assert [int((~output.isfinite()).sum()) for output in own] == [2, 0, 2], "non-finite values stay in their head"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_unrotate_and_join_matches_torch(size: tuple[int, ...], dtype: torch.dtype) -> None:
    from harness.kernels.rope import split_and_rotate, unrotate_and_join

    fused, cos, sin, widths = make_inputs(size, dtype)
    query, key, value = grads = [random_values(len(fused), width, dtype=dtype) for width in widths]
    own = unrotate_and_join(query, key, value, cos, sin)
    outputs = split_in_torch(fused.requires_grad_(), cos, sin, widths)
    (expected,) = torch.autograd.grad(outputs, fused, grads)
    assert_same(own, expected)
    back = unrotate_and_join(*split_and_rotate(fused.detach(), cos, sin, widths=widths), cos, sin)
    torch.testing.assert_close(back, fused.detach(), rtol=0.0, atol=8 * torch.finfo(dtype).eps)
