"""`harness drill` with several nodes on one machine: virtual hosts, and launchers on loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.core import event_json
from harness.core.events import RunRestarted, RunStarted
from harness.core.rundir import RunDir
from launch.drills import local_nodes
from launch.drills.virtual_hosts import reason_against_hosts
from tests.forked_launchers import fork_launchers
from tests.launch.cli.test_drill import PATIENCE_S, run_drill

pytestmark = [pytest.mark.full, pytest.mark.timeout(2 * PATIENCE_S), pytest.mark.xdist_group("node-drills")]

SHORT = (
    "train.num_steps=34",
    "train.sequence_length=32",
    "model.num_layers=1",
    "launch.slurm.health=false",
    "launch.threads=1",
)
AT = "drill.fault.at=27"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both drills have an equal twin, which is trained once."""
    return tmp_path_factory.mktemp("node-drills")


def last_restart(run: RunDir) -> tuple[RunRestarted, RunStarted]:
    log = list(event_json.read(run.events))
    (restarted,) = (event for event in log if isinstance(event, RunRestarted))
    *_, started = (event for event in log if isinstance(event, RunStarted))
    return restarted, started


@pytest.mark.skipif(bool(reason_against_hosts()), reason=reason_against_hosts())
def test_the_loss_of_the_first_host_is_survived(directory: Path) -> None:
    done = run_drill("lost_coordinator", AT, "--no-mlflow", *SHORT, cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(directory / "runs/drill-lost_coordinator")
    restarted, started = last_restart(run)
    assert (restarted.replaced_by, restarted.out) == ({"host1": "host3"}, {"host1": "node 0 (host1) is gone"})
    assert (started.in_memory, started.fetched_ranks) == (True, [0]), "from the memory of the partner"
    score = json.loads((run.path / "score.json").read_text())["score"]
    assert score["identical"]
    assert 0 < score["notice_s"] < score["first_update_s"] < 200


def work_without_root() -> None:
    """Fork launchers, and find no right to create virtual hosts."""
    vars(local_nodes)["reason_against_hosts"] = lambda: "needs root"
    fork_launchers()


def test_a_spare_on_loopback_replaces_a_lost_node(directory: Path) -> None:
    """Without root: nodes have names and folders in shared memory of their own."""
    done = run_drill("lost_node", AT, "--no-mlflow", *SHORT, cwd=directory, first=work_without_root)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(directory / "runs/drill-lost_node")
    assert json.loads((run.path / "score.json").read_text())["passed"]
    restarted, started = last_restart(run)
    assert (restarted.replaced_by, started.world_size) == ({"node1": "node2"}, 2)
    assert (started.in_memory, started.fetched_ranks) == (True, [1])
