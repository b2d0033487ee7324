"""After any kind of stop request all ranks save the same step and exit with 75, and the run resumes bit-identically."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from harness import train
from harness.control import stop_requests
from harness.core import event_json
from harness.core.events import Event, Intervention, RunEnded, RunStarted, StepRecord
from harness.core.rundir import RunDir, locate, user_name
from harness.faults.site import intercept
from harness.run import Run
from harness.telemetry import system_sampler
from tests.distributed import cases
from tests.distributed.pool import Pool
from tests.forks import Launched

pytestmark = pytest.mark.full

LAG = 1
ENDLESS = ("train.num_steps=100000", "optim.schedule=constant", "model.num_layers=1", f"sentinel.lag={LAG}")
MORE_STEPS = 2
StepResults = dict[int, tuple[float, float, float, int]]


def run_with_signal_in_step(directory: str, nth: int, rank: int, place: str, *overrides: str) -> tuple[int, int]:
    """A run in which one rank is sent SIGUSR1 in the n-th step it starts, at the start of a function of the loop.
    Returns the exit code and the number of steps started."""
    num_started = 0

    def interrupted(name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(train, name)

        def replaced(*arguments: Any, **options: Any) -> Any:
            nonlocal num_started
            num_started += name == "forward_backward"
            if name == place and num_started == nth and int(os.environ["RANK"]) == rank:
                os.kill(os.getpid(), signal.SIGUSR1)
            return function(*arguments, **options)

        return replaced

    compute, decide = interrupted("forward_backward"), interrupted("reduce_signals")
    with patch.multiple(train, forward_backward=compute, reduce_signals=decide):
        code, _ = cases.run(directory, *overrides)
    return code, num_started


def log_of(run: RunDir) -> list[Event]:
    return list(event_json.read(run.events))


def step_results(log: list[Event]) -> StepResults:
    """The exact results of each step."""
    records = [event for event in log if isinstance(event, StepRecord)]
    assert len({record.step for record in records}) == len(records), "no step was repeated"
    return {record.step: (record.loss, record.grad_norm, record.lr, record.cursor) for record in records}


def end_of(log: list[Event]) -> RunEnded:
    assert isinstance(log[-1], RunEnded)
    return log[-1]


@contextmanager
def launched(run: RunDir) -> Iterator[Launched]:
    """An endless run through the launcher, in its own session; yields once it trains."""
    overrides = [*cases.TINY, *ENDLESS, f"run.dir={run.path.parent}", f"run.name={run.path.name}", "launch.nproc=2"]
    with Launched("launch.cli.main", "train", *overrides, output=run.path.parent / "output") as process:
        deadline = time.monotonic() + 200
        while not (run.events.exists() and any(isinstance(event, StepRecord) for event in log_of(run))):
            assert process.poll() is None, process.stderr
            assert time.monotonic() < deadline, "the run does not start"
            time.sleep(0.05)
        yield process


def worker(run: RunDir, rank: int) -> int:
    (file,) = run.logs.glob(f"*/rank-{rank}.pid")
    return int(file.read_text())


def stop_by_signal(_run: RunDir, launcher: Launched) -> None:
    launcher.send_signal(signal.SIGUSR1)


def stop_by_file(run: RunDir, _launcher: Launched) -> None:
    run.stop.touch()


def stop_by_command(run: RunDir, _launcher: Launched) -> None:
    command = ("ctl", str(run.path), "stop", "--reason", "new nodes", "--wait")
    with Launched("launch.cli.main", *command, output=run.path.parent / "ctl") as ctl:
        assert (ctl.wait(timeout=200), ctl.stderr) == (75, "")
    assert f"{run.path} ended at step {end_of(log_of(run)).step}: " in ctl.stdout


STOP_METHODS = {
    "signal": (stop_by_signal, "SIGUSR1"),
    "file": (stop_by_file, "STOP file"),
    "command": (stop_by_command, f"asked by {user_name()}: new nodes"),
}
"""The kind of stop request -> the reason in the last event."""


@dataclass(frozen=True)
class Stopped:
    run: RunDir
    exit_code: int
    log: list[Event]

    @property
    def step(self) -> int:
        return end_of(self.log).step


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stopped]:
    """One stopped run per kind of stop request."""
    runs = {}
    for method, (request_stop, _) in STOP_METHODS.items():
        run = RunDir(tmp_path_factory.mktemp("runs") / method)
        with launched(run) as process:
            request_stop(run, process)
            code = process.wait(timeout=200)
        runs[method] = Stopped(run, code, log_of(run))
    return runs


@pytest.fixture(scope="module")
def control(ranks: Pool, stopped: dict[str, Stopped], tmp_path_factory: pytest.TempPathFactory) -> StepResults:
    """An undisturbed run of at least as many steps as the others."""
    run = RunDir(tmp_path_factory.mktemp("control") / "control")
    last = max(each.step for each in stopped.values()) + MORE_STEPS
    overrides = (f"run.dir={run.path.parent}", "run.name=control", *ENDLESS)
    results = ranks.run(2, run_with_signal_in_step, str(run.path.parent), last, 0, "forward_backward", *overrides)
    assert results == [(75, last + LAG)] * 2
    return step_results(log_of(run))


@pytest.mark.parametrize("method", STOP_METHODS)
def test_a_stopped_run_saves_logs_the_reason_and_resumes_bit_identically(
    method: str, ranks: Pool, stopped: dict[str, Stopped], control: StepResults
) -> None:
    run, step, log = stopped[method].run, stopped[method].step, stopped[method].log
    assert stopped[method].exit_code == end_of(log).exit_code == 75
    assert end_of(log).reason.endswith(STOP_METHODS[method][1])
    seen = next(event.iteration for event in log if isinstance(event, StepRecord) and event.stop_requested)
    assert end_of(log).iteration - seen == LAG, "steps that started after the request was seen"
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step-{step:08d}-gen-0"]
    assert run.stop.exists() == (method in ("file", "command")), "a requested stop stays visible"

    overrides = (f"run.dir={run.path.parent}", f"run.name={method}", *ENDLESS)
    results = ranks.run(2, run_with_signal_in_step, str(run.path.parent), MORE_STEPS, 0, "forward_backward", *overrides)
    assert results == [(75, MORE_STEPS + LAG)] * 2, "the earlier stop does not stop it again"
    assert not run.stop.exists()
    log = log_of(run)
    (began, resumed) = [event for event in log if isinstance(event, RunStarted)]
    assert (began.resumed_from, resumed.resumed_from) == (None, f"step-{step:08d}-gen-0")
    assert step_results(log).items() <= control.items()
    assert len(step_results(log)) == step + MORE_STEPS + LAG


def test_the_operator_is_logged(stopped: dict[str, Stopped]) -> None:
    run, log = stopped["command"].run, stopped["command"].log
    (intervention,) = [event for event in log if isinstance(event, Intervention)]
    assert (intervention.who, intervention.reason) == (user_name(), "new nodes")
    assert list(event_json.read(run.interventions)) == [intervention]
    for method in ("signal", "file"):
        assert not [event for event in stopped[method].log if isinstance(event, Intervention)]


def stop_that_cannot_be_recorded(directory: str, *overrides: str) -> int:
    """A run that a file STOP stops after its third step, while interventions.jsonl cannot be written."""
    cfg = cases.tiny(*overrides, directory=directory)
    run = locate(cfg)

    def wrap(started: Run) -> Run:
        def stop() -> None:
            if started.state.iteration == 3 and started.inbox is not None:
                run.interventions.mkdir()
                stop_requests.ask(run, who="ada", reason="new nodes")
                started.inbox.look()

        started.parts.mailbox = intercept(started.parts.mailbox, "post", stop, first=False)
        return started

    return train.run_worker(cfg, wrap)


def test_a_stop_that_cannot_be_recorded_still_saves(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(1, stop_that_cannot_be_recorded, str(tmp_path), "run.name=a", *ENDLESS) == [75]
    run = RunDir(tmp_path / "a")
    log = log_of(run)
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step-{end_of(log).step:08d}-gen-0"]
    (intervention,) = [event for event in log if isinstance(event, Intervention)]
    assert (intervention.who, intervention.reason) == ("ada", "new nodes")


def start_with_stop_file(directory: str, environment: dict[str, str], *overrides: str) -> int:
    """A run whose directory has a file STOP when its ranks start."""
    cfg = cases.tiny(*overrides, directory=directory)
    with patch.dict(os.environ, environment):
        if os.environ["RANK"] == "0":
            locate(cfg).path.mkdir()
            locate(cfg).stop.touch()
        return train.run_worker(cfg)


@pytest.mark.parametrize(
    ("environment", "num_steps", "code"), [({stop_requests.STOP_CLEARED: "1"}, 300, 75), ({}, 6, 0)]
)
def test_a_stop_while_ranks_start_holds_if_their_launcher_has_removed_the_last_one(
    ranks: Pool, tmp_path: Path, environment: dict[str, str], num_steps: int, code: int
) -> None:
    overrides = (*ENDLESS, f"train.num_steps={num_steps}", "run.name=a")
    assert ranks.run(2, start_with_stop_file, str(tmp_path), environment, *overrides) == [code] * 2
    assert RunDir(tmp_path / "a").stop.exists() == bool(environment)


def test_a_run_can_be_stopped_before_it_trains(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    overrides = [*cases.TINY, "train.num_steps=300", f"run.dir={tmp_path}", "run.name=a", "launch.nproc=2"]
    with Launched("launch.cli.main", "train", *overrides, output=tmp_path / "output") as process:
        deadline = time.monotonic() + 200
        while not list(run.logs.glob("*/rank-0.pid")):
            assert process.poll() is None, process.stderr
            assert time.monotonic() < deadline, "no rank starts"
            time.sleep(0.01)
        run.stop.touch()
        assert process.wait(timeout=200) == 75


def test_the_first_rank_of_a_machine_samples_it(stopped: dict[str, Stopped]) -> None:
    run, log = stopped["signal"].run, stopped["signal"].log
    assert [path.name for path in run.system.iterdir()] == ["rank-00000.jsonl"]
    first, *_, last = system_sampler.read(system_sampler.system_file(run, 0))
    assert first.iteration == 0 < last.iteration
    assert all(event.loader_wait_s for event in log if isinstance(event, StepRecord))


@pytest.mark.parametrize(
    ("lag", "rank", "place", "extra_steps"),
    [
        (0, 0, "forward_backward", 0),
        (0, 1, "reduce_signals", 1),
        (3, 1, "forward_backward", 0),
        (3, 0, "reduce_signals", 1),
    ],
)
def test_few_steps_start_after_a_request(
    lag: int, rank: int, place: str, extra_steps: int, ranks: Pool, tmp_path: Path
) -> None:
    """Whichever rank receives the request, before its check in a step or just after."""
    overrides = ("run.name=a", *ENDLESS, f"sentinel.lag={lag}")
    assert (
        ranks.run(2, run_with_signal_in_step, str(tmp_path), 4, rank, place, *overrides)
        == [(75, 4 + lag + extra_steps)] * 2
    )
    ended = end_of(log_of(RunDir(tmp_path / "a")))
    assert ended.step == 4 + lag + extra_steps
    assert ended.reason.endswith("SIGUSR1" if rank == 0 else "a signal to another rank")


@pytest.mark.parametrize("nth", [5, 6])
def test_a_run_stopped_in_its_last_steps_is_done(nth: int, ranks: Pool, tmp_path: Path) -> None:
    overrides = ("run.name=a", "train.num_steps=6")
    assert ranks.run(2, run_with_signal_in_step, str(tmp_path), nth, 1, "forward_backward", *overrides) == [(0, 6)] * 2
    assert end_of(log_of(RunDir(tmp_path / "a"))).reason == "all steps done"


def is_gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "zombie" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_second_ctrl_c_ends_a_run_that_hangs(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "hung")
    with launched(run) as process:
        workers = [worker(run, rank) for rank in range(2)]
        os.kill(workers[1], signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=200) == 75
        assert all(is_gone(pid) for pid in workers)
