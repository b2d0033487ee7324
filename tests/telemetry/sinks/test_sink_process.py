"""Tests of the sink process from the trainer's side, with servers and trainers that die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import pytest

from harness.config.schema import Config
from harness.core.events import RunEnded, RunStarted, StepRecord
from harness.core.processes import last_line
from harness.core.rundir import RunDir
from harness.telemetry.event_log import EventLog
from harness.telemetry.sinks.feeder import send_until_end
from harness.telemetry.sinks.mlflow_progress import load_progress
from harness.telemetry.sinks.sink_process import SINK_LOG, SinkProcess, send_rest
from harness.telemetry.sinks.store_uri import tracking_uri
from launch.drills.fault_environment import SERVER_ENVIRONMENT
from launch.local.ports import reserved_port

MakeRun = Callable[..., tuple[RunDir, Config]]
MakeStep = Callable[..., StepRecord]

# Deprecations inside MLflow are not ours to fix.
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("ready_store"),
]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.1)


def iterations(cfg: Config, run: RunDir) -> list[int]:
    """Iterations whose loss MLflow has; empty while it has no run."""
    run_id = load_progress(run, None).run_id if run.mlflow.exists() else None
    if run_id is None:
        return []
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracking_uri(cfg))
    return [row.step for row in client.get_metric_history(run_id, "loss")]


def status(cfg: Config, run: RunDir) -> str:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracking_uri(cfg))
    return str(client.get_run(run_id_of(run)).info.status)


def run_id_of(run: RunDir) -> str:
    run_id = load_progress(run, None).run_id
    assert run_id is not None
    return run_id


def process_of(sink: SinkProcess) -> subprocess.Popen[bytes]:
    process = sink._process
    assert process is not None
    return process


@final
class Server:
    """`mlflow server` on loopback, with a database that persists."""

    def __init__(self, directory: Path, port: int) -> None:
        self.port = port
        self.uri = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None:
            return
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self._directory / 'server.db'}", "--workers", "1"]
        command += ["--artifacts-destination", str(self._directory / "artifacts")]
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | SERVER_ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self._answers, "the server answers")

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Server]:
    """A server that is not started yet: that takes seconds, and each test starts it when it needs it."""
    directory = tmp_path_factory.mktemp("server")
    shutil.copy(empty_store, directory / "server.db")
    with reserved_port() as port:
        server = Server(directory, port)
        yield server
        server.kill()


def test_events_that_a_dead_server_missed_are_sent_later(
    server: Server, make_run: MakeRun, make_step: MakeStep, ended: RunEnded, capfd: pytest.CaptureFixture[str]
) -> None:
    server.kill()
    run, cfg = make_run(tracking_uri=server.uri)
    log = EventLog(run.events)
    sink = SinkProcess.start(run)
    log.write(make_step(0))
    log.write(ended)
    log.close()
    wait_until(lambda: "next try in" in last_line(run.logs / SINK_LOG), "the sink process notices the dead server")
    assert not sink.finish(wait_s=0)
    assert process_of(sink).returncode == -signal.SIGTERM
    assert "warning: some events were not sent" in capfd.readouterr().err
    assert load_progress(run, None).offset == 0
    server.start()
    assert send_until_end(run, None) == 0
    assert iterations(cfg, run) == [0]
    assert status(cfg, run) == "FINISHED"


def test_a_restarted_server_has_everything_once(
    server: Server, make_run: MakeRun, make_step: MakeStep, started: RunStarted, ended: RunEnded
) -> None:
    from mlflow.tracking import MlflowClient

    server.start()
    run, cfg = make_run(tracking_uri=server.uri)
    run.picture.write_bytes(b"png")
    log = EventLog(run.events)
    sink = SinkProcess.start(run)
    log.write(started)
    for iteration in range(60):
        log.write(make_step(iteration))
    wait_until(lambda: len(iterations(cfg, run)) == 60, "the first half has arrived")
    server.kill()
    for iteration in range(60, 120):
        log.write(make_step(iteration))
    wait_until(lambda: "next try in" in last_line(run.logs / SINK_LOG), "the loss of the server is noticed")
    assert process_of(sink).poll() is None
    server.start()
    for iteration in range(120, 180):
        log.write(make_step(iteration))
    log.write(ended)
    log.close()
    assert sink.finish(wait_s=200)
    assert iterations(cfg, run) == list(range(180))
    assert status(cfg, run) == "FINISHED"
    client = MlflowClient(tracking_uri=server.uri)
    assert [artifact.path for artifact in client.list_artifacts(run_id_of(run))] == ["loss.png"]


def test_a_killed_trainer_leaves_its_events_in_mlflow_and_no_process(make_run: MakeRun, make_step: MakeStep) -> None:
    """The launcher ends with the trainer: while it lived, the sink process would wait for its last event."""
    run, cfg = make_run()
    log = EventLog(run.events)
    log.write(make_step(0))
    log.close()
    program = f"""
import os, signal
from pathlib import Path
from harness.core.rundir import RunDir
from harness.telemetry.sinks.sink_process import SinkProcess
trainer = os.fork()
if trainer == 0:
    print(SinkProcess.start(RunDir(Path({str(run.path)!r})))._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1]) != -signal.SIGKILL)
"""
    launcher = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=200)
    assert launcher.returncode == 0
    process = Path("/proc") / launcher.stdout.decode().strip()
    wait_until(
        lambda: not process.exists() or "State:\tZ" in (process / "status").read_text(), "the sink process is gone"
    )
    assert iterations(cfg, run) == [0]
    assert status(cfg, run) == "FAILED"


def test_an_old_run_ended_event_or_an_interrupt_does_not_end_the_sink_process(
    make_run: MakeRun, make_step: MakeStep, ended: RunEnded
) -> None:
    run, cfg = make_run()
    log = EventLog(run.events)
    log.write(make_step(0))
    log.write(ended)
    assert log.flush(), "an earlier start left all of this in the file"
    sink = SinkProcess.start(run)
    wait_until(lambda: iterations(cfg, run) == [0], "the first start is sent")
    process_of(sink).send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process_of(sink).poll() is None
    log.write(make_step(1))
    log.write(ended)
    log.close()
    assert sink.finish(wait_s=200)
    assert iterations(cfg, run) == [0, 1]


def test_a_sink_process_that_cannot_start_causes_a_warning(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert not SinkProcess.start(run).finish(wait_s=200)
    assert "warning: cannot start the sink process" in capfd.readouterr().err


def test_what_no_retry_can_change_is_on_the_console_while_the_run_trains(
    make_run: MakeRun, capfd: pytest.CaptureFixture[str]
) -> None:
    """A tracking URI that MLflow rejects."""
    run, _ = make_run(tracking_uri="bogus://nowhere")
    sink = SinkProcess.start(run)
    shown, until = "", time.monotonic() + 200
    while "mlflow gets no events: telemetry.tracking_uri: " not in shown:
        assert time.monotonic() < until, (run.logs / SINK_LOG).read_text()
        time.sleep(0.05)
        shown += capfd.readouterr().err
    assert shown.startswith("warning: ")
    assert "bogus://nowhere" in shown
    assert not sink.finish(wait_s=200)


def test_a_sink_process_that_takes_too_long_is_ended(make_run: MakeRun) -> None:
    run, _ = make_run()
    log = run.path / "log"
    assert send_rest([str(run.path)], log=log, within_s=0.01) == "no answer within 0.01 s"
    assert send_rest([str(run.logs)], log=log, within_s=200).endswith("is not a run directory: it has no config.yaml")


def test_the_sink_process_imports_no_heavy_module_at_start() -> None:
    sinks = "harness.telemetry.sinks"
    program = f"import sys, {sinks}.sink_process, {sinks}.__main__; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "mlflow", "matplotlib", "hydra", "wandb", "tensorboard"} & set(modules)
