"""Tests of alerts from the log to a real webhook: a server that fails and returns, a trainer that dies, secrets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.schema import Config
from harness.core.event_json import to_json
from harness.core.events import Action, ActionKind, EndCause, Event, RunEnded, RunRestarted, RunStarted, StepRecord
from harness.core.rundir import RunDir
from harness.telemetry.alerts.alert_sink import AlertSink
from harness.telemetry.event_log import read_chunk
from harness.telemetry.sinks.feeder import send_until_end
from harness.telemetry.sinks.parent_run import SWEEP_FILE
from harness.telemetry.sinks.sink import SinkKind, progress_file
from harness.telemetry.sinks.sink_process import SinkProcess
from harness.telemetry.sinks.trainer_watch import Trainer
from tests.telemetry.alerts.webhook_server import WebhookServer, webhook_server

MakeRun = Callable[..., tuple[RunDir, Config]]
MakeStep = Callable[..., StepRecord]
ON = {"mlflow": "false", "alerts.webhook.url": "env:HOOK"}


@pytest.fixture(name="server")
def _server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebhookServer]:
    with webhook_server() as server:
        monkeypatch.setenv("HOOK", server.url)
        yield server


def append(run: RunDir, *events: Event) -> None:
    with run.events.open("a") as file:
        file.writelines(f"{to_json(event)}\n" for event in events)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.1)


def skip(number: int) -> Action:
    return Action(time=time.time(), iteration=7, kind=ActionKind.skip, step=7, incident=number, reason="r", onset=7)


def titles(server: WebhookServer) -> list[str]:
    return [text.splitlines()[0] for text in server.texts]


def test_only_events_of_this_start_are_alerted_and_each_once(
    make_run: MakeRun, server: WebhookServer, started: RunStarted, ended: RunEnded
) -> None:
    run, _ = make_run("big", **ON)
    append(run, started, skip(1), ended)
    assert send_until_end(run, None) == 0
    assert server.texts == [], "alerts were not configured when this happened"
    trainer = Trainer(-1, run.events.stat().st_size)
    append(run, started, skip(2), skip(2), ended)
    assert send_until_end(run, trainer) == 0
    assert send_until_end(run, None) == 0
    assert titles(server) == [
        "[big] incident 2 opened: r",
        "[big] skip for incident 2: r",
        "[big] finished at step 100: all steps done",
    ]
    assert f"post-mortem: {run.path}/incidents/002/postmortem.md" in server.texts[0]


@pytest.mark.parametrize("with_restarts", [False, True], ids=["the sink process", "the launcher"])
def test_the_start_after_a_log_lost_its_end_is_alerted(
    make_run: MakeRun,
    server: WebhookServer,
    started: RunStarted,
    make_step: MakeStep,
    ended: RunEnded,
    capfd: pytest.CaptureFixture[str],
    with_restarts: bool,
) -> None:
    """A power failure may take the end of the log, and leave the progress of its sinks."""
    run, _ = make_run("big", **ON)
    append(run, started)
    left_bytes = run.events.stat().st_size
    send_until_end(run, None)
    append(run, *map(make_step, range(20)))
    send_until_end(run, None)
    sent_bytes = run.events.stat().st_size
    os.truncate(run.events, left_bytes)
    append(run, replace(ended, exit_code=3, reason="structural"))
    assert run.events.stat().st_size < sent_bytes
    assert send_until_end(run, Trainer(-1, left_bytes, with_restarts=with_restarts)) == 0
    assert titles(server) == ["[big] the sentinel halted the run at step 100: structural"]
    lost = f"alerts: events.jsonl has lost its end: {sent_bytes} bytes of it were sent; continues at byte {left_bytes}"
    assert lost in capfd.readouterr().err


def test_an_incident_with_the_number_of_one_that_the_log_has_lost_is_alerted(
    make_run: MakeRun, server: WebhookServer, started: RunStarted
) -> None:
    run, _ = make_run("big", **ON)
    send_until_end(run, None)
    append(run, started, skip(1))
    left_bytes = run.events.stat().st_size
    append(run, skip(2))
    send_until_end(run, None)
    os.truncate(run.events, left_bytes)
    append(run, started, skip(1), skip(2))
    num_before = len(titles(server))
    assert send_until_end(run, Trainer(-1, left_bytes)) == 0
    opened = [title for title in titles(server)[num_before:] if "opened" in title]
    assert opened == ["[big] incident 2 opened: r"]


def test_an_alert_waits_on_disk_for_its_server(
    make_run: MakeRun, server: WebhookServer, ended: RunEnded, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run("big", **ON)
    send_until_end(run, None)
    append(run, replace(ended, exit_code=3, reason="structural"))
    server.status = 503
    assert send_until_end(run, None) == 1
    said = capfd.readouterr().err
    assert "webhook: the webhook answered with HTTP status 503; next try in 2 s" in said
    assert "hunter2" not in said
    state = json.loads(progress_file(run, SinkKind.alerts).read_text())
    assert [item["alert"]["kind"] for item in state["queue"]] == ["halt"]
    server.status = 200
    state["queue"][0]["not_before"] = 0.0  # the pause is over
    progress_file(run, SinkKind.alerts).write_text(json.dumps(state))
    assert send_until_end(run, None) == 0
    assert titles(server) == ["[big] the sentinel halted the run at step 100: structural"]


def test_a_webhook_whose_url_is_missing_for_a_moment_keeps_its_alerts_and_stops_no_other_channel(
    make_run: MakeRun, server: WebhookServer, ended: RunEnded, tmp_path: Path
) -> None:
    secret, paged, pager = tmp_path / "url", tmp_path / "paged", tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\ncat >> {paged}\n")
    pager.chmod(0o755)
    run, _ = make_run(
        "big", **{"mlflow": "false", "alerts.webhook.url": f"file:{secret}", "alerts.command.run": f"[{pager}]"}
    )
    send_until_end(run, None)
    append(run, ended)
    assert send_until_end(run, None) == 1, "the alert waits; the config is not invalid"
    assert json.loads(paged.read_text())["kind"] == "finished"
    secret.write_text(f"{server.url}\n")
    state = json.loads(progress_file(run, SinkKind.alerts).read_text())
    state["queue"][0]["not_before"] = 0.0  # the pause is over
    progress_file(run, SinkKind.alerts).write_text(json.dumps(state))
    assert send_until_end(run, None) == 0
    assert titles(server) == ["[big] finished at step 100: all steps done"]


def test_an_end_is_alerted_once_in_each_start(
    make_run: MakeRun, server: WebhookServer, started: RunStarted, ended: RunEnded
) -> None:
    run, _ = make_run("big", **ON)
    send_until_end(run, None)
    hung = replace(ended, exit_code=1, cause=EndCause.hung_rank)
    for number, reason in ((1, "wrong numbers"), (2, "loss diverges")):
        append(run, started, replace(skip(number), kind=ActionKind.halt), replace(ended, exit_code=3, reason=reason))
    for seconds in (30, 31):
        append(run, started, replace(hung, reason=f"rank 1 on n1 has not moved for {seconds} s"))
    for reason in ("out of memory", "out of memory"):
        append(run, started, replace(ended, exit_code=1, reason=reason))
    append(run, started, ended, started, ended)
    assert send_until_end(run, None) == 0
    kinds = [alert.split("] ")[1].partition(":")[0] for alert in titles(server) if "incident" not in alert]
    failed, done = "failed at step 100 with exit code 1", "finished at step 100"
    halts = ["the sentinel halts the run"] * 2
    hangs = [
        "rank 1 on n1 has not moved for 30 s",
        failed,
        "rank 1 on n1 has not moved for 31 s",
        failed,
    ]
    assert kinds == [*halts, *hangs, failed, done, done], "the same reason of a failure is not repeated"


@pytest.mark.parametrize("is_logged", [False, True], ids=["by torchrun", "by the launcher"])
def test_a_crash_is_alerted_if_nothing_logged_it_before_the_next_start(
    make_run: MakeRun, server: WebhookServer, started: RunStarted, make_step: MakeStep, is_logged: bool
) -> None:
    run, _ = make_run("big", **ON)
    restart = RunRestarted(time=time.time(), iteration=1, step=1, number=1, reason="rank 0 was killed by SIGKILL")
    append(run, started, make_step(1), *[restart] * is_logged, started, make_step(2))
    assert send_until_end(run, Trainer(-1, 0)) == 0
    crash = "restart 1 at step 1: rank 0 was killed by SIGKILL" if is_logged else "rank 0 is gone without an end"
    assert [title.removeprefix("[big] ").partition(",")[0] for title in titles(server)] == [crash]


def test_a_machine_that_fails_slurms_health_check_is_alerted(make_run: MakeRun, server: WebhookServer) -> None:
    run, cfg = make_run("big", **ON)
    line = {"time": time.time(), "job": "71", "unhealthy": {"node7": "GPU 3: uncorrectable ECC errors"}}
    old = line | {"time": 0.0, "unhealthy": {"node1": "long ago"}}
    damaged = [{"unhealthy": {"node2": "when?"}}, line | {"unhealthy": None}, line | {"time": "now"}, {}]
    lines = [json.dumps(old), "not JSON", *map(json.dumps, damaged), json.dumps(line)]
    (run.path / "requeues.jsonl").write_text("".join(f"{line}\n" for line in lines))
    sink = AlertSink(run, cfg.telemetry.alerts, None)
    sink.connect()
    for _ in range(2):
        sink.poll()
    expected = "[big] machine node7 failed the health check of job 71: GPU 3: uncorrectable ECC errors"
    assert titles(server) == [expected]


def test_a_link_of_a_job_contains_its_sweep(make_run: MakeRun, server: WebhookServer) -> None:
    run, _ = make_run("job-1", **ON, **{"alerts.base_url": "https://files.example/runs"})
    (run.path.parent / SWEEP_FILE).write_text("jobs: []\n")
    send_until_end(run, None)
    append(run, skip(2))
    assert send_until_end(run, None) == 0
    page = f"{run.path.parent.name}/job-1/incidents/002/postmortem.html"
    assert server.texts[0].endswith(f"post-mortem: https://files.example/runs/{page}")


def test_events_and_queue_are_stored_together(make_run: MakeRun, server: WebhookServer, ended: RunEnded) -> None:
    run, cfg = make_run("big", **ON)
    sink = AlertSink(run, cfg.telemetry.alerts, None)
    sink.connect()
    append(run, ended)
    chunk = read_chunk(run.events, 0)
    assert chunk is not None
    sink.send(chunk)
    assert json.loads(progress_file(run, SinkKind.alerts).read_text())["queue"] == [], "killed before the save"
    again = AlertSink(run, cfg.telemetry.alerts, None)
    again.connect()
    assert again.state.offset == 0
    again.send(chunk)
    again.poll()
    assert len(server.texts) == 1


@pytest.mark.full
def test_a_server_that_fails_and_returns_gets_every_alert_once_while_the_run_lives(
    make_run: MakeRun, server: WebhookServer, make_step: MakeStep, started: RunStarted, ended: RunEnded
) -> None:
    run, _ = make_run("big", **ON)
    server.status = 500
    sink = SinkProcess.start(run)
    append(run, started, make_step(0), skip(1))
    wait_until(lambda: server.num_refused >= 2, "the alert is tried again")
    server.status = 200
    append(run, make_step(1), ended)
    assert sink.finish(wait_s=120)
    assert titles(server) == [
        "[big] incident 1 opened: r",
        "[big] skip for incident 1: r",
        "[big] finished at step 100: all steps done",
    ]
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()], "the URL of a webhook is a secret"
    assert "env:HOOK" in run.config.read_text()


@pytest.mark.full
def test_a_trainer_that_dies_without_a_word_is_alerted(
    make_run: MakeRun, server: WebhookServer, make_step: MakeStep
) -> None:
    run, _ = make_run("big", **ON)
    append(run, make_step(41))
    program = f"""
import os, signal, subprocess, sys
from pathlib import Path
from harness.core.rundir import RunDir
from harness.telemetry.sinks.sink_process import SinkProcess
if os.fork() == 0:
    print(SinkProcess.start(RunDir(Path({str(run.path)!r})))._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
    launcher = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=200)
    assert launcher.returncode == -signal.SIGKILL
    wait_until(lambda: bool(server.texts), "the death is alerted")
    assert titles(server) == ["[big] rank 0 is gone without an end, so is its launcher"]
    assert server.texts[0].splitlines()[1].startswith("iteration 41, ")
    process = Path("/proc") / launcher.stdout.decode().strip()
    wait_until(lambda: not process.exists() or "State:\tZ" in (process / "status").read_text(), "no process is left")
    assert os.environ["HOOK"] == server.url
