"""Half-precision matmuls on a CPU without them: computed in fp32 and rounded, as the hardware would."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.config.parallel import ActivationCheckpointing
from harness.config.precision import PrecisionKind
from harness.distributed.fsdp import wrap
from harness.model.transformer import Block, rotary_tables
from harness.precision import mixed_precision
from harness.precision.mixed_precision import DTYPES, Fp32MatmulMode, emulate_half_matmul, has_native_matmul, linear
from tests.composed import load

CPU = torch.device("cpu")


HALVES = [PrecisionKind.bf16, PrecisionKind.fp16]


@pytest.fixture
def no_native_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "has_native_matmul", lambda _: False)


@pytest.fixture(params=HALVES)
def dtype(request: pytest.FixtureRequest, no_native_matmul: None) -> Iterator[torch.dtype]:  # noqa: ARG001
    """A half-precision dtype, inside the emulation."""
    with emulate_half_matmul(request.param, CPU):
        yield DTYPES[request.param]


def modes() -> list[object]:
    return list(torch.overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Integers whose products sum exactly in any order, to values that half precision must round."""
    return torch.randint(-50, 51, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_matmul_is_the_exact_result_rounded(dtype: torch.dtype) -> None:
    left, right = numbers(24, 40, dtype=dtype), numbers(16, 40, dtype=dtype)
    exact = (left.double() @ right.double().T).to(dtype)
    into = torch.empty_like(exact)
    products = [
        F.linear(left, right),
        left @ right.T,
        left.matmul(right.T),
        torch.matmul(left, right.T),
        torch.mm(left, right.T),
        torch.mm(left, right.T, out=into),
    ]
    assert all(torch.equal(product, exact) for product in products)
    assert products[-1] is into
    query = numbers(2, 3, 8, 16, dtype=dtype)
    attended = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    wide = query.float()
    expected = F.scaled_dot_product_attention(wide, wide, wide, is_causal=True)
    assert torch.equal(attended, expected.to(dtype))
    assert torch.equal(F.linear(input=left, weight=right), exact), "keyword arguments"


def test_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    left, right = (numbers(*shape, dtype=dtype).requires_grad_() for shape in ((24, 40), (16, 40)))
    grad = numbers(24, 16, dtype=dtype)
    torch.autograd.backward(F.linear(left, right), grad)
    wide = grad.double()
    assert left.grad is not None
    assert right.grad is not None
    assert left.grad.dtype is right.grad.dtype is dtype
    assert torch.equal(left.grad, (wide @ right.double()).to(dtype))
    assert torch.equal(right.grad, (wide.T @ left.double()).to(dtype))


def test_other_dtypes_and_operators_are_unchanged(dtype: torch.dtype) -> None:
    left, right = numbers(24, 40, dtype=torch.float32), numbers(16, 40, dtype=torch.float32)
    assert F.linear(left, right).dtype is torch.float32
    half = numbers(4, dtype=dtype)
    assert (half + half).dtype is dtype


BOTH = pytest.mark.parametrize("kind", [ActivationCheckpointing.full, ActivationCheckpointing.selective])


@BOTH
def test_recomputed_activations_are_the_same(dtype: torch.dtype, kind: ActivationCheckpointing) -> None:
    check_recomputed(dtype, kind)


@BOTH
def test_recomputation_outside_the_mode_is_outside_too(kind: ActivationCheckpointing) -> None:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a CPU without bf16
        check_recomputed(torch.bfloat16, kind)


def check_recomputed(dtype: torch.dtype, kind: ActivationCheckpointing) -> None:
    cfg = load(["model.dim=32", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=48"])
    plain, checkpointed = Block(cfg.model, linear=linear).to(dtype), Block(cfg.model, linear=linear).to(dtype)
    checkpointed.load_state_dict(plain.state_dict())
    parallel = replace(cfg.parallel, activation_checkpointing=kind)
    wrap(checkpointed, parallel, recomputing=Fp32MatmulMode(dtype))
    hidden = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = (table.float() for table in rotary_tables(cfg.model, 6))
    found = []
    for block in (plain, checkpointed):
        kept, change = block(hidden.requires_grad_(), torch.zeros_like(hidden), cos, sin)
        found.append(torch.autograd.grad((kept + change).float().square().sum(), [hidden, *block.parameters()]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.usefixtures("no_native_matmul")
@pytest.mark.parametrize(
    ("kind", "device", "is_emulated"),
    [
        (PrecisionKind.bf16, "cpu", True),
        (PrecisionKind.fp8, "cpu", True),
        (PrecisionKind.fp32, "cpu", False),
        (PrecisionKind.fp16, "cpu", True),
        (PrecisionKind.bf16, "cuda", False),
    ],
)
def test_emulation_is_on_only_where_it_is_needed(kind: PrecisionKind, device: str, is_emulated: bool) -> None:
    before = modes()
    with emulate_half_matmul(kind, torch.device(device)):
        assert len(modes()) == len(before) + is_emulated
    assert modes() == before


@pytest.mark.parametrize("kind", HALVES)
def test_a_cpu_with_native_matmul_is_not_emulated(kind: PrecisionKind) -> None:
    with emulate_half_matmul(kind, CPU):
        assert bool(modes()) != has_native_matmul(DTYPES[kind])
