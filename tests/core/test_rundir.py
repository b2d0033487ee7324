"""Tests of the run directory: creation, resume, rejection with the differing keys, and atomic writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from harness.checkpoint import catalog
from harness.config.compose import plain
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core import rundir
from harness.core.event_json import to_json
from harness.core.events import RunEnded, RunRestarted, RunStarted
from tests.composed import load


def config(root: Path, *overrides: str) -> Config:
    return load([f"run.dir={root}", "run.name=a", *overrides])


def start(cfg: Config) -> rundir.RunDir:
    """A run that has started."""
    run = rundir.locate(cfg)
    rundir.prepare_run_dir(cfg, run)
    run.events.touch()
    return run


def test_the_resolved_configuration_is_written(tmp_path: Path) -> None:
    cfg = config(tmp_path, "optim.beta2=0.99")
    run = rundir.locate(cfg)
    assert rundir.prepare_run_dir(cfg, run) == {}
    assert yaml.safe_load(run.config.read_text()) == plain(cfg)


def test_a_different_configuration_is_rejected_with_its_keys_and_changes_nothing(tmp_path: Path) -> None:
    run = start(config(tmp_path))
    before = run.config.read_bytes()
    with pytest.raises(
        ConfigError, match=r"^run\.name: .*optim\.lr was 0\.003, is 0\.1.*run\.resume=changed"
    ) as rejection:
        rundir.prepare_run_dir(config(tmp_path, "optim.lr=0.1", "optim.beta1=0.8"), run)
    assert "optim.beta1" in str(rejection.value)
    assert "\n" not in str(rejection.value)
    assert run.config.read_bytes() == before


def test_a_run_that_is_older_than_a_key_had_its_default(tmp_path: Path) -> None:
    run = start(config(tmp_path))
    tree = yaml.safe_load(run.config.read_text())
    del tree["model"]["norm_placement"]
    run.config.write_text(yaml.safe_dump(tree))
    assert rundir.differences(config(tmp_path), run) == {}
    changed = config(tmp_path, "model.norm_placement=post")
    assert rundir.differences(changed, run) == {"model.norm_placement": ("pre", "post")}


def test_launch_telemetry_and_cluster_keys_may_differ(tmp_path: Path) -> None:
    run = start(config(tmp_path))
    assert rundir.prepare_run_dir(config(tmp_path, "launch.nproc=4", "telemetry=plain", "cluster=h100"), run) == {}


def test_the_configuration_of_a_run_that_never_started_may_change(tmp_path: Path) -> None:
    wrong, right = config(tmp_path, "optim.lr=0.1"), config(tmp_path)
    run = rundir.locate(wrong)
    rundir.prepare_run_dir(wrong, run)
    assert rundir.prepare_run_dir(right, run) == {}
    assert yaml.safe_load(run.config.read_text()) == plain(right)
    assert not run.interventions.exists()


def test_a_requested_change_is_recorded_as_an_intervention(tmp_path: Path) -> None:
    run = start(config(tmp_path))
    changed = config(tmp_path, "optim.lr=0.1", "run.resume=changed")
    assert rundir.prepare_run_dir(changed, run) == {"optim.lr": [0.003, 0.1]}
    [entry] = [json.loads(line) for line in run.interventions.read_text().splitlines()]
    assert entry["changes"] == {"optim.lr": [0.003, 0.1]}
    assert entry["who"]
    assert yaml.safe_load(run.config.read_text())["optim"]["lr"] == 0.1


def test_a_run_without_a_name_gets_its_model_and_the_time(tmp_path: Path) -> None:
    cfg = load([f"run.dir={tmp_path}"])
    rundir.name_run(cfg)
    assert cfg.run.name is not None
    assert cfg.run.name.startswith("tiny-2")
    other = load([f"run.dir={tmp_path}", "model.name=.lab/model"])
    rundir.name_run(other)
    assert rundir.locate(other).path.parent == tmp_path
    assert rundir.locate(other).path.name.startswith("lab-model-2")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_impossible_run_directory_is_a_config_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    cfg = config(tmp_path / place)
    with pytest.raises(ConfigError, match=r"^run\.dir: cannot create"):
        rundir.prepare_run_dir(cfg, rundir.locate(cfg))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"run: \xff", "is not UTF-8 text"),
        (b"- run\n", "must be a mapping of keys to values"),
        (b"run: [", "is not valid YAML"),
    ],
)
def test_a_stored_config_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    run = start(config(tmp_path))
    run.config.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{run.config}: {problem}"):
        rundir.check_resume(config(tmp_path), run)


def test_an_event_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = start(config(tmp_path))
    run.events.unlink()
    run.events.mkdir()
    with pytest.raises(ConfigError, match=rf"^run\.dir: cannot read {run.events}: Is a directory"):
        rundir.check_resume(config(tmp_path), run)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    rundir.write_atomically(path, "old")

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        rundir.write_atomically(path, "new")
    assert path.read_text() == "old"


def test_the_name_of_a_new_file_is_synced_with_its_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "ledger.jsonl", list[Path]()
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").readlink()))
    rundir.append_line(path, "first")
    rundir.append_line(path, "second")
    assert synced == [path, tmp_path, path]
    assert path.read_text() == "first\nsecond\n"


def test_a_run_that_only_crashed_has_not_begun(tmp_path: Path) -> None:
    """Its name can be used with another configuration; a run with any other event cannot."""
    cfg = config(tmp_path)
    run = rundir.locate(cfg)
    rundir.prepare_run_dir(cfg, run)
    crash = RunEnded(time=0.0, iteration=0, step=0, exit_code=1, reason="rank 0 ran out of memory")
    for _ in range(2):
        rundir.append_line(run.events, to_json(crash))
    restarted = RunRestarted(time=0.0, iteration=0, step=0, number=1, reason="rank 0 ran out of memory")
    rundir.append_line(run.events, to_json(restarted))
    assert not rundir.has_begun(run)
    rundir.append_line(run.events, to_json(RunStarted(time=0.0, iteration=0, world_size=1, num_steps=9, step=0)))
    assert rundir.has_begun(run)


def start_with_checkpoint(root: Path, *overrides: str) -> rundir.RunDir:
    """A run that has saved a checkpoint."""
    run = start(config(root, *overrides))
    (run.checkpoints / catalog.name_of(10, 0)).mkdir(parents=True)
    return run


@pytest.mark.parametrize(
    ("then", "now", "line"),
    [
        (["num_heads=4", "num_kv_heads=2"], ["num_heads=2", "num_kv_heads=1"], "num_heads: must stay 4 in this run"),
        (["num_layers=2"], ["num_layers=1"], "num_layers: must stay 2 in this run, got 1: its weights were trained"),
        (["norm=rms"], ["norm=layer"], "norm: must stay rms in this run, got layer"),
        (["norm_placement=pre"], ["norm_placement=post"], "norm_placement: must stay pre in this run, got post"),
        (["mup_base_width=null"], ["mup_base_width=32"], "mup_base_width: must stay None in this run, got 32"),
    ],
)
@pytest.mark.parametrize("policy", ["same", "changed"])
def test_a_model_that_the_weights_of_the_run_do_not_belong_to_is_rejected(
    tmp_path: Path, then: list[str], now: list[str], line: str, policy: str
) -> None:
    """All shapes stay the same, but in one case."""
    run = start_with_checkpoint(tmp_path, *(f"model.{setting}" for setting in then))
    before = run.config.read_bytes()
    other = config(tmp_path, *(f"model.{setting}" for setting in now), f"run.resume={policy}")
    with pytest.raises(ConfigError, match=rf"^model\.{line}"):
        rundir.prepare_run_dir(other, run)
    assert run.config.read_bytes() == before
    assert not run.interventions.exists()


def test_a_run_without_a_checkpoint_may_get_another_model(tmp_path: Path) -> None:
    run = start(config(tmp_path, "model.norm=rms"))
    (run.checkpoints / f".{catalog.name_of(10, 0)}.part").mkdir(parents=True)
    changes = rundir.prepare_run_dir(config(tmp_path, "model.norm=layer", "run.resume=changed"), run)
    assert changes == {"model.norm": ["rms", "layer"]}


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_another_base_of_rope_is_accepted_with_a_warning(
    tmp_path: Path, has_checkpoint: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = (start_with_checkpoint if has_checkpoint else lambda root: start(config(root)))(tmp_path)
    changes = rundir.prepare_run_dir(config(tmp_path, "model.rope_theta=500000", "run.resume=changed"), run)
    assert changes == {"model.rope_theta": [10000.0, 500000.0]}
    line = "warning: model.rope_theta was 10000.0, is 500000.0: the weights were trained with 10000.0\n"
    assert capsys.readouterr().err == (line if has_checkpoint else "")
