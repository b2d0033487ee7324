"""Every measured figure of the README and the docs names a measurement whose command exists."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.cli import main
from tests.bench.claims import (
    PAGE,
    ROOT,
    SHOWN_ON,
    Block,
    Run,
    all_blocks,
    find_contradictions,
    find_unmarked,
    load_runs,
    parse_blocks,
    render,
)
from tests.composed import load

RUNS, BLOCKS = load_runs(), all_blocks()
COMMANDS = sorted({command for run in RUNS.values() for command in run.commands})
OPTION = re.compile(r"^--[a-z]")


def build_run(name: str, **quantities: str) -> Run:
    return Run(
        name=name, what="", shown_on="gpu", hardware="", date="2026-11-16", commands=(), quantities=dict(quantities)
    )


def test_blocks_that_look_measured_name_a_measurement() -> None:
    assert find_unmarked(BLOCKS) == []


def test_names_on_pages_and_in_the_list_are_the_same() -> None:
    assert {name for block in BLOCKS for name in block.runs} == set(RUNS)


def test_no_quantity_has_two_values() -> None:
    assert find_contradictions(RUNS) == []


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_entry_is_complete(run: Run) -> None:
    """Its values appear in a block that names it; it has a date, hardware and commands."""
    text = "\n".join(block.text for block in BLOCKS if run.name in block.runs)
    assert [quantity for quantity, value in run.quantities.items() if value not in text] == []
    assert run.shown_on in SHOWN_ON
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", run.date)
    assert run.hardware
    assert run.commands


def problem_of(command: str) -> str:
    """Why a command cannot be run; empty if it can."""
    parts = shlex.split(command.rpartition(" | ")[2])
    try:
        match parts:
            case ["python", "-m", module, *arguments]:
                return problem_of_module(module, arguments)
            case ["harness", name, *arguments]:
                return problem_of_harness(name, arguments)
            case ["pytest", *nodes]:
                return "; ".join(filter(None, map(problem_of_node, nodes)))
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "neither python -m, harness nor pytest"


def problem_of_module(name: str, arguments: Sequence[str]) -> str:
    """Check that the module can be imported and has each option, and that its overrides are valid."""
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    missing = [each for each in arguments if OPTION.match(each) and f'"{each}"' not in source]
    if missing:
        return f"{name} has no option {', '.join(missing)}"
    if hasattr(module, "parse_args"):
        with contextlib.redirect_stderr(io.StringIO()) as output:
            try:
                module.parse_args(list(arguments))
            except SystemExit:
                return output.getvalue().strip()
    return problem_of_overrides(arguments)


def problem_of_harness(name: str, arguments: Sequence[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        main.main([name, *(each for each in arguments[:1] if each.isalpha()), "--help"])
    missing = [each for each in arguments if OPTION.match(each) and each not in output.getvalue()]
    if not output.getvalue():
        return f"harness has no command {name}"
    return f"harness {name} has no option {', '.join(missing)}" if missing else problem_of_overrides(arguments)


def problem_of_overrides(arguments: Sequence[str]) -> str:
    load([each for each in arguments if "=" in each and not each.startswith("--")])
    return ""


def problem_of_node(node: str) -> str:
    name, *functions = node.split("::")
    if not (ROOT / name).exists():
        return f"{name} does not exist"
    defined = {
        each.name for each in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(each, ast.FunctionDef)
    }
    return ", ".join(f"{name} has no {function}" for function in functions if function not in defined)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command: str) -> None:
    assert problem_of(command) == ""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m tests.bench.nothing", "ModuleNotFoundError: No module named 'tests.bench.nothing'"),
        ("python -m tests.bench.cpu --turns 4", "tests.bench.cpu has no option --turns"),
        ("python -m tests.bench.checkpoint --rounds 0", "must be at least 1"),
        ("python -m tests.bench.sentinel optim.rate=3", "optim.rate"),
        ("harness drills all", "no command drills"),
        ("harness plan --planets 8", "has no option --planets"),
        ("pytest tests/plan/test_nothing.py", "tests/plan/test_nothing.py does not exist"),
        ("pytest tests/analysis/plan/test_shadow.py::test_nothing", "has no test_nothing"),
        ("make coffee", "neither"),
    ],
)
def test_a_command_that_does_not_exist_is_reported(command: str, expected: str) -> None:
    assert expected in problem_of(command)


def test_figures_of_prose_and_tables() -> None:
    page = """# Title

About 8 x 4096 tokens in 3 steps, `--rounds 6`, 4.5 ms, +0.24 % (1.7x, x1.95, 350-fold) at 82,210 tokens/s.

| | a | b |
|---|---|---|
| row 5 | 63,741, 63.4 GiB | 1.057 (1.05 to 1.06) |

| code | meaning |
|---|---|
| 1 | ends with 75 |

    63.4 GiB in code
"""
    prose, table, codes = parse_blocks("page.md", page)
    assert prose.figures == ("4.5 ms", "+0.24 %", "1.7x", "x1.95", "350-fold", "82,210 tokens/s")
    assert table.figures == ("63,741", "63.4 GiB", "1.057", "1.05", "1.06")
    assert (codes.figures, codes.looks_measured) == (("75",), False)
    assert find_unmarked([prose, table, codes]) == [
        "page.md:3: 4.5 ms, +0.24 %, 1.7x, x1.95, 350-fold, 82,210 tokens/s: no measurement is named for these figures",
        "page.md:5: 63,741, 63.4 GiB, 1.057, 1.05, 1.06: no measurement is named for these figures",
    ]


def test_comments_apply_to_a_block_or_to_a_section() -> None:
    page = """## One

<!-- claims: a, b -->

1 ms

<!-- no claim: a limit -->
2 ms

3 ms

### Below

4 ms

## Two

5 ms

<!-- claims: c -->
| | x |
|---|---|
| | 6.0 |
"""
    found = [(block.heading, block.line, block.kind, block.runs) for block in parse_blocks("page.md", page)]
    assert found == [
        ("One", 5, "claims", ("a", "b")),
        ("One", 8, "no claim", ()),
        ("One", 10, "claims", ("a", "b")),
        ("Below", 14, "claims", ("a", "b")),
        ("Two", 18, "", ()),
        ("Two", 21, "claims", ("c",)),
    ]


def test_two_values_for_one_quantity_are_reported() -> None:
    first, same, other = (
        build_run("first", speed="1.05"),
        build_run("same", speed="1.05"),
        build_run("other", speed="2"),
    )
    assert find_contradictions({"first": first, "same": same}) == []
    assert find_contradictions({"first": first, "other": other}) == ["speed: 1.05 in first, 2 in other"]


def test_rendered_page() -> None:
    run = Run(
        name="gpu-table",
        what="tokens/s",
        shown_on="gpu",
        hardware="one NVIDIA H200",
        date="2026-11-16",
        commands=("python -m tests.bench.gpu --models 1b",),
        quantities={"tokens/s, bf16": "63,741"},
    )
    block = Block("README.md", "Measured", 3, "63,741 tokens/s, 5.5 ms", "claims", "gpu-table")
    table = Block("docs/speed.md", "Step: 1b", 9, f"| | |\n|---|---|\n| a {'| 5 ms ' * 13}|", "claims", "gpu-table")
    assert render({"gpu-table": run}, [block, table]).splitlines()[5:] == [
        "## Shown on: one GPU",
        "",
        "### gpu-table: tokens/s",
        "",
        "one NVIDIA H200; 2026-11-16.",
        "",
        "    python -m tests.bench.gpu --models 1b",
        "",
        "| quantity | value |",
        "|---|---|",
        "| tokens/s, bf16 | 63,741 |",
        "",
        "- [README.md, Measured](../README.md#measured): 63,741 tokens/s; 5.5 ms",
        "- [docs/speed.md, Step: 1b](speed.md#step-1b): 13 figures",
    ]


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(RUNS, BLOCKS), "python -m tests.bench.claims --write"
