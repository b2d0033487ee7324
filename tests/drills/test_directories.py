"""Tests of drill directories: other directories are not touched, and only an equal twin is reused."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import compose
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core import event_json
from harness.core.event_json import to_json
from harness.core.events import RunEnded
from harness.core.rundir import RunDir, append_line
from harness.drills import directories
from tests.drills import logs

pytestmark = pytest.mark.usefixtures("composed_once")


def config(runs: Path, *overrides: str) -> Config:
    return directories.configure(["telemetry=plain"], [f"run.dir={runs}", *overrides])


def train_twin(cfg: Config, run: RunDir, exit_code: int = 0) -> RunDir:
    """A twin with a log and a checkpoint, as a trainer leaves it."""
    assert not directories.prepare_twin(cfg, run)
    for event in (logs.started(), logs.step(1), logs.ended(exit_code=exit_code)):
        append_line(run.events, to_json(event))
    (run.checkpoints / "step-1").mkdir(parents=True)
    (run.checkpoints / "step-1/weights").write_text("w")
    return run


def test_an_equal_twin_is_copied_and_the_original_kept(tmp_path: Path) -> None:
    first = train_twin(config(tmp_path), RunDir(tmp_path / "drill-a-twin"))
    second = RunDir(tmp_path / "drill-b-twin")
    assert directories.prepare_twin(config(tmp_path, "launch.hang_after_s=5"), second)
    assert second.events.read_text() == first.events.read_text()
    assert (second.checkpoints / "step-1/weights").samefile(first.checkpoints / "step-1/weights")
    assert compose.read(second.config).run.name == "drill-b-twin"
    assert directories.prepare_twin(config(tmp_path), first)
    append_line(second.events, to_json(logs.ended()))
    assert len(list(event_json.read(first.events))) == 3
    inside = RunDir(tmp_path / "campaign-1/twin")
    assert directories.prepare_twin(config(tmp_path), inside)


@pytest.mark.parametrize("overrides", [["optim.lr=1e-4"], ["launch.nproc=1"], ["checkpoint.every_steps=7"]])
def test_another_configuration_is_another_twin(tmp_path: Path, overrides: list[str]) -> None:
    train_twin(config(tmp_path), RunDir(tmp_path / "drill-a-twin"))
    assert not directories.prepare_twin(config(tmp_path, *overrides), RunDir(tmp_path / "drill-b-twin"))


def test_a_twin_that_did_not_finish_is_trained_again(tmp_path: Path) -> None:
    run = train_twin(config(tmp_path), RunDir(tmp_path / "drill-a-twin"), exit_code=75)
    assert not directories.prepare_twin(config(tmp_path), RunDir(tmp_path / "drill-b-twin"))
    assert not directories.prepare_twin(config(tmp_path), run)
    assert not run.events.exists()


def test_other_code_is_another_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_twin(config(tmp_path), RunDir(tmp_path / "drill-a-twin"))
    monkeypatch.setattr(directories, "code_digest", lambda: "other")
    assert not directories.prepare_twin(config(tmp_path), RunDir(tmp_path / "drill-b-twin"))


def test_a_directory_that_is_not_a_drill_is_not_touched(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "drill-kill_rank")
    run.path.mkdir()
    directories.create_directory(config(tmp_path), run)
    (run.path / "thesis.txt").write_text("years of work")
    for create in (directories.create_directory, directories.prepare_twin):
        with pytest.raises(ConfigError, match=r"^run.dir: .*drill-kill_rank exists and is not a drill; move it away"):
            create(config(tmp_path), run)
    assert (run.path / "thesis.txt").read_text() == "years of work"
    run.drill.write_text("{}")
    directories.create_directory(config(tmp_path), run)
    assert not (run.path / "thesis.txt").exists()


@pytest.mark.parametrize("override", ["run.name=mine", "launch.dry_run=true"])
def test_keys_that_a_drill_sets_itself_are_rejected(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{override.partition('=')[0]}: "):
        config(tmp_path, override)


def test_a_resumed_run_does_not_count_as_a_finished_twin(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not directories.has_finished(run)
    for event in (logs.started(), logs.ended(9, 9, exit_code=75), logs.started(9, 9), logs.ended()):
        append_line(run.events, to_json(event))
    assert isinstance(list(event_json.read(run.events))[-1], RunEnded)
    assert not directories.has_finished(run)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["parallel.device=cuda"], True),
        (["parallel.device=cpu"], False),
        (["run.deterministic=false"], False),
        (["parallel.device=cpu", "run.deterministic=true"], True),
        (["precision=fp8_emulated"], True),
        (["precision=fp8_emulated", "precision.fp8.recipe=delayed"], False),
    ],
)
def test_drills_that_may_use_a_gpu_are_deterministic(tmp_path: Path, overrides: list[str], expected: bool) -> None:
    assert config(tmp_path, *overrides).run.deterministic is expected
