"""The summary of `python -m tests.gpu`: real runs of pytest, in parts, of which one is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu.summary import passed_tests, read_newest, render

CASES = """
import os, signal
import pytest

@pytest.mark.xdist_group("shared")
def test_good(): pass
def test_depends():
    print("text of the test")
    assert "MENDED" in os.environ
@pytest.mark.skip(reason="needs two devices")
def test_two(): pass
def test_last():
    if "KILLED" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
"""
PART = """
import sys
from pathlib import Path
import pytest
from tests.gpu.summary import Recorder
options = ["-q", "--disable-plugin-autoload", "-p", "xdist.plugin", "-p", "no:cacheprovider", *sys.argv[2:]]
sys.exit(pytest.main(options, plugins=[Recorder(Path(sys.argv[1]), "one GPU")]))
"""


def run_part(directory: Path, *arguments: str, **environment: str) -> int:
    """Run the cases with the recorder in a process of its own; returns its exit code."""
    command = [sys.executable, "-c", PART, "results.jsonl", *arguments, "test_cases.py"]
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        command, cwd=directory, env=os.environ | {"PYTHONPATH": root} | environment, capture_output=True, check=False
    )
    return done.returncode


def test_parts_add_up_and_a_part_that_was_killed_counts_as_far_as_it_came(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    results = tmp_path / "results.jsonl"
    assert run_part(tmp_path, "-n", "1", "--dist", "loadgroup", "-k", "good") == 0
    assert passed_tests(results) == ["test_cases.py::test_good"], "without the group that xdist appends"
    assert run_part(tmp_path, KILLED="1") < 0
    table = render(results)
    assert table.startswith("one GPU\n\n| file | passed | failed | skipped | seconds |\n")
    assert "| all | 1 | 1 | 1 |" in table
    assert "1 skipped: needs two devices\n\nfailed: test_cases.py::test_depends\n    E       AssertionError" in table
    assert "text of the test" not in table, "printed by the test, and only in the file"
    assert "text of the test" in read_newest(results)["test_cases.py::test_depends"]["reason"]
    assert run_part(tmp_path, "-k", "depends or last", MENDED="1") == 0
    table = render(results)
    assert "| test_cases.py | 3 | 0 | 1 |" in table
    assert "failed:" not in table
