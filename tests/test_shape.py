"""The shape of the code: who may import whom, one door per library, functions that stay small.

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
    {"config", "core"},
    {"kernels"},
    {"precision"},
    {"distributed"},
    {"model", "data", "optim", "sentinel", "checkpoint", "telemetry"},
    {"build", "control", "held_out", "huggingface", "planned_changes", "recovery", "resume", "run", "run_corpus"}
    | {"step", "train"},
    {"faults", "drills", "analysis"},
)
"""Packages and modules of harness/, lowest first: each imports its layer and lower ones; leaves never each other."""
LEAVES = LAYERS[4]

DOORS = {
    "hydra": {"harness/config/compose.py", "launch/train.py"},
    "omegaconf": {"harness/config/compose.py", "launch/train.py"},
    "mlflow": {"harness/telemetry/tracking/mlflow_run.py", "harness/telemetry/tracking/mlflow_sink.py"},
    "matplotlib": {
        "harness/telemetry/run_picture.py",
        "harness/analysis/judge/judge_picture.py",
        "harness/analysis/sweeps/sweep_picture.py",
        "harness/analysis/postmortem/report/axes.py",
        "harness/analysis/postmortem/report/panels.py",
    },
    "rich": {"harness/telemetry/console.py", "launch/cli/progress_bar.py", "launch/cli/watch.py"},
    "plotly": {"harness/analysis/dashboard/page.py"},
    "markdown_it": {"harness/analysis/markdown_html.py"},
    "tokenizers": {"harness/data/prepare/tokenizer.py"},
    "zstandard": {"harness/data/prepare/documents.py"},
    "pyarrow": {"harness/data/prepare/documents.py"},
    "safetensors": {"harness/huggingface/convert.py"},
    "torch.distributed": {
        "harness/distributed/world.py",
        "harness/distributed/collectives.py",
        "harness/distributed/shards.py",
        "harness/precision/mixed_precision.py",
        "harness/distributed/reduce_scatter.py",
        "harness/distributed/torch_private/chunk_cat.py",
        "harness/distributed/torch_private/fsdp_collectives.py",
        "harness/distributed/torch_private/fsdp_param.py",
        "harness/distributed/torch_private/storage_info.py",
        "harness/distributed/fsdp.py",
        "harness/checkpoint/tensor_index.py",
        "harness/checkpoint/store.py",
        "launch/local/agent.py",
        "launch/local/start.py",
        "launch/local/ranks.py",
    },
    "triton": {f"harness/kernels/{path.name}" for path in ROOT.glob("harness/kernels/*.py")},
    "transformer_engine": {"harness/precision/fp8/te_backend.py"},
    "transformer_engine_torch": {"harness/precision/fp8/te_backend.py"},
}
"""Library -> the only files that may import it."""

TORCH_PRIVATE = "harness/distributed/torch_private/"
"""The only package that may import private names of torch: one file per API, each with a canary test."""

LIGHT = (
    "harness.core.processes",
    "harness.config.schema",
    "harness.config.compose",
    "harness.core.events",
    "harness.core.fast_imports",
    "harness.core.batch_shares",
    "harness.core.state",
    "harness.core.rundir",
    "harness.core.locking.run_lease",
    "harness.model.mup",
    "harness.model.size",
    "harness.data.order.order",
    "harness.data.order.ledger",
    "harness.data.order.mixture",
    "harness.data.corpus.token_files",
    "harness.data.prepare.prepare",
    "harness.optim.schedule",
    "harness.sentinel.device.slots",
    "harness.sentinel.detect.baseline",
    "harness.sentinel.detect.detectors",
    "harness.sentinel.policy.policy",
    "harness.analysis.judge.incident_groups",
    "harness.analysis.judge.foreign_logs",
    "harness.checkpoint.integrity",
    "harness.checkpoint.catalog",
    "harness.checkpoint.ring_cost",
    "harness.telemetry.heartbeat",
    "harness.control.inbox",
    "harness.control.stop_requests",
    "harness.control.watcher",
    "harness.analysis.plan.fit",
    "harness.analysis.plan.plan",
    "harness.analysis.plan.plan_text",
    "harness.faults.fault_plan",
    "harness.analysis.replay.history",
    "harness.analysis.replay.verdict",
    "harness.analysis.replay.replay_text",
    "launch.cli.replay",
    "harness.drills.scenario",
    "harness.drills.score",
    "harness.drills.score_card",
    "harness.drills.campaign",
    "harness.drills.directories",
    "harness.analysis.postmortem.write",
    "harness.analysis.diagnose.decision_tree",
    "harness.analysis.sweeps.sweep_record",
    "harness.analysis.sweeps.job_result",
    "harness.analysis.sweeps.ranking",
    "harness.analysis.sweeps.sweep_text",
    "harness.analysis.sweeps.sweep_picture",
    "launch.cli.main",
    "launch.train",
    "launch.sweeps.jobs",
    "launch.local.ports",
    "launch.sweeps.multirun",
    "launch.sweeps.scheduler",
    "launch.cli.sweep",
    "launch.cli.data",
    "launch.cli.checkpoint",
    "launch.cli.ctl",
    "launch.cli.drill",
    "launch.drills.runner",
    "launch.drills.fault_environment",
    "launch.cli.campaign",
    "launch.cli.judge",
    "launch.cli.diagnose",
    "launch.cli.postmortem",
    "launch.cli.plan",
    "launch.slurm.submit",
    "launch.slurm.job_directory",
    "launch.slurm.requeue",
    "launch.slurm.node_health",
    "launch.cli.status",
    "launch.local.node",
    "launch.local.rendezvous",
    "launch.local.supervisor",
    "launch.cli.dashboard",
    "launch.cli.watch",
    "launch.cli.report",
    "harness.analysis.dashboard.serve",
    "harness.analysis.dashboard.index",
)
"""Modules that must not import torch: the command line and offline tools answer at once."""

STEP_PATH = (
    *("held_out.py", "recovery.py", "step.py", "train.py", "checkpoint/ring.py"),
    *("distributed/", "kernels/", "model/", "optim/", "precision/", "sentinel/"),
)
"""Files and packages of harness/ whose code runs in a step: a copy from the device to the host is marked there."""

DECIDING = ("build.py", "control/", "recovery.py", "resume.py", "step.py", "train.py")
"""Modules in which a rank takes a branch, beside the sentinel and the checkpoints."""

SHARED_NAMES = {"main", "build_parser", "render", "read", "write", "draw", "load", "as_json", "as_text", "as_markdown"}
"""Public functions that mean the same in every module."""
OPERATORS = {"forward", "backward"}
"""Parts of a custom operator."""
NAMED_BY_SUBJECT = ("harness/config/", "launch/cli/", "harness/kernels/", "harness/distributed/torch_private/")
"""Packages with one file a subject: its config section, command, kernel or torch API."""

FUNCTION_LINES, NUM_ARGUMENTS = 80, 8
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


def test_no_import_goes_in_a_circle() -> None:
    """Between modules, imports inside functions included."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources()}
    below = {module: {name for name in imports(path) if name in modules} for module, path in modules.items()}
    while removable := [module for module, others in below.items() if not others & below.keys()]:
        for module in removable:
            del below[module]
    assert_none(f"{module} imports {', '.join(sorted(others & below.keys()))}" for module, others in below.items())


def test_training_does_not_import_the_offline_tools() -> None:
    assert_none(
        f"{name_of(path)} imports {name}"
        for path in sorted(ROOT.glob("harness/**/*.py"))
        if room(path) not in LAYERS[-1]
        for name in imports(path)
        if name.startswith(tuple(f"harness.{offline}" for offline in LAYERS[-1]))
    )


def test_each_library_has_one_door() -> None:
    assert_none(
        f"{name_of(path)} imports {name}; {library} enters through {', '.join(sorted(doors))} only"
        for path in sources()
        for name in imports(path)
        for library, doors in DOORS.items()
        if (name == library or name.startswith(f"{library}.")) and name_of(path) not in doors
    )


def test_private_torch_imports_are_in_one_package() -> None:
    """A private name is an import path of torch with a component that begins with an underscore."""
    assert_none(
        f"{name_of(path)} imports {name}; only {TORCH_PRIVATE} may"
        for path in sources()
        for name in imports(path)
        if name.split(".")[0] == "torch"
        and any(component.startswith("_") for component in name.split("."))
        and not name_of(path).startswith(TORCH_PRIVATE)
    )


def test_python_is_started_by_one_door() -> None:
    """`harness.core.processes` keeps the working directory out of what a child process imports."""
    assert_none(
        f"{name_of(path)}:{node.lineno}: starts Python; harness.core.processes does that"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.List)
        and name_of(path) != "harness/core/processes.py"
        and "sys.executable" in map(ast.unparse, node.elts)
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
    logged = {
        "harness/sentinel/device/step_report.py",
        "harness/sentinel/policy/log_events.py",
        "harness/control/inbox.py",
    }
    rooms = ("harness/sentinel/", "harness/checkpoint/", *(f"harness/{name}" for name in DECIDING))
    assert_none(
        f"{name_of(path)} imports StepRecord"
        for path in sources()
        if name_of(path).startswith(rooms) and name_of(path) not in logged
        if "harness.core.events.StepRecord" in imports(path)
    )


def test_light_modules_do_without_torch() -> None:
    program = f"import sys, {', '.join(LIGHT)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_leaves_agree_on_the_target_that_is_ignored() -> None:
    """Data writes it, the loss reads it, and neither may import the other."""
    from harness.data import batch
    from harness.model import loss

    assert batch.IGNORED == loss.IGNORED


def places_by_name(places: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Names with more than one place, as lines."""
    found: dict[str, list[str]] = {}
    for name, place in places:
        found.setdefault(name, []).append(place)
    yield from (f"{name}: {', '.join(where)}" for name, where in found.items() if len(where) > 1)


def test_public_names_have_one_meaning() -> None:
    """Two public functions or classes with one name make a reader guess which one is meant."""
    assert_none(
        places_by_name(
            (node.name, name_of(path))
            for path in sources()
            for node in tree(path).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if node.name not in SHARED_NAMES | OPERATORS
        )
    )


def test_file_names_have_one_meaning() -> None:
    exceptions = {"__init__.py", "__main__.py", "train.py"}
    assert_none(
        places_by_name(
            (path.name, name_of(path))
            for path in sources()
            if path.name not in exceptions and not name_of(path).startswith(NAMED_BY_SUBJECT)
        )
    )
