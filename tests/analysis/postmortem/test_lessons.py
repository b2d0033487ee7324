"""`lessons.md`: one line for each incident, replaced when its post-mortem is written again."""

from __future__ import annotations

from multiprocessing import Process
from pathlib import Path

import pytest

from harness.analysis.postmortem.lessons import lessons_file, read_lessons, record_lesson
from harness.analysis.postmortem.write import lesson_of
from harness.core.rundir import RunDir
from launch.cli.main import main
from tests.analysis.postmortem import stories
from tests.analysis.postmortem.stories import evidence_of, log_of, write


def lines(run: RunDir) -> list[str]:
    return list(read_lessons(lessons_file(run)))


def test_line_is_replaced_not_repeated(tmp_path: Path) -> None:
    run, other = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")
    record_lesson(run, "001", "old")
    record_lesson(other, "001", "of another run")
    record_lesson(run, "002", "of another incident")
    record_lesson(run, "001", "new")
    record_lesson(run, "001", "new")
    assert lines(run) == ["- first 001: new", "- first 002: of another incident", "- second 001: of another run"]
    record_lesson(run, "002", "")
    assert lines(run) == ["- first 001: new", "- second 001: of another run"], "the cause is no longer known"
    record_lesson(run, "001", "")
    record_lesson(other, "001", "")
    assert lines(run) == []


def test_lines_of_people_stay_as_they_are(tmp_path: Path) -> None:
    run, file = RunDir(tmp_path / "first"), tmp_path / "lessons.md"
    record_lesson(run, "002", "old")
    written = file.read_text()
    file.write_text(
        written.replace("# Lessons", "# Our lessons") + "  see ticket 7\n\n## To do\n- ask Ada\n* buy disks\n"
    )
    record_lesson(run, "002", "new")
    record_lesson(run, "001", "before it")
    record_lesson(run, "003", "behind its paragraph")
    heading = "# Our lessons\n\nOne line for each incident; its post-mortem replaces the line.\n\n"
    lessons = "- first 001: before it\n- first 002: new\n  see ticket 7\n- first 003: behind its paragraph\n"
    assert file.read_text() == heading + lessons + "\n## To do\n- ask Ada\n* buy disks\n"
    for number in ("001", "002", "003"):
        record_lesson(run, number, "")
    assert file.read_text() == heading + "  see ticket 7\n\n## To do\n- ask Ada\n* buy disks\n"


def test_lesson_of_an_incident_names_its_cause(tmp_path: Path) -> None:
    known = evidence_of(write(tmp_path / "run", stories.poisoned()))
    assert lesson_of(known).endswith("(long-tail token)")
    change = stories.refused(loss=6.0, grad_norm=1.0)
    unknown = evidence_of(write(tmp_path / "other", log_of({stories.ONSET: change}, stories.skipped())))
    assert lesson_of(unknown) == ""


def test_report_ends_with_the_lessons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", stories.poisoned())
    record_lesson(run, "001", "Spread <rare> tokens.")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "- run 001: Spread <rare> tokens."
    page = (tmp_path / "index.html").read_text()
    assert "<h2>Lessons</h2><ul>\n<li>run 001: Spread &lt;rare&gt; tokens.</li>" in page
    assert "1 (1 step)" in page


@pytest.mark.full
def test_processes_of_several_runs_lose_no_line(tmp_path: Path) -> None:
    runs = [RunDir(tmp_path / f"run-{number}") for number in range(6)]
    writers = [Process(target=record_lesson, args=(run, "001", "text")) for run in runs]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(lines(runs[0])) == len(runs)
