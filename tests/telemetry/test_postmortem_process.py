"""The process that writes post-mortems, as the trainer knows it: started late, one at a time, never waited for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.core.events import ActionKind, Event, FindingKind
from harness.core.rundir import RunDir
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
    """A module of another name in the place of the one that takes seconds."""
    (tmp_path / "stand_in_writer.py").write_text(WRITER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(postmortem_process, "MODULE", "stand_in_writer")
    made = RunDir(tmp_path / "run")
    made.path.mkdir()
    return made


def written(run: RunDir) -> list[str]:
    path = run.path / "written"
    return path.read_text().split() if path.exists() else []


def tell(writer: PostmortemProcess, *events: Event) -> None:
    for event in events:
        writer.hear(event)


def test_an_incident_is_written_about_when_it_ends_one_at_a_time(run: RunDir) -> None:
    writer = PostmortemProcess(run)
    tell(writer, stories.ended(number=1), stories.ended(number=2), stories.ended(number=2))
    assert writer.finish(30)
    assert written(run) == ["1", "2"]


def test_a_draft_a_while_after_something_was_done(run: RunDir) -> None:
    writer = PostmortemProcess(run)
    tell(writer, stories.action(ActionKind.watch, ONSET), stories.action(ActionKind.skip, ONSET))
    tell(writer, *(stories.healthy(at) for at in range(ONSET, ONSET + DRAFT_AFTER)))
    assert writer.finish(30)
    assert written(run) == []
    tell(writer, stories.healthy(ONSET + DRAFT_AFTER))
    assert writer.finish(30)
    assert written(run) == ["1"]


def test_duplicate_batches_are_a_remark_at_the_end(run: RunDir) -> None:
    writer = PostmortemProcess(run)
    tell(writer, stories.finding(FindingKind.duplicate_batch, 9, "twice"), stories.healthy(10))
    assert written(run) == []
    assert writer.finish(30)
    assert written(run) == ["0"]


def test_a_run_without_trouble_starts_nothing(run: RunDir) -> None:
    writer = PostmortemProcess(run)
    tell(writer, *(stories.healthy(at) for at in range(200)))
    assert writer.finish(30)
    assert not run.logs.exists()


def test_a_failure_costs_a_warning_with_its_last_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(postmortem_process, "MODULE", "no_such_module")
    writer = PostmortemProcess(run)
    tell(writer, stories.ended())
    assert not writer.finish(30)
    assert "warning: a post-mortem was not written: " in capsys.readouterr().err
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    tell(writer, stories.ended())
    assert not writer.finish(30)
    assert "No such file" in capsys.readouterr().err


def test_a_writer_that_hangs_is_left_behind_dead(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stand_in_writer.py").write_text("import time; time.sleep(60)")
    writer = PostmortemProcess(run)
    tell(writer, stories.ended())
    process = writer._process
    assert process is not None
    assert not writer.finish(0.3)
    assert process.poll() is not None
    assert "still writing after 0.3 s" in capsys.readouterr().err
