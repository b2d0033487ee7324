"""Tests of the post-mortem process from the trainer's side: when it starts, one at a time, without blocking."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.core.events import ActionKind, Event, FindingKind
from harness.core.rundir import RunDir
from harness.sentinel.policy.open_incident import IncidentVerdict
from harness.telemetry import postmortem_process
from harness.telemetry.postmortem_process import DRAFT_AFTER, PostmortemProcess
from tests.analysis.postmortem import stories
from tests.analysis.postmortem.stories import ONSET

WRITER = """\
import pathlib, sys, time
run, number = pathlib.Path(sys.argv[1]), sys.argv[3]
assert not (run / "busy").exists()
(run / "busy").touch()
time.sleep(0.2)
(run / "busy").unlink()
with (run / "written").open("a") as log: print(number, file=log)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with a fast stand-in for the post-mortem module."""
    (tmp_path / "stand_in_writer.py").write_text(WRITER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(postmortem_process, "MODULE", "stand_in_writer")
    run_directory = RunDir(tmp_path / "run")
    run_directory.path.mkdir()
    return run_directory


def written(run: RunDir) -> list[str]:
    path = run.path / "written"
    return path.read_text().split() if path.exists() else []


def send_events(writer: PostmortemProcess, *events: Event) -> None:
    for event in events:
        writer.on_event(event)


def test_ended_incidents_are_reported_one_at_a_time(run: RunDir) -> None:
    writer = PostmortemProcess(run)
    send_events(writer, stories.ended(number=1), stories.ended(number=2), stories.ended(number=2))
    assert writer.finish(30)
    assert written(run) == ["1", "2"]


def test_a_draft_is_written_some_iterations_after_an_action(run: RunDir) -> None:
    writer = PostmortemProcess(run)
    send_events(writer, stories.action(ActionKind.watch, ONSET), stories.action(ActionKind.skip, ONSET))
    send_events(writer, *(stories.healthy(at) for at in range(ONSET, ONSET + DRAFT_AFTER)))
    assert writer.finish(30)
    assert written(run) == []
    send_events(writer, stories.healthy(ONSET + DRAFT_AFTER))
    assert writer.finish(30)
    assert written(run) == ["1"]


def test_duplicate_batches_are_reported_at_the_end(run: RunDir) -> None:
    writer = PostmortemProcess(run)
    send_events(writer, stories.finding(FindingKind.duplicate_batch, 9, "twice"), stories.healthy(10))
    assert written(run) == []
    assert writer.finish(30)
    assert written(run) == ["0"]


def test_a_run_without_incidents_starts_no_process(run: RunDir) -> None:
    writer = PostmortemProcess(run)
    send_events(writer, *(stories.healthy(at) for at in range(200)))
    assert writer.finish(30)
    assert not run.logs.exists()


def test_a_failure_prints_a_warning_with_its_last_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(postmortem_process, "MODULE", "no_such_module")
    writer = PostmortemProcess(run)
    send_events(writer, stories.ended())
    assert not writer.finish(30)
    assert "warning: a post-mortem was not written: " in capsys.readouterr().err
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    send_events(writer, stories.ended())
    assert not writer.finish(30)
    assert "No such file" in capsys.readouterr().err


def test_a_hanging_process_is_killed_at_the_end(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stand_in_writer.py").write_text("import time; time.sleep(60)")
    writer = PostmortemProcess(run)
    send_events(writer, stories.ended())
    process = writer._process
    assert process is not None
    assert not writer.finish(0.3)
    assert process.poll() is not None
    assert "still writing after 0.3 s" in capsys.readouterr().err


REPLAYER = """\
import json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
if "--replay-within" in sys.argv:
    seen = {key: os.environ.get(key) for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")}
    with (run / "replayed").open("a") as log: print(json.dumps([sys.argv[3], float(sys.argv[5]), seen]), file=log)
"""


def test_incidents_are_replayed_after_the_run_without_gpu_and_rank(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in_writer.py").write_text(REPLAYER)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "host")):
        monkeypatch.setenv(name, value)
    writer = PostmortemProcess(run)
    send_events(writer, stories.finding(FindingKind.duplicate_batch, 9, "twice"))
    ended = stories.ended(number=1), stories.ended(number=2, verdict=IncidentVerdict.harmless), stories.ended(number=3)
    send_events(writer, *ended)
    assert writer.finish(30)
    assert not (run.path / "replayed").exists()
    lines: list[str] = []
    writer.replay_incidents(0, announce=lines.append)
    assert not (run.path / "replayed").exists(), "no time, no replay"
    assert lines == []
    writer.replay_incidents(40, announce=lines.append)
    assert [line[:21] for line in lines] == ["replaying incident 1 ", "replaying incident 3 "]
    replayed = [json.loads(line) for line in (run.path / "replayed").read_text().splitlines()]
    assert [number for number, _, _ in replayed] == ["1", "3"], "2 was harmless"
    assert all(seconds <= 30 for _, seconds, _ in replayed)
    own = {"RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None, "CUDA_VISIBLE_DEVICES": ""}
    assert all(seen == own for _, _, seen in replayed)


def test_a_replay_that_hangs_is_ended_without_a_warning(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = PostmortemProcess(run)
    send_events(writer, stories.ended())
    assert writer.finish(30)
    (tmp_path / "stand_in_writer.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(postmortem_process, "REPORT_S", 0.1)
    writer.replay_incidents(0.5, announce=print)
    assert writer._process is None
    assert "warning" not in capsys.readouterr().err
