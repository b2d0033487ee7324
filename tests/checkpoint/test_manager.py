"""Full runs on real ranks: when checkpoints are saved, marked good and deleted, and what happens on a full disk."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from harness import train
from harness.checkpoint import catalog, integrity, saver
from harness.checkpoint.catalog import Health
from harness.checkpoint.manager import CheckpointManager
from harness.checkpoint.ring import Ring
from harness.config.errors import StorageError
from harness.core import event_json
from harness.core.events import CheckpointFailed, CheckpointJudged, CheckpointSaved, Event, RunEnded, StepRecord
from harness.core.state import RunState
from harness.distributed.world import connect, disconnect
from harness.faults.site import intercept
from harness.run import Run
from tests.checkpoint.storage import failing
from tests.composed import load
from tests.distributed import cases, faulty_runs
from tests.distributed.faulty_runs import Fault
from tests.distributed.pool import Pool


def log_of(directory: Path) -> list[Event]:
    return list(event_json.read(directory / "a" / "events.jsonl"))


def saved_steps(directory: Path) -> list[int]:
    return [event.step for event in log_of(directory) if isinstance(event, CheckpointSaved)]


def health(directory: Path) -> dict[int, Health]:
    return {each.step: each.health for each in catalog.list_checkpoints(directory / "a" / "checkpoints")}


def test_candidates_become_good_and_retention_is_kept(ranks: Pool, tmp_path: Path) -> None:
    overrides = ("train.num_steps=24", "checkpoint.every_steps=2", "checkpoint.good_after_steps=7", "checkpoint.keep=2")
    ranks.run(2, cases.run, str(tmp_path), "run.name=a", *overrides, "checkpoint.keep_every_steps=10")
    assert saved_steps(tmp_path) == list(range(2, 26, 2))
    marks = [event for event in log_of(tmp_path) if isinstance(event, CheckpointJudged)]
    assert all(event.health == Health.good for event in marks)
    proved = {int(event.directory[5:13]): event.reason for event in marks}
    assert proved.pop(24) == "24 clean steps led up to the end of the run"
    assert set(proved.values()) == {"7 clean steps followed"}, "each at the first record that shows it"
    assert set(health(tmp_path)) == {10, 20, 22, 24}, "every tenth step, and the newest two; 24 is good"
    assert health(tmp_path)[24] is Health.good


def obstructed(directory: str) -> None:
    """A run whose first checkpoint cannot be marked for a while: a directory blocks the health file."""
    overrides = ("run.name=a", "train.num_steps=20", "checkpoint.every_steps=4", "checkpoint.good_after_steps=2")
    cfg = load([*cases.TINY, f"run.dir={directory}", "checkpoint.keep=100", *overrides])
    obstacle = Path(directory) / "a" / "checkpoints" / "step-00000004-gen-0" / catalog.HEALTH

    def wrap(run: Run) -> Run:
        def look() -> None:
            if run.state.iteration == 6:
                while not obstacle.parent.exists():
                    time.sleep(0.01)
                obstacle.mkdir()
            if run.state.iteration == 12:
                obstacle.rmdir()

        run.parts.mailbox = intercept(run.parts.mailbox, "post", look, first=False)
        return run

    train.run_worker(cfg, wrap)


def test_failed_health_mark_is_retried(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(1, obstructed, str(tmp_path))
    assert health(tmp_path)[4] is Health.good
    (marks,) = [each for each in log_of(tmp_path) if isinstance(each, CheckpointJudged) and "00004" in each.directory]
    assert marks.reason != "2 clean steps followed", "that was when it could not be marked"


def test_first_candidate_is_kept_until_one_is_good(ranks: Pool, tmp_path: Path) -> None:
    overrides = ("train.num_steps=12", "checkpoint.every_steps=2", "checkpoint.good_after_steps=100")
    ranks.run(2, cases.run, str(tmp_path), "run.name=a", *overrides, "checkpoint.keep=1")
    assert health(tmp_path) == {2: Health.candidate, 12: Health.candidate}, "the heir, and the newest"


@pytest.mark.full
def test_run_with_nan_keeps_its_last_good_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    """The worst case: a save at every step and by the clock, keep=1, only NaN afterwards, and a policy that does not
    react."""
    overrides = (
        "run.name=a",
        "model.num_layers=1",
        "train.num_steps=10",
        "checkpoint.every_steps=1",
        "checkpoint.every_minutes=1e-5",
        "checkpoint.good_after_steps=2",
        "checkpoint.keep=1",
        "sentinel.halt_after_refused=5",
        "sentinel.policy.refused_in_row=1000",
        "sentinel.policy.budgets.skip.per_window=1000",
        "sentinel.probe_every=1000",
    )
    fault = Fault("weights", 1, factor=math.nan, iteration=6)
    results = ranks.run(2, faulty_runs.run, str(tmp_path), fault, *overrides)
    assert [result.code for result in results] == [3, 3]
    log = log_of(tmp_path)
    assert sum(event.refused for event in log if isinstance(event, StepRecord)) >= 5
    refusals = [event for event in log if isinstance(event, CheckpointFailed)]
    assert refusals
    assert all(event.reason == "weights or moments are not finite" for event in refusals)
    left = health(tmp_path)
    good = [step for step, each in left.items() if each is Health.good]
    assert good
    assert max(left) <= 6, "what is broken was never written"
    root = tmp_path / "a" / "checkpoints"
    for checkpoint in catalog.list_checkpoints(root):
        integrity.verify(checkpoint.path)
    code, records = ranks.run(2, cases.run, str(tmp_path), *overrides)[0]
    assert code == 0, "and the run resumes from it"
    assert records[-1].step == 10


@pytest.mark.full
def test_checkpoints_are_saved_by_the_clock(ranks: Pool, tmp_path: Path) -> None:
    overrides = ("train.num_steps=18", "checkpoint.every_minutes=0.0015", "sentinel.lag=2", "model.num_layers=1")
    ranks.run(2, cases.run, str(tmp_path), "run.name=a", *overrides)
    saves = saved_steps(tmp_path)
    log = log_of(tmp_path)
    asked = [event.iteration for event in log if isinstance(event, StepRecord) and event.save_requested]
    assert asked
    for iteration in asked:
        soon = range(
            iteration + 3, iteration + 7
        )  # reaches all ranks after `lag` iterations; a pending save comes first
        assert soon[-1] > 18 or set(soon) & set(saves)
    assert saves[-1] == 18
    assert len(saves) <= len(asked) + 1, "one for each request, and the last"


@pytest.mark.full
@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("slots", [0, 2])
def test_run_state_on_disk_matches_the_weights_whatever_the_lag(
    ranks: Pool, tmp_path: Path, lag: int, slots: int
) -> None:
    """Whatever the lag, state.json belongs to the weights beside it."""
    overrides = (
        *(f"sentinel.lag={lag}", f"checkpoint.ring.slots={slots}", "checkpoint.every_steps=1"),
        *("model.num_layers=1", "train.num_steps=8"),
    )
    ranks.run(2, cases.run, str(tmp_path), "run.name=a", "checkpoint.keep=100", *overrides)
    saves = saved_steps(tmp_path)
    assert saves[-1] == 8
    assert len(saves) >= 8 // (lag + 1)
    for checkpoint in catalog.list_checkpoints(tmp_path / "a" / "checkpoints"):
        state = cases.state_on_disk(checkpoint.path)
        assert state.step == state.cursor == state.iteration == checkpoint.step == cases.device_step(checkpoint.path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB; a checkpoint of the tiny model needs two thirds of it."""
    root = tmp_path / "a" / "checkpoints"
    root.mkdir(parents=True)
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)], check=False, capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("only root can mount a small disk")
    yield root
    subprocess.run(["umount", str(root)], check=True)


@pytest.mark.full
def test_full_disk_loses_only_that_checkpoint(ranks: Pool, small_disk: Path) -> None:
    directory = small_disk.parents[1]
    overrides = ("run.name=a", "train.num_steps=12", "checkpoint.every_steps=5")
    assert ranks.run(2, cases.run, str(directory), *overrides)[0][0] == 75
    log = log_of(directory)
    assert saved_steps(directory) == [5]
    failed = [event for event in log if isinstance(event, CheckpointFailed)]
    assert [event.step for event in failed] == [10, 12]
    assert all("No space left on device" in event.reason and "\n" not in event.reason for event in failed), failed
    assert isinstance(log[-1], RunEnded)
    assert (log[-1].exit_code, log[-1].step) == (75, 12)
    assert log[-1].reason == "all steps done, but the last checkpoint was not saved"
    assert [path.name for path in small_disk.iterdir()] == ["step-00000005-gen-0"], "nothing half-written is left"
    integrity.verify(small_disk / "step-00000005-gen-0")
    catalog.delete(small_disk / "step-00000005-gen-0")
    code, records = ranks.run(
        2, cases.run, str(directory), *overrides, "checkpoint.keep=1", "checkpoint.every_steps=0"
    )[0]
    assert code == 0, "with free disk space the run resumes to its end"
    assert records[-1].step == 12


def going_back(directory: str, file: str, iteration: int) -> str:
    """Taint and prune on a manager while rank 0 cannot open these files; returns the outcome."""
    cfg = load([*cases.TINY, "checkpoint.retry_s=0.02", "checkpoint.keep=1"])
    world, tensors = connect(cfg.parallel), {"model.weight": torch.zeros(3)}
    ring = Ring(tensors, cfg=cfg.checkpoint.ring, world=world)
    checkpoints = CheckpointManager(cfg, Path(directory), ring=ring, world=world)
    outcome = "tainted"
    with failing(file) if world.is_first else nullcontext():
        try:
            checkpoints.taint_since(iteration, "a test")
        except StorageError as error:
            outcome = str(error)
        if world.is_first:
            checkpoints._prune()
    checkpoints.close()
    disconnect()
    return outcome


def three_good(directory: str) -> None:
    world = connect(load(["parallel.device=cpu"]).parallel)
    for step in (10, 20, 30):
        state = RunState(step=step, iteration=step)
        path = saver.write(Path(directory), {"model.weight": torch.zeros(3)}, state, world=world, rollback={}).path
        catalog.mark(path, Health.good, "a test") if world.is_first else None
    disconnect()


@pytest.mark.parametrize("file", [integrity.MANIFEST, catalog.HEALTH])
def test_unreadable_checkpoint_blocks_taint_and_pruning(ranks: Pool, tmp_path: Path, file: str) -> None:
    ranks.run(2, three_good, str(tmp_path))
    for outcome in ranks.run(2, going_back, str(tmp_path), f"step-00000030-gen-0/{file}", 45):
        assert ("cannot be read" in outcome) is (file == integrity.MANIFEST)
    left = {each.step: each.health for each in catalog.list_checkpoints(tmp_path)}
    assert left == dict.fromkeys([10, 20, 30] if file == catalog.HEALTH else [30], Health.good)


def test_later_checkpoints_are_tainted_although_one_health_is_unread(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, three_good, str(tmp_path))
    file = f"step-00000010-gen-0/{catalog.HEALTH}"
    assert ranks.run(2, going_back, str(tmp_path), file, 15) == ["tainted"] * 2
    left = {each.step: each.health for each in catalog.list_checkpoints(tmp_path)}
    assert left == {10: Health.good, 20: Health.tainted, 30: Health.tainted}
