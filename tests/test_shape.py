"""The shape of the house: who may import whom, one door per library, and budgets that keep rooms small.

The tables below are the rule; a change of shape is a change of this file, with its reason in the commit.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    {"children", "config", "compose", "events", "garbage", "loading", "shares", "state", "rundir"}
    | {"credentials", "holder", "lease", "locks", "run_lease"},
    {"alone", "compute_clock", "fp8", "heads", "joining", "parallel", "precision", "sharding", "kernels"},
    {"model", "data", "optim", "sentinel", "checkpoint", "telemetry"},
    {
        "build",
        "commands",
        "exchange",
        "held_out",
        "opening",
        "operator",
        "orders",
        "planned",
        "recovery",
        "requests",
        "run",
        "run_data",
        "step",
        "train",
        "watching",
    },
    {"plan", "replay", "faults", "drills", "sweeps", "dashboard", "evidence"},
)
"""Rooms of harness/ from the vocabulary up: a room imports its own layer and lower ones; leaves never each other."""
LEAVES = LAYERS[2]

DOORS = {
    "hydra": {"harness/compose.py", "launch/train.py"},
    "omegaconf": {"harness/compose.py", "launch/train.py"},
    "mlflow": {"harness/telemetry/mlflow_run.py", "harness/telemetry/mlflow_sink.py"},
    "matplotlib": {
        "harness/telemetry/picture.py",
        "harness/telemetry/verdict.py",
        "harness/drills/mechanism_picture.py",
        "harness/sweeps/picture.py",
        "harness/evidence/axes.py",
        "harness/evidence/panels.py",
    },
    "rich": {"harness/telemetry/console.py", "launch/progress.py", "launch/watch.py"},
    "plotly": {"harness/dashboard/page.py"},
    "markdown_it": {"harness/dashboard/markdown.py"},
    "tokenizers": {"harness/data/tokenizer.py"},
    "zstandard": {"harness/data/text.py"},
    "pyarrow": {"harness/data/text.py"},
    "safetensors": {"harness/exchange.py"},
    "torch.distributed": {
        "harness/parallel.py",
        "harness/precision.py",
        "harness/alone.py",
        "harness/joining.py",
        "harness/sharding.py",
        "harness/checkpoint/description.py",
        "harness/checkpoint/store.py",
        "launch/agent.py",
        "launch/local.py",
        "launch/ranks.py",
    },
    "triton": {
        f"harness/kernels/{name}.py" for name in ("gradients", "lists", "rotation", "rounding", "state", "swiglu")
    },
    "transformer_engine": {"harness/fp8/transformer_engine.py"},
    "transformer_engine_torch": {"harness/fp8/transformer_engine.py"},
}
"""Library -> the only files that may import it."""

LIGHT = (
    "harness.children",
    "harness.config",
    "harness.compose",
    "harness.events",
    "harness.loading",
    "harness.shares",
    "harness.state",
    "harness.rundir",
    "harness.run_lease",
    "harness.model.mup",
    "harness.model.size",
    "harness.data.order",
    "harness.data.ledger",
    "harness.data.mixture",
    "harness.data.index",
    "harness.data.prepare",
    "harness.optim.schedule",
    "harness.sentinel.slots",
    "harness.sentinel.baseline",
    "harness.sentinel.detectors",
    "harness.sentinel.policy",
    "harness.sentinel.incidents",
    "harness.sentinel.foreign",
    "harness.checkpoint.integrity",
    "harness.checkpoint.catalog",
    "harness.checkpoint.cadence",
    "harness.telemetry.heartbeat",
    "harness.commands",
    "harness.requests",
    "harness.watching",
    "harness.plan.fit",
    "harness.plan.plan",
    "harness.plan.render",
    "harness.faults.plan",
    "harness.replay.history",
    "harness.replay.verdict",
    "harness.replay.words",
    "launch.replay",
    "harness.drills.scenario",
    "harness.drills.score",
    "harness.drills.card",
    "harness.drills.campaign",
    "harness.drills.layout",
    "harness.evidence.write",
    "harness.evidence.diagnose",
    "harness.sweeps.record",
    "harness.sweeps.result",
    "harness.sweeps.ranking",
    "harness.sweeps.render",
    "harness.sweeps.picture",
    "launch.cli",
    "launch.train",
    "launch.jobs",
    "launch.ports",
    "launch.multirun",
    "launch.crew",
    "launch.sweep",
    "launch.data",
    "launch.checkpoint",
    "launch.ctl",
    "launch.drill",
    "launch.drilling",
    "launch.stage",
    "launch.campaign",
    "launch.judge",
    "launch.diagnose",
    "launch.postmortem",
    "launch.plan",
    "launch.slurm",
    "launch.layout",
    "launch.requeue",
    "launch.health",
    "launch.status",
    "launch.node",
    "launch.muster",
    "launch.supervisor",
    "launch.dashboard",
    "launch.watch",
    "launch.report",
    "harness.dashboard.serve",
    "harness.dashboard.index",
)
"""Modules that must not import torch: the command line and offline tools answer at once."""

STEP_PATH = (
    *("alone.py", "compute_clock.py", "heads.py", "held_out.py", "joining.py", "parallel.py", "precision.py"),
    *("recovery.py", "sharding.py", "step.py", "train.py", "checkpoint/ring.py"),
    *("fp8/", "kernels/", "model/", "optim/", "sentinel/"),
)
"""Files and packages of harness/ whose code runs in a step: a copy from the device to the host is marked there."""

DECIDING = ("build", "opening", "operator", "recovery", "step", "train")
"""Modules in which a rank takes a branch, beside the sentinel and the checkpoints."""

FILE_LINES, FUNCTION_LINES, NUM_ARGUMENTS = 300, 80, 8
LONG_FILES = {
    "harness/checkpoint/integrity.py": "what is damage, and what is not, is told in one place",
    "harness/checkpoint/keeper.py": "what is saved, tainted and deleted when",
    "harness/checkpoint/store.py": "a checkpoint is written and read in one file",
    "harness/exchange.py": "export and import",
    "harness/config.py": "one tree, one file: every option with its unit and limits",
    "harness/compose.py": "the door to Hydra",
    "harness/telemetry/console.py": "everything that is printed",
    "harness/events.py": "one vocabulary, one file: everything that can happen in a run",
    "harness/train.py": "the loop, and everything that it decides",
    "harness/data/batches.py": "which rows a rank reads, and what it says of them",
    "harness/dashboard/story.py": "one fold of the log: every kind of event that the page shows",
    "harness/data/ledger.py": "the file, its entries, and the order of the batches that follows from them",
    "harness/sentinel/chart.py": "one fold: every event that the policy knows of",
    "harness/sentinel/policy.py": "one ladder: every answer and when it is given",
}
TRAIN_LOOP_LINES = 60


def sources() -> list[Path]:
    return sorted([*ROOT.glob("harness/**/*.py"), *ROOT.glob("launch/**/*.py")])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Full names that a file imports, at any depth."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)


def room(path: Path) -> str:
    return path.relative_to(ROOT / "harness").parts[0].removesuffix(".py")


def test_every_room_has_a_layer() -> None:
    rooms = {room(path) for path in ROOT.glob("harness/**/*.py")} - {"__init__"}
    assert rooms == set().union(*LAYERS)


def assert_none(violations: Iterable[str]) -> None:
    """Report all violations of a rule at once."""
    found = list(violations)
    assert not found, "\n" + "\n".join(found)


def test_imports_are_absolute() -> None:
    assert_none(
        f"{name_of(path)}:{node.lineno}: relative import"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.level
    )


def upward_imports(path: Path) -> Iterator[str]:
    """Packages that a file of harness/ imports from a higher layer or from another leaf."""
    yield from {name.split(".")[0] for name in imports(path)} & {"launch", "tests"}
    here = room(path)
    if here == "__init__":
        return
    level = next(index for index, rooms in enumerate(LAYERS) if here in rooms)
    allowed = set().union(*LAYERS[: level + 1])
    if here in LEAVES:
        allowed -= LEAVES - {here}
    yield from {name.split(".")[1] for name in imports(path) if name.startswith("harness.")} - allowed


def test_imports_point_down() -> None:
    assert_none(
        f"{name_of(path)} imports {upward}"
        for path in sorted(ROOT.glob("harness/**/*.py"))
        for upward in upward_imports(path)
    )


def test_each_library_has_one_door() -> None:
    assert_none(
        f"{name_of(path)} imports {name}; {library} enters through {', '.join(sorted(doors))} only"
        for path in sources()
        for name in imports(path)
        for library, doors in DOORS.items()
        if (name == library or name.startswith(f"{library}.")) and name_of(path) not in doors
    )


def test_python_is_started_by_one_door() -> None:
    """`harness.children` keeps the working directory out of what a child process imports."""
    assert_none(
        f"{name_of(path)}:{node.lineno}: starts Python; harness.children does that"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.List)
        and name_of(path) != "harness/children.py"
        and "sys.executable" in map(ast.unparse, node.elts)
    )


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_stay_small() -> None:
    assert_none(
        f"{name_of(path)} has {num_lines(path)} lines"
        for path in sources()
        if num_lines(path) > FILE_LINES and name_of(path) not in LONG_FILES
    )


def test_functions_stay_small() -> None:
    def complaints(path: Path) -> Iterator[str]:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{name_of(path)}: {node.name} has {length} lines"
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            is_kernel = any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
            if count > NUM_ARGUMENTS and not is_kernel:
                yield f"{name_of(path)}: {node.name} takes {count} arguments"

    assert_none(complaint for path in sources() for complaint in complaints(path))


def test_exceptions_are_needed() -> None:
    assert_none(f"{name} is short again" for name in LONG_FILES if num_lines(ROOT / name) <= FILE_LINES)


def test_the_loop_reads_aloud() -> None:
    train = next(
        node
        for node in ast.walk(tree(ROOT / "harness/train.py"))
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    )
    assert train.end_lineno is not None
    assert train.end_lineno - train.lineno < TRAIN_LOOP_LINES


def test_modules_have_docstrings() -> None:
    """An `__init__.py` is one line of docstring and nothing else."""

    def complaints(path: Path) -> Iterator[str]:
        docstring = ast.get_docstring(tree(path))
        if not docstring:
            yield f"{name_of(path)} has no docstring"
        elif path.name == "__init__.py" and (len(tree(path).body) > 1 or "\n" in docstring):
            yield f"{name_of(path)} is more than one docstring line"

    assert_none(complaint for path in sources() for complaint in complaints(path))


def numbered(path: Path) -> Iterator[tuple[str, str]]:
    """Each line with its file and number."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        yield f"{name_of(path)}:{number}", line


def test_host_copies_are_marked() -> None:
    """A device-to-host copy in the step path gives its reason on its line."""
    copies = (".item()", ".tolist()", ".cpu()", ".synchronize()", ".numpy()")
    assert_none(
        f"{place}: {line.strip()}"
        for path in sources()
        if name_of(path).removeprefix("harness/").startswith(STEP_PATH)
        for place, line in numbered(path)
        if any(copy in line for copy in copies) and "# sync:" not in line
    )


def test_a_mark_stands_where_something_is_copied() -> None:
    """The mark allows a copy (`tests/no_sync.py`). No other line has it."""
    copies = (".item()", ".tolist()", ".synchronize(", ".numpy()", "int(", "bool(")
    assert_none(
        f"{place}: {line.strip()}"
        for path in sources()
        for place, line in numbered(path)
        if "# sync:" in line and not any(copy in line for copy in copies)
    )


def test_what_decides_does_not_see_what_one_rank_alone_knows() -> None:
    """Detectors, policy, checkpoints, recovery and the loop take a `ReducedRecord`; a `StepRecord` also has the clock,
    the memory and the rows of one rank."""
    logged = {"harness/sentinel/report.py", "harness/sentinel/judged.py", "harness/sentinel/foreign.py"}
    rooms = ("harness/sentinel/", "harness/checkpoint/", *(f"harness/{name}.py" for name in DECIDING))
    assert_none(
        f"{name_of(path)} imports StepRecord"
        for path in sources()
        if name_of(path).startswith(rooms) and name_of(path) not in logged
        if "harness.events.StepRecord" in imports(path)
    )


def test_light_modules_do_without_torch() -> None:
    program = f"import sys, {', '.join(LIGHT)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_leaves_agree_on_the_target_that_is_ignored() -> None:
    """Data writes it, the loss reads it, and neither may import the other."""
    from harness.data import batch
    from harness.model import loss

    assert batch.IGNORED == loss.IGNORED
