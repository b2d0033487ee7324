"""Canary tests: one per private API of torch that the harness relies on. They fail first when torch changes it.

Checked on torch 2.11 and 2.13. The wrappers are in `harness/distributed/torch_private/`. The last three APIs are used
in `harness/precision/`, which may not import `harness/distributed/`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from harness.distributed.shards import local
from harness.distributed.torch_private.attention_ops import ATTENTION_OPS
from harness.distributed.torch_private.compiled_call import discard_compiled_call
from harness.distributed.torch_private.flight_recorder import recorded_collectives
from harness.distributed.torch_private.foreach import foreach_add_, foreach_copy_, foreach_norm
from harness.distributed.torch_private.fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from harness.distributed.torch_private.fsdp_param import cast_on_copy, fsdp_params
from harness.distributed.torch_private.fused_adamw import fused_adamw_
from harness.distributed.torch_private.group_timeout import set_timeout
from harness.distributed.torch_private.inductor_options import PINNED, compile_options
from harness.distributed.torch_private.operator_mode import OperatorMode
from harness.distributed.torch_private.pytree import tree_map
from harness.distributed.torch_private.recompile_limit import MOST_GRAPHS, compile_limit, raise_global_limit
from harness.distributed.torch_private.storage_info import StorageInfo

MakeModel = Callable[[int], nn.Module]


@pytest.fixture
def make_model() -> Iterator[MakeModel]:
    """A linear layer, sharded in bf16 over a fake process group: sharding is real, communication is not."""

    def make(world_size: int) -> nn.Module:
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = nn.Linear(4, 6, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), mp_policy=precision)
        return model

    yield make
    dist.destroy_process_group()


class Operators(TorchDispatchMode):
    """Records the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def names(function: Callable[..., Any]) -> list[str]:
    return list(signature(function).parameters)


class RecordedReduceScatter(DefaultReduceScatter):
    """Records the calls of FSDP2, and what the input buffer holds when the output is allocated."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reduce_input: Tensor | None = None
        self.filled: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.calls.append("allocate")
        buffer = super().allocate(size, dtype=dtype, device=device).fill_(-1.0)
        if self.reduce_input is None:
            self.reduce_input = buffer
        else:
            self.filled = self.reduce_input.clone()
        return buffer

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *inputs: Any, **options: Any) -> dist.Work:
        self.calls.append("reduce-scatter")
        assert self.reduce_input is not None
        assert input_tensor.data_ptr() == self.reduce_input.data_ptr()
        return super().__call__(output_tensor, input_tensor, *inputs, **options)


@pytest.mark.parametrize(
    ("world_size", "calls"), [(1, ["allocate", "allocate"]), (2, ["allocate", "allocate", "reduce-scatter"])]
)
def test_fsdp_collectives(make_model: MakeModel, world_size: int, calls: list[str]) -> None:
    assert names(DefaultAllGather.__call__)[:3] == ["self", "output_tensor", "input_tensor"]
    assert names(DefaultReduceScatter.__call__)[:3] == ["self", "output_tensor", "input_tensor"]
    assert names(DefaultReduceScatter.allocate) == ["self", "size", "dtype", "device"]
    model, comm = make_model(world_size), RecordedReduceScatter()
    assert isinstance(model, FSDPModule)
    model.set_custom_reduce_scatter(comm)
    model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    assert comm.calls == calls
    assert comm.filled is not None
    assert comm.filled.dtype is torch.float32
    assert comm.filled.flatten().tolist() == [3.0] * 24, "the input is filled when the output is allocated"


def test_fsdp_param(make_model: MakeModel) -> None:
    assert names(FSDPParam.init_all_gather_outputs)[:3] == [
        "self",
        "all_gather_input_numels",
        "all_gather_input_dtypes",
    ]
    for casts in (False, True):
        model = make_model(1)
        assert isinstance(model, FSDPModule)
        (parameter,) = fsdp_params(model)
        assert type(parameter) is FSDPParam
        if casts:
            cast_on_copy(model)
        weight = local(model.get_parameter("weight"))
        expected = weight.detach().to(torch.bfloat16)
        with torch.no_grad():
            found = model(torch.eye(4, dtype=torch.bfloat16))
        assert torch.equal(found.T, expected)
        assert parameter.param_dtype is torch.bfloat16
        assert parameter.all_gather_outputs[0].dtype is torch.bfloat16
        model.reshard()
        (shard,) = parameter.all_gather_inputs
        assert shard.dtype is (torch.float32 if casts else torch.bfloat16), "torch casts in a separate pass"
        assert (shard.data_ptr() == weight.data_ptr()) == casts


def test_chunk_cat(make_model: MakeModel) -> None:
    operator = torch.ops.fsdp.chunk_cat.default
    assert str(operator._schema) == (
        "fsdp::chunk_cat(Tensor[] tensors, int dim, int num_chunks, *, Tensor(a!) out) -> ()"
    )
    model = make_model(2)
    output = model(torch.ones(3, 4, dtype=torch.bfloat16))
    seen: list[Any] = []

    def record(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
        seen.append((dim, num_chunks))
        torch._chunk_cat(tensors, dim, num_chunks, out=out)

    library = torch.library.Library("fsdp", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # if no test before it caused it
            library.impl("chunk_cat", record, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
        output.sum().backward()
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
    assert seen == [(0, 2)], "called once per group, along dim 0"


def test_pytree() -> None:
    nested = (1, [2, {"three": 3}], None)
    assert tree_map(lambda leaf: leaf if leaf is None else -leaf, nested) == (-1, [-2, {"three": -3}], None)


def test_foreach() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([-2.0])]
    assert [norm.item() for norm in foreach_norm(tensors, 2, dtype=torch.float32)] == [5.0, 2.0]
    assert [norm.item() for norm in foreach_norm(tensors, 1, dtype=torch.float32)] == [7.0, 2.0]
    steps = [torch.tensor(1.0), torch.tensor(2.0)]
    foreach_add_(steps, [torch.tensor(1.0)] * 2)
    assert [step.item() for step in steps] == [2.0, 3.0]
    foreach_copy_(steps, [torch.tensor(8.0), torch.tensor(9.0)], non_blocking=True)
    assert [step.item() for step in steps] == [8.0, 9.0]


def test_fused_adamw() -> None:
    """Bit for bit what `torch.optim.AdamW` does, and nothing if it is skipped."""
    options: dict[str, Any] = {"lr": torch.tensor(0.1), "weight_decay": 0.01, "eps": 1e-8}
    expected = nn.Parameter(torch.linspace(-1, 1, 9))
    optimizer = torch.optim.AdamW([expected], betas=(0.9, 0.95), fused=True, **options)
    parameter, first, second, step = expected.detach().clone(), torch.zeros(9), torch.zeros(9), torch.zeros(())
    for number in range(3):
        gradient, scale = torch.linspace(3, -2, 9) + number, torch.tensor(2.0)
        expected.grad = gradient / scale
        optimizer.step()
        columns = [parameter], [gradient], [first], [second], [step]
        for skip in (torch.ones(()), torch.zeros(())):
            fused_adamw_(*columns, grad_scale=scale, found_inf=skip, beta1=0.9, beta2=0.95, **options)
            assert torch.equal(parameter, expected) is not bool(skip)
        assert step == number + 1


def test_compiled_call() -> None:
    module, calls = nn.Identity(), []
    module.register_forward_hook(lambda *_: calls.append("hook"))
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None
    module._compiled_call_impl = lambda *_: calls.append("compiled")
    module(torch.ones(1))
    discard_compiled_call(module)
    module(torch.ones(1))
    assert calls == ["compiled", "hook"]


def test_attention_ops() -> None:
    query = torch.randn(1, 2, 8, 16)
    with Operators() as operators:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert ATTENTION_OPS & set(operators.called)
    assert len(ATTENTION_OPS) == 5


def test_operator_mode() -> None:
    """Operators of the forward and the backward pass are seen, also of composite functions."""

    class Names(OperatorMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def on_operator(self, namespace: str, name: str, inputs: tuple[Any, ...], output: Any) -> None:
            assert bool(torch.isfinite(output).all()), "does not see its own operators"
            assert inputs
            self.names.append(f"{namespace}::{name}")

    weight = torch.ones(3, 3, requires_grad=True)
    with Names() as seen:
        F.softmax(F.linear(torch.ones(2, 3), weight), dim=-1).square().sum().backward()  # type: ignore[no-untyped-call]
    assert {"aten::mm", "aten::_softmax", "aten::_softmax_backward_data"} <= set(seen.names)


def test_storage_info() -> None:
    """Its module and name are in the pickled metadata of old checkpoints."""
    assert names(StorageInfo)[:3] == ["relative_path", "offset", "length"]
    assert (StorageInfo.__module__, StorageInfo.__name__) == (
        "torch.distributed.checkpoint.filesystem",
        "_StorageInfo",
    )


def test_flight_recorder() -> None:
    """The fields that `launch.local.hang_report` reads are checked there, on two ranks that hang."""
    assert "version" in recorded_collectives()


def test_group_timeout() -> None:
    """The groups of four ranks are read in `test_parallel`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        group = dist.group.WORLD
        assert group is not None
        set_timeout(group, 7)
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()


def test_unsafe_view() -> None:
    """`harness.precision.fp8` reshapes outputs of operators with it, and they are no views."""
    values = torch.ones(2, 6)
    assert torch.ops.aten._unsafe_view(values, [3, 4])._base is None
    assert values.view(3, 4)._base is values


def test_forward_hooks() -> None:
    """`harness.precision.fp8` runs layers one by one if one of them has a forward hook."""
    layer = nn.Linear(1, 1)
    assert not layer._forward_hooks
    handle = layer.register_forward_hook(lambda *_: None)
    assert layer._forward_hooks
    handle.remove()
    assert not layer._forward_hooks


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")  # type: ignore[no-untyped-call]
def test_mkldnn_support(name: str) -> None:
    """`harness.precision.mixed_precision` asks whether the CPU has half-precision matmuls."""
    assert isinstance(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")(), bool)


@pytest.mark.full
def test_inductor_has_the_pinned_options() -> None:
    """torch.compile raises if it does not know an option or if its value has another type."""
    assert compile_options() is None
    torch.use_deterministic_algorithms(True)
    try:
        assert compile_options() == PINNED
        torch.compile(torch.square, options=compile_options())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.full
@pytest.mark.parametrize("is_global", [False, True], ids=["argument", "config"])
def test_recompile_limit(is_global: bool) -> None:
    """Without the limit, torch raises at the ninth graph; with it, at the next after the last."""

    def add(values: Tensor, number: int) -> Tensor:
        return values + number

    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        if is_global:
            raise_global_limit()
        limit = {} if is_global else compile_limit()
        torch.compiler.reset()
        compiled = torch.compile(add, fullgraph=True, dynamic=False, backend="eager", **limit)
        for number in range(MOST_GRAPHS):
            assert compiled(torch.zeros(1), number).item() == number
        with pytest.raises(FailOnRecompileLimitHit):
            compiled(torch.zeros(1), MOST_GRAPHS)
    torch.compiler.reset()
