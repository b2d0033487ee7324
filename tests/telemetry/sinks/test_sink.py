"""Tests of the stored progress of a sink."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.core.rundir import RunDir
from harness.telemetry.alerts.outbox import AlertState
from harness.telemetry.sinks.sink import SinkKind, load_sink_state, progress_file, save_state


def test_progress_is_read_without_the_keys_of_a_later_version(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert load_sink_state(run, SinkKind.alerts, AlertState) == AlertState()
    stored = AlertState(offset=7, is_new=False, topics={"webhook halt": 1.0})
    save_state(run, SinkKind.alerts, stored)
    path = progress_file(run, SinkKind.alerts)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"later": 1}))
    assert load_sink_state(run, SinkKind.alerts, AlertState) == stored


@pytest.mark.parametrize("content", ["", "[1]", '{"offset": 7'])
def test_damaged_progress_starts_from_the_first_event(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    progress_file(run, SinkKind.alerts).write_text(content)
    assert load_sink_state(run, SinkKind.alerts, AlertState) == AlertState()
    assert "alerts.json is damaged" in capsys.readouterr().err


def test_progress_that_cannot_be_read_is_not_damaged(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    progress_file(run, SinkKind.alerts).mkdir()
    with pytest.raises(IsADirectoryError):
        load_sink_state(run, SinkKind.alerts, AlertState)
