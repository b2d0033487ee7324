"""Fused QKV with RoPE against three projections and RoPE: outputs and gradients, eager, compiled and recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from harness.config.model import ModelConfig
from harness.config.parallel import ActivationCheckpointing
from harness.config.precision import Fp8Recipe
from harness.distributed.fsdp import wrap
from harness.model.attention_layer import Attention
from harness.model.transformer import Block, rotary_tables
from harness.precision import fused_qkv
from harness.precision.fp8.linear import Fp8Linear, Recipe, Switch
from harness.precision.fused_qkv import apply_rope, can_fuse_qkv, project_qkv_rope
from harness.precision.mixed_precision import linear
from tests.composed import load
from tests.graph_compiler import without_kernels

MakeConfig = Callable[..., ModelConfig]
NUM_ROWS, LENGTH = 2, 6


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled attention fuses QKV, as it does on a GPU."""
    monkeypatch.setattr(fused_qkv, "is_compiled_for_cuda", lambda _hidden: torch.compiler.is_compiling())
    with without_kernels():
        yield
    torch._dynamo.reset()


def tables(cfg: ModelConfig) -> tuple[Tensor, Tensor]:
    cos, sin = rotary_tables(cfg, LENGTH)
    return cos.float(), sin.float()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def three_projections(hidden: Tensor, projections: Sequence[nn.Module], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    query, key, value = (each(hidden).unflatten(-1, (-1, 2 * cos.shape[1])) for each in projections)
    return tuple(each.flatten(2) for each in (apply_rope(query, cos, sin), apply_rope(key, cos, sin), value))


@pytest.mark.parametrize(("num_queries", "num_keys", "head_dim"), [(4, 2, 8), (3, 1, 2), (2, 2, 12)])
def test_fused_equals_three_projections(num_queries: int, num_keys: int, head_dim: int) -> None:
    projections = [linear(20, count * head_dim) for count in (num_queries, num_keys, num_keys)]
    hidden, angles = numbers(NUM_ROWS, LENGTH, 20).requires_grad_(), numbers(LENGTH, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    expected, outputs = (way(hidden, projections, cos, sin) for way in (three_projections, project_qkv_rope))
    torch.testing.assert_close(outputs, expected)
    grads = [numbers(*each.shape) for each in expected]
    wanted = (hidden, *(each.get_parameter("weight") for each in projections))
    ours, theirs = (torch.autograd.grad(each, wanted, grads) for each in (outputs, expected))
    torch.testing.assert_close(ours, theirs)


def test_fake_implementations_are_correct() -> None:
    hidden, weights = numbers(NUM_ROWS * LENGTH, 16), [numbers(16, 16), numbers(8, 16), numbers(8, 16)]
    angles = numbers(LENGTH, 4)
    cos, sin = angles.cos(), angles.sin()
    operators = torch.ops.harness
    grads = operators.qkv_rope(hidden, weights, cos, sin)
    torch.library.opcheck(operators.qkv_rope_backward.default, (grads, hidden, weights, cos, sin))
    learned = (hidden.requires_grad_(), [weight.requires_grad_() for weight in weights])
    torch.library.opcheck(operators.qkv_rope.default, (*learned, cos, sin))


def gradients(block: Block, cfg: ModelConfig) -> tuple[Tensor, ...]:
    """The outputs of a block, then the gradients of its inputs and parameters."""
    inputs = tuple(numbers(NUM_ROWS, LENGTH, cfg.dim).mul(factor).requires_grad_() for factor in (1.0, 0.5))
    outputs = block(*inputs, *tables(cfg))
    grads = [numbers(*each.shape) for each in outputs]
    return (*outputs, *torch.autograd.grad(outputs, (*inputs, *block.parameters()), grads))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # two, from torch's own compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler reads it of any tensor
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("kind", "num_forwards"), [("none", 1), ("selective", 1), ("full", 2)])
def test_a_compiled_block_fuses_qkv(make_config: MakeConfig, kind: str, num_forwards: int) -> None:
    cfg = make_config()
    plain, compiled = Block(cfg, linear=linear), Block(cfg, linear=linear)
    compiled.load_state_dict(plain.state_dict())
    parallel = replace(load().parallel, compile=True, activation_checkpointing=ActivationCheckpointing(kind))
    wrap(compiled, parallel)
    torch.testing.assert_close(gradients(compiled, cfg), gradients(plain, cfg))
    with torch.profiler.profile(acc_events=True) as seen:  # after compilation, during which operators are called too
        gradients(compiled, cfg)
    names = [event.name for event in seen.events()]
    assert names.count("harness::qkv_rope") == num_forwards
    assert names.count("harness::qkv_rope_backward") == 1


@pytest.mark.full
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"dim": 24, "num_heads": 4}], ids=str)
def test_unsupported_heads_are_not_fused(make_config: MakeConfig, changes: dict[str, int]) -> None:
    """Heads with a norm before RoPE, and heads whose half is not a power of two."""
    cfg = make_config(**changes)
    attention = Attention(cfg, linear=linear)
    hidden = numbers(NUM_ROWS, LENGTH, cfg.dim)
    compiled = torch.compile(attention, fullgraph=True)
    with torch.profiler.profile(acc_events=True) as seen:
        output = compiled(hidden, *tables(cfg), None)
    torch.testing.assert_close(output, attention(hidden, *tables(cfg), None))
    assert "harness::qkv_rope" not in [event.name for event in seen.events()]


def test_only_plain_projections_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, cos = numbers(1, LENGTH, 16), numbers(LENGTH, 4)
    plain, biased = linear(16, 16), nn.Linear(16, 16)
    in_fp8 = Fp8Linear(16, 16, recipe=Recipe(Fp8Recipe.current, "emulated"), switch=Switch())
    assert not can_fuse_qkv(hidden, [plain, plain, plain], cos), "on a CPU, not compiled"
    monkeypatch.setattr(fused_qkv, "is_compiled_for_cuda", lambda _hidden: True)
    assert can_fuse_qkv(hidden, [plain, plain, plain], cos)
    assert not can_fuse_qkv(hidden, [plain, plain, biased], cos)
    assert not can_fuse_qkv(hidden, [in_fp8, plain, plain], cos)
    assert not can_fuse_qkv(hidden, [plain, plain, plain], numbers(LENGTH, 3))
