"""FSDP2's mixed-precision policy, and fp32 emulation of half-precision matmuls on CPUs that lack them.

How: FSDP2 casts each block's weights when it gathers them, and reduces gradients in fp32. Master weights and moments
are fp32. fp16 adds a loss scale on the device (`harness.precision.loss_scale`); the gate that refuses NaN also refuses
the update of an overflow. fp8 is bf16 to FSDP2: matmul operands are quantized inside the blocks
(`harness.precision.fp8`).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Self

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
"""The dtype that weights are gathered in."""


def linear(in_features: int, out_features: int) -> nn.Module:
    """A projection of a block: `nn.Linear` without bias."""
    return nn.Linear(in_features, out_features, bias=False)


def fsdp_policy(kind: PrecisionKind) -> MixedPrecisionPolicy:
    """How FSDP2 casts. Inputs are not cast: rotary tables and the loss seed must stay fp32."""
    return MixedPrecisionPolicy(param_dtype=DTYPES[kind], reduce_dtype=torch.float32, cast_forward_inputs=False)


@contextmanager
def emulate_half_matmul(kind: PrecisionKind, device: torch.device) -> Iterator[None]:
    """Compute half-precision matmuls in fp32 and round the result, on a CPU without half-precision instructions.

    torch's fallback there is scalar code, up to hundreds of times slower.
    """
    with fp32_matmul_mode(DTYPES[kind], device) or nullcontext():
        yield


def fp32_matmul_mode(dtype: torch.dtype, device: torch.device) -> TorchFunctionMode | None:
    """The function mode that computes matmuls of `dtype` in fp32; None if the device does not need it.

    Function modes are off inside a backward pass, so recomputed activations must enter the mode again, if the forward
    pass was in it (`is_emulating`).
    """
    is_needed = device.type == "cpu" and dtype is not torch.float32 and not has_native_matmul(dtype)
    return Fp32MatmulMode(dtype) if is_needed else None


def is_emulating() -> bool:
    """Whether matmuls are computed in fp32 now."""
    return Fp32MatmulMode.depth > 0


def has_native_matmul(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` natively and faster than in fp32.

    Arm CPUs report fp16 support, but through torch an fp16 matmul takes several times as long as in fp32.
    """
    if dtype is torch.float16 and platform.machine() != "x86_64":
        return False
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)  # missing if torch has no oneDNN
    return is_supported is not None and bool(is_supported())


class Fp32MatmulMode(TorchFunctionMode):
    """Computes matmuls and attention of one half-precision dtype in fp32, and rounds the result to that dtype."""

    MATMULS = frozenset(
        {F.linear, F.scaled_dot_product_attention, torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__}
    )

    depth: ClassVar[int] = 0
    """How many of these modes are entered."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __enter__(self) -> Self:
        Fp32MatmulMode.depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        Fp32MatmulMode.depth -= 1
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func not in self.MATMULS:  # first: nearly every call, each read of a shape included
            return func(*args, **options)
        inputs = (*args, *options.values())
        if not any(getattr(value, "dtype", None) is self._dtype for value in inputs):
            return func(*args, **options)
        options = dict(options)
        out = options.pop("out", None)
        rounded = func(*map(_to_fp32, args), **{key: _to_fp32(value) for key, value in options.items()}).to(self._dtype)
        return rounded if out is None else out.copy_(rounded)


def _to_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
