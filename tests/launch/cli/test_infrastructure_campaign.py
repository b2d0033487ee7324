"""`harness drill campaign --infrastructure` with a real run, a disk that fills up, and a launcher that is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.checkpoint import catalog
from harness.core import event_json
from harness.core.events import RunStarted, StepRecord
from harness.core.rundir import RunDir
from harness.faults.fault_plan import FaultKind
from launch.drills.fault_environment import UnavailableError, find_unshare
from tests.launch.cli.test_drill import PATIENCE_S, SMALL, run_drill

pytestmark = [pytest.mark.full, pytest.mark.timeout(2 * PATIENCE_S)]

SEED = "104"
"""Draws full_disk at 0.4 s, then kill_node at 0.9 s."""
OPTIONS = ("--infrastructure", "--seed", SEED, "--minutes", "0.00625", "--every", "0.5", "--goal", "0.01")
NUM_STEPS = 90
CHECKPOINT_EVERY = 10
OFTEN = (
    f"train.num_steps={NUM_STEPS}",
    "train.sequence_length=64",
    f"checkpoint.every_steps={CHECKPOINT_EVERY}",
    "checkpoint.ring.every_steps=4",
)


def test_a_run_survives_a_full_disk_and_a_killed_launcher(tmp_path: Path) -> None:
    """Its checkpoints are on a disk of its own, which outlives the launcher."""
    try:
        find_unshare(FaultKind.full_disk)
    except UnavailableError as error:
        pytest.skip(str(error))
    done = run_drill("campaign", *OPTIONS, *SMALL, *OFTEN, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    root = tmp_path / f"runs/campaign-{SEED}-infrastructure"
    report = json.loads((root / "campaign.json").read_text())
    assert [card["name"] for card in report["cards"]] == ["full_disk", "kill_node"]
    killed = report["cards"][1]["recovery"]
    assert (killed["cause"], killed["starts"], killed["recovered"]) == ("lost launcher", 1, True)
    assert 0 < killed["notice_s"] < killed["notice_s"] + killed["restart_s"] < killed["first_update_s"]
    assert report["identical"], "weights and moments, byte for byte"
    assert 0 < report["effective"] < report["twin_effective"] <= 1
    assert report["lost_s"]["lost launcher"] > 0
    run = RunDir(root / "run")
    log = list(event_json.read(run.events))
    first, second = (event for event in log if isinstance(event, RunStarted))
    assert first.step == 0
    num_done = sum(isinstance(event, StepRecord) for event in log[: log.index(second)])
    assert second.step > 0 or num_done <= CHECKPOINT_EVERY, "it did not start over, unless nothing was saved yet"
    assert catalog.list_checkpoints(run.checkpoints)[-1].step == NUM_STEPS, "copied from the small disk"
    assert "2 of 2 faults survived, 0 lost, " in done.stdout
