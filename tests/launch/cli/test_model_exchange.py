"""`harness checkpoint export` and `import`: output and exit codes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.analysis.replay import history
from harness.analysis.replay.request import choose_path
from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.core.event_json import read
from harness.core.events import RunStarted
from harness.core.rundir import RunDir
from launch.cli.model_exchange import export_command, import_command
from tests import composed
from tests.huggingface.test_convert import make_run

ROOT = Path(__file__).parents[3]
SHORT = [
    "train.num_steps=2",
    "train.batch_size=2",
    "train.sequence_length=16",
    "optim.warmup_steps=1",
    "launch.nproc=1",
    "launch.threads=1",
    "eval.every_steps=0",
    "telemetry=plain",
    "telemetry.picture=no",
    "parallel.device=cpu",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one run, `first`, with a good checkpoint of step 5 and a newer one of step 10."""
    directory = tmp_path_factory.mktemp("runs")
    run, _, _ = make_run(directory / "first", "model.qk_norm=true", "model.tied_head=true", steps=(5, 10))
    catalog.mark(run.checkpoints / "step-00000005-gen-0", Health.good, "a test")
    return directory


def test_arguments_are_checked_before_torch_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from launch.cli.model_exchange import export_command, import_command\n"
        "assert export_command(['gone', '--output', 'x']) == 2\n"
        "assert import_command(['gone', 'x']) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert result.stderr == "harness: gone: is not a run directory\nharness: gone: is not a directory\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["first"], "checkpoint export: the following arguments are required: --output; see --help"),
        (["first", "--output", "/"], "--output: must be the name of a new directory, got '/'"),
        (["first", "--output", "first"], "--output: first exists; choose another name"),
        (["first", "--output", "x", "--dtype", "fp8"], "checkpoint export: argument --dtype: invalid choice: 'fp8'"),
        (["first", "--output", "x", "--step", "7"], "--step: no checkpoint of step 7; there are step-00000005-gen-0, "),
        (
            ["first", "--output", "x", "--checkpoint", "y"],
            "--checkpoint: no checkpoint 'y'; there are step-00000005-gen-0, ",
        ),
        (["first", "--output", "x", "--checkpoint", "y", "--step", "7"], "checkpoint export: argument --step: not all"),
        ([".", "--output", "x"], ".: has no checkpoint"),
        (["first", "--output", "first/config.yaml/x"], "--output: cannot create first/config.yaml/.x.part: Not a dir"),
    ],
)
def test_a_bad_export_is_one_line(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], line: str
) -> None:
    monkeypatch.chdir(runs)
    assert export_command(args) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"harness: {line}")
    assert shown.err.count("\n") == 1
    assert not shown.out
    assert [path.name for path in runs.iterdir()] == ["first"]


def test_export_prints_what_it_wrote(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [str(runs / "first"), "--output"]
    assert export_command([*args, str(tmp_path / "good")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "checkpoint  step-00000005-gen-0, good",
        "weights     0.000 GB of fp32 in 1 file",
        "tokenizer   none beside the data of the run",
        f"output      {tmp_path / 'good'}",
    ]
    assert export_command([*args, str(tmp_path / "newest"), "--step", "10", "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.startswith(
        "checkpoint  step-00000010-gen-0, candidate\nweights     0.000 GB of bf16"
    )
    small, large = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("newest", "good"))
    assert small < large


def test_a_damaged_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, _ = make_run(tmp_path / "run")
    path = run.checkpoints / "step-00000005-gen-0" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert export_command([str(run.path), "--output", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"harness: {path}: has ")
    assert error.count("\n") == 1


@pytest.mark.full
def test_a_run_starts_from_an_imported_model(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export_command([str(runs / "first"), "--output", "model"]) == 0
    capsys.readouterr()
    assert import_command(["model", "runs/second"]) == 0
    first, _, command = capsys.readouterr().out.splitlines()
    assert first == "checkpoint  runs/second/checkpoints/step-00000000-gen-0"
    assert import_command(["model", "runs/second"]) == 2
    assert "already has checkpoints" in capsys.readouterr().err

    program, train, *overrides = shlex.split(command)
    assert (program, train) == ("harness", "train")
    model = composed.load(overrides).model
    assert (model.dim, model.num_kv_heads, model.qk_norm, model.tied_head) == (32, 2, True, True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    args = [sys.executable, "-m", "launch.cli.main", "train", *overrides, *SHORT]
    result = subprocess.run(args, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    run = RunDir(Path("runs/second"))
    (started,) = [event for event in read(run.events) if isinstance(event, RunStarted)]
    assert started.resumed_from == "step-00000000-gen-0"
    assert started.step == 0
    assert choose_path(run, history.read(run.events), 1).checkpoint == "step-00000000-gen-0", "a replay begins with it"
