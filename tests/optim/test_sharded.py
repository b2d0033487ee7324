"""The update of sharded parameters: bit-equal to torch's AdamW, without DTensor dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.distributed.shards import local
from harness.distributed.world import World, connect, disconnect
from harness.optim.update import Group, Update, build_update
from tests.composed import load
from tests.distributed.pool import Pool

SHAPES = {"even": (4,), "uneven": (5, 3), "one_row": (1, 4)}
REFUSALS = (0.0, 0.0, 1.0, 0.0)
GRAD_NORM, DIVISOR = 3.0, 2.0


class Sharded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation that has a DTensor argument."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def make_sharded(world: World, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: distribute_tensor(tensor, world.mesh, [Shard(0)]) for name, tensor in whole.items()}


def parameters(world: World) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor) for name, tensor in make_sharded(world, 0).items()}


def set_gradients(owners: dict[str, nn.Parameter], world: World, seed: int) -> None:
    for name, gradient in make_sharded(world, seed).items():
        owners[name].grad = gradient


def update_both() -> tuple[list[list[float]], list[list[float]], list[str]]:
    """This rank's shards after some updates, ours and AdamW's, and the DTensor operations of ours."""
    cfg = load([])
    world = connect(cfg.parallel)
    ours, theirs = parameters(world), parameters(world)
    group = Group(parameters=ours, lr_multiplier=0.5, weight_decay=0.1)
    update = build_update([group], cfg=cfg.optim, num_steps=100, device=world.device)
    rate = torch.zeros(())
    betas = (cfg.optim.beta1, cfg.optim.beta2)
    reference: Any = torch.optim.AdamW(
        theirs.values(), lr=rate, betas=betas, eps=cfg.optim.eps, weight_decay=0.1, fused=True
    )
    operations: list[str] = []
    for seed, refuse in enumerate(REFUSALS, start=1):
        set_gradients(ours, world, seed)
        set_gradients(theirs, world, seed)
        with Sharded() as seen:
            lr = apply(update, refuse)
        operations += seen.operations
        rate.copy_(lr * 0.5)
        assert cfg.optim.clip_norm is not None
        reference.grad_scale = torch.tensor(DIVISOR * max(1.0, GRAD_NORM / cfg.optim.clip_norm))
        reference.found_inf = torch.tensor(refuse)
        reference.step()
    disconnect()
    return numbers(ours, update.adamw), numbers(theirs, reference), operations


def apply(update: Update, refuse: float) -> Tensor:
    return update.apply(
        skip_mask=torch.tensor(refuse), grad_norm=torch.tensor(GRAD_NORM), divisor=torch.tensor(DIVISOR)
    )


def numbers(owners: dict[str, nn.Parameter], adamw: torch.optim.AdamW) -> list[list[float]]:
    tensors = [each for owner in owners.values() for each in (owner, *adamw.state[owner].values())]
    return [local(tensor).detach().flatten().tolist() for tensor in tensors]


def test_equals_adamw_on_shards_without_its_dispatch(ranks: Pool) -> None:
    first, second = ranks.run(2, update_both)
    for ours, theirs, operations in (first, second):
        assert ours == theirs
        assert operations == []
    assert [] in second[0], "a parameter of one row has an empty shard on one rank"
    assert first[0] != second[0]


CLIP_VALUE, CLIP_NORM = 0.25, 0.5


def update_with_clipped_elements(replicate: int) -> tuple[list[list[float]], list[list[float]]]:
    """This rank's first moments after one update, ours and from gradients clipped by torch."""
    cfg = load([f"parallel.replicate={replicate}", f"optim.clip_value={CLIP_VALUE}", f"optim.clip_norm={CLIP_NORM}"])
    world = connect(cfg.parallel)
    names = list(SHAPES)
    generator = torch.Generator().manual_seed(1)
    whole = {name: torch.randn(SHAPES[name], generator=generator) for name in names}
    whole["even"][0] = 1000.0
    placements: list[Any] = [Replicate(), Shard(0)] if replicate > 1 else [Shard(0)]
    owners = {
        name: nn.Parameter(distribute_tensor(torch.zeros(SHAPES[name]), world.mesh, placements)) for name in names
    }
    group = Group(parameters=owners, lr_multiplier=1.0, weight_decay=0.0)
    update = build_update([group], cfg=cfg.optim, num_steps=9, device=world.device, replicate=world.replicate)
    for name, owner in owners.items():
        owner.grad = distribute_tensor(whole[name] * DIVISOR, world.mesh, placements)
    update.apply(skip_mask=torch.zeros(()), grad_norm=torch.tensor(1000.0), divisor=torch.tensor(DIVISOR))
    clipped = {name: gradient.clamp(-CLIP_VALUE, CLIP_VALUE) for name, gradient in whole.items()}
    norm = torch.cat([gradient.flatten() for gradient in clipped.values()]).norm()
    factor = (1 - cfg.optim.beta1) * min(1.0, CLIP_NORM / float(norm))
    expected = {name: distribute_tensor(clipped[name] * factor, world.mesh, placements) for name in names}
    disconnect()
    return (
        [local(update.adamw.state[owner]["exp_avg"]).flatten().tolist() for owner in owners.values()],
        [local(expected[name]).flatten().tolist() for name in names],
    )


@pytest.mark.parametrize(("num_ranks", "replicate"), [(2, 1), (2, 2)])
def test_elements_are_clipped_before_the_norm(ranks: Pool, num_ranks: int, replicate: int) -> None:
    """The other way round, an outlier takes the whole norm, and no element is large enough to be clipped."""
    for ours, expected in ranks.run(num_ranks, update_with_clipped_elements, replicate):
        for mine, wanted in zip(ours, expected, strict=True):
            assert mine == pytest.approx(wanted, rel=1e-5)
        assert max(abs(value) for shard in expected for value in shard) > 0.001


def moments_in_bf16() -> tuple[list[float], list[float], str]:
    """Weights and first moments after some updates, gathered from all ranks, and the dtype of the moments."""
    cfg = load(["optim.moment_dtype=bf16"])
    world = connect(cfg.parallel)
    owners = parameters(world)
    group = Group(parameters=owners, lr_multiplier=0.5, weight_decay=0.1)
    update = build_update([group], cfg=cfg.optim, num_steps=100, device=world.device)
    update.seed_noise(5)
    for seed, refuse in enumerate(REFUSALS, start=1):
        set_gradients(owners, world, seed)
        skip_mask, norm = torch.tensor(refuse), torch.tensor(GRAD_NORM)
        update.apply(skip_mask=skip_mask, grad_norm=norm, divisor=torch.tensor(DIVISOR))
    state = update.state()
    weights = torch.cat([full(owner.detach()).view(-1) for owner in owners.values()])
    moments = [full(state[name][key]).view(-1).float() for name in owners for key in ("exp_avg", "exp_avg_sq")]
    disconnect()
    return weights.tolist(), torch.cat(moments).tolist(), str(state["even"]["exp_avg"].dtype)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_moments_in_bf16_have_the_same_bits_on_any_number_of_ranks(ranks: Pool) -> None:
    """Shards are even, uneven and empty."""
    one, two, three = (ranks.run(size, moments_in_bf16)[-1] for size in (1, 2, 3))
    assert one == two == three
    assert one[2] == "torch.bfloat16"
