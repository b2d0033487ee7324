"""A guard that finds host reads of device data on the CPU, where they are silent: on CUDA each of them is a sync.

Why: `torch.cuda.set_sync_debug_mode` needs a GPU. On a CPU `.item()` costs nothing and no test would fail.
How: inside `no_sync` every tensor counts as a device tensor. A function mode sees calls that never reach the dispatcher
(`.tolist()`, `.numpy()`, `.cpu()`), a dispatch mode sees operators: those that torch tags as data-dependent, indexing
with a boolean mask, and copies to another type of device. A call may read if its line in the sources is marked with
`# sync:`; its line is that of the innermost frame in this repository. Everything else is collected and raised together
at the end of the block: an exception in the middle of a backward pass would leave other ranks waiting.
Left out: `copy_` to host memory, which a CPU cannot tell from a copy on the device; other threads, because modes belong
to a thread; blocks that are compiled, which modes cannot look into. The tests in tests/gpu cover these.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.precision import fused_qkv, te_attention
from harness.precision.fp8 import custom_ops, swiglu

ROOT = Path(__file__).resolve().parent.parent
MARK = "# sync:"

HOST_READS: dict[Any, str] = {
    Tensor.item: ".item()",
    Tensor.tolist: ".tolist()",
    Tensor.numpy: ".numpy()",
    Tensor.__array__: "numpy.asarray()",
    Tensor.cpu: ".cpu()",
    Tensor.__bool__: "bool()",
    Tensor.__float__: "float()",
    Tensor.__int__: "int()",
    Tensor.__index__: "an index",
    Tensor.__complex__: "complex()",
    torch.is_nonzero: "torch.is_nonzero()",
    Tensor.is_nonzero: ".is_nonzero()",
}
"""Functions that copy a value of a tensor to the host, with the name that the error message uses."""

FROM_HOST = frozenset({torch.tensor, torch.as_tensor, Tensor.new_tensor})
"""Copy host values to a device, and wait until the copy is done."""

DATA_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

INDEXING = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._unsafe_index.Tensor,
        torch.ops.aten._unsafe_index_put.default,
        torch.ops.aten._index_put_impl_.default,
    }
)
"""Read the device only if an index is a boolean mask, whose number of elements becomes a shape."""

KERNELS: dict[Any, Callable[..., Any]] = {
    torch.ops.harness.fp8_forward.default: custom_ops.forward,
    torch.ops.harness.fp8_backward.default: custom_ops.backward,
    torch.ops.harness.swiglu_forward.default: swiglu.forward,
    torch.ops.harness.swiglu_backward.default: swiglu.backward,
    torch.ops.harness.qkv_rope.default: fused_qkv.forward,
    torch.ops.harness.qkv_rope_backward.default: fused_qkv.backward,
    torch.ops.harness.attention_forward.default: te_attention.forward,
    torch.ops.harness.attention_backward.default: te_attention.backward,
}
"""Custom operators of this repository and the functions that implement them. The dispatcher would run an implementation
without the modes, so the guard calls the function itself."""

INTERPRETER = "triton/runtime/interpreter.py"
"""Runs a Triton kernel on the host. On CUDA it is a kernel launch, which reads nothing."""


class SyncError(AssertionError):
    """Calls in the guarded block that would wait for the device."""


@contextmanager
def no_sync() -> Iterator[set[str]]:
    """Raise a `SyncError` at the end of the block if anything in it reads device data on a line without a mark.

    Yields the marked places that were reached, as `path:function`.
    """
    reads = _Reads()
    functions = _Functions(reads)
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def backward(*args: Any, **options: Any) -> Any:
        """`Tensor.backward` is a torch function: without this, function modes would be off inside it."""
        with functions:
            return run_backward(*args, **options)

    with _Operators(reads, functions), functions, patch.object(torch.autograd, "_engine_run_backward", backward):
        yield reads.marked
    if reads.unmarked:
        raise SyncError("would wait for the device:\n" + "\n".join(dict.fromkeys(reads.unmarked)))


@final
class _Reads:
    """The host reads, and the lines that made them."""

    def __init__(self) -> None:
        self.marked: set[str] = set()
        self.unmarked: list[str] = []

    def record(self, call: str) -> None:
        """Attribute a call to the innermost frame of this repository."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.endswith(INTERPRETER):
                return
            is_ours = path != __file__ and path.startswith((f"{ROOT}/harness/", f"{ROOT}/tests/"))
            if is_ours and frame.f_code.co_name != "__torch_function__":  # a mode only passes the call on
                break
            frame = frame.f_back
        assert frame is not None, "called from outside this repository"
        name = Path(path).relative_to(ROOT).as_posix()
        line = linecache.getline(path, frame.f_lineno)
        if MARK in line:
            self.marked.add(f"{name}:{frame.f_code.co_name}")
        else:
            self.unmarked.append(f"{name}:{frame.f_lineno}: {call}: {line.strip()}")


@final
class _Functions(TorchFunctionMode):
    """Sees Python calls before torch decomposes them."""

    def __init__(self, reads: _Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if call := HOST_READS.get(func) or _copy(func, args, options):
            self._reads.record(call)
            with torch._C._DisableTorchDispatch():  # recorded once, not again as an operator
                return func(*args, **options)
        if func is F.one_hot:  # with a number of classes, only the CPU kernel reads its input
            if options.get("num_classes", args[1] if len(args) > 1 else -1) < 0:
                self._reads.record("one_hot() without a number of classes")
            with torch._C._DisableTorchDispatch():
                return func(*args, **options)
        return func(*args, **options)


def _copy(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> str | None:
    """The name of a blocking copy between host and device, or None."""
    if func in FROM_HOST:
        return f"torch.{func.__name__}(device=...)" if options.get("device") is not None else None
    if func is not Tensor.to or options.get("non_blocking") is True:
        return None
    devices = [value for value in (*args[1:2], options.get("device")) if isinstance(value, str | torch.device)]
    return f".to({str(devices[0])!r})" if devices else None


@final
class _Operators(TorchDispatchMode):
    """Sees operators, wherever they are called from: below autograd, DTensor and other subclasses."""

    def __init__(self, reads: _Reads, functions: _Functions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads
        self._functions = functions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(each is not Tensor and issubclass(each, Tensor) for each in types):
            return NotImplemented  # the subclass handles it first, with this mode on
        options = dict(kwargs or {})
        if self._is_read(func, args):
            self._reads.record(str(func))
        elif func._can_decompose():  # inside an operator, where autograd does not decompose composite operators
            with self:
                return func.decompose(*args, **options)
        if func.namespace == "harness":
            with self, self._functions:
                return KERNELS[func](*args, **options)
        out = func(*args, **options)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
            if source.device.type != out.device.type:
                self._reads.record(f"a copy from {source.device.type} to {out.device.type}")
        return out

    @staticmethod
    def _is_read(func: Any, args: Sequence[Any]) -> bool:
        if func in INDEXING:
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return not DATA_DEPENDENT.isdisjoint(func.tags)


@contextmanager
def host_syncs_fail() -> Iterator[None]:
    """On CUDA: raise an error in any call that waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
