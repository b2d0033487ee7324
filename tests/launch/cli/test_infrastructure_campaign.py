"""`harness drill campaign --infrastructure` with a real run, a disk that fills up, and a launcher that is killed."""

from __future__ import annotations

import json
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint import catalog
from harness.core import event_json
from harness.core.events import RunStarted, StepRecord
from harness.core.rundir import RunDir
from harness.faults.fault_plan import FaultKind
from launch.drills import infrastructure_run
from launch.drills.fault_environment import UnavailableError, find_unshare
from tests.forked_launchers import ForkedPopen, fork_launchers
from tests.launch.cli.test_drill import PATIENCE_S, SMALL, run_drill
from tests.slow_steps import slow_steps

pytestmark = [pytest.mark.full, pytest.mark.timeout(2 * PATIENCE_S)]

SEED = "104"
"""Draws full_disk at 0.4 s, then kill_node at 0.9 s."""
OPTIONS = ("--infrastructure", "--seed", SEED, "--minutes", "0.00625", "--every", "0.5", "--goal", "0.01")
NUM_STEPS = 40
SLEEP_S = 0.08
"""Of each step, so that few steps take longer than the schedule."""
CHECKPOINT_EVERY = 10
OFTEN = (
    f"train.num_steps={NUM_STEPS}",
    "train.sequence_length=64",
    f"checkpoint.every_steps={CHECKPOINT_EVERY}",
    "checkpoint.ring.every_steps=4",
)


ATTENDANT_RUNS = threading.Lock()
"""Held by the thread of the campaign that attends to the run, unless it waits for its next round."""


class Pause(threading.Event):
    """What that thread waits for."""

    has_waited = False

    def wait(self, timeout: float | None = None) -> bool:
        if self.has_waited:
            ATTENDANT_RUNS.release()
        is_over, self.has_waited = super().wait(timeout), True
        if not is_over:
            ATTENDANT_RUNS.acquire()
        return is_over


class PopenBesideAttendant(ForkedPopen):
    """Forks while the attendant waits."""

    @staticmethod
    def may_fork() -> bool:
        return True

    def _execute_child(self, args: Any, *others: Any) -> None:
        with ATTENDANT_RUNS if self.find_command(args) else nullcontext():
            super()._execute_child(args, *others)


def fork_slow_launchers() -> None:
    fork_launchers()
    slow_steps(SLEEP_S)
    vars(subprocess)["Popen"] = PopenBesideAttendant
    vars(infrastructure_run)["Event"] = Pause


def test_a_run_survives_a_full_disk_and_a_killed_launcher(tmp_path: Path) -> None:
    """Its checkpoints are on a disk of its own, which outlives the launcher."""
    try:
        find_unshare(FaultKind.full_disk)
    except UnavailableError as error:
        pytest.skip(str(error))
    done = run_drill("campaign", *OPTIONS, *SMALL, *OFTEN, cwd=tmp_path, first=fork_slow_launchers)
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
