"""Replays of real incidents on real ranks: what struck once does not come again, what is in the data does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.replay import history
from harness.analysis.replay.rerun import Order, run_worker, uncompiled
from harness.analysis.replay.wording import render
from harness.build import Parts
from harness.checkpoint import catalog
from harness.config.compose import load
from harness.core import events
from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from harness.faults import worker
from harness.faults.plan import Fault, FaultKind, FaultPlan
from launch.cli.replay import repeat_data_fault
from tests.distributed import trouble
from tests.distributed.cases import TINY
from tests.distributed.pool import Pool

RUN = (
    "train.num_steps=40",
    "optim.warmup_steps=5",
    "checkpoint.every_steps=10",
    "checkpoint.good_after_steps=3",
    "checkpoint.keep=100",
    "checkpoint.ring.every_steps=4",
)


def replayed(
    ranks: Pool,
    run: RunDir,
    *,
    iteration: int | None = None,
    samples: bool = False,
    tamper: Callable[[Parts], None] | None = None,
) -> dict[str, Any]:
    """Replay a step, that of the first incident unless told, on as many ranks as made it."""
    cfg = uncompiled(load([*TINY, *RUN, f"run.dir={run.path.parent}", f"run.name={run.path.name}"]))
    log = history.read(events.read(run.events))
    guilty = iteration or history.guilty(log, 1).iteration
    names = [each.name for each in catalog.list_checkpoints(run.checkpoints)]
    way = history.way(log, guilty, names)
    order = Order(
        run=run.path,
        report=run.path / "replay.json",
        checkpoint=way.checkpoint,
        way=way.records,
        older=history.older(log, guilty, names, way.checkpoint),
        exactly=True,
        with_samples=samples,
        tamper=tamper,
    )
    assert ranks.run(2, run_worker, order, cfg) == [0, 0]
    result: dict[str, Any] = json.loads(order.report.read_text())
    return result


@pytest.fixture(scope="module")
def victim(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Rank 1's gradient is NaN once, at iteration 36."""
    directory = tmp_path_factory.mktemp("replay")
    fault = trouble.Fault("gradient", 1, factor=math.nan, iteration=36)
    ranks.run(2, trouble.run, str(directory), fault, "run.name=victim", *RUN)
    return RunDir(directory / "victim")


@pytest.mark.full
def test_what_struck_once_is_transient_and_the_way_there_is_the_logs_bit_for_bit(ranks: Pool, victim: RunDir) -> None:
    before = victim.events.read_bytes(), victim.ledger.read_bytes(), sorted(victim.checkpoints.iterdir())
    found = replayed(ranks, victim, samples=True)
    assert (found["iteration"], found["cursor"]) == (36, 35)
    assert (found["checkpoint"], found["num_on_the_way"]) == ("step-00000030-gen-0", 5)
    assert found["left_the_log_at"] is None
    assert found["logged"]["grad_norm"] == "nan"
    assert found["first"] == found["second"]
    assert math.isfinite(found["first"]["grad_norm"])
    assert (found["nature"], found["cause"], found["seen"]) == ("transient", "unknown", {})
    assert "so it was in the machine" in render(found)
    assert before == (victim.events.read_bytes(), victim.ledger.read_bytes(), sorted(victim.checkpoints.iterdir()))


def test_the_samples_of_the_batch_are_weighed_and_named(ranks: Pool, victim: RunDir) -> None:
    found = replayed(ranks, victim, samples=True)
    losses = [sample["loss"] for sample in found["samples"]]
    assert len(losses) == 8
    assert sum(losses) / 8 == pytest.approx(found["first"]["loss"], rel=1e-5)
    assert all(sample["file"] == "pydoc_data.topics" and sample["grad_norm"] > 0 for sample in found["samples"])
    assert "x the median)" in render(found)


def drilled(directory: str) -> int:
    """A run with the drill that lies in its directory."""
    return worker.run_worker(load([*TINY, *RUN, f"run.dir={directory}", "run.name=poisoned"]))


@pytest.mark.full
def test_bad_data_is_bad_again_and_on_an_older_state_too(ranks: Pool, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "poisoned")
    run.path.mkdir()
    plan = FaultPlan(seed=0, faults=[Fault(kind=FaultKind.poisoned_batch, at=34)])
    run.drill.write_text(json.dumps({"plan": plan.as_dict()}))
    assert ranks.run(2, drilled, str(tmp_path)) == [0, 0]
    found = replayed(ranks, run, iteration=35, tamper=partial(repeat_data_fault, run.path, 2))
    assert (found["cursor"], found["left_the_log_at"]) == (34, None)
    assert found["first"] == found["second"] == found["logged"]
    assert (found["nature"], found["cause"]) == ("deterministic", "data")
    assert "stands out on an older state as well" in render(found)
    assert replayed(ranks, run, iteration=35)["nature"] == "transient", "with other data it is another step"


def test_a_step_that_was_clean_comes_again_bit_for_bit(ranks: Pool, victim: RunDir) -> None:
    """The log's own numbers, through JSON and back, are those of the replay."""
    log = [event for event in events.read(victim.events) if isinstance(event, StepRecord)]
    cfg = uncompiled(load([*TINY, *RUN, f"run.dir={victim.path.parent}", f"run.name={victim.path.name}"]))
    order = Order(
        run=victim.path,
        report=victim.path / "clean.json",
        checkpoint=None,
        way=log[:3],
        older=None,
        exactly=True,
        with_samples=False,
    )
    assert ranks.run(2, run_worker, order, cfg) == [0, 0]
    found = json.loads(order.report.read_text())
    assert found["nature"] == "deterministic"
    assert found["first"]["loss"] == log[2].loss
