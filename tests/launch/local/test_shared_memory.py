"""Snapshots stay in memory after a crash, and are removed when no start on this machine will need them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_CRASHED, EXIT_DONE, EXIT_HALTED, EXIT_INTERRUPTED
from harness.core import event_json, snapshot_files
from harness.core.events import RunStarted, StepRecord
from harness.core.rundir import locate
from launch.local.shared_memory import keeps_snapshots, run_and_clean_up, snapshot_bytes
from launch.local.worker_pool import TEMPLATE_NAME
from tests.composed import load
from tests.distributed.cases import TINY
from tests.forks import Launched

WAIT_S = 240.0


@pytest.mark.parametrize(
    ("code", "environ", "keeps"),
    [
        (EXIT_DONE, {}, False),
        (EXIT_BAD_CONFIG, {}, False),
        (EXIT_HALTED, {}, False),
        (EXIT_CRASHED, {}, True),
        (EXIT_INTERRUPTED, {}, True),
        (EXIT_CRASHED, {"SLURM_JOB_ID": "7"}, False),
    ],
)
def test_snapshots_stay_only_where_the_next_start_finds_them(code: int, environ: dict[str, str], keeps: bool) -> None:
    assert keeps_snapshots(code, environ) == keeps


def test_the_launcher_removes_snapshots_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    cfg = load([*TINY, "run.name=a"])
    cfg.run.dir, cfg.checkpoint.ring.shared_dir = str(tmp_path), str(tmp_path)
    folder = snapshot_files.snapshot_folder(tmp_path, locate(cfg).path)
    snapshot_files.create_folder(folder, locate(cfg).path)
    (folder / "set-0").mkdir()
    (folder / "set-0" / "slot-0").write_bytes(b"x" * 4096)
    assert snapshot_bytes(cfg) == 4096
    assert run_and_clean_up(cfg, lambda: EXIT_CRASHED) == EXIT_CRASHED
    assert folder.exists()
    assert run_and_clean_up(cfg, lambda: EXIT_HALTED) == EXIT_HALTED
    assert not folder.exists()
    cfg.checkpoint.ring.shared_dir = None
    assert snapshot_bytes(cfg) == 0
    assert run_and_clean_up(cfg, lambda: EXIT_DONE) == EXIT_DONE


def ranks_of(pid: int) -> list[int]:
    """The ranks of a launcher, without the process that they are forked from: a restart forks new ones from it."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    ranks = [child for child in children if Path(f"/proc/{child}/comm").read_text() != f"{TEMPLATE_NAME}\n"]
    assert len(ranks) == 2
    return ranks


def wait_for_steps(log: Path, count: int) -> None:
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        if log.is_file() and log.read_text(errors="replace").count('{"event":"step"') >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{log} has fewer than {count} steps")


def leave_slurm() -> None:
    os.environ.pop("SLURM_JOB_ID", None)


@pytest.mark.full
def test_a_restart_and_the_same_command_after_kill_9_resume_from_memory(tmp_path: Path) -> None:
    """First the ranks are killed, then everything. Nothing was saved to disk: without snapshots the run starts over."""
    overrides = [
        "run.name=a",
        f"run.dir={tmp_path}",
        "train.num_steps=48",
        "model.num_layers=1",
        "launch.nproc=2",
        "checkpoint.ring.slots=2",
        "checkpoint.ring.every_steps=4",
    ]
    command = ("launch.train", *TINY, *overrides, f"checkpoint.ring.shared_dir={tmp_path}")
    log = tmp_path / "a" / "events.jsonl"
    with Launched(*command, output=tmp_path / "first", first=leave_slurm) as first:
        wait_for_steps(log, 10)
        for pid in ranks_of(first.pid):
            os.kill(pid, signal.SIGKILL)
        wait_for_steps(log, 20)
        for pid in (*ranks_of(first.pid), first.pid):
            os.kill(pid, signal.SIGKILL)
        assert first.wait(WAIT_S) == -signal.SIGKILL
    last_step = max(event.step for event in event_json.read(log) if isinstance(event, StepRecord))
    with Launched(*command, output=tmp_path / "second", first=leave_slurm) as second:
        assert second.wait(WAIT_S) == EXIT_DONE, second.stderr
    started = [event for event in event_json.read(log) if isinstance(event, RunStarted)]
    assert [event.in_memory for event in started] == [False, True, True]
    assert 4 <= started[1].step < started[2].step <= last_step
    assert not list(tmp_path.glob("harness-snapshots-*"))
