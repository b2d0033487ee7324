"""A live run is not started twice: real launchers, ranks and torchrun, on a system without flock."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import current_thread

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import harness.train
from harness.checkpoint import catalog
from harness.config.errors import ConfigError
from harness.core import event_json
from harness.core.events import RunEnded, RunStarted, StepRecord
from harness.core.locking import directory_lease, lease_holder
from harness.core.locking.lease_holder import this_process
from harness.core.rundir import RunDir, prepare_run_dir
from launch import train
from tests import composed
from tests.distributed import cases
from tests.forked_launchers import ForkedPopen, LauncherCommand
from tests.forks import Launched
from tests.slow_steps import slow_steps

pytestmark = pytest.mark.full

ENDLESS = (
    "train.num_steps=100000",
    "optim.schedule=constant",
    "checkpoint.every_minutes=1000",
    "model.num_layers=1",
)
IN_USE = r"harness: run\.name: {run} is in use by pid {pid} on \S+, held for \d+ s, last heartbeat \d+ s ago; [^\n]*\n"


def without_flock() -> None:
    """Disables flock in this process and all that it forks, and slows their training down."""
    slow_steps(0.05)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    fcntl.flock = refuse


def overrides(run: RunDir) -> list[str]:
    return [*cases.TINY, *ENDLESS, f"run.dir={run.path.parent}", f"run.name={run.path.name}"]


def started(run: RunDir, output: str) -> Launched:
    arguments = ("train", *overrides(run), "launch.nproc=2")
    return Launched("launch.cli.main", *arguments, output=run.path.parent / output, first=without_flock)


def wait_for_step(run: RunDir, process: Launched, num_starts: int) -> None:
    """Wait until a start of the run has begun to train."""
    deadline = time.monotonic() + 200
    while True:
        log = list(event_json.read(run.events)) if run.events.exists() else []
        if sum(isinstance(event, RunStarted) for event in log) == num_starts and isinstance(log[-1], StepRecord):
            return
        assert process.poll() is None, process.stderr
        assert time.monotonic() < deadline, "the run does not start"
        time.sleep(0.05)


def content(run: RunDir) -> dict[str, str]:
    """Hash of every file, and every directory."""
    found = sorted(run.path.rglob("*"))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for path in found}


@contextmanager
def paused(process: Launched) -> Iterator[None]:
    """Stop the process meanwhile: its files do not change, but it stays alive."""
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(0.2)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGCONT)


def test_a_live_run_is_not_started_twice_and_a_killed_one_restarts_at_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "once")
    with started(run, "first") as first:
        wait_for_step(run, first, 1)
        seen = directory_lease.read_newest(run.lease)
        assert seen is not None
        assert seen.holder is not None
        line = IN_USE.format(run=re.escape(str(run.path)), pid=seen.holder.pid)
        with paused(first):
            before = content(run)
            with started(run, "second") as second:
                assert second.wait(timeout=200) == 2
                assert re.fullmatch(line, second.stderr), second.stderr
            torchrun = ("torch.distributed.run", "--nproc-per-node=2", "-m", "harness.train", *overrides(run))
            with Launched(*torchrun, output=tmp_path / "torchrun", first=fork_ranks_of_torchrun) as again:
                assert again.wait(timeout=200) == 1, "torchrun exits with 1 whatever its workers return"
                assert len(re.findall(line, again.stderr)) == 1, again.stderr
            assert content(run) == before
        first.kill_group()
    with started(run, "third") as third:
        wait_for_step(run, third, 2)
        third.send_signal(signal.SIGTERM)
        assert third.wait(timeout=200) == 75, third.stderr
    seen = directory_lease.read_newest(run.lease)
    assert seen is not None
    assert seen.released


class ForkedRank(ForkedPopen):
    """A rank that torchrun starts."""

    @staticmethod
    def may_fork() -> bool:
        """The keep-alive timer of torchrun waits for five seconds before it does anything, and holds no lock."""
        return all("KeepAlive" in thread.name for thread in threading.enumerate() if thread is not current_thread())

    @staticmethod
    def find_command(args: Sequence[str]) -> LauncherCommand | None:
        start = args.index("harness.train")
        return LauncherCommand(__name__, list(args[start:]), ())


def fork_ranks_of_torchrun() -> None:
    subprocess_handler.Popen = ForkedRank  # type: ignore[attr-defined]


def main(arguments: list[str]) -> int:
    """What `python -m harness.train OVERRIDES` does."""
    sys.argv = arguments
    return harness.train.main()


def saved(run: RunDir) -> dict[str, str]:
    """Hash of every file in a named checkpoint."""
    return {
        path: kept for path, kept in content(run).items() if re.search(r"checkpoints/step-[^/]*(/[^.][^/]*)?$", path)
    }


def on_another_machine() -> None:
    """Pretend to be another machine, in this process and all that it forks."""
    lease_holder.this_machine = lambda: "another machine"


def test_a_run_that_was_taken_over_exits_with_2_and_saves_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "stalled")
    arguments = ("train", *overrides(run), "launch.nproc=2", "run.lease_s=1", "checkpoint.every_steps=5")
    with Launched("launch.cli.main", *arguments, output=tmp_path / "output", first=on_another_machine) as process:
        wait_for_step(run, process, 1)
        while not catalog.list_checkpoints(run.checkpoints):
            time.sleep(0.05)
        with paused(process):
            held = directory_lease.acquire(run.lease, this_process(), on_lost=lambda _: None)
            before = saved(run)
        assert process.wait(timeout=200) == 2, process.stderr
        assert f"harness: this run was taken over by pid {os.getpid()} on " in process.stderr
        assert saved(run) == before
        assert not isinstance(list(event_json.read(run.events))[-1], RunEnded)
        held.release()


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_every_launcher_rejects_a_run_that_is_live_on_another_machine(tmp_path: Path, kind: str) -> None:
    cfg = composed.load([*cases.TINY, f"launch={kind}", f"run.dir={tmp_path}", "run.name=far"])
    run = RunDir(tmp_path / "far")
    far = replace(this_process(6.0), machine="another machine", host="node7", job="99")
    held = directory_lease.acquire(run.lease, far, on_lost=lambda _: None)
    for start_run in (lambda: train.launch_run(cfg), lambda: prepare_run_dir(cfg, run)):
        with pytest.raises(ConfigError, match=r"^run\.name: .* is in use by pid \d+ on node7, job 99, held for "):
            start_run()
    assert sorted(path.name for path in run.path.iterdir()) == ["lease"]
    held.release()
