"""The thread that looks for hung ranks and planned restarts, with a file system that fails. No ranks."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, cast

import pytest

from harness.core.events import EndCause
from harness.core.rundir import RunDir
from harness.telemetry.rank_progress import HangLimits
from launch.local import rank_watch
from launch.local.node_group import LOOPBACK, SINGLE_NODE, NodeFailure, NodeGroup
from launch.local.planned_restart import RestartPlanner
from launch.local.rank_watch import RankWatch
from launch.local.ranks import RankLogs
from launch.local.supervisor import Supervisor
from tests import composed
from tests.launch.local.test_rendezvous import wait_until

PLANNED = NodeFailure(node_rank=0, host="a", exit_code=75, line="planned restart", cause=EndCause.planned)


class FailingPlanner:
    """The first look fails, as a read of a file that the server has replaced."""

    def __init__(self) -> None:
        self.num_looks = 0

    def check(self, _now_s: float) -> NodeFailure | None:
        self.num_looks += 1
        if self.num_looks == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return PLANNED


def watch(directory: Path, group: NodeGroup, planner: Any, stop_signals: list[int]) -> RankWatch:
    supervisor = Supervisor(RunDir(directory), range(1), HangLimits(composed.load([]).launch))
    return RankWatch(group, supervisor, cast(RestartPlanner, planner), RankLogs(directory, range(1)), stop_signals)


@pytest.fixture
def group() -> NodeGroup:
    return NodeGroup(SINGLE_NODE, LOOPBACK, "start", 0, None, 1.0)


def test_it_looks_again_after_an_error(tmp_path: Path, group: NodeGroup) -> None:
    planner = FailingPlanner()
    with watch(tmp_path, group, planner, []):
        wait_until(lambda: group.failure == PLANNED)
    assert planner.num_looks == 2


def test_a_look_that_returns_after_the_start_reports_nothing(tmp_path: Path, group: NodeGroup) -> None:
    planner = FailingPlanner()
    ended = watch(tmp_path, group, planner, [])
    with ended:
        wait_until(lambda: planner.num_looks > 0)
        ended._ended.set()
        ended._report(PLANNED)
    assert group.failure is None


def test_no_restart_is_planned_during_a_stop(tmp_path: Path, group: NodeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "LOOK_EVERY_S", 0.01)
    planner = FailingPlanner()
    with watch(tmp_path, group, planner, [15]) as looking:
        wait_until(lambda: looking._supervisor._checked_s > 0)
    assert planner.num_looks == 0
