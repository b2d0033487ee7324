"""The command line in real processes: exit codes, stderr, and files on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from harness.config import compose
from launch.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[3]
TINY = [
    "train.num_steps=2",
    "train.batch_size=2",
    "train.sequence_length=16",
    "model.dim=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=32",
    "optim.warmup_steps=1",
    "launch.nproc=1",
    "launch.threads=1",
    "eval.every_steps=0",
    "telemetry=plain",
    "telemetry.picture=no",
    "parallel.device=cpu",
]


def harness(
    *arguments: str, cwd: Path, module: str = "launch.cli.main", within_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=within_s, check=False
    )


def test_help_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from launch.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        "assert main(['fly']) == 2\n"
        "assert all(main([name, '--help']) == 0 for name in ('drill', 'data', 'checkpoint', 'ctl', 'plan', 'sweep'))\n"
        "assert not {'torch', 'hydra'} & set(sys.modules)\n"
        "assert main(['train', '--cfg', 'job']) == 0\n"
        "assert main(['train', 'optim.lr=-1']) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True)
    assert not list(tmp_path.iterdir())


def test_a_usage_error_is_one_line_and_exits_2(tmp_path: Path) -> None:
    result = harness("train", "optim.lr=abc", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "harness: optim.lr: must be a number, got 'abc'\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["fly"], f"harness: unknown command 'fly'; choose {COMMANDS}"),
        ([], f"harness: missing command; choose {COMMANDS}"),
        (["train", "+foo=1"], "harness: foo: no such key; the configuration has "),
        (["train", "model=9b"], "harness: model: no '9b'; choose one of "),
        (["train", "model.num_heads=3"], "harness: model.num_heads: must divide model.dim=128, got 3"),
        (
            ["train", "train.batch_size=1", "launch.nproc=2"],
            "harness: train.batch_size: must be at least the number of ranks",
        ),
    ],
)
def test_usage_errors_are_one_line(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(line)
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_of_train(tmp_path: Path) -> None:
    result = harness("train", "--help", cwd=tmp_path)
    assert result.returncode == 0
    for part in ("harness train --multirun", "precision: bf16, fp16, fp32", "  num_steps: 200", "75 interrupted"):
        assert part in result.stdout


@pytest.mark.parametrize("module", ["launch.cli.main", "launch.train"])
def test_both_entry_points_compose_alike(module: str, tmp_path: Path) -> None:
    overrides = ["+experiment=1b_bf16", "optim.lr=1e-5", "run.name=x"]
    prefix = ["train"] if module == "launch.cli.main" else []
    result = harness(*prefix, "--cfg", "job", "--resolve", *overrides, cwd=tmp_path, module=module)
    assert yaml.safe_load(result.stdout) == compose.plain(compose.load(overrides))


def test_a_rerun_resumes_and_another_config_is_rejected(tmp_path: Path) -> None:
    command = ["train", *TINY, "run.name=again"]
    assert harness(*command, cwd=tmp_path).returncode == 0
    config = (tmp_path / "runs" / "again" / "config.yaml").read_text()
    result = harness(*command, "optim.lr=0.5", cwd=tmp_path)
    assert result.returncode == 2
    (error,) = result.stderr.splitlines()
    assert error.startswith("harness: run.name: runs/again has another configuration: optim.lr was 0.003, is 0.5;")
    assert (tmp_path / "runs" / "again" / "config.yaml").read_text() == config


@pytest.mark.full
def test_the_wheel_contains_conf_scripts_and_data(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = (
        "from harness.config import compose; print(compose.conf_dir());"
        "compose.load(['model=7b', '+experiment=rare_tail'])"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == str(tmp_path / "site" / "harness" / "conf")
    assert (tmp_path / "site" / "harness" / "slurm" / "train.sbatch").exists(), "job scripts"
    assert (tmp_path / "site" / "harness" / "analysis" / "dashboard" / "page.js").exists(), (
        "files of the dashboard page"
    )
    assert (tmp_path / "site" / "harness" / "data" / "corpus" / "embedded.json.gz").exists(), "embedded text"
