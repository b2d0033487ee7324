"""When a rank counts as hung: real heartbeat files, simulated time."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import threading
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

from harness.config.launch import LaunchConfig
from harness.core.rundir import RunDir
from harness.telemetry import heartbeat
from harness.telemetry.heartbeat import Beat, Phase
from harness.telemetry.rank_progress import ALIVE_EXTRA_S, HangLimits, RankProgress
from launch.local import supervisor
from launch.local.supervisor import Supervisor, probe_path
from tests import composed

HANG_AFTER_S, START_WITHIN_S = 30.0, 100.0


@cache
def config() -> LaunchConfig:
    overrides = [f"launch.hang_after_s={HANG_AFTER_S}", f"launch.start_within_s={START_WITHIN_S}"]
    return composed.load(overrides).launch


class FakeRanks:
    """Two ranks and a clock."""

    def __init__(self, path: Path) -> None:
        self.now_s = 1000.0
        self.run = RunDir(path)
        self.run.heartbeat.mkdir()
        heartbeat.heartbeat_file(self.run, 0).write_text("left by an earlier start")
        self.supervisor = Supervisor(self.run, range(2), HangLimits(config()))
        assert not heartbeat.heartbeat_file(self.run, 0).exists()
        self.beats = [
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

    def run_for(self, seconds: float, *, moving: tuple[int, ...] = (), writing: tuple[int, ...] = ()) -> str | None:
        """Return what the supervisor reports while some ranks make progress and some only write."""
        line = None
        while seconds > 0 and line is None:
            self.now_s += 1.0
            seconds -= 1.0
            for rank, beat in enumerate(self.beats):
                self.beats[rank] = replace(
                    beat, beats=beat.beats + (rank in moving), writes=beat.writes + (rank in (*moving, *writing))
                )
                heartbeat.replace_file(heartbeat.heartbeat_file(self.run, rank), asdict(self.beats[rank]))
            line = self.supervisor.check(self.now_s)
        return line


@pytest.fixture
def ranks(tmp_path: Path) -> FakeRanks:
    return FakeRanks(tmp_path)


@pytest.mark.full
def test_a_run_that_makes_progress_is_not_hung(ranks: FakeRanks) -> None:
    assert ranks.run_for(500, moving=(0, 1)) is None


def test_a_stopped_process_is_named_and_not_its_victim(ranks: FakeRanks) -> None:
    assert ranks.run_for(10, moving=(0, 1)) is None
    assert ranks.run_for(HANG_AFTER_S, writing=(0,)) is None
    assert ranks.run_for(3, writing=(0,)) == (
        "rank 1 on host1 has not moved for 31 s, in iteration 42 (train); its process (pid 501) is silent too"
    )


def test_a_stalled_loop_in_a_live_process_is_named_a_little_later(ranks: FakeRanks) -> None:
    ranks.run_for(10, moving=(0, 1))
    assert ranks.run_for(HANG_AFTER_S + ALIVE_EXTRA_S, moving=(0,), writing=(1,)) is None
    line = ranks.run_for(3, moving=(0,), writing=(1,))
    assert line is not None
    assert line.startswith("rank 1 on host1 has not moved for 36 s")
    assert line.endswith("its process (pid 501) is alive")


@pytest.mark.parametrize("phase", [Phase.start, Phase.save, Phase.restore])
def test_start_save_and_restore_have_the_longer_limit(ranks: FakeRanks, phase: Phase) -> None:
    ranks.beats = [replace(beat, phase=phase) for beat in ranks.beats]
    assert ranks.run_for(START_WITHIN_S, writing=(0, 1)) is None
    assert ranks.run_for(20, writing=(0, 1)) is not None


@pytest.mark.parametrize("num_ranks", [4_096, 16_384])
def test_ranks_that_write_rarely_are_not_hung_between_writes(ranks: FakeRanks, num_ranks: int) -> None:
    """With 16,384 ranks each writes every 164 s, which is longer than `hang_after_s`."""
    every_s = num_ranks / heartbeat.WRITES_PER_S
    assert every_s > HANG_AFTER_S
    beat = replace(ranks.beats[0], every_s=every_s)
    progress = RankProgress(beat)
    for number in range(1, 4):
        progress.update(replace(beat, beats=beat.beats + number, writes=beat.writes + number), 1.0)
        progress.update(progress.beat, 2 * every_s)  # one write was lost
        assert not progress.is_hung(HangLimits(config()))
    progress.update(progress.beat, every_s - 1.0)
    assert not progress.is_hung(HangLimits(config()))
    progress.update(progress.beat, 2.0)
    assert progress.is_hung(HangLimits(config())), "a hung rank is still found"


@pytest.mark.parametrize(
    ("slowest_step_s", "timeout_s", "limit_s"),
    [
        (0.0, math.inf, HANG_AFTER_S),
        (HANG_AFTER_S / 20, math.inf, HANG_AFTER_S),
        (HANG_AFTER_S / 10, math.inf, 2 * HANG_AFTER_S),
        (HANG_AFTER_S, 10 * HANG_AFTER_S, 9 * HANG_AFTER_S),
        (HANG_AFTER_S, HANG_AFTER_S / 2, HANG_AFTER_S),
    ],
    ids=["no step yet", "short steps", "long steps", "before the timeout of collectives", "never below the minimum"],
)
def test_the_limit_follows_the_slowest_step(
    ranks: FakeRanks, slowest_step_s: float, timeout_s: float, limit_s: float
) -> None:
    limits = HangLimits(config(), timeout_s)
    beat = replace(ranks.beats[0], slowest_step_s=slowest_step_s)
    assert limits.limit_s(beat) == pytest.approx(limit_s)
    assert limits.limit_s(replace(beat, phase=Phase.save)) == pytest.approx(max(START_WITHIN_S, limit_s))
    progress = RankProgress(beat)
    progress.update(beat, limit_s - 0.5)
    assert not progress.is_hung(limits)
    progress.update(beat, 1.0)
    assert progress.is_hung(limits)


@pytest.mark.full
def test_a_rank_that_has_ended_is_not_hung(ranks: FakeRanks) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    ranks.beats = [
        replace(beat, phase=Phase.end, exit_code=0, host=socket.gethostname(), pid=ended.pid) for beat in ranks.beats
    ]
    assert ranks.run_for(1000) is None


@pytest.mark.parametrize(("host", "is_hung"), [(socket.gethostname(), True), ("host1", False)])
def test_a_rank_that_has_ended_but_does_not_exit_is_hung(ranks: FakeRanks, host: str, is_hung: bool) -> None:
    """Only on its own machine: the pid of another one means nothing here."""
    ended = replace(ranks.beats[1], phase=Phase.end, exit_code=0, host=host, pid=os.getpid())
    ranks.beats[1] = ended
    line = ranks.run_for(START_WITHIN_S + 5, moving=(0,))
    assert (line is not None and line.startswith(f"rank 1 on {host} has not moved for 101 s")) is is_hung


def test_the_end_of_a_run_may_take_as_long_as_rank_0_waits(ranks: FakeRanks) -> None:
    """Rank 0 waits for an evaluation, for example. Until then the process of rank 1 exists and writes nothing."""
    host, pid = socket.gethostname(), os.getpid()
    for beat in ranks.beats:
        ended = replace(beat, phase=Phase.end, exit_code=0, end_wait_s=7200.0, host=host, pid=pid)
        progress = RankProgress(ended)
        progress.update(ended, START_WITHIN_S + 7199.0)
        assert not progress.is_hung(HangLimits(config()))
        progress.update(ended, 2.0)
        assert progress.is_hung(HangLimits(config())), "a rank that really hangs is still found"


def test_time_in_which_the_supervisor_was_paused_does_not_count(ranks: FakeRanks) -> None:
    ranks.run_for(10, moving=(0, 1))
    ranks.now_s += 1000.0
    assert ranks.run_for(5, moving=(0, 1)) is None
    ranks.now_s += 1000.0
    assert ranks.run_for(HANG_AFTER_S - 5) is None


def test_ranks_that_never_wrote_are_ignored(ranks: FakeRanks) -> None:
    for _ in range(300):
        ranks.now_s += 1.0
        assert ranks.supervisor.check(ranks.now_s) is None


def test_time_in_which_the_file_system_stalls_does_not_count(ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe for writing blocks until there is a reader, as a write blocks on a stalled file system."""
    monkeypatch.setattr(supervisor, "WRITE_TIMEOUT_S", 0.2)
    assert ranks.run_for(10, moving=(0, 1)) is None
    pipe = probe_path(ranks.run, range(2))
    pipe.unlink()
    os.mkfifo(pipe)
    assert ranks.run_for(3 * HANG_AFTER_S) is None, "no rank can write, and neither can the supervisor"
    blocked = next(thread for thread in threading.enumerate() if thread.name == "probe")
    with pipe.open("rb"):
        pipe.unlink()
    blocked.join()  # the clock of the ranks does not wait for it
    monkeypatch.undo()
    assert ranks.run_for(2) is None
    assert ranks.run_for(2 * HANG_AFTER_S, writing=(0, 1)) is not None, "a real hang is still found"
