"""A save with a cached plan writes the same bytes as one with a new plan; changed tensors get a new plan."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.checkpoint import integrity, saver, store
from harness.core.state import RunState
from harness.distributed.world import World, connect, disconnect
from tests.composed import load
from tests.distributed.pool import Pool


def tensors(world: World, seed: int, *, dtype: torch.dtype = torch.float32, rows: int = 5) -> dict[str, Tensor]:
    """Sharded, replicated and plain tensors; 5 rows on 2 or 4 ranks give uneven and empty shards."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(rows, 3, generator=generator).to(dtype)
    each = -(-rows // world.size)
    own = full[world.rank * each : (world.rank + 1) * each].clone()
    sharded = DTensor.from_local(
        own, world.host_mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
    )
    copied = DTensor.from_local(full + 1, world.host_mesh, [Replicate()], run_check=False)
    return {"model.sharded": sharded, "model.copied": copied, "device.step": torch.tensor(seed)}


def files_of(directory: Path) -> dict[str, str]:
    """Hashes of a checkpoint's shards and metadata."""
    manifest = integrity.verify(directory)
    return {name: entry.sha256 for name, entry in manifest.files.items() if name != store.STATE_FILE}


def save_in_turn(root: str, series: list[dict[str, Any]]) -> tuple[int, list[dict[str, str]], list[dict[str, str]]]:
    """Save several series of tensors with and without a cache; returns the number of plans with the cache, and the
    hashes of both."""
    world = connect(load(["parallel.device=cpu"]).parallel)
    with patch("harness.checkpoint.saver.save_shards", wraps=save) as counted:
        kept = save_all(Path(root) / "kept", series, world, saver.SavePlanCache())
    uncached = save_all(Path(root) / "uncached", series, world, None)
    disconnect()
    return counted.call_count, kept, uncached


def save_all(
    root: Path, series: list[dict[str, Any]], world: World, plan_cache: saver.SavePlanCache | None
) -> list[dict[str, str]]:
    found = []
    for step, options in enumerate(series):
        now = tensors(world, step, **options)
        path = saver.write(root, now, RunState(step=step), world=world, rollback={}, plan_cache=plan_cache).path
        found.append(files_of(path))
        back = {name: torch.zeros_like(tensor) for name, tensor in now.items()}
        store.load_first(root, [path.name], back, world=world)
        for name, tensor in now.items():
            mine, its = (each.to_local() if isinstance(each, DTensor) else each for each in (tensor, back[name]))
            assert torch.equal(mine, its), name
    return found


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 4])
def test_cached_plan_writes_the_same_bytes_as_a_new_one(ranks: Pool, tmp_path: Path, size: int) -> None:
    for num_planned, kept, uncached in ranks.run(size, save_in_turn, str(tmp_path / str(size)), [{}, {}, {}]):
        assert num_planned == 1
        assert kept == uncached
        assert {f"__{rank}_0.distcp" for rank in range(size)} <= set(kept[2])
        assert kept[0]["__0_0.distcp"] != kept[1]["__0_0.distcp"], "other numbers"
        assert kept[0][".metadata"] == kept[1][".metadata"]


def test_other_dtype_or_shape_makes_a_new_plan(ranks: Pool, tmp_path: Path) -> None:
    series: list[dict[str, Any]] = [{}, {"dtype": torch.float16}, {}, {"rows": 6}, {"rows": 6}]
    for num_planned, kept, uncached in ranks.run(2, save_in_turn, str(tmp_path), series):
        assert num_planned == 4
        assert kept == uncached


def save_odd_one(root: str) -> tuple[int, str]:
    """Only rank 1 has other tensors than the cached plan; then a cached plan with wrong write results."""
    world = connect(load(["parallel.device=cpu"]).parallel)
    plan_cache = saver.SavePlanCache()

    def write(step: int) -> saver.Written:
        now = tensors(world, step)
        return saver.write(Path(root), now, RunState(step=step), world=world, rollback={}, plan_cache=plan_cache)

    write(0)
    if world.rank == 1:
        plan_cache.signature = []
    write(1)
    if world.rank == 1:
        plan_cache.results = plan_cache.results[:-1]
    path = write(2).path
    integrity.verify(path)
    content = hashlib.sha256((path / "__1_0.distcp").read_bytes()).hexdigest()
    disconnect()
    return len(plan_cache.results), content


def test_change_on_one_rank_makes_a_new_plan_on_all(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, save_odd_one, str(tmp_path))
    assert first[1] == second[1]
    assert first[0] + second[0] == 4, "two shards, one copy and one number"
