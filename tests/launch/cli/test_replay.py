"""`harness replay` without ranks: what it stores, and what it says about the log."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from harness.analysis.replay import history
from harness.config.errors import ConfigError
from harness.core.rundir import RunDir
from launch.cli.replay import find_iteration, store_result
from tests.analysis.postmortem import stories

CHOSEN = Namespace(incident=None, iteration=7)


def test_a_result_that_cannot_be_stored_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path)
    store_result(run, CHOSEN, "{}\n")
    assert (run.incidents / "iteration-7" / history.REPLAY_FILE).read_text() == "{}\n"
    assert capsys.readouterr().err == ""
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    other.incidents.write_text("not a directory")
    store_result(other, CHOSEN, "{}\n")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the result is printed and not stored: ")


def test_an_iteration_that_the_log_does_not_have_is_an_error_with_the_range(tmp_path: Path) -> None:
    run = stories.write(tmp_path / "run", stories.one_rank())
    log = history.read(run.events)
    last = max(event.iteration for event in stories.one_rank())
    assert find_iteration(log, Namespace(incident=None, iteration=last)) == last
    with pytest.raises(ConfigError, match=rf"--iteration: no iteration 100000; the log has \d+ to {last}"):
        find_iteration(log, Namespace(incident=None, iteration=100_000))
