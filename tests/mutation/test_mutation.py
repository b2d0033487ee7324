"""The mutation runner: the mutants of each kind of statement, and complete runs on a small module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import ROOT
from tests.mutation.mutants import Mutator
from tests.mutation.tables import list_files, load_equivalents, suite_for

LIMITED = """
def clamp(value: float, limit: float = 2.5) -> float:
    return min(value, limit)


def is_over(value: float) -> bool:
    return value > 2.5


def in_a_process() -> int:
    return 7
"""
TESTS_OF_LIMITED = """
import subprocess
import sys

from limited import clamp, is_over

def test_clamp():
    assert (clamp(3.0), clamp(1.0)) == (2.5, 1.0)

def test_is_over():
    assert is_over(3.0)
    assert not is_over(2.0)

def test_in_a_process():
    assert subprocess.run([sys.executable, "-c", "import limited; assert limited.in_a_process() == 7"]).returncode == 0
"""


def list_changes(source: str) -> list[tuple[str, str]]:
    return [(mutant.before, mutant.after) for mutant in Mutator(source).mutants]


@pytest.mark.parametrize(
    ("statement", "after"),
    [
        ("y = a < b", ["y = a <= b", "y = a >= b"]),
        ("y = a == b", ["y = a != b"]),
        ("y = a in b", ["y = a not in b"]),
        ("y = a and b", ["y = a or b", "y = b", "y = a"]),
        ("y = a or b or c", ["y = a and b and c", "y = b or c", "y = a or c", "y = a or b"]),
        ("y = not a", ["y = a"]),
        ("y = -a", ["y = a"]),
        ("y = a + b", ["y = a - b"]),
        ("y = a * b", ["y = a / b"]),
        ("y = 3", ["y = 4", "y = 2"]),
        ("y = 0.5", ["y = 1.0", "y = 0.0"]),
        ("y = 0.0", ["y = 1.0"]),
        ("y = True", ["y = False"]),
        ("y = max(a)", ["y = min(a)"]),
        ("y = max(a, default=b)", ["y = max(a)", "y = min(a, default=b)"]),
        ("y += a", ["pass", "y -= a"]),
        ("a.b = c", ["pass"]),
        ("a.b(c)", ["pass"]),
        ("del a[b]", ["pass"]),
        ("y = a if b else c", ["y = a if not b else c"]),
        ("y = [a for a in b if c]", ["y = [a for a in b if not c]"]),
        ("if a: b = c", ["if not a:"]),
        ("def f(): return (a, b)", ["return (b, a)", "return None"]),
        ("def f() -> bool: return a.b", ["return not a.b"]),
        ("def f(): yield a", ["if False:"]),
        ("def f(a=1): b = a", ["def f(a=2):", "def f(a=0):"]),
        ("def f(a, b=c): d = a\nf(a, b=d)", ["pass", "f(a)"]),
        ("raise ValueError(1)", ["pass"]),
    ],
)
def test_a_statement_has_these_mutants(statement: str, after: list[str]) -> None:
    assert [changed for _, changed in list_changes(statement)] == after


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring of 1 line."""',
        'y: int | None = "a text"',
        "def f(a: tuple[1, 2]) -> dict[3, 4]: b = a",
        'y = f"{a + 1} of {b:.2f}"',
        "assert a > 0, 1 + 2",
        "@dataclass(slots=True)\nclass A:\n    b: int",
        "class A:\n    def __repr__(self): return a + b",
        "import a.b",
        "y = None",
    ],
)
def test_code_without_tested_behaviour_is_not_mutated(source: str) -> None:
    assert list_changes(source) == []


def test_a_mutant_is_one_change_of_the_whole_file() -> None:
    mutator = Mutator(LIMITED)
    original = mutator.source().splitlines()
    for mutant in mutator.mutants:
        changed = mutator.source(mutant).splitlines()
        lines = [(old.strip(), new.strip()) for old, new in zip(original, changed, strict=True) if old != new]
        assert lines == [(mutant.before, mutant.after)]
    assert mutator.source().splitlines() == original


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.mutation", "--root", str(folder), *arguments]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture
def limited(tmp_path: Path) -> Path:
    (tmp_path / "limited.py").write_text(LIMITED)
    (tmp_path / "test_limited.py").write_text(TESTS_OF_LIMITED)
    return tmp_path


@pytest.mark.full
def test_survivors_are_named_and_no_file_changes(limited: Path) -> None:
    code, output = run(limited, "limited.py", "--tests", "test_limited.py", "--jobs", "2")
    assert code == 0, output
    assert "limited.py: 11 of 11 mutants, 10 killed (0 by the timeout), 0 equivalent, 1 survived" in output
    assert "limited.py:7 (is_over) survived\n  - return value > 2.5\n  + return value >= 2.5\n" in output
    assert "| limited.py | 11 | 10 | 0 | 1 | 91% |" in output
    assert (limited / "limited.py").read_text() == LIMITED
    program = "import limited; assert limited.in_a_process() == 7 and limited.is_over(2.6)"
    assert subprocess.run([sys.executable, "-c", program], cwd=limited, check=False).returncode == 0, (
        "stale bytecode was cached"
    )


@pytest.mark.full
def test_a_recorded_equivalent_is_counted_separately_and_must_survive(tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text("def is_over(value: float) -> bool:\n    return value > 2.5\n")
    tests = "from limited import is_over\n\ndef test_is_over():\n    assert is_over(3.0) and not is_over(2.0)\n"
    (tmp_path / "test_limited.py").write_text(tests)
    entry = """[[equivalent]]
file = "limited.py"
function = "is_over"
before = "return value > 2.5"
after = "return value {operator} 2.5"
reason = "a test"
"""
    record = tmp_path / "equivalent.toml"
    record.write_text(entry.format(operator=">=") + entry.format(operator="<="))
    code, output = run(tmp_path, "limited.py", "--tests", "test_limited.py", "--equivalent", str(record), "--jobs", "2")
    assert code == 1, "one of the two is killed"
    assert "3 killed (0 by the timeout), 1 equivalent, 0 survived" in output
    assert "limited.py:2 (is_over) KILLED, but recorded as equivalent" in output


@pytest.mark.full
def test_a_mutant_that_hangs_is_killed(tmp_path: Path) -> None:
    """Every mutant of this module hangs, so that the result does not depend on the speed of the machine."""
    (tmp_path / "hanging.py").write_text("def wait(flag=False):\n    while flag: pass\n")
    (tmp_path / "test_hanging.py").write_text("from hanging import wait\n\ndef test_wait():\n    wait()\n")
    code, output = run(tmp_path, "hanging.py", "--tests", "test_hanging.py", "--timeout", "0.3", "--jobs", "2")
    assert code == 0, output
    assert "hanging.py: 2 of 2 mutants, 2 killed (2 by the timeout), 0 equivalent, 0 survived" in output


@pytest.mark.full
def test_tests_that_fail_unchanged_are_an_error(limited: Path) -> None:
    (limited / "test_limited.py").write_text("def test_fails():\n    assert False\n")
    code, output = run(limited, "limited.py", "--tests", "test_limited.py")
    assert code == 1
    assert "its tests fail without any mutation: test_limited.py" in output


@pytest.mark.full
def test_every_file_has_tests_and_every_equivalent_is_a_mutant() -> None:
    for file in list_files(ROOT):
        assert all((ROOT / each.partition("::")[0]).exists() for each in suite_for(file))
    recorded = load_equivalents()
    for file in {each.file for each in recorded}:
        mutants = Mutator((ROOT / file).read_text(encoding="utf-8")).mutants
        known = {(mutant.function, mutant.before, mutant.after) for mutant in mutants}
        assert {each[1:] for each in recorded if each.file == file} <= known
