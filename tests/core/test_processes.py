"""Tests that subprocesses import the harness's own code, even if the working directory has modules of these names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from harness.analysis.postmortem.write import MARKDOWN
from harness.core.rundir import locate, prepare_run_dir
from harness.telemetry.postmortem_process import PostmortemProcess
from launch.sweeps import scheduler
from launch.sweeps.scheduler import ResourceSlot
from tests import composed
from tests.analysis.postmortem import stories
from tests.launch.cli.test_main import ROOT, TINY

pytestmark = pytest.mark.full

STRAY = ("harness/__init__.py", "launch/__init__.py", "json.py")
TRAP = """\
import sys
with open({trapped!r}, "a") as log: print(__file__, "in", sys.orig_argv, file=log)
raise ImportError("trapped")
"""
START_SUBPROCESS = """\
import subprocess
from harness.core import processes
subprocess.run(processes.command("print_harness_path"), env=processes.child_environment(), cwd="/", check=True)
"""
PRINT_HARNESS_PATH = """\
import harness, json, os
print(json.dumps([harness.__file__, os.environ.get("PYTHONPATH")]))
"""


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log that gets a line whenever a stray module of the working directory is imported."""
    log, directory = tmp_path / "trapped", tmp_path / "working_directory"
    for name in STRAY:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(TRAP.format(trapped=str(log)))
    monkeypatch.chdir(directory)
    return log


def read_log(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def test_a_post_mortem_ignores_stray_modules(trapped: Path, tmp_path: Path) -> None:
    run = stories.write(tmp_path / "run", stories.poisoned())
    writer = PostmortemProcess(run)
    writer.on_event(stories.ended())
    written = writer.finish(60)
    assert read_log(trapped) == ""
    assert written
    assert (run.incidents / "001" / MARKDOWN).exists()


def test_a_run_and_its_sink_process_ignore_stray_modules(trapped: Path, tmp_path: Path) -> None:
    """The launcher of a sweep's job, its rank, and the rank's sink process."""
    overrides = [*TINY, f"run.dir={tmp_path / 'runs'}", "run.name=job", "telemetry.mlflow=true"]
    overrides.append("telemetry.exit_wait_s=200")
    cfg = composed.load(overrides)
    run = locate(cfg)
    prepare_run_dir(cfg, run)
    with scheduler.lock_sweep(tmp_path) as lock:
        codes, _ = scheduler.run_jobs([run], [ResourceSlot(threads=1)], lock, lambda *_: None)
    assert read_log(trapped) == ""
    assert codes == {"job": 0}, (run.logs / "console.txt").read_text()
    assert json.loads(run.mlflow.read_text())["run_id"]


def find_harness(python: Path | str, cwd: Path, search_path: str | None) -> tuple[str, str | None]:
    """Where a process started in `cwd` finds the harness, and its PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {} if search_path is None else {"PYTHONPATH": search_path}
    done = subprocess.run(
        [python, "-c", START_SUBPROCESS], cwd=cwd, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    found, python_path = json.loads(done.stdout)
    return found, python_path


@pytest.mark.parametrize(
    ("search_path_before", "inherited"),
    [
        (None, "{directory}"),
        ("", "{directory}"),
        ("/a:/b", "{directory}:/a:/b"),
        ("{directory}:/a", "{directory}:/a"),
        ("/a:{directory}", "{directory}:/a"),
    ],
)
def test_a_copy_of_the_code_imports_itself(search_path_before: str | None, inherited: str, tmp_path: Path) -> None:
    """The copy is found, although the default search path of Python has the code of the tests."""
    (tmp_path / "harness").symlink_to(ROOT / "harness")
    (tmp_path / "print_harness_path.py").write_text(PRINT_HARNESS_PATH)
    search_path = None if search_path_before is None else search_path_before.format(directory=tmp_path)
    found = str(tmp_path / "harness" / "__init__.py")
    assert find_harness(sys.executable, tmp_path, search_path) == (found, inherited.format(directory=tmp_path))


def test_an_installed_package_needs_no_entry_in_pythonpath(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "harness").symlink_to(ROOT / "harness")
    (site / "print_harness_path.py").write_text(PRINT_HARNESS_PATH)
    found = str(site / "harness" / "__init__.py")
    assert find_harness(tmp_path / "venv" / "bin" / "python", tmp_path, None) == (found, None)
    assert find_harness(tmp_path / "venv" / "bin" / "python", tmp_path, "/a") == (found, "/a")
