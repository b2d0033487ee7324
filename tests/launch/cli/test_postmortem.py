from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.cli.main import main
from tests.analysis.postmortem import stories


def test_one_incident_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stories.write(tmp_path / "run", stories.poisoned())
    assert main(["postmortem", str(run.path), "--incident", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown == (run.incidents / "001" / "postmortem.md").read_text()
    assert "- Why: long-tail token (" in shown


@pytest.mark.full
def test_several_are_listed_each_with_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = [*stories.duplicated(), stories.ended(last=20, onset=20, kinds=["loss_spike"])]
    run = stories.write(tmp_path / "run", log)
    assert main(["postmortem", str(run.path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("001  iteration 20: loss_spike; cured; not known yet")
    assert second.startswith("remark-001  iteration 150: duplicate_batch; remark; data duplicate (0.95)")
    assert (run.incidents / "remark-001" / "postmortem.html").exists()


def test_a_run_without_incidents_and_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean = stories.write(tmp_path / "clean", stories.log_of({}))
    assert main(["postmortem", str(clean.path)]) == 0
    assert capsys.readouterr().out == f"{clean.path}: no incidents\n"
    assert main(["postmortem", str(clean.path), "--incident", "3"]) == 2
    message = f"{clean.path} has no incident 3; incidents of this run: none"
    assert capsys.readouterr().err == f"harness: --incident: {message}\n"
    assert main(["postmortem", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"harness: {tmp_path}: is not a run directory: it has no events.jsonl\n"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stories.write(tmp_path / "run", stories.poisoned())
    run.incidents.write_text("in the way")
    assert main(["postmortem", str(run.path)]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"harness: {run.incidents}")
    assert line.count(os.linesep) == 1
