"""The command line in real processes: exit codes, stderr, and files on disk."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import yaml

from harness.config import compose
from harness.config.key_help import render_keys
from launch.cli.main import COMMANDS, SUMMARIES, exit_code_of, main
from tests.analysis.postmortem import stories
from tests.forks import Launched
from tests.full_disk import fill, may_mount, small_disk
from tests.privileges import obeying_modes

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
        "from launch.cli.main import SUMMARIES, main\n"
        "def code_of(*arguments):\n"
        "    try:\n"
        "        return main(arguments)\n"
        "    except SystemExit as end:\n"
        "        return end.code\n"
        "assert code_of('--help') == 0\n"
        "assert code_of('fly') == 2\n"
        "for name in SUMMARIES:\n"
        "    assert code_of(name, '--help') == 0, name\n"
        "    assert not {'torch', 'hydra', 'omegaconf'} & set(sys.modules), name\n"
        "assert code_of('train', '--cfg', 'job') == 0\n"
        "assert code_of('train', 'optim.lr=-1') == 2\n"
        "assert 'torch' not in sys.modules\n"
        "print('the end')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "the end"), ended.stderr
    assert not list(tmp_path.iterdir())


def test_the_app_of_hydra_takes_the_text_of_a_string_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg", "job", "run.name=1.10"]) == 0
    assert "\n  name: '1.10'\n" in capsys.readouterr().out


def test_a_usage_error_is_one_line_and_exits_2(tmp_path: Path) -> None:
    result = harness("train", "optim.lr=abc", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "harness: optim.lr: must be a number, got 'abc'\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["fly"], f"harness: unknown command 'fly'; choose {COMMANDS}"),
        (["trian"], f"harness: unknown command 'trian'; did you mean train?; choose {COMMANDS}"),
        (["generate"], f"harness: unknown command 'generate'; did you mean sample?; choose {COMMANDS}"),
        (["doctor"], f"harness: unknown command 'doctor'; did you mean health?; choose {COMMANDS}"),
        (["train", "learning_rate=1e-3"], "harness: learning_rate: no such key; the configuration has run, "),
        (["train", "--cfg", "foo"], "harness: --cfg: must be one of job, hydra, all, got 'foo'"),
        (["train", "--cfg", "job", "--multirun"], "harness: --cfg: prints the config of one job; give one value for "),
        (["train", "--mutlirun"], "harness: --mutlirun: no such option; see harness train --help; did you mean --mult"),
        ([], f"harness: missing command; choose {COMMANDS}"),
        *[([name, "--mine"], "harness: ") for name in SUMMARIES],
        (["train", "+foo=1"], "harness: foo: no such key; the configuration has "),
        (["train", "+foo.bar=1"], "harness: foo: no such key; the configuration has "),
        (["train", "run.name=${oc.env:NO_SUCH_NAME}"], "harness: run.name: "),
        (["train", "model=9b"], "harness: model: no '9b'; choose one of "),
        (["train", "model.num_heads=3"], "harness: model.num_heads: must divide model.dim=128, got 3"),
        (
            ["train", "train.batch_size=1", "launch.nproc=2"],
            "harness: train.batch_size: must be at least the number of ranks",
        ),
        (
            ["train", "data=files", "data.sources.main.paths=[absent]", "parallel.device=cpu"],
            "harness: data.sources.main.paths: absent: no such file",
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


@pytest.mark.parametrize("command", ["status", "watch", "diagnose", "postmortem", "verify"])
def test_a_file_that_cannot_be_read_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stories.write(tmp_path / "run", stories.poisoned())
    run.status.write_text('{"iteration": 150, "state": "running"}')
    run.events.chmod(0)
    with obeying_modes():
        assert main([command, str(run.path), *(["--incident", "1"] if command == "verify" else [])]) == 2
    assert capsys.readouterr().err == f"harness: {run.events}: Permission denied\n"


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_disk_that_is_full_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And exit code 75, because the same command may succeed later. The error of a write to an open file has no file
    name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("text")
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{step},3\n" for step in range(9)))
    with small_disk(tmp_path / "disk") as disk:
        stories.write(disk / "run", stories.poisoned())
        fill(disk)
        for command in (
            ["report", "disk"],
            ["postmortem", "disk/run"],
            ["dashboard", "disk/run"],
            ["judge", "log.csv", "--plot", "disk/loss.png"],
            ["data", "prepare", "in.txt", "--output", "disk/corpus", "--workers", "1"],
            ["data", "prepare", "in.txt", "--output", "disk/new/corpus", "--workers", "1"],
        ):
            assert main(command) == 75, command
    lines = capsys.readouterr().err.splitlines()
    full = "No space left on device"
    assert [line.partition(" (")[0] for line in lines] == [
        f"harness: report: {full}",
        f"harness: postmortem: {full}",
        f"harness: disk/run/dashboard.html: cannot be written: {full}",
        f"harness: disk/loss.png: cannot be written: {full}",
        f"harness: disk/corpus: cannot be written: {full}",
        f"harness: disk/new/corpus: cannot be written: {full}",
    ]
    assert "(write_atomically in rundir.py:" in lines[0]


def test_a_directory_with_too_long_a_name_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ("x" * 480)
    assert main(["status", str(path)]) == 2
    assert main(["train", *TINY, f"run.dir={path}"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"harness: {path}/config.yaml: File name too long"
    assert second.startswith(f"harness: {path}/tiny-")
    assert second.endswith(": File name too long")


def test_a_start_is_requeued_only_if_its_storage_failed() -> None:
    assert exit_code_of(OSError(errno.ESTALE, "Stale file handle", "runs")) == 75
    assert exit_code_of(OSError(errno.ENAMETOOLONG, "File name too long", "runs")) == 2
    assert exit_code_of(OSError(errno.ENOSPC, "No space left on device")) == 75
    assert exit_code_of(OSError(errno.EMFILE, "Too many open files")) == 1, "a crash, not a bad path"


def test_ctrl_c_during_imports_is_no_traceback(tmp_path: Path) -> None:
    """Of the module of the command. A process that is started in the background ignores the signal."""
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from launch.cli import main\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'launch.cli.status':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.exit(main.main(['status', 'runs/first']))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (75, "", "")


def test_help_of_train_shows_value_unit_and_meaning_of_each_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "--help", "train.num_steps=70"]) == 0
    text = capsys.readouterr().out
    for part in ("harness train --multirun", "precision: bf16, fp16, fp32", "  num_steps: 70 ", "75 interrupted"):
        assert part in text
    assert "# Updates to apply; a rejected update does not count." in text
    assert main(["train", "--help", "train.num_steps=x"]) == 2


def test_every_key_has_a_meaning_in_the_help() -> None:
    text = render_keys(compose.load(), width=120)
    assert max(map(len, text.splitlines())) <= 120
    without = [line for line in text.splitlines() if ": " in line and "#" not in line]
    assert [line for line in without if not line.startswith("      ") and len(line) < 36] == []


def test_the_help_fits_into_a_narrow_terminal() -> None:
    assert max(map(len, render_keys(compose.load(), width=60).splitlines())) <= 60


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"harness .+, torch \d+\.\d+.*, Python 3\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """`harness --help | head -1`, with more output than a pipe holds."""
    script = (
        "import sys\n"
        "from launch.cli import main\n"
        "main.help_text = lambda: 'line\\n' * 100_000\n"
        "sys.exit(main.main(['--help']))\n"
    )
    command = f'"{sys.executable}" -c "$SCRIPT" | head -1; exit ${{PIPESTATUS[0]}}'
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SCRIPT": script}
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "line\n", "")


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
        "from harness.config import compose, conf_files; print(conf_files.conf_dir());"
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


@pytest.mark.full
def test_a_run_without_a_name_says_how_to_resume_it(tmp_path: Path) -> None:
    arguments = [*TINY, "train.num_steps=100000", f"run.dir={tmp_path}/runs", "checkpoint.ring.shared_dir=null"]
    with Launched("launch.cli.main", "train", *arguments, output=tmp_path / "output") as process:
        until = time.monotonic() + 200
        while not any('"step"' in path.read_text() for path in tmp_path.glob("runs/*/events.jsonl")):
            assert time.monotonic() < until, process.stderr
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 75
    (run,) = (tmp_path / "runs").glob("tiny-*")
    assert process.stderr.endswith(f"harness: resume with the same command and run.name={run.name}\n")
