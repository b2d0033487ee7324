"""Snapshots in host memory are restored bit for bit, and all ranks agree on one; on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.build import Parts, build
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.shards import local
from harness.distributed.world import connect
from harness.step import finish_step, forward_backward
from tests.checkpoint.test_ring_in_process import Bench
from tests.composed import load
from tests.distributed.cases import digest, run, tiny
from tests.distributed.pool import Pool

ONE_LAYER = "model.num_layers=1"
UNEVEN = (
    ONE_LAYER,
    "model.dim=24",
    "model.num_heads=12",
    "model.num_kv_heads=6",
    "model.qk_norm=true",
    "model.ffn_dim=42",
)
"""Heads of 2: over 4 ranks a QK-norm has two empty shards; the other widths do not divide by 4 either."""


def start(*overrides: str) -> tuple[Parts, Config]:
    cfg = tiny(*overrides)
    return build(cfg, connect(cfg.parallel), RunDir(Path("/nonexistent"))), cfg


def step(parts: Parts, cfg: Config, index: int) -> list[float]:
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=False)
    return finish_step(parts, cfg=cfg, probe=False).tolist()


def rewind(*overrides: str) -> dict[str, Any]:
    """Four steps with a snapshot after the second, a rewind to it, and the last two steps again."""
    parts, cfg = start(*overrides)
    first = [step(parts, cfg, index) for index in range(2)]
    state = RunState(step=2, iteration=2, cursor=2, tokens=512)
    slot = parts.ring.take_snapshot(state)
    at_snapshot = digest(parts.tensors())
    second = [step(parts, cfg, index) for index in (2, 3)]
    at_end = digest(parts.tensors())
    slot.complete(step=2, refused_in_row=0)
    parts.ring.trust(3)
    agreed = parts.ring.agree_on_target(before=4)
    assert agreed is slot
    returned = parts.ring.restore(agreed)
    parts.update.measure_digest()
    return {
        "state": returned == state,
        "restored": digest(parts.tensors()) == at_snapshot,
        "moved": at_end != at_snapshot,
        "replayed": [step(parts, cfg, index) for index in (2, 3)] == second,
        "ended": digest(parts.tensors()) == at_end,
        "fresh": first[0] != second[0],
        "empty": any(local(tensor).numel() == 0 for tensor in parts.tensors().values()),
    }


@pytest.mark.parametrize(
    ("size", "overrides", "has_empty_shards"),
    [
        (1, (), False),
        (2, ("precision=bf16",), False),
        (2, ("optim=muon",), False),
        pytest.param(4, (*UNEVEN, "optim=muon"), True, marks=pytest.mark.full),
        pytest.param(4, UNEVEN, True, marks=pytest.mark.full),
        pytest.param(4, (ONE_LAYER, "parallel.replicate=2", "precision=fp16"), False, marks=pytest.mark.full),
    ],
)
def test_rewind_is_bit_exact(ranks: Pool, size: int, overrides: tuple[str, ...], has_empty_shards: bool) -> None:
    results = ranks.run(size, rewind, *overrides)
    empty = [result.pop("empty") for result in results]
    assert any(empty) == has_empty_shards
    for result in results:
        assert all(result.values()), result


def ranks_agree_on_the_oldest_of_their_newest() -> list[int | None]:
    bench = Bench(connect(load(["parallel.device=cpu"]).parallel), slots=3)
    seen = []
    bench.take(10)
    bench.take(20)
    bench.ring.trust(11)
    if bench.world.rank == 0:
        bench.ring.trust(21)
    seen.append(bench.target())
    if bench.world.rank == 1:
        bench.ring.discard_from(10)
    seen.append(bench.target())
    return seen


def test_all_ranks_agree_on_a_slot_that_all_hold(ranks: Pool) -> None:
    assert ranks.run(2, ranks_agree_on_the_oldest_of_their_newest) == [[10, None], [10, None]]


def complaint(*overrides: str) -> str:
    try:
        start(*overrides)
    except ConfigError as error:
        return str(error)
    return ""


def test_ring_that_does_not_fit_is_rejected_on_all_ranks_with_its_numbers(ranks: Pool) -> None:
    first, second = ranks.run(2, complaint, "checkpoint.ring.memory_gb=1.6e-3", "checkpoint.ring.slots=9")
    assert first == second
    numbers = "9 snapshots and the one being saved need 10 x 0.000386 GB on a machine with 2 ranks, 0.00386 GB of host"
    assert first.startswith(f"checkpoint.ring.memory_gb: {numbers} memory; allowed are 0.0016 GB, ")
    assert first.endswith("enough for checkpoint.ring.slots=3")
    assert ranks.run(2, complaint, "checkpoint.ring.memory_gb=1.6e-3", "checkpoint.ring.slots=3") == ["", ""]
    (starved, _) = ranks.run(2, complaint, "checkpoint.ring.memory_gb=1e-6")
    assert starved.endswith("not enough for one")


def test_ring_that_does_not_fit_is_rejected_before_the_first_step(ranks: Pool, tmp_path: Path) -> None:
    (message, _) = ranks.run(2, refused_run, str(tmp_path))
    assert "checkpoint.ring.memory_gb" in message
    assert not (tmp_path / "a" / "events.jsonl").exists()


def refused_run(directory: str) -> str:
    try:
        run(directory, "run.name=a", "checkpoint.ring.memory_gb=1e-6")
    except ConfigError as error:
        return str(error)
    return ""
