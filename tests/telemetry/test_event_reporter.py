"""Tests of the end of a run on rank 0: what it waits for, for how long, and what ends the waits."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.config.errors import EXIT_DONE
from harness.core.events import Event, RunEnded, TaskEvaluated
from harness.telemetry import evaluation_process, event_reporter, postmortem_process
from harness.telemetry.evaluation_process import EvaluationProcess
from harness.telemetry.event_log import CLOSE_WAIT_S, FLUSH_WAIT_S, tail
from harness.telemetry.event_reporter import EventReporter, longest_end_s
from tests.analysis.postmortem import stories
from tests.composed import load
from tests.telemetry.conftest import MakeRun

FIRST_RANK = cast(Any, SimpleNamespace(is_first=True))


def test_a_stop_request_ends_the_waits(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processes beside training are stand-ins that never end."""
    (tmp_path / "stand_in.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for module, name in ((evaluation_process, "EVALUATION_MODULE"), (postmortem_process, "MODULE")):
        monkeypatch.setattr(module, name, "stand_in")
    monkeypatch.setattr(postmortem_process, "HURRIED_WAIT_S", 0.2)
    run, cfg = make_run(mlflow="false", picture="true", postmortem="true", replay_s="600")
    cfg.eval.harness, cfg.eval.harness_exit_wait_s = ["any"], 600.0
    asked: list[bool] = []

    def is_stopping() -> bool:
        asked.append(True)
        return len(asked) > 3  # during the first wait

    begun_s = time.monotonic()
    with EventReporter(cfg, run, world=FIRST_RANK, meter=cast(Any, None)) as reporter:
        reporter.emit_event(stories.ended())
        ended = RunEnded(time=time.time(), iteration=9, step=9, exit_code=EXIT_DONE, reason="all steps done")
        reporter.end(ended, is_stopping=is_stopping)
    assert time.monotonic() - begun_s < 100
    assert tail(run.events)[-1] == ended
    assert not run.picture.exists()
    printed = capsys.readouterr().err
    assert "the last checkpoint was not evaluated: still running after " in printed
    assert "a post-mortem was not written: still writing after 0.2 s" in printed


def test_the_thread_of_the_log_is_done_with_the_post_mortems_before_they_are_finished(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    result = TaskEvaluated(
        time=0.0, iteration=9, step=9, directory="step-9", task="any", metrics={}, num_examples=1, seconds=1.0
    )
    results = iter([result])

    def on_event(event: Event) -> None:
        time.sleep(0.2)
        calls.append(event.name)

    def finish(*_: object, **__: object) -> None:
        calls.append("finish")

    postmortems = SimpleNamespace(on_event=on_event, finish=finish, replay_incidents=lambda *_, **__: None)
    evaluations = SimpleNamespace(finish=lambda *_, **__: True, drain_events=lambda: results)
    monkeypatch.setattr(event_reporter, "PostmortemProcess", lambda _run: postmortems)
    monkeypatch.setattr(event_reporter, "EvaluationProcess", SimpleNamespace(start=lambda *_: evaluations))
    run, cfg = make_run(mlflow="false", picture="false", postmortem="true")
    with EventReporter(cfg, run, world=FIRST_RANK, meter=cast(Any, None)) as reporter:
        reporter.end(RunEnded(time=time.time(), iteration=9, step=9, exit_code=EXIT_DONE, reason="all steps done"))
    assert calls == ["task_evaluated", "finish", "run_ended"]


def test_a_picture_that_cannot_be_drawn_is_one_warning(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(*_: object) -> None:
        raise ValueError("no formula\n^")

    monkeypatch.setattr(event_reporter, "draw", draw)
    run, cfg = make_run(mlflow="false", picture="true", postmortem="false")
    with EventReporter(cfg, run, world=FIRST_RANK, meter=cast(Any, None)) as reporter:
        reporter.end(RunEnded(time=time.time(), iteration=9, step=9, exit_code=EXIT_DONE, reason="all steps done"))
    assert capsys.readouterr().err == f"warning: cannot draw {run.picture}: ValueError: no formula\n"
    assert len(tail(run.events)) == 1


def test_a_warning_says_that_the_evaluation_process_has_ended_before_the_run(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stand_in.py").write_text("raise SystemExit('eval.harness: no task any')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(evaluation_process, "EVALUATION_MODULE", "stand_in")
    run, cfg = make_run(mlflow="false", picture="false", postmortem="false")
    cfg.eval.harness = ["any"]
    process = EvaluationProcess.start(run, cfg.eval)
    assert process is not None
    process._reader.join(timeout=60)
    assert capsys.readouterr().err == (
        "warning: no more checkpoints are evaluated until the next start: eval.harness: no task any\n"
    )
    assert not process.finish(0.0)


def test_the_longest_end_is_the_sum_of_the_waits() -> None:
    cfg = load([])
    cfg.telemetry.mlflow = cfg.telemetry.postmortem = False
    log_s = longest_end_s(cfg)
    assert log_s == FLUSH_WAIT_S + CLOSE_WAIT_S
    cfg.eval.harness, cfg.eval.harness_exit_wait_s = ["x"], 7200.0
    assert longest_end_s(cfg) == log_s + 7200 + evaluation_process.READER_WAIT_S
    cfg.checkpoint.remote.url, cfg.checkpoint.remote.exit_wait_s = "file:///store", 900.0
    cfg.eval.harness = []
    assert longest_end_s(cfg) >= log_s + 900
    cfg.checkpoint.remote.url = None
    cfg.telemetry.mlflow, cfg.telemetry.exit_wait_s = True, 300.0
    assert longest_end_s(cfg) >= log_s + 300
    cfg.telemetry.postmortem, cfg.telemetry.replay_s = True, 100.0
    assert longest_end_s(cfg) >= log_s + 300 + 100 + postmortem_process.EXIT_WAIT_S
