"""Who is taken for hung, and when: real heartbeat files, time that the test tells."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

from harness.config import compose
from harness.config.launch import LaunchConfig
from harness.core.rundir import RunDir
from harness.telemetry import heartbeat
from harness.telemetry.heartbeat import Beat, Phase
from launch.local import supervisor
from launch.local.supervisor import VICTIMS_LATER_S, Supervisor, Watched, probe_of

HANG_AFTER_S, START_WITHIN_S = 30.0, 100.0


@cache
def config() -> LaunchConfig:
    words = [f"launch.hang_after_s={HANG_AFTER_S}", f"launch.start_within_s={START_WITHIN_S}"]
    return compose.load(words).launch


class Scene:
    """Two ranks, and a clock."""

    def __init__(self, path: Path) -> None:
        self.now_s = 1000.0
        self.run = RunDir(path)
        self.run.heartbeat.mkdir()
        heartbeat.file_of(self.run, 0).write_text("of an earlier start")
        self.supervisor = Supervisor(self.run, range(2), config())
        assert not heartbeat.file_of(self.run, 0).exists()
        self.ranks = [
            Beat(
                rank=rank,
                world_size=2,
                host="host1",
                pid=500 + rank,
                phase=Phase.train,
                iteration=41,
                step=41,
                beats=9,
                writes=1,
                every_s=1.0,
                beat_time=0.0,
                time=0.0,
            )
            for rank in range(2)
        ]

    def after(self, seconds: float, *, moving: tuple[int, ...] = (), writing: tuple[int, ...] = ()) -> str | None:
        """What the supervisor says after a time in which some ranks moved, and some only wrote."""
        line = None
        while seconds > 0 and line is None:
            self.now_s += 1.0
            seconds -= 1.0
            for rank, beat in enumerate(self.ranks):
                self.ranks[rank] = replace(
                    beat, beats=beat.beats + (rank in moving), writes=beat.writes + (rank in (*moving, *writing))
                )
                heartbeat.replace_file(heartbeat.file_of(self.run, rank), asdict(self.ranks[rank]))
            line = self.supervisor.look(self.now_s)
        return line


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.full
def test_a_run_that_moves_is_left_alone(scene: Scene) -> None:
    assert scene.after(500, moving=(0, 1)) is None


def test_a_stopped_process_is_named_and_not_the_one_that_waits_for_it(scene: Scene) -> None:
    assert scene.after(10, moving=(0, 1)) is None
    assert scene.after(HANG_AFTER_S, writing=(0,)) is None
    assert scene.after(3, writing=(0,)) == (
        "rank 1 on host1 has not moved for 31 s, in iteration 42 (train); its process (pid 501) is silent too"
    )


def test_a_loop_that_stands_still_in_a_living_process_is_named_a_little_later(scene: Scene) -> None:
    scene.after(10, moving=(0, 1))
    assert scene.after(HANG_AFTER_S + VICTIMS_LATER_S, moving=(0,), writing=(1,)) is None
    line = scene.after(3, moving=(0,), writing=(1,))
    assert line is not None
    assert line.startswith("rank 1 on host1 has not moved for 36 s")
    assert line.endswith("its process (pid 501) is alive")


@pytest.mark.parametrize("phase", [Phase.start, Phase.save, Phase.restore])
def test_one_long_call_may_take_as_long_as_a_start(scene: Scene, phase: Phase) -> None:
    scene.ranks = [replace(beat, phase=phase) for beat in scene.ranks]
    assert scene.after(START_WITHIN_S, writing=(0, 1)) is None
    assert scene.after(20, writing=(0, 1)) is not None


@pytest.mark.parametrize("num_ranks", [4_096, 16_384])
def test_ranks_that_write_rarely_are_given_the_time_to_write(scene: Scene, num_ranks: int) -> None:
    """With 16,384 ranks each writes every 164 s: a healthy one seems to stand still for longer than `hang_after_s`."""
    every_s = num_ranks / heartbeat.WRITES_PER_S
    assert every_s > HANG_AFTER_S
    beat = replace(scene.ranks[0], every_s=every_s)
    watched = Watched(beat)
    for number in range(1, 4):
        watched.see(replace(beat, beats=beat.beats + number, writes=beat.writes + number), 1.0)
        watched.see(watched.beat, 2 * every_s)  # one write was lost
        assert not watched.is_hung(config())
    watched.see(watched.beat, every_s - 1.0)
    assert not watched.is_hung(config())
    watched.see(watched.beat, 2.0)
    assert watched.is_hung(config()), "a rank that hangs is found all the same"


@pytest.mark.full
def test_a_rank_that_has_ended_is_not_hung(scene: Scene) -> None:
    scene.ranks = [replace(beat, phase=Phase.end, exit_code=0) for beat in scene.ranks]
    assert scene.after(1000) is None


def test_a_supervisor_that_could_not_look_condemns_nobody(scene: Scene) -> None:
    scene.after(10, moving=(0, 1))
    scene.now_s += 1000.0
    assert scene.after(5, moving=(0, 1)) is None
    scene.now_s += 1000.0
    assert scene.after(HANG_AFTER_S - 5) is None


def test_ranks_that_never_wrote_are_not_judged(scene: Scene) -> None:
    for _ in range(300):
        scene.now_s += 1.0
        assert scene.supervisor.look(scene.now_s) is None


def test_a_file_system_that_takes_no_writes_condemns_nobody(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe for writing waits for a reader, as a write waits for a file system that stalls."""
    monkeypatch.setattr(supervisor, "WRITE_WITHIN_S", 0.2)
    assert scene.after(10, moving=(0, 1)) is None
    pipe = probe_of(scene.run, range(2))
    pipe.unlink()
    os.mkfifo(pipe)
    assert scene.after(3 * HANG_AFTER_S) is None, "no rank can write, and neither can the supervisor"
    with pipe.open("rb"):
        pipe.unlink()
    monkeypatch.undo()
    assert scene.after(2) is None
    assert scene.after(2 * HANG_AFTER_S, writing=(0, 1)) is not None, "a real hang is still found"
