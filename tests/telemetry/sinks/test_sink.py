"""Tests of the stored progress of a sink."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.checkpoint.remote.remote_run import open_remote_run
from harness.checkpoint.remote.uploader import RUN_FILES, Uploader
from harness.core.rundir import RunDir
from harness.telemetry.alerts.outbox import AlertState
from harness.telemetry.sinks.sink import SinkKind, SinkState, load_sink_state, progress_file, save_state, stored_offset
from tests.composed import load


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


def test_an_object_store_holds_the_progress_of_targets_that_outlive_the_machine(tmp_path: Path) -> None:
    """It is read before the log: what was sent is a position there."""
    run, elsewhere = RunDir(tmp_path / "here"), RunDir(tmp_path / "elsewhere")
    run.checkpoints.mkdir(parents=True)
    elsewhere.path.mkdir()
    run.events.write_text("{}\n")
    remote = open_remote_run(f"file://{tmp_path}/store", "here", retry_s=0)
    for kind in SinkKind:
        save_state(run, kind, SinkState(offset=3))
    list(Uploader(run, remote, load([]).checkpoint).upload_due(last=True))
    index = remote.read_index()
    assert index is not None
    names = [name for name in RUN_FILES[: RUN_FILES.index("events.jsonl")] if name in index.files]
    for name in names:
        remote.download_file(index.files[name], elsewhere.path / name)
    outliving = {SinkKind.mlflow, SinkKind.wandb, SinkKind.alerts}
    assert {kind for kind in SinkKind if stored_offset(elsewhere, kind) == 3} == outliving
