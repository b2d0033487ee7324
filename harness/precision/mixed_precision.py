"""What numbers the matrices are multiplied in: fp32, bf16, fp16 or fp8; master weights, moments, reduction are fp32.

How: FSDP2 casts each block's weights when it gathers them and reduces gradients in fp32; nothing else in the harness
knows the dtype. fp16 adds a loss scale that lives on the device: it doubles after enough clean steps, halves at an
overflow, and the same gate that refuses a NaN refuses the overflowed update. fp8 is bf16 to FSDP: products are rounded
further inside the blocks, by `harness.fp8`. A CPU that has no products in half precision takes them in fp32.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from harness.config.precision import PrecisionKind

DTYPES = {
    PrecisionKind.fp32: torch.float32,
    PrecisionKind.bf16: torch.bfloat16,
    PrecisionKind.fp16: torch.float16,
    PrecisionKind.fp8: torch.bfloat16,
}
"""What weights are gathered in."""


def linear(in_features: int, out_features: int) -> nn.Module:
    """The matrix of a block: no bias."""
    return nn.Linear(in_features, out_features, bias=False)


def policy(kind: PrecisionKind) -> MixedPrecisionPolicy:
    """How FSDP2 casts. Inputs are left alone: rotary tables and the loss seed must stay fp32."""
    return MixedPrecisionPolicy(param_dtype=DTYPES[kind], reduce_dtype=torch.float32, cast_forward_inputs=False)


@contextmanager
def emulate_half_matmul(kind: PrecisionKind, device: torch.device) -> Iterator[None]:
    """Where a CPU has no products in half precision, take them in fp32 and round what comes out, as the hardware would:
    torch goes number by number there, up to hundreds of times slower."""
    with fp32_matmul_mode(DTYPES[kind], device) or nullcontext():
        yield


def fp32_matmul_mode(dtype: torch.dtype, device: torch.device) -> TorchFunctionMode | None:
    """The mode that takes products of `dtype` in fp32, if the device needs it.

    No function mode is on inside a backward pass. What is computed again there has to enter the mode itself.
    """
    is_needed = device.type == "cpu" and dtype is not torch.float32 and not has_native_matmul(dtype)
    return Fp32MatmulMode(dtype) if is_needed else None


def has_native_matmul(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU has products of such numbers that are worth it.

    Arm's say that they have them in fp16; by way of torch these take several times as long as in fp32.
    """
    if dtype is torch.float16 and platform.machine() != "x86_64":
        return False
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)  # not there where torch has no oneDNN
    return asked is not None and bool(asked())


class Fp32MatmulMode(TorchFunctionMode):
    PRODUCTS = frozenset(
        {F.linear, F.scaled_dot_product_attention, torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__}
    )

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        given = (*args, *options.values())
        if func not in self.PRODUCTS or not any(getattr(each, "dtype", None) is self._dtype for each in given):
            return func(*args, **options)
        out = options.pop("out", None)
        rounded = func(*map(_wide, args), **{key: _wide(value) for key, value in options.items()}).to(self._dtype)
        return rounded if out is None else out.copy_(rounded)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
