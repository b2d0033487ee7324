"""The banner of a start names everything that a start decides, and fits into the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import Health
from harness.config.schema import Config
from harness.core.event_json import to_json
from harness.core.events import Event, RunEnded, RunStarted
from harness.core.rundir import RunDir, locate
from harness.telemetry.console import clock
from launch.local.banner import banner_rows, finished_line, render_banner, sentinel_preset, time_text
from tests.composed import load
from tests.sentinel.series import record

SHARD = "__0_0.distcp"
LABELS = ["model", "batch", "length", "ranks", "precision", "data", "sentinel", "checkpoints", "time", "run"]


def config(runs: Path, *overrides: str) -> Config:
    return load([f"run.dir={runs}", "run.name=first", *overrides])


def started(step: int = 0) -> RunStarted:
    return RunStarted(time=1.0, iteration=0, world_size=2, num_steps=200, step=step, resumed_from=None)


def ended(step: int, exit_code: int = 0) -> RunEnded:
    return RunEnded(time=2.0, iteration=step, step=step, exit_code=exit_code, reason="all steps done")


def write_log(cfg: Config, *events: Event) -> None:
    run = locate(cfg)
    run.checkpoints.mkdir(parents=True)
    for step in (100, 200):
        write_checkpoint(run, step)
    run.events.write_text("".join(f"{to_json(event)}\n" for event in events))


def write_checkpoint(run: RunDir, step: int) -> None:
    path = run.checkpoints / catalog.name_of(step, 0)
    path.mkdir()
    (path / SHARD).write_bytes(b"weights")
    files = integrity.hash_files(path, [SHARD])
    manifest = integrity.Manifest(
        step=step, generation=0, iteration=step, tokens=step, time=1.0, world_size=2, files=files
    )
    integrity.write_checkpoint_manifest(path, manifest)


def test_all_rows_of_a_new_run(tmp_path: Path) -> None:
    rows = banner_rows(config(tmp_path), [], nproc=2, num_nodes=1, is_gpu=False)
    assert list(rows) == LABELS
    assert rows["model"] == "tiny, 804k parameters"
    assert rows["batch"] == "8 sequences of 256 = 2,048 tokens a step"
    assert rows["length"] == "200 steps, 409,600 tokens"
    assert rows["ranks"] == "2 ranks, CPU, sharded over 2"
    assert (rows["precision"], rows["data"], rows["sentinel"]) == ("fp32", "main (embedded)", "default")
    assert rows["checkpoints"] == "every 100 steps, 2 kept; 3 snapshots in memory, every 10 steps"
    assert rows["time"] == "not known before the first steps"
    assert rows["run"] == f"{tmp_path}/first (new)"


def test_rows_of_a_larger_run(tmp_path: Path) -> None:
    cfg = config(tmp_path, "data=mixture", "parallel.replicate=2", "checkpoint.every_minutes=30")
    rows = banner_rows(cfg, [], nproc=4, num_nodes=2, is_gpu=True)
    assert rows["ranks"] == "8 ranks, 1 GPU each, 2 nodes, 2 replicas sharded over 4"
    shared = config(tmp_path, "launch.ranks_per_gpu=4")
    rehearsal = banner_rows(shared, [], nproc=4, num_nodes=1, is_gpu=True)["ranks"]
    assert rehearsal == "4 ranks, 4 on each GPU: a rehearsal, collectives go over loopback, sharded over 4"
    assert rows["data"] == "text (embedded) 50%, synthetic (synthetic) 50%, 1 planned phases"
    assert rows["checkpoints"].startswith("every 100 steps or every 30 minutes")
    fast = config(tmp_path, "precision=bf16", "parallel.compile=true", "run.deterministic=true")
    precision = banner_rows(fast, [], nproc=1, num_nodes=1, is_gpu=True)["precision"]
    assert precision == "bf16, compiled, deterministic"


@pytest.mark.parametrize("width", [60, 130])
def test_the_banner_fits_into_a_terminal(width: int) -> None:
    cfg = config(Path("runs"), "data=mixture", "sentinel.detect.gate_sigmas=12")
    lines = render_banner(cfg, nproc=8, is_gpu=True, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == LABELS
    assert (len(lines) > len(LABELS)) is (width == 60)


def test_a_resume_names_the_newest_state_it_may_begin_from(tmp_path: Path) -> None:
    """Snapshots in memory need the same number of ranks, so it may be an older checkpoint."""
    rows = banner_rows(config(tmp_path), [started(), ended(57, exit_code=75)], nproc=1, num_nodes=1, is_gpu=False)
    assert rows["run"] == f"{tmp_path}/first (resumes from the newest state up to step 57)"


def test_sentinel_presets_and_changes_are_named() -> None:
    assert sentinel_preset(load().sentinel) == "default"
    strict = load(["sentinel=strict"]).sentinel
    assert sentinel_preset(strict) == "strict"
    changed = replace(strict, detect=replace(strict.detect, gate_sigmas=12.0))
    assert sentinel_preset(changed) == "strict with detect.gate_sigmas=12.0"


def test_time_comes_from_the_last_start_or_from_the_plan(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    step = replace(record(99, 2.0), step=100, step_time_s=0.5, tokens_per_s=8 * 256 / 0.5)
    assert time_text(cfg, [started(), step], world_size=2, is_gpu=False) == "about 0:50 at the speed of the last start"
    planned = load(["cluster.peak_tflops=900"])
    assert time_text(planned, [], world_size=1, is_gpu=True).endswith(" by the plan")
    assert time_text(planned, [], world_size=1, is_gpu=False) == "not known before the first steps"


def test_time_of_a_batch_size_warmup_counts_tokens() -> None:
    """Half of the run is left, 50 batches of 2 and 450 of 8 sequences; the last step had 2."""
    cfg = load(["train.num_steps=1000", "train.batch_size_warmup=[{until_batch: 550, batch_size: 2}]"])
    step = replace(record(499, 2.0), step=500, step_time_s=1.0, tokens_per_s=2 * 256 / 1.0)
    num_s = 50 + 450 * 4
    text = time_text(cfg, [started(), step], world_size=2, is_gpu=False)
    assert text == f"about {clock(num_s)} at the speed of the last start"


def test_a_model_too_large_for_a_cpu_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.local.banner.num_cores", lambda: 2)
    text = time_text(load(["model=125m", "train.num_steps=200"]), [], world_size=2, is_gpu=False)
    assert text == "about 0:32 per step on this CPU and 1:47:18 in all, at 20 GFLOP/s per core"


def test_only_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    assert finished_line(cfg) == ""
    write_log(cfg, started(), ended(200))
    assert finished_line(cfg).startswith(f"{tmp_path}/first: all 200 steps are done; nothing to do.")
    assert finished_line(config(tmp_path, "train.num_steps=300", "run.resume=changed")) == ""
    shorter = finished_line(config(tmp_path, "train.num_steps=100", "run.resume=changed"))
    assert shorter.startswith(f"{tmp_path}/first: 200 steps are done, more than train.num_steps=100; nothing to do.")
    locate(cfg).events.write_text("".join(f"{to_json(event)}\n" for event in (started(), ended(150, exit_code=75))))
    assert finished_line(cfg) == ""
    locate(cfg).events.write_text("".join(f"{to_json(event)}\n" for event in (started(), ended(200), started(200))))
    assert finished_line(cfg) == ""


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / SHARD).write_bytes(b"wei"),
        lambda path: (path / SHARD).unlink(),
        lambda path: (path / integrity.MANIFEST).write_text("{}"),
        lambda path: catalog.mark(path, Health.tainted, "test"),
        catalog.quarantine,
        shutil.rmtree,
    ],
    ids=["truncated", "file missing", "manifest", "tainted", "quarantined", "gone"],
)
def test_a_finished_run_without_its_last_checkpoint_starts_again(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    cfg = config(tmp_path)
    write_log(cfg, started(), ended(200))
    damage(locate(cfg).checkpoints / catalog.name_of(200, 0))
    assert finished_line(cfg) == ""
