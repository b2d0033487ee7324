"""Muon against torch's own and against a plain reference; skipped updates; sharded matrices against whole ones."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import harness.optim.muon
from harness.config.errors import ConfigError
from harness.config.optim import OptimConfig, OptimizerKind
from harness.config.schema import Config
from harness.distributed.shards import local
from harness.distributed.world import World, connect, disconnect
from harness.optim import matrix_owners
from harness.optim.orthogonalize import COEFFICIENTS, orthogonalize
from harness.optim.update import Group, Update, build_update
from tests.composed import load
from tests.distributed.cases import full
from tests.distributed.pool import Pool

CPU = torch.device("cpu")
SHAPES = {"wide": (5, 12), "tall": (12, 5), "square": (7, 7), "twin": (5, 12), "one_row": (1, 6), "other": (12, 5)}
"""Over 2 and 4 ranks no number of rows but 12 divides evenly, and most ranks have no row of `one_row`."""
NORM = "norm"
MULTIPLIER, DECAY = 0.5, 0.1


def optim(*overrides: str) -> OptimConfig:
    return load(["optim=muon", "optim.schedule=constant", "optim.warmup_steps=0", "optim.lr=0.1", *overrides]).optim


def random_values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in (SHAPES | {NORM: (6,)}).items()}


def build(cfg: OptimConfig, values: dict[str, Tensor], world: World | None = None) -> Update:
    parameters = {name: nn.Parameter(value) for name, value in values.items()}
    groups = [
        Group(parameters={NORM: parameters.pop(NORM)}, lr_multiplier=1.0, weight_decay=0.0),
        Group(parameters=parameters, lr_multiplier=MULTIPLIER, weight_decay=DECAY, optimizer=OptimizerKind.muon),
    ]
    return build_update(groups, cfg=cfg, num_steps=10, device=CPU, world=world)


def apply(
    update: Update, gradients: dict[str, Tensor], *, refuse: float = 0.0, divisor: float = 1.0, norm: float = 0.0
) -> None:
    for name, parameter in update.parameters.items():
        parameter.grad = gradients[name] * divisor
    update.apply(skip_mask=torch.tensor(refuse), grad_norm=torch.tensor(norm), divisor=torch.tensor(divisor))


def reference(cfg: OptimConfig, weight: Tensor, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Weight and momentum after plain updates in fp32, one matrix at a time."""
    first, third, fifth = COEFFICIENTS
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = cfg.muon.momentum * momentum + (1 - cfg.muon.momentum) * gradient
        direction = momentum
        if cfg.muon.nesterov:
            direction = cfg.muon.momentum * momentum + (1 - cfg.muon.momentum) * gradient
        x = direction / direction.norm()
        for _ in range(cfg.muon.iterations):
            x = first * x + third * (x @ x.T) @ x + fifth * (x @ x.T) @ (x @ x.T) @ x
        scale = cfg.muon.update_rms * math.sqrt(max(weight.shape))
        weight = weight * (1 - cfg.lr * MULTIPLIER * DECAY) - cfg.lr * MULTIPLIER * scale * x
    return weight, momentum


@pytest.mark.parametrize(
    "overrides", [(), ("optim.muon.nesterov=false", "optim.muon.iterations=3", "optim.muon.update_rms=0.7")]
)
@pytest.mark.parametrize("divisor", [1.0, 1024.0])
def test_equals_the_reference(overrides: tuple[str, ...], divisor: float) -> None:
    cfg = optim(*overrides)
    update = build(cfg, random_values(0))
    gradients = [random_values(seed) for seed in range(1, 5)]
    for each in gradients:
        apply(update, each, divisor=divisor)
    for name in SHAPES:
        weight, momentum = reference(cfg, random_values(0)[name], [each[name] for each in gradients])
        torch.testing.assert_close(update.parameters[name].detach(), weight, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(update.state()[name]["exp_avg"], momentum, rtol=1e-5, atol=1e-6, msg=name)


def test_equals_torch_up_to_the_rounding_of_bf16() -> None:
    """torch orthogonalizes in bf16, also on a CPU."""
    cfg = optim()
    update = build(cfg, random_values(0))
    theirs = {name: nn.Parameter(random_values(0)[name]) for name in SHAPES}
    muon = torch.optim.Muon(theirs.values(), lr=cfg.lr * MULTIPLIER, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for seed in range(1, 4):
        gradients = random_values(seed)
        apply(update, gradients)
        for name, parameter in theirs.items():
            parameter.grad = gradients[name]
        muon.step()  # type: ignore[no-untyped-call]
    for name, parameter in theirs.items():
        moved = (parameter.detach() - random_values(0)[name]).norm()
        assert (update.parameters[name].detach() - parameter.detach()).norm() < 0.05 * moved, name
        momentum = muon.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(update.state()[name]["exp_avg"], momentum, rtol=1e-6, atol=1e-7, msg=name)


def test_the_norm_is_clipped_before_the_momentum() -> None:
    cfg = optim("optim.clip_norm=2")
    update = build(cfg, random_values(0))
    apply(update, random_values(1), norm=8.0)
    momentum = (1 - cfg.muon.momentum) * random_values(1)["wide"] / 4
    torch.testing.assert_close(update.state()["wide"]["exp_avg"], momentum)


def tensors_of(update: Update) -> dict[str, Tensor]:
    moments = {f"{name}.{key}": value for name, state in update.state().items() for key, value in state.items()}
    weights = {name: parameter.detach() for name, parameter in update.parameters.items()}
    return {name: tensor.clone() for name, tensor in (weights | moments).items()}


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_a_skipped_update_changes_nothing_and_the_next_one_follows(bad: float) -> None:
    update, control = (build(optim(), random_values(0)) for _ in range(2))
    for each in (update, control):
        apply(each, random_values(1))
    before, square = tensors_of(update), control.muon and control.muon.update_squares(torch.tensor(1.0))
    apply(update, {name: torch.full_like(value, bad) for name, value in random_values(2).items()}, refuse=1.0)
    after = tensors_of(update)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not update.digest.changed
    assert update.muon is not None
    assert update.muon.update_squares(torch.tensor(1.0)) == square
    for each in (update, control):
        apply(each, random_values(3))
    final, expected = tensors_of(update), tensors_of(control)
    assert all(torch.equal(final[name], expected[name]) for name in final)
    assert not torch.equal(final["wide"], before["wide"])
    assert not update.digest.changed


def test_muon_has_one_moment_and_adamw_two() -> None:
    state = build(optim(), random_values(0)).state()
    assert set(state["wide"]) == {"exp_avg"}
    assert set(state[NORM]) == {"step", "exp_avg", "exp_avg_sq"}


def test_updates_have_the_same_root_mean_square_for_all_shapes() -> None:
    cfg = optim("optim.muon.update_rms=0.5", "optim.muon.iterations=10")
    values = random_values(0)
    update = build(cfg, values)
    keep = 1 - cfg.lr * MULTIPLIER * DECAY
    before = {name: value.clone() for name, value in values.items()}
    apply(update, random_values(1))
    moved = {name: update.parameters[name].detach() - before[name] * keep for name in SHAPES}
    for name, change in moved.items():
        assert float(change.square().mean().sqrt()) == pytest.approx(0.5 * cfg.lr * MULTIPLIER, rel=0.25), name
    assert update.muon is not None
    measured = float(sum(update.muon.update_squares(torch.tensor(cfg.lr)).values())) ** 0.5
    assert measured == pytest.approx(float(torch.cat([each.flatten() for each in moved.values()]).norm()), rel=1e-4)
    update.measure_digest()
    nominal = float(sum(update.muon.update_squares(torch.tensor(cfg.lr)).values())) ** 0.5
    assert nominal == pytest.approx(0.5 * cfg.lr * MULTIPLIER * math.sqrt(sum(map(math.prod, SHAPES.values()))))


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 6, 6)])
def test_singular_values_become_about_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(matrices, num_iterations=5)
    assert found.shape == shape
    values = torch.linalg.svdvals(found)
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert float((found * (left @ right)).sum() / (found.norm() * (left @ right).norm())) > 0.95, "same directions"


def test_matrices_of_a_batch_do_not_mix() -> None:
    matrices = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    clean = orthogonalize(matrices, num_iterations=5)
    matrices[1, 0, 0] = math.nan
    matrices[2] = 0
    found = orthogonalize(matrices, num_iterations=5)
    assert torch.equal(found[0], clean[0])
    assert found[1].isnan().all()
    assert not found[2].any()


def update_sharded(replicate: int, max_batch_values: int) -> dict[str, Any]:
    """The largest difference to an update of whole matrices, and the digests of weights and moments on this rank."""
    matrix_owners.MAX_BATCH_VALUES = max_batch_values
    cfg = load(["optim=muon", "optim.warmup_steps=0", f"parallel.replicate={replicate}", "parallel.device=cpu"])
    world = connect(cfg.parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.optim.muon, "orthogonalize", partial(orthogonalize_inexactly, error=2e-7 * world.replica))
        return update_with(cfg, world, replicate)


def orthogonalize_inexactly(matrices: Tensor, *, num_iterations: int, error: float) -> Tensor:
    """As on a device that rounds differently."""
    return orthogonalize(matrices, num_iterations=num_iterations) * (1 + error)


def update_with(cfg: Config, world: World, replicate: int) -> dict[str, Any]:
    placements: list[Any] = [Replicate(), Shard(0)] if replicate > 1 else [Shard(0)]

    def sharded(seed: int) -> dict[str, Tensor]:
        return {name: distribute_tensor(each, world.mesh, placements) for name, each in random_values(seed).items()}

    ours, whole = build(cfg.optim, sharded(0), world), build(cfg.optim, random_values(0))
    for seed, refuse in enumerate((0.0, 1.0, 0.0), start=1):
        apply(ours, sharded(seed), refuse=refuse)
        apply(whole, random_values(seed), refuse=refuse)
    expected = tensors_of(whole)
    found = tensors_of(ours)
    difference = max(float((full(found[name]) - expected[name]).abs().max()) for name in expected)
    lr = torch.tensor(0.1)
    assert ours.muon is not None
    assert whole.muon is not None
    shares = [None] * world.size
    torch.distributed.all_gather_object(shares, float(sum(ours.muon.update_squares(lr).values())))
    result = {
        "difference": difference,
        "bits": {name: local(tensor).flatten().tolist() for name, tensor in found.items()},
        "shard": world.shard,
        "square": (sum(filter(None, shares)) / replicate, float(sum(whole.muon.update_squares(lr).values()))),
        "empty": local(ours.parameters["one_row"]).numel() == 0,
    }
    disconnect()
    return result


@pytest.mark.parametrize(("num_ranks", "replicate", "max_batch_values"), [(2, 1, 2**25), (4, 1, 60), (4, 2, 2**25)])
def test_sharded_matrices_are_updated_as_whole_ones(
    ranks: Pool, num_ranks: int, replicate: int, max_batch_values: int
) -> None:
    results = ranks.run(num_ranks, update_sharded, replicate, max_batch_values)
    assert any(result["empty"] for result in results)
    for result in results:
        assert result["difference"] < 1e-6
        assert result["square"][0] == pytest.approx(result["square"][1], rel=1e-5)
    for first, second in zip(results[: num_ranks // replicate], results[-(num_ranks // replicate) :], strict=True):
        assert first["shard"] == second["shard"]
        assert first["bits"] == second["bits"], "replicas have the same bits, though they round differently"


@pytest.mark.parametrize(
    ("key", "value"),
    [("momentum", 1.0), ("momentum", -0.1), ("iterations", 0), ("iterations", 21), ("update_rms", 0.0)],
)
def test_invalid_settings_are_rejected_by_key(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^optim\.muon\.{key}: must be"):
        load([f"optim.muon.{key}={value}"])
