"""The launcher with real processes: how ranks end decides the exit code and what is said about it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.config import ConfigError, DeviceKind
from harness.rundir import locate
from launch import local
from tests.launch import workers

ROOT = Path(__file__).parents[2]


def launch(worker: local.Worker, runs: Path) -> int:
    return local.launch(workers.config(runs, worker.__name__), worker)


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} never came"
        time.sleep(0.05)


@pytest.fixture
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher of its own, once its workers work."""
    name = str(request.param)
    command = [sys.executable, "-m", "tests.launch.workers", name, str(tmp_path)]
    launcher = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(tmp_path / name / "ready-0", tmp_path / name / "ready-1")
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def test_worst_code_of_the_ranks_and_where_their_words_go(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch(workers.halt_on_one, tmp_path) == 3
    out, err = capfd.readouterr()
    assert out == "rank 0 of 2 with 1 threads\n"
    assert err == ""
    (log,) = (tmp_path / "halt_on_one" / "logs").glob("*/rank-1.stdout")
    assert log.read_text() == "rank 1 of 2 with 1 threads\n"
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_crash_names_the_first_rank_with_its_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(workers.crash, tmp_path) == 1
    err = capfd.readouterr().err
    first, *rest = err.splitlines()
    assert first.startswith("harness: rank 1 exited with code 1; its log: ")
    assert first.endswith("rank-1.stderr")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ZeroDivisionError: the first to fall"
    assert "victim" not in err


def test_killed_rank_is_named_though_another_one_raised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(workers.killed, tmp_path) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("harness: rank 1 was killed by SIGKILL; its log: ")


def test_bad_configuration_found_by_the_workers_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(workers.refuse, tmp_path) == 2
    assert capfd.readouterr().err == "harness: data.path: no such file\n"


def test_exit_code_of_the_contract_passes_through(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(workers.exit_late, tmp_path) == 75
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
@pytest.mark.parametrize("process", ["patient"], indirect=True)
def test_stop_lets_the_workers_finish(process: subprocess.Popen[str], tmp_path: Path, number: signal.Signals) -> None:
    process.send_signal(number)
    assert process.wait(timeout=30) == 75
    saved = [(tmp_path / "patient" / f"saved-{rank}").read_text() for rank in range(2)]
    assert saved == ["SIGTERM", "SIGTERM"], "what the workers were told"
    assert process.stderr is not None
    assert process.stderr.read() == "harness: stopping in order; a second Ctrl-C or SIGTERM kills the workers\n"


@pytest.mark.parametrize("process", ["stubborn"], indirect=True)
def test_second_stop_kills(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 75


@pytest.mark.parametrize("process", ["patient"], indirect=True)
def test_sigusr1_to_every_process_twice_kills_nobody(process: subprocess.Popen[str], tmp_path: Path) -> None:
    """As a scheduler sends it that knows no launcher from a worker; the helper of multiprocessing is hit too."""
    everybody = [process.pid, *children(process.pid)]
    assert len(everybody) >= 4, "launcher, two workers, resource tracker"
    for _ in range(2):
        for pid in everybody:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
    assert not [pid for pid in everybody if "zombie" in Path(f"/proc/{pid}/status").read_text()]
    assert process.wait(timeout=30) == 75
    saved = [(tmp_path / "patient" / f"saved-{rank}").read_text() for rank in range(2)]
    assert saved == ["SIGUSR1", "SIGUSR1"]
    assert process.stderr is not None
    assert process.stderr.read() == "harness: stopping in order; a second Ctrl-C or SIGTERM kills the workers\n"


@pytest.mark.parametrize("process", ["stubborn"], indirect=True)
def test_sigusr1_is_not_counted_among_those_that_kill(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 75


@pytest.mark.parametrize("process", ["stubborn"], indirect=True)
def test_workers_die_with_a_launcher_that_was_killed(process: subprocess.Popen[str]) -> None:
    workers_of_it = [pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(workers_of_it) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 2
    while any(is_alive(pid) for pid in workers_of_it):
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_a_rank_that_hangs_is_named_and_shown_and_all_are_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = workers.config(tmp_path, "hang")
    cfg.launch.hang_after_s = 2.0
    begun_s = time.monotonic()
    assert local.launch(cfg, workers.hang) == 1
    assert time.monotonic() - begun_s < 60
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(r"harness: rank 1 on \S+ has not moved for \d+ s, in iteration 4 \(train\); its process", line)
    assert "is silent too" in line
    (stacks,) = (tmp_path / "hang" / "logs").glob("*/rank-0.stacks")
    assert "in hang" in stacks.read_text()
    found = json.loads(locate(cfg).status.read_text())
    assert (found["state"], found["exit_code"]) == ("ended", 1)
    assert found["reason"].startswith("rank 1 on ")


def test_nothing_listens_beyond_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither torch's store nor gloo, where a run has one machine to itself."""
    assert launch(workers.listening, tmp_path) == 0
    addresses = capfd.readouterr().out.split()
    assert addresses
    assert set(addresses) <= {"0100007F", "0000000000000000FFFF00000100007F"}, "127.0.0.1, and the same within IPv6"


def test_stop_while_workers_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.launch.workers", "patient", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as launcher:
        wait_for(tmp_path / "patient" / "logs")
        time.sleep(1.0)
        os.killpg(launcher.pid, signal.SIGINT)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 75
    assert err == "harness: stopping in order; a second Ctrl-C or SIGTERM kills the workers\n"


def test_unusable_directory_names_the_key(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match=r"^run\.dir: cannot create "):
        launch(workers.exit_late, blocked)


def test_threads_are_shared_out_unless_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    cfg = workers.config(tmp_path, "threads")
    with local.threads_of_a_rank(cfg, 2):
        assert os.environ["OMP_NUM_THREADS"] == "3"
    cfg.launch.threads = 5
    with local.threads_of_a_rank(cfg, 2):
        assert os.environ["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in os.environ
    assert not locate(cfg).path.exists()


def test_ranks_follow_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = workers.config(tmp_path, "ranks")
    cfg.launch.nproc = None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert local.num_ranks(cfg) == 2
    cfg.parallel.device = DeviceKind.auto
    assert local.num_ranks(cfg) == 4
    cfg.launch.nproc = 8
    with pytest.raises(ConfigError, match=r"^launch\.nproc: must not exceed the 4 GPUs"):
        local.num_ranks(cfg)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cfg.parallel.device = DeviceKind.cuda
    with pytest.raises(ConfigError, match=r"^parallel\.device: no CUDA device"):
        local.num_ranks(cfg)
