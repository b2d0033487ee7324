"""The chunked loss against torch in fp64, its peak memory, and small gradients in half precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.model.loss import (
    ENTROPY_TOKENS,
    IGNORED,
    LossOptions,
    LossSums,
    chunked_cross_entropy,
    sample_entropy,
)

NUM_TOKENS, DIM, VOCAB_SIZE = 50, 12, 37


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the number of elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        self.num_elements = max(self.num_elements, *sizes, 0)
        return out


def make_options(**changes: Any) -> LossOptions:
    defaults: dict[str, Any] = {"z_loss": 0.0, "output_multiplier": 1.0, "chunk_tokens": 8}
    return LossOptions(**(defaults | changes))


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, DIM, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB_SIZE, DIM, generator=generator).requires_grad_()
    targets = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    targets[::7] = IGNORED
    return hidden, weight, targets


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Cross-entropy and z-loss of whole fp64 logits."""
    logits = hidden.double() @ weight.double().T * options.output_multiplier
    loss_sum = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    z_sum = options.z_loss * logits.logsumexp(-1)[targets != IGNORED].square().sum()
    return loss_sum, z_sum


def run(options: LossOptions, *, seed: float = 1.0) -> tuple[LossSums, Tensor, Tensor]:
    hidden, weight, targets = make_inputs()
    sums = chunked_cross_entropy(hidden, weight, targets, torch.tensor(seed), options=options)
    torch.autograd.backward(sums.objective)
    assert hidden.grad is not None
    assert weight.grad is not None
    return sums, hidden.grad, weight.grad


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("output_multiplier", [1.0, 0.25])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 25, 1000])
def test_equals_reference(z_loss: float, output_multiplier: float, chunk_tokens: int) -> None:
    options = make_options(z_loss=z_loss, output_multiplier=output_multiplier, chunk_tokens=chunk_tokens)
    seed = 3.5
    sums, hidden_gradient, weight_gradient = run(options, seed=seed)

    hidden, weight, targets = make_inputs()
    loss_sum, z_sum = reference(hidden, weight, targets, options)
    torch.autograd.backward(seed * (loss_sum + z_sum))
    torch.testing.assert_close(sums.losses.sum().double(), loss_sum.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(sums.z_sum.double(), z_sum.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(sums.objective.detach(), seed * (sums.losses.sum() + sums.z_sum))
    torch.testing.assert_close(hidden_gradient, hidden.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight_gradient, weight.grad, rtol=1e-5, atol=1e-5)


def test_gradients_are_multiplied_by_the_upstream_gradient() -> None:
    hidden, weight, targets = make_inputs()
    sums = chunked_cross_entropy(hidden, weight, targets, torch.tensor(1.0), options=make_options())
    torch.autograd.backward(sums.objective * 5)
    _, expected, _ = run(make_options(), seed=5.0)
    torch.testing.assert_close(hidden.grad, expected)


def test_only_the_objective_is_differentiable() -> None:
    sums, _, _ = run(make_options(z_loss=0.1))
    assert sums.objective.requires_grad
    assert not sums.losses.sum().requires_grad
    assert not sums.z_sum.requires_grad


def test_without_gradients_the_sums_are_the_same() -> None:
    options = make_options(z_loss=0.1, output_multiplier=0.5)
    expected, _, _ = run(options, seed=2.0)
    with torch.no_grad():
        sums = chunked_cross_entropy(*make_inputs(), torch.tensor(2.0), options=options)
    for value, wanted in zip(sums, expected, strict=True):
        assert not value.requires_grad
        assert torch.equal(value, wanted.detach())


def test_all_ignored_gives_zeros() -> None:
    hidden, weight, _ = make_inputs()
    targets = torch.full((NUM_TOKENS,), IGNORED)
    sums = chunked_cross_entropy(hidden, weight, targets, torch.tensor(1.0), options=make_options(z_loss=0.1))
    torch.autograd.backward(sums.objective)
    for value in (*sums, hidden.grad, weight.grad):
        assert value is not None
        assert torch.count_nonzero(value.detach()) == 0


@pytest.mark.parametrize(("num_rows", "length"), [(64, 32), (63, 16), (192, 34), (2, 34), (3, 2), (3, 1)])
def test_entropy_is_sampled_at_all_places_of_a_sequence(num_rows: int, length: int) -> None:
    """The model is certain of its token at odd places of a sequence, and knows nothing at even ones."""
    is_certain = torch.arange(length) % 2 * torch.ones(num_rows, 1)
    hidden = 1e4 * is_certain[..., None] * torch.tensor([1.0, 0.0])
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    targets = torch.zeros(num_rows, length, dtype=torch.int64)
    total, count = sample_entropy(hidden, weight, targets, output_multiplier=1.0)
    assert int(count) == min(ENTROPY_TOKENS, targets.numel())
    assert float(total / count) == pytest.approx(float(1 - is_certain.mean()) * math.log(4), rel=0.1)


@pytest.mark.parametrize("with_gradient", [True, False])
def test_logits_of_all_tokens_are_never_allocated(with_gradient: bool) -> None:
    num_tokens, dim, vocab_size, chunk_tokens = 256, 4, 64, 16
    hidden = torch.randn(num_tokens, dim, requires_grad=with_gradient)
    weight = torch.randn(vocab_size, dim, requires_grad=with_gradient)
    targets = torch.randint(vocab_size, (num_tokens,))
    with LargestTensor() as largest:
        options = make_options(z_loss=0.1, chunk_tokens=chunk_tokens)
        sums = chunked_cross_entropy(hidden, weight, targets, torch.tensor(1.0), options=options)
        if with_gradient:
            torch.autograd.backward(sums.objective)
    assert largest.num_elements == chunk_tokens * vocab_size


def test_the_seed_keeps_small_gradients_from_fp16_underflow() -> None:
    """Unlikely tokens have probability 1.5e-8, which is zero in fp16; the seed has to come before the cast."""
    hidden = torch.ones(1, 1, dtype=torch.float16).requires_grad_()
    weight = torch.tensor([[18.0], [0.0], [0.0]], dtype=torch.float16).requires_grad_()
    seed = torch.tensor(65536.0)
    sums = chunked_cross_entropy(hidden, weight, torch.tensor([0]), seed, options=make_options())
    torch.autograd.backward(sums.objective)
    assert weight.grad is not None
    expected = torch.tensor([65536.0 * 1.523e-8] * 2)
    torch.testing.assert_close(weight.grad[1:, 0].float(), expected, rtol=1e-2, atol=0)


def test_gradient_of_the_head_is_summed_in_fp32() -> None:
    """600 chunks add 0.5 each: a bf16 sum would stay at 128."""
    num_tokens = 600
    hidden = torch.ones(num_tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    options = make_options(chunk_tokens=1)
    sums = chunked_cross_entropy(hidden, weight, targets, torch.tensor(1.0), options=options)
    torch.autograd.backward(sums.objective)
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [-300.0, 300.0]
