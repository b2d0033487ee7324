"""Tests of the console: plain lines in a file, a progress bar on a terminal, and output errors that stop no run."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.schema import Config
from harness.core.batch_sizes import BatchSize, BatchSizes, TokenSchedule
from harness.core.events import (
    BY_OPERATOR,
    Action,
    ActionKind,
    CheckpointSaved,
    EvalRecord,
    Event,
    Intervention,
    RunEnded,
    RunStarted,
    StepRecord,
)
from harness.core.rundir import RunDir
from harness.core.safe_stream import SafeStream
from harness.telemetry.console import (
    Console,
    RunTotals,
    clock,
    closing_lines,
    event_line,
    mlflow_command,
    with_prefix,
)

MakeRun = Callable[..., tuple[RunDir, Config]]
MakeStep = Callable[..., StepRecord]


def events_of_a_run(make_step: MakeStep, started: RunStarted, num_steps: int) -> list[Event]:
    """One step per second, with one event of each other kind."""
    events: list[Event] = [started, *(make_step(iteration) for iteration in range(num_steps))]
    events[4] = make_step(3, loss=float("nan"), grad_norm=float("inf"), refused=True, step=3)
    events[7:7] = [
        EvalRecord(time=0.0, iteration=5, step=6, loss=2.5, tokens=8),
        CheckpointSaved(time=0.0, iteration=5, step=6, directory="step-6-gen-0", seconds=0.42),
        Intervention(time=0.0, iteration=5, who="ann", reason="too hot", changes={"optim.lr": [3e-3, 1e-3]}),
    ]
    return events


def read_terminal(leader: int) -> str:
    """Everything that a terminal shows until its other side is closed, which Linux reports as an I/O error."""
    shown = b""
    with os.fdopen(leader, "rb", buffering=0) as screen:
        while True:
            try:
                shown += screen.read(1 << 16)
            except OSError:
                return shown.decode()


def test_plain_lines(make_step: MakeStep, started: RunStarted) -> None:
    stream = io.StringIO()
    console = Console(12, stream)
    for event in events_of_a_run(make_step, started, 12):
        console.show(event)
    console.close()
    assert stream.getvalue().splitlines() == [
        "training 100 steps on 2 ranks",
        "step 1/12  loss 5.5000  grad 1.25  lr 3.0e-03  20.5 ktok/s  38.2 GFLOP/s",
        "iteration 3: update rejected, loss nan, grad norm inf",
        "step 6/12  loss 5.4500  grad 1.25  lr 3.0e-03  20.5 ktok/s  38.2 GFLOP/s  ETA 0:01",
        "step 6: eval loss 2.5000",
        "step 6: saved step-6-gen-0 in 0.4 s",
        "ann changed optim.lr: [0.003, 0.001] (too hot)",
        "step 11/12  loss 5.4000  grad 1.25  lr 3.0e-03  20.5 ktok/s  38.2 GFLOP/s  ETA 0:00",
        "step 12/12  loss 5.3900  grad 1.25  lr 3.0e-03  20.5 ktok/s  38.2 GFLOP/s  ETA 0:00",
    ]


def test_steps_are_shown_after_the_clock_was_set_back(make_step: MakeStep) -> None:
    stream = io.StringIO()
    console = Console(100, stream)
    for iteration in range(21):
        record = make_step(iteration)
        console.show(record if iteration < 8 else replace(record, time=record.time - 3600))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == [f"{step}/100" for step in (1, 6, 9, 14, 19)]


def test_an_action_of_an_operator_is_one_line() -> None:
    action = Action(
        time=0.0,
        iteration=128,
        kind=ActionKind.cool,
        step=128,
        incident=1,
        reason="third spike",
        onset=128,
        lr_scale=0.5,
    )
    changes = {"command": "multiply the learning rate by 0.5", "factor": 0.5, "step": 128}
    asked = Intervention(time=0.0, iteration=128, who="ann", reason="too hot", changes=changes)
    stream = io.StringIO()
    console = Console(200, stream)
    for event in (action, replace(action, incident=BY_OPERATOR, reason="too hot"), asked):
        console.show(event)
    console.close()
    assert stream.getvalue().splitlines() == [
        "iteration 128: cool, third spike",
        "command of ann: multiply the learning rate by 0.5 (too hot)",
    ]


def test_the_time_to_the_end_counts_the_larger_batches_that_are_to_come(make_step: MakeStep) -> None:
    stream = io.StringIO()
    schedule = TokenSchedule(sizes=BatchSizes([BatchSize(0, 1), BatchSize(6, 16)]), sequence_length=2048)
    console = Console(12, stream, schedule=schedule)
    for iteration in range(11):
        console.show(make_step(iteration))
    console.close()
    shown = [line.split("  ")[-1] for line in stream.getvalue().splitlines()]
    left = [6 * 16, 1 * 16]  # after steps 6 and 11, in batches of 2,048 tokens, at 0.1 s each
    assert shown[1:] == [f"ETA 0:{round(batches * 0.1):02d}" for batches in left]


def test_an_interrupted_run_shows_where_it_stopped(make_step: MakeStep) -> None:
    stream = io.StringIO()
    console = Console(100, stream)
    for iteration in range(3):
        console.show(make_step(iteration, mfu=0.583))
    console.show(RunEnded(time=0.0, iteration=3, step=3, exit_code=75, reason="asked to stop"))
    console.close()
    assert stream.getvalue().splitlines()[1:] == [
        "ended at step 3: asked to stop (exit code 75)",
        "step 3/100  loss 5.4800  grad 1.25  lr 3.0e-03  20.5 ktok/s  58.3% MFU",
    ]


def test_a_terminal_shows_a_progress_bar_below_the_permanent_lines(
    make_step: MakeStep, started: RunStarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    leader, follower = os.openpty()
    termios.tcsetwinsize(follower, (30, 80))
    with ThreadPoolExecutor(1) as pool, os.fdopen(follower, "w") as terminal:
        screen = pool.submit(read_terminal, leader)
        console = Console(12, terminal)
        for event in events_of_a_run(make_step, started, 12):
            console.show(event)
        console.close()
        console.print("goodbye")
        terminal.close()
        output = screen.result(timeout=200)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert "━" in text
    assert "\x1b[2K" in output
    for expected in (
        "12/12 ETA 0:00 loss 5.3900 grad 1.25 lr 3.0e-03 20.5 ktok/s 38.2 GFLOP/s",
        "iteration 3: update rejected",
        "step 6: eval loss 2.5000",
    ):
        assert expected in text
    assert text.index("step 6: saved step-6-gen-0") < text.index(" 7/12 ")
    assert max(len(line.rstrip()) for line in re.split(r"[\r\n]+", text)) <= 80
    assert text.rstrip().endswith("goodbye")


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    program = """
import sys
from harness.core.events import EvalRecord
from harness.telemetry.console import Console
console = Console(10)
for iteration in range(5000):
    console.show(EvalRecord(time=0.0, iteration=iteration, step=1, loss=2.5, tokens=8))
console.close()
console.print("not read")
print("to the end", file=sys.stderr)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "step 1: eval loss 2.5000\n"
    process.stdout.close()
    assert process.stderr.read() == "to the end\n"
    process.stderr.close()
    assert process.wait(timeout=200) == 0


def test_the_closing_lines(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, _ = make_run("tiny-1")
    run.picture.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "mlflow"):
        (tmp_path / ".venv" / "bin" / name).touch()
    totals = RunTotals(first_loss=5.5, last_loss=2.25, eval_loss=2.5, num_refused=1)
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert closing_lines(run, totals, tracking_uri=uri, is_sent=False).splitlines() == [
        "loss       5.5000 -> 2.2500",
        "eval loss  2.5000",
        "rejected   1 update",
        "run        runs/tiny-1",
        "picture    runs/tiny-1/loss.png",
        "mlflow     .venv/bin/mlflow ui --backend-store-uri sqlite:///runs/mlflow.db",
        "send rest  .venv/bin/python -m harness.telemetry.sinks runs/tiny-1",
    ]
    totals.first_step = 40
    assert closing_lines(run, totals, tracking_uri=None, is_sent=True).splitlines()[:3] == [
        "loss       5.5000 -> 2.2500 since step 40",
        "eval loss  2.5000",
        "rejected   1 update since step 40",
    ]
    run.picture.unlink()
    assert closing_lines(run, RunTotals(), tracking_uri=None, is_sent=True).splitlines() == ["run  runs/tiny-1"]


def test_one_is_singular(started: RunStarted) -> None:
    assert event_line(replace(started, num_steps=1, world_size=1)) == "training 1 step on 1 rank"


@pytest.mark.parametrize("step", [0, 40])
def test_the_totals_begin_with_the_start(started: RunStarted, make_step: MakeStep, step: int) -> None:
    totals = RunTotals()
    for event in (replace(started, step=step), make_step(step + 1), make_step(step + 2)):
        totals.count(event)
    assert totals.first_step == step


def test_the_command_that_opens_a_store_hides_credentials() -> None:
    assert mlflow_command("https://ann:secret@mlflow.example") == "https://***@mlflow.example"
    assert mlflow_command("postgresql://ann:secret@db/x").endswith("--backend-store-uri 'postgresql://***@db/x'")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 x"), (12.34, "12.3 x"), (999.6, "1 kx"), (38.2e9, "38.2 Gx"), (1.5e18, "1.5 Ex"), (2e22, "2e+04 Ex")],
)
def test_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert with_prefix(value, "x") == text


def test_durations_are_formatted() -> None:
    assert [clock(seconds) for seconds in (0.4, 59.6, 125, 3723)] == ["0:00", "1:00", "2:05", "1:02:03"]


def test_a_stream_may_be_closed_before_the_console_is_freed() -> None:
    """Python 3.13 reports exceptions of a finalizer; older versions ignore them."""
    stream = io.StringIO()
    patient = SafeStream(stream)
    stream.close()
    patient.close()
