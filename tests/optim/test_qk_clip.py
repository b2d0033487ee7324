"""QK-clip on sharded weights against the rule on whole ones; a rejected update; a real model under growing logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness.build import build
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.distributed.reduce_scatter import CommStats
from harness.distributed.shards import local
from harness.distributed.world import World, connect, disconnect
from harness.optim.qk_clip import QkClip
from harness.optim.weight_digest import WeightDigest, sum_weights
from harness.step import finish_step, forward_backward
from tests.composed import load
from tests.distributed.cases import full, tiny
from tests.distributed.pool import Pool

SHAPE = ("model.dim=24", "model.num_layers=2", "model.num_heads=6", "model.num_kv_heads=3")
HEAD = 4
THRESHOLD = 10.0
LOGITS = torch.tensor([[5.0, 40.0, 20.0, 40.0, 10.0, 10.0], [math.nan, 2.0, math.inf, 80.0, 12.5, 160.0]])
QUERY_FACTORS = [[1, 1 / 4, 2**-0.5, 1 / 4 / 2**-0.5, 1, 1], [1, 1, 1, 1 / 8, 0.8**0.5, 1 / 16 / 0.8**0.5]]
KEY_FACTORS = [[1, 2**-0.5, 1], [1, 1, 0.8**0.5]]
"""By hand: the key head takes the root of the largest gamma of its two query heads, each query the rest."""


def random_weights(cfg: Config) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = {"query": cfg.model.dim, "key": cfg.model.num_kv_heads * HEAD}
    shapes: dict[str, tuple[int, ...]] = {
        f"blocks.{layer}.attention.{name}.weight": (num_rows, cfg.model.dim)
        for layer in range(2)
        for name, num_rows in rows.items()
    }
    shapes |= {name.replace(".weight", "_norm.weight"): (HEAD,) for name in list(shapes)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def make_clip(cfg: Config, weights: dict[str, Tensor], world: World) -> tuple[QkClip, WeightDigest]:
    parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
    digest = WeightDigest.start(world.device)
    digest.on_restore(sum_weights([local(parameter) for parameter in parameters.values()]))
    stats = CommStats(torch.zeros(()), measures_gradients=False, is_sharded=False)
    clip = QkClip(parameters, cfg=cfg.model, threshold=THRESHOLD, digest=digest, device=world.device, comm_stats=stats)
    weights.update(parameters)
    return clip, digest


def clip_sharded(replicate: int, qk_norm: bool, skip: float) -> dict[str, Any]:
    """The whole weights after a clip, and this rank's bits. Each rank saw a part of the logits."""
    cfg = load([*SHAPE, f"parallel.replicate={replicate}", "parallel.device=cpu", f"model.qk_norm={qk_norm}"])
    world = connect(cfg.parallel)
    placements: list[Any] = [Replicate(), Shard(0)] if replicate > 1 else [Shard(0)]
    weights: dict[str, Tensor] = {
        name: distribute_tensor(each, world.mesh, placements) for name, each in random_weights(cfg).items()
    }
    clip, digest = make_clip(cfg, weights, world)
    clip.start_step()
    is_seen = torch.arange(LOGITS.numel()).view_as(LOGITS) % world.size == world.rank
    clip.add_logits(torch.where(is_seen, LOGITS, -1.0))
    clip.add_logits(torch.full_like(LOGITS, -2.0))
    clip.after_update(torch.tensor(skip))
    measured = sum_weights([local(weight) for weight in weights.values()])
    result = {
        "whole": {name: full(weight.detach()).tolist() for name, weight in weights.items()},
        "digest": (int(digest.total), int(measured.after)),
        "square": (float(digest.square), float(measured.square)),
        "shard": world.shard,
        "bits": {name: local(weight.detach()).flatten().tolist() for name, weight in weights.items()},
    }
    disconnect()
    return result


def expected_weights(qk_norm: bool) -> dict[str, Tensor]:
    weights = random_weights(load([*SHAPE]))
    for layer in range(2):
        for name, factors in (("query", QUERY_FACTORS), ("key", KEY_FACTORS)):
            path = f"blocks.{layer}.attention.{name}"
            if qk_norm:
                weights[f"{path}_norm.weight"] *= [0.5, 1 / 4][layer]
            else:
                weights[f"{path}.weight"] *= torch.tensor(factors[layer]).repeat_interleave(HEAD)[:, None]
    return weights


@pytest.mark.parametrize(
    ("num_ranks", "replicate", "qk_norm"), [(1, 1, False), (2, 1, False), (4, 2, False), (2, 1, True)]
)
def test_shards_are_scaled_as_whole_weights_by_the_largest_logits_of_all_ranks(
    ranks: Pool, num_ranks: int, replicate: int, qk_norm: bool
) -> None:
    results = ranks.run(num_ranks, clip_sharded, replicate, qk_norm, 0.0)
    for result in results:
        for name, expected in expected_weights(qk_norm).items():
            torch.testing.assert_close(torch.tensor(result["whole"][name]), expected, rtol=1e-6, atol=0, msg=name)
        assert result["digest"][0] == result["digest"][1]
        assert result["square"][0] == pytest.approx(result["square"][1], rel=1e-5)
    by_shard: dict[int, Any] = {}
    for result in results:
        assert by_shard.setdefault(result["shard"], result["bits"]) == result["bits"], "replicas have the same bits"


def test_a_rejected_update_clips_nothing(ranks: Pool) -> None:
    weights = {name: each.tolist() for name, each in random_weights(load([*SHAPE])).items()}
    for result in ranks.run(2, clip_sharded, 1, False, 1.0):
        assert result["whole"] == weights
        assert result["digest"][0] == result["digest"][1]


def train_with_growing_logits(directory: str) -> dict[str, list[Any]]:
    """Largest logits, refusals and changed weights of steps before which the query weights are multiplied."""
    cfg = tiny("optim.qk_clip=2", "optim.lr=1e-6", "model.num_layers=1")
    found: dict[str, list[Any]] = {"logits": [], "changed": [], "kept": []}
    parts = build(cfg, connect(cfg.parallel), RunDir(Path(directory)))
    weight = local(parts.update.parameters["blocks.0.attention.query.weight"]).detach()
    layout = parts.signals.layout
    weight.mul_(2000)
    parts.update.measure_digest()
    for number in range(4):
        before = weight.clone()
        forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
        if number == 1:
            local(next(iter(parts.update.parameters.values())).grad).fill_(math.nan)  # type: ignore[arg-type]
        found["logits"].append(float(parts.qk_clip.logits.max()))
        report = finish_step(parts, cfg=cfg, probe=False)
        found["changed"].append(float(layout.slot(report[: layout.size], "weights_changed").sum()))
        found["kept"].append(torch.equal(before, weight))
        if number == 0:
            weight.mul_(20)
            parts.update.measure_digest()
    parts.close()
    disconnect()
    return found


def test_the_logits_of_a_model_stay_at_the_threshold(ranks: Pool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, train_with_growing_logits, str(tmp_path))
    first, grown, again, last = found["logits"]
    assert first > 10
    assert grown == pytest.approx(40, rel=0.01), "clipped to 2, then times 20"
    assert again == pytest.approx(40, rel=0.01), "the rejected update clipped nothing"
    assert last == pytest.approx(2, rel=0.01)
    assert found["kept"] == [False, True, False, False]
    assert not any(found["changed"]), "scaled weights are no memory error"


@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_threshold_is_positive(value: str) -> None:
    with pytest.raises(ConfigError, match=r"optim\.qk_clip: must be positive, or null for no clipping of logits"):
        load([f"optim.qk_clip={value}"])
