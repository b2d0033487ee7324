"""Tests of process, file and clock faults on two real ranks that are killed; each run ends like its twin."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.checkpoint import catalog
from harness.core import event_json
from harness.core.events import CheckpointJudged, RunStarted
from harness.core.rundir import RunDir
from harness.drills import directories, scenario
from harness.drills.drill_record import DrillRecord, gather
from harness.drills.score import BoundStatus, Card, score_run
from harness.faults.files import fill, flip_bit
from harness.faults.process import children_of
from tests.distributed import drill_cases
from tests.distributed.killable_ranks import KillableRanks, KillAtTime

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked from a process that imported torch"),
]

SIZE = 2
NUM_STEPS = 20
TRAIN = (
    f"train.num_steps={NUM_STEPS}",
    "train.sequence_length=32",
    "model.num_layers=1",
    "checkpoint.every_steps=6",
    "parallel.device=cpu",
)
FAULT_OVERRIDES = ("drill.fault.at=15", "drill.expected.names_rank=false")
KILLED_BY_FAULT = KillAtTime(after_s=150, rank=1, grace_s=0.3)
"""Rank 1 is killed by its fault; the other rank follows, as under a launcher."""


@pytest.fixture(scope="module")
def killable() -> Iterator[KillableRanks]:
    parent = KillableRanks("torch._dynamo", "harness.faults.drill_worker", drill_cases.__name__)
    yield parent
    parent.close()


@pytest.fixture(scope="module")
def runs(killable: KillableRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the common twin."""
    root = tmp_path_factory.mktemp("runs")
    twin = RunDir(root / "twin")
    directories.create_directory(directories.configure(scenario.load_scenario("kill_rank").train, TRAIN), twin)
    assert killable.run(SIZE, drill_cases.run, str(twin.path)).results == [0] * SIZE
    return root


def run_scenario(killable: KillableRanks, runs: Path, name: str, *overrides: str) -> tuple[RunDir, Card]:
    """Run a scenario until it is done; returns the run and its score card."""
    drill = scenario.load_scenario(name, [*FAULT_OVERRIDES, *overrides])
    victim = RunDir(runs / name)
    directories.create_directory(directories.configure(drill.train, TRAIN), victim)
    DrillRecord(name=name, scenario=drill, plan=drill.plan, twin="twin").write(victim)
    is_killed = name in ("kill_rank", "corrupted_checkpoint", "truncated_checkpoint")
    for start in range(drill.expected.starts):
        outcome = killable.run(
            SIZE, drill_cases.run, str(victim.path), kill_point=KILLED_BY_FAULT if is_killed and start == 0 else None
        )
        assert outcome.killed is (is_killed and start == 0)
    return victim, score_run(victim)


def broken_bounds(card: Card) -> list[str]:
    return [bound.name for bound in card.bounds if bound.verdict not in (BoundStatus.held, BoundStatus.free)]


def test_a_run_resumes_after_a_killed_rank(killable: KillableRanks, runs: Path) -> None:
    victim, card = run_scenario(killable, runs, "kill_rank", 'drill.expected.notices=["resumed from snapshot"]')
    assert not broken_bounds(card), card.score
    assert card.score.struck == 1
    assert [started.in_memory for started in gather(victim).of(RunStarted)] == [False, True]
    assert card.score.steps_lost < 8, "the newest checkpoint is that of step 12"


@pytest.mark.parametrize("name", ["corrupted_checkpoint", "truncated_checkpoint"])
def test_a_run_resumes_from_an_older_checkpoint_than_a_damaged_one(
    killable: KillableRanks, runs: Path, name: str
) -> None:
    victim, card = run_scenario(killable, runs, name, 'drill.expected.notices=["is damaged: "]')
    assert not broken_bounds(card), card.score
    judged = [event for event in event_json.read(victim.events) if isinstance(event, CheckpointJudged)]
    assert [event.directory for event in judged if event.health == "damaged"] == ["step-00000012-gen-0"]
    assert [path.name for path in catalog.list_damaged(victim.checkpoints)] == ["step-00000012-gen-0.damaged"]
    assert [started.resumed_from for started in gather(victim).of(RunStarted)] == [None, "step-00000006-gen-0"]


def test_a_clock_jump_changes_no_result(killable: KillableRanks, runs: Path) -> None:
    victim, card = run_scenario(killable, runs, "clock_jump", "drill.fault.duration=4")
    assert not broken_bounds(card), card.score
    assert card.score.struck == 4
    times = {record.iteration: record.time for record in gather(victim).records}
    assert times[17] < times[10] - 3000  # records are late: that of 17 was written while the clock was wrong
    assert times[NUM_STEPS] > times[10]


def test_a_preempted_run_resumes_without_loss(killable: KillableRanks, runs: Path) -> None:
    victim, card = run_scenario(killable, runs, "preemption")
    assert not broken_bounds(card), card.score
    assert [started.step for started in gather(victim).of(RunStarted)] == [0, 16]


def test_one_bit_is_flipped_and_no_timestamp_changes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    os.utime(path, ns=(5, 7))
    flip_bit(path, 8 * 42 + 3)
    assert path.read_bytes() == bytes(42) + b"\x08" + bytes(57)
    assert path.stat().st_mtime_ns == 7
    flip_bit(path, 8 * 42 + 3)
    assert path.read_bytes() == bytes(100)


def test_a_disk_is_filled_to_the_last_byte(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_234_567, before[1]))
    try:
        fill(tmp_path / "filler")
        fill(tmp_path / "filler")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "filler").stat().st_size == 1_234_567


def test_children_of_lists_direct_children() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert child.pid in children_of(os.getpid())
        assert children_of(child.pid) == []
    finally:
        child.kill()
        child.wait()
