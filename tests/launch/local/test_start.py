"""The launcher with real processes: exit codes and messages for every way in which ranks end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path

import pytest

from harness.config.parallel import DeviceKind
from harness.core.events import EndCause
from harness.core.locking import directory_lease
from harness.core.locking.lease_holder import this_process
from harness.core.rundir import RunDir, locate
from launch import train
from launch.local import agent, start, worker_pool
from launch.local.node_group import LOOPBACK, NodeFailure, NodeGroup, RendezvousSpec
from launch.local.planned_restart import RestartPlanner
from launch.local.restart import RestartHistory
from launch.local.supervisor import WRITE_TIMEOUT_S
from launch.local.thread_count import count_expected_ranks, rank_thread_environment
from tests.forks import ROOT, Launched, forks
from tests.full_disk import fill, may_mount, small_disk
from tests.launch import workers
from tests.launch.local.test_rendezvous import wait_until
from tests.stalled import Stalled, can_stall

STOPPING = "harness: stopping gracefully; a second Ctrl-C or SIGTERM kills the workers\n"

Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """A separate launcher process."""
    return lambda name: Launched("tests.launch.workers", name, str(tmp_path), output=tmp_path / f"{name}.output")


def ended(launcher: Launched) -> tuple[int, str, str]:
    """Wait for a launcher that ends by itself: exit code, stdout, stderr."""
    with launcher:
        return launcher.wait(timeout=200), launcher.stdout, launcher.stderr


def children(pid: int) -> list[int]:
    """Child processes of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def session_of(leader: int) -> list[int]:
    """Live processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} never appeared"
        time.sleep(0.01)


@pytest.fixture
def process(request: pytest.FixtureRequest, launch: Launch, tmp_path: Path) -> Iterator[Launched]:
    """A launcher whose workers are running."""
    name = str(request.param)
    with launch(name) as launcher:
        wait_for(tmp_path / name / "ready-0", tmp_path / name / "ready-1")
        yield launcher


def test_the_worst_exit_code_wins_and_rank_1_logs_to_a_file(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("halt_on_one")
    assert ended(launcher) == (3, "rank 0 of 2 with 1 threads\n", "")
    (log,) = (tmp_path / "halt_on_one" / "logs").glob("*/rank-1.stdout")
    assert log.read_text() == "rank 1 of 2 with 1 threads\n"
    assert session_of(launcher.pid) == [], "nothing is left behind"


def test_ranks_whose_logs_are_gone_keep_their_exit_code(launch: Launch) -> None:
    assert ended(launch("halt_without_logs"))[::2] == (3, "")


@pytest.mark.full
def test_a_launcher_that_cannot_fork_spawns_its_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert worker_pool.TORCH_NUM_THREADS != "3"
    assert start.launch(workers.config(tmp_path, "halt_on_one"), workers.halt_on_one) == 3
    assert capfd.readouterr() == ("rank 0 of 2 with 3 threads\n", "")
    (log,) = (tmp_path / "halt_on_one" / "logs").glob("*/rank-1.stdout")
    assert log.read_text() == "rank 1 of 2 with 3 threads\n"
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_a_process_with_a_second_thread_does_not_fork() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert not worker_pool.can_fork()
    finally:
        release.set()
        thread.join()


@pytest.mark.full
def test_the_launcher_has_one_thread_and_no_cuda_when_it_forks() -> None:
    """Torch and the trainer are loaded for several threads, none of which has started yet.

    (A thread that NumPy's BLAS starts is ended by the fork itself.) Workers are children of the launcher, also if the
    template was killed and they are spawned. A signal that one cannot handle yet does not end it.
    """
    program = (
        "import os, signal, torch, launch.local.start, harness.train, harness.faults.drill_worker\n"
        "from launch.local.worker_pool import STACKS_SIGNAL, WorkerPool, WorkerTask, can_fork\n"
        "from harness.faults.process import children_of\n"
        "with WorkerPool(forked=can_fork()) as pool:\n"
        "    (template,) = children_of(os.getpid())\n"
        "    print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized(), os.environ['OMP_NUM_THREADS'])\n"
        "    for number in range(2):\n"
        "        with pool.start_workers(1) as (process,):\n"
        "            process.send_signal(STACKS_SIGNAL)\n"
        "            process.assign(WorkerTask(call=os.getppid))\n"
        "            assert process.poll_result(60) == os.getpid()\n"
        "        if number == 0:\n"
        "            os.kill(template, signal.SIGKILL)\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "4"}
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("1 False 4\n", "")


def test_crash_names_the_first_rank_with_its_traceback(launch: Launch) -> None:
    code, _, err = ended(launch("crash"))
    assert code == 1
    first, *rest = err.splitlines()
    assert first.startswith("harness: rank 1 exited with code 1; its log: ")
    assert first.endswith("rank-1.stderr")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ZeroDivisionError: the first failure"
    assert "victim" not in err


def test_killed_rank_is_named_though_another_one_raised(launch: Launch) -> None:
    code, _, err = ended(launch("killed"))
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("harness: rank 1 was killed by SIGKILL; its log: ")


def test_a_rank_that_exits_without_a_result_has_failed(launch: Launch) -> None:
    code, _, err = ended(launch("vanish"))
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("harness: rank 1 exited with code 0; its log: ")


def test_bad_configuration_found_by_the_workers_is_one_line_and_leaves_nothing(launch: Launch, tmp_path: Path) -> None:
    assert ended(launch("refuse")) == (2, "", "harness: data.path: no such file\n")
    assert not (tmp_path / "refuse").exists()


def test_a_rejected_start_leaves_the_run_to_the_start_that_got_it(launch: Launch, tmp_path: Path) -> None:
    """Both are the first start of the run, at the same moment."""
    run = RunDir(tmp_path / "refuse_late")
    with launch("refuse_late") as launcher:
        wait_for(run.path / "ready-0", run.path / "ready-1")
        winner = directory_lease.acquire(run.lease, this_process(), on_lost=lambda _: None)
        run.status.write_text('{"state": "running"}')
        (run.path / "go").touch()
        assert launcher.wait(timeout=200) == 2
    winner.release()
    assert run.status.read_text() == '{"state": "running"}'


def test_a_rank_outlives_its_output(launch: Launch, tmp_path: Path) -> None:
    """Rank 0 has the output of the launcher; the one of rank 1 is a log."""
    write_to_full_disk(tmp_path / "print_everything.output")
    with launch("print_everything") as launcher:
        assert launcher.wait(timeout=200) == 3
    (log,) = (tmp_path / "print_everything" / "logs").glob("*/rank-1.stdout")
    assert log.read_text() == "rank 1\n"


def test_exit_code_75_passes_through(launch: Launch) -> None:
    assert ended(launch("exit_late")) == (75, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
@pytest.mark.parametrize("process", ["patient"], indirect=True)
def test_stop_lets_the_workers_finish(process: Launched, tmp_path: Path, number: signal.Signals) -> None:
    process.send_signal(number)
    assert process.wait(timeout=200) == 75
    saved = [(tmp_path / "patient" / f"saved-{rank}").read_text() for rank in range(2)]
    assert saved == [number.name, number.name], "the reason is the signal that was sent"
    assert process.stderr == STOPPING


def write_to_full_disk(output: Path) -> None:
    """Send the output of a launcher that starts later to a disk without space."""
    for stream in ("stdout", "stderr"):
        Path(f"{output}.{stream}").symlink_to("/dev/full")


def test_stop_lets_the_workers_of_a_launcher_without_output_finish(launch: Launch, tmp_path: Path) -> None:
    write_to_full_disk(tmp_path / "patient.output")
    with launch("patient") as launcher:
        wait_for(tmp_path / "patient" / "ready-0", tmp_path / "patient" / "ready-1")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=200) == 75
    assert (tmp_path / "patient" / "saved-1").exists()


@pytest.mark.parametrize("process", ["patient"], indirect=True)
def test_signals_need_no_files_of_the_run(process: Launched, tmp_path: Path) -> None:
    """A read error of a shared file system must not leave the ranks unsupervised."""
    for path in (tmp_path / "patient" / "logs").glob("*/rank-*.pid"):
        path.unlink()
        path.mkdir()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=200) == 75
    assert (tmp_path / "patient" / "saved-1").exists()
    assert process.stderr == STOPPING


@pytest.mark.full
@pytest.mark.skipif(not can_stall(), reason="needs root and /dev/fuse")
@pytest.mark.parametrize("process", ["patient"], indirect=True)
def test_signals_are_forwarded_while_the_file_system_stalls(process: Launched, tmp_path: Path) -> None:
    with Stalled(RunDir(tmp_path / "patient").heartbeat) as stalled:
        wait_until(lambda: stalled.num_held > 0, within_s=60)
        time.sleep(2 * WRITE_TIMEOUT_S)  # the probe has timed out; the read of a heartbeat waits
        process.send_signal(signal.SIGTERM)
        wait_for(tmp_path / "patient" / "saved-0", tmp_path / "patient" / "saved-1")
        stalled.release()
        assert process.wait(timeout=200) == 75


@pytest.mark.parametrize("process", ["stubborn"], indirect=True)
def test_second_stop_kills(process: Launched) -> None:
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=200) == 75


@pytest.mark.parametrize("process", ["patient"], indirect=True)
def test_sigusr1_to_every_process_twice_kills_no_process(process: Launched, tmp_path: Path) -> None:
    """A scheduler may send the signal to the launcher and to all workers."""
    pids = [process.pid, *children(process.pid)]
    assert len(pids) == 4, "launcher, template and two workers"
    for _ in range(2):
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
    assert not [pid for pid in pids if "zombie" in Path(f"/proc/{pid}/status").read_text()]
    assert process.wait(timeout=200) == 75
    saved = [(tmp_path / "patient" / f"saved-{rank}").read_text() for rank in range(2)]
    assert saved == ["SIGUSR1", "SIGUSR1"]
    assert process.stderr == STOPPING


@pytest.mark.parametrize("process", ["patient"], indirect=True)
def test_one_ctrl_c_reaches_a_worker_twice_and_lets_it_finish(process: Launched, tmp_path: Path) -> None:
    """A terminal sends it to every process, and the launcher forwards it."""
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=200) == 75
    assert [(tmp_path / "patient" / f"saved-{rank}").read_text() for rank in range(2)] == ["SIGINT", "SIGINT"]
    assert process.stderr == STOPPING


@pytest.mark.parametrize("process", ["stubborn"], indirect=True)
def test_sigusr1_does_not_count_towards_a_forced_kill(process: Launched) -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=200) == 75


@pytest.mark.parametrize("process", ["stubborn"], indirect=True)
def test_workers_die_with_a_launcher_that_was_killed(process: Launched) -> None:
    assert len(session_of(process.pid)) == 4
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + workers.PATIENCE_S / 2
    while session_of(process.pid):
        assert time.monotonic() < deadline, "an orphaned process"
        time.sleep(0.02)


@pytest.mark.parametrize("process", ["stubborn"], indirect=True)
def test_each_rank_has_its_own_process_name(process: Launched) -> None:
    names = [Path(f"/proc/{pid}/comm").read_text() for pid in children(process.pid)]
    assert sorted(names) == ["rank-0\n", "rank-1\n", "rank-template\n"]


@pytest.mark.full
def test_a_hung_rank_is_named_with_stacks_and_all_ranks_are_killed(launch: Launch, tmp_path: Path) -> None:
    begun_s = time.monotonic()
    code, _, err = ended(launch("hang"))
    assert code == 1
    assert time.monotonic() - begun_s < 60
    (line,) = err.splitlines()
    assert re.match(r"harness: rank 1 on \S+ has not moved for \d+ s, in iteration 4 \(train\); its process", line)
    assert "is silent too" in line
    (stacks,) = (tmp_path / "hang" / "logs").glob("*/rank-0.stacks")
    assert "in hang" in stacks.read_text()
    found = json.loads((tmp_path / "hang" / "status.json").read_text())
    assert (found["state"], found["exit_code"]) == ("ended", 1)
    assert found["reason"].startswith("rank 1 on ")


def run_without_store(tmp_path: Path, failure: NodeFailure | None = None) -> tuple[int, NodeFailure]:
    """Run the ranks of node 1 while node 0 does not serve its store, and maybe fails; returns the port of the store and
    the failure that all nodes know."""
    cfg = workers.config(tmp_path, "alone")
    with socket.socket() as listener, ThreadPoolExecutor() as explainer:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        group = NodeGroup(RendezvousSpec(num_nodes=2, node_rank=1), LOOPBACK, "start", port, None, 1.0, roster=(0, 1))
        if failure is not None:
            threading.Timer(0.3, group.report_failure, [failure]).start()
        waiting = forks().Process(target=time.sleep, args=(60,))
        waiting.start()
        processes = [worker_pool.PooledWorker(waiting, Pipe()[0])]
        planner = RestartPlanner(group, RestartHistory(locate(cfg), cfg.launch, None))
        assert start.run_ranks(cfg, workers.slow, group, processes, [], planner, explainer) == 1
    for thread in threading.enumerate():
        if thread.name == "store":
            thread.join()  # a thread in torch at the exit of this process would abort it
    assert waiting.exitcode is not None, "it never had a task"
    assert group.failure is not None
    return port, group.failure


def test_a_node_that_does_not_reach_the_store_fails_like_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Node 0 is slow; then all start again."""
    monkeypatch.setattr(agent, "STORE_TIMEOUT_S", 1.0)
    port, failure = run_without_store(tmp_path)
    assert (failure.node_rank, failure.exit_code, failure.cause) == (1, 1, "error")
    where = f"torch's store at {LOOPBACK}:{port}"
    assert re.fullmatch(rf"node 1 \(\S+\) cannot reach {where}: no answer within 1 s", failure.line)
    assert f"harness: {failure.line}\n" in capfd.readouterr().err


def test_a_node_that_waits_for_the_store_stops_when_node_0_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "STORE_TIMEOUT_S", 2.0)
    lost = NodeFailure(node_rank=0, host="a", exit_code=1, line="node 0 (a) is gone", cause=EndCause.lost_node)
    assert run_without_store(tmp_path, lost)[1] == lost
    assert re.search(r"^harness: node 1 \(\S+\) stops: node 0 \(a\) is gone$", capfd.readouterr().err, re.MULTILINE)


def test_a_single_node_run_listens_on_the_loopback_only(launch: Launch) -> None:
    """Holds for torch's store and for gloo."""
    code, out, _ = ended(launch("listening"))
    assert code == 0
    addresses = out.split()
    assert addresses
    assert set(addresses) <= {"0100007F", "0000000000000000FFFF00000100007F"}, "127.0.0.1, and the same within IPv6"


def starts(directory: Path) -> list[list[list[str]]]:
    """Pid and restart count of each start, by rank."""
    return [[line.split() for line in (directory / f"starts-{rank}").read_text().splitlines()] for rank in range(2)]


def test_a_killed_rank_is_restarted_with_all_others(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("die_once")
    code, _, err = ended(launcher)
    assert code == 0
    first, second = err.splitlines()
    assert first.startswith("harness: rank 1 was killed by SIGKILL; its log: ")
    assert second == "harness: restart 1: all ranks start again"
    for rank_starts in starts(tmp_path / "die_once"):
        assert [count for _, count in rank_starts] == ["0", "1"]
        assert len({pid for pid, _ in rank_starts}) == 2, "new processes, also for the rank that lived"
    logs = sorted(path.name for path in (tmp_path / "die_once" / "logs").iterdir())
    assert [name.partition("-restart-")[2] for name in logs] == ["", "1"], "the logs of both starts are kept"
    assert session_of(launcher.pid) == [], "nothing is left behind"


def test_a_killed_rank_is_restarted_by_a_launcher_without_output(launch: Launch, tmp_path: Path) -> None:
    write_to_full_disk(tmp_path / "die_once.output")
    with launch("die_once") as launcher:
        assert launcher.wait(timeout=200) == 0
    assert [len(rank_starts) for rank_starts in starts(tmp_path / "die_once")] == [2, 2]


def test_the_same_error_at_the_same_step_twice_ends_the_run(launch: Launch, tmp_path: Path) -> None:
    code, _, err = ended(launch("raise_always"))
    assert code == 1
    lines = err.splitlines()
    assert lines[0].startswith("harness: rank 1 exited with code 1; its log: ")
    assert lines[1].startswith("Traceback"), "the traceback of the first start is shown before the restart"
    assert lines.index("ZeroDivisionError: in start 1") < lines.index("harness: restart 1: all ranks start again")
    assert lines.index("harness: restart 1: all ranks start again") < lines.index("ZeroDivisionError: in start 2")
    assert lines[-1].startswith("harness: not restarted: the same error at step 4 twice: ZeroDivisionError in workers")
    assert [len(rank_starts) for rank_starts in starts(tmp_path / "raise_always")] == [2, 2]


def test_a_halt_after_a_restart_is_final(launch: Launch, tmp_path: Path) -> None:
    code, _, err = ended(launch("halt_later"))
    assert (code, err.count("start again")) == (3, 1)
    assert [len(rank_starts) for rank_starts in starts(tmp_path / "halt_later")] == [2, 2]


@pytest.mark.parametrize("process", ["die_while_stopping"], indirect=True)
def test_a_rank_that_dies_after_a_stop_request_is_not_restarted(process: Launched, tmp_path: Path) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=200) == 75
    assert [len(rank_starts) for rank_starts in starts(tmp_path / "die_while_stopping")] == [1, 1]


def test_the_stop_of_an_earlier_start_does_not_forbid_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = workers.config(tmp_path, "a")
    run = RunDir(tmp_path / "a")
    run.path.mkdir()
    run.stop.touch()
    obstacles = []

    def look(*_: object) -> int:
        obstacles.append(run.stop.exists())
        return 0

    monkeypatch.setattr(start, "launch", look)
    assert train.launch_run(cfg) == 0
    assert obstacles == [False]


def test_stop_while_workers_start(launch: Launch, tmp_path: Path) -> None:
    with launch("slow") as launcher:
        wait_for(tmp_path / "slow" / "logs")
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(timeout=200) == 75
    assert launcher.stderr == STOPPING


def test_unusable_directory_names_the_key(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    code, _, err = ended(Launched("tests.launch.workers", "exit_late", str(blocked), output=tmp_path / "output"))
    assert (code, err.partition(": cannot create ")[0]) == (2, "run.dir")


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_start_on_a_full_disk_is_one_line_that_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        code, out, err = ended(Launched("tests.launch.workers", "patient", str(disk), output=tmp_path / "output"))
    (line,) = err.splitlines()
    assert (code, out) == (75, "")
    assert line.startswith(f"{disk}/patient/logs/")
    assert line.endswith(": cannot create it: No space left on device")


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_ranks_that_fill_the_disk_end_with_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        code, _, err = ended(Launched("tests.launch.workers", "fill_up", str(disk), output=tmp_path / "output"))
    assert (code, err) == (75, f"harness: {disk}/fill_up/config.yaml: cannot write it: No space left on device\n")


def test_cores_are_divided_among_ranks_unless_threads_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    cfg = workers.config(tmp_path, "threads")
    with rank_thread_environment(cfg, 2):
        assert os.environ["OMP_NUM_THREADS"] == "3"
    cfg.launch.threads = 5
    with rank_thread_environment(cfg, 2):
        assert os.environ["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in os.environ
    assert not locate(cfg).path.exists()


def test_expected_ranks_follow_the_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = workers.config(tmp_path, "ranks")
    assert count_expected_ranks(cfg) == 2
    cfg.launch.nproc = None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5")
    assert count_expected_ranks(cfg) == 2, "on CPU"
    cfg.parallel.device = DeviceKind.auto
    assert count_expected_ranks(cfg) == 3
    cfg.launch.ranks_per_gpu = 2
    assert count_expected_ranks(cfg) == 6
    cfg.launch.ranks_per_gpu = 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_expected_ranks(cfg) == 2
    cfg.launch.nproc = 8
    assert count_expected_ranks(cfg) == 8
