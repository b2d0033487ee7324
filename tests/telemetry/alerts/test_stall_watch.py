"""Tests of hang and no progress: real heartbeat files, simulated time."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.alerts import AlertKind
from harness.core.rundir import RunDir
from harness.telemetry import heartbeat
from harness.telemetry.alerts.alert import Alert
from harness.telemetry.alerts.stall_watch import StallWatch
from harness.telemetry.heartbeat import Beat, Phase
from harness.telemetry.rank_progress import HangLimits
from tests import composed

HANG_AFTER_S, NO_PROGRESS_S = 30.0, 120.0
BEAT = Beat(
    rank=0, world_size=2, host="n1", pid=1, phase=Phase.train, iteration=5, step=5, beats=9, writes=1, every_s=1.0,
    beat_time=0.0, time=0.0,
)  # fmt: skip


class Watched:
    """Two ranks, and the watch that observes them."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self.run.heartbeat.mkdir()
        limits = HangLimits(composed.load([f"launch.hang_after_s={HANG_AFTER_S}"]).launch)
        self.now_s = 1000.0
        self.watch = StallWatch(self.run, limits, no_progress_s=NO_PROGRESS_S, now_s=self.now_s)
        self.beats = [replace(BEAT, rank=rank, pid=500 + rank) for rank in range(2)]

    def run_for(self, seconds: float, *, moving: bool, writing: tuple[int, ...] = (0, 1)) -> list[Alert]:
        found: list[Alert] = []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 2.0
            for rank in writing:
                beat = self.beats[rank]
                step: dict[str, Any] = {"beats": beat.beats + 1, "iteration": beat.iteration + 1} if moving else {}
                self.beats[rank] = replace(beat, writes=beat.writes + 1, **step)
                heartbeat.replace_file(heartbeat.heartbeat_file(self.run, rank), asdict(self.beats[rank]))
            found += self.watch.check(self.now_s)
        return found

    def set_phase(self, phase: Phase) -> None:
        self.beats = [replace(beat, phase=phase) for beat in self.beats]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_moving_run_causes_no_alert(watched: Watched) -> None:
    assert watched.run_for(NO_PROGRESS_S + 20, moving=True) == []


def test_the_silent_rank_is_named_and_not_its_victims(watched: Watched) -> None:
    assert watched.run_for(10, moving=True) == []
    first = watched.run_for(HANG_AFTER_S + 10, moving=False, writing=(0,))[0]
    assert first.kind is AlertKind.hang
    assert first.message.startswith("rank 1 on n1 has not moved for 3")
    assert "its process (pid 501) is silent too" in first.message


def test_no_progress_is_reported_in_a_long_phase_but_not_in_a_pause(watched: Watched) -> None:
    watched.run_for(5, moving=True)
    watched.set_phase(Phase.save)
    assert watched.run_for(NO_PROGRESS_S - 10, moving=False) == []
    found = watched.run_for(20, moving=False)
    assert {alert.kind for alert in found} == {AlertKind.no_progress}, "a save is no hang yet"
    assert found[0].message == "no new iteration for 2 minutes; rank 0 is in phase save"
    assert found[0].iteration == 8
    watched.set_phase(Phase.train)
    assert watched.run_for(5, moving=True) == []
    watched.set_phase(Phase.pause)
    assert [
        alert for alert in watched.run_for(NO_PROGRESS_S + 20, moving=False) if alert.kind is AlertKind.no_progress
    ] == []


def test_a_start_without_any_heartbeat_counts(watched: Watched) -> None:
    found = watched.run_for(NO_PROGRESS_S + 10, moving=False, writing=())
    assert found[0].message == "no new iteration for 2 minutes; rank 0 has not written a heartbeat"


def test_time_in_which_the_watch_itself_was_stopped_does_not_count(watched: Watched) -> None:
    watched.run_for(5, moving=True)
    watched.now_s += 10_000.0
    assert watched.run_for(10, moving=False) == []
