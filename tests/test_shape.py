"""Rules of the tree: which package may import which, where each library is imported, the size of functions.

The tables below are the rules. A change of the rules is a change of this file, with its reason in the commit.
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
    {
        "build",
        "control",
        "held_out",
        "huggingface",
        "planned_changes",
        "recomputation",
        "recovery",
        "remote_resume",
        "resume",
        "run",
        "run_corpus",
    }
    | {"start_check", "step", "train", "trials"},
    {"faults", "drills", "analysis"},
)
"""Packages and modules of harness/, lowest layer first. Each imports from its layer and lower ones only; packages in
`LEAVES` do not import each other."""
LEAVES = LAYERS[4]

LIBRARY_IMPORTERS = {
    "hydra": {"harness/config/compose.py", "harness/config/explain.py", "launch/train.py"},
    "omegaconf": {"harness/config/compose.py", "harness/config/explain.py", "launch/train.py"},
    "mlflow": {"harness/telemetry/sinks/mlflow_run.py", "harness/telemetry/sinks/mlflow_sink.py"},
    "wandb": {"harness/telemetry/sinks/wandb_sink.py"},
    "tensorboard": {"harness/telemetry/sinks/tensorboard_sink.py"},
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
    "fsspec": {"harness/core/object_store.py"},
    "aiohttp": {"harness/core/object_store.py"},
    "tokenizers": {"harness/data/prepare/tokenizer.py"},
    "zstandard": {"harness/data/prepare/documents.py"},
    "pyarrow": {"harness/data/prepare/documents.py"},
    "lm_eval": {"harness/analysis/evaluation/task_runner.py"},
    "transformers": {"harness/analysis/evaluation/task_runner.py"},
    "datasets": {"harness/data/prepare/streamed.py"},
    "safetensors": {"harness/huggingface/convert.py"},
    "torch.distributed": {
        "harness/distributed/world.py",
        "harness/distributed/collectives.py",
        "harness/distributed/exchange.py",
        "harness/distributed/shards.py",
        "harness/precision/mixed_precision.py",
        "harness/distributed/reduce_scatter.py",
        "harness/distributed/torch_private/chunk_cat.py",
        "harness/distributed/torch_private/fsdp_collectives.py",
        "harness/distributed/torch_private/fsdp_param.py",
        "harness/distributed/torch_private/group_timeout.py",
        "harness/distributed/torch_private/storage_info.py",
        "harness/distributed/fsdp.py",
        "harness/checkpoint/tensor_index.py",
        "harness/checkpoint/saver.py",
        "harness/checkpoint/store.py",
        "launch/local/agent.py",
        "launch/local/start.py",
        "launch/local/this_machine.py",
        "launch/local/ranks.py",
    },
    "triton": {f"harness/kernels/{path.name}" for path in ROOT.glob("harness/kernels/*.py")},
    "transformer_engine": {"harness/precision/fp8/te_backend.py", "harness/precision/te_attention.py"},
    "transformer_engine_torch": {"harness/precision/fp8/te_backend.py"},
}
"""Library -> the only files that may import it."""

TORCH_PRIVATE = "harness/distributed/torch_private/"
"""The only package that may import private names of torch: one file per API, each with a test that detects changes."""

TORCH_FREE_MODULES = (
    "harness.core.child_process",
    "harness.core.processes",
    "harness.core.stderr_lines",
    "harness.config.schema",
    "harness.config.compose",
    "harness.core.event_json",
    "harness.core.events",
    "harness.core.fast_imports",
    "harness.core.batch_shares",
    "harness.core.batch_sizes",
    "harness.core.state",
    "harness.core.rundir",
    "harness.core.locking.run_lease",
    "harness.core.memory_limits",
    "harness.core.object_store",
    "harness.core.safe_stream",
    "harness.core.snapshot_files",
    "harness.config.key_help",
    "harness.model.mup",
    "harness.model.size",
    "harness.data.order.order",
    "harness.data.order.ledger",
    "harness.data.order.mixture",
    "harness.data.corpus.token_files",
    "harness.data.prepare.prepare",
    "harness.optim.matrix_owners",
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
    "harness.telemetry.sinks.__main__",
    "harness.telemetry.alerts.alert_sink",
    "harness.control.inbox",
    "harness.control.order_effect",
    "harness.control.stop_requests",
    "harness.control.watcher",
    "harness.analysis.plan.fit",
    "harness.analysis.plan.plan",
    "harness.analysis.plan.plan_text",
    "harness.analysis.plan.machine_memory",
    "harness.faults.fault_plan",
    "harness.analysis.replay.history",
    "harness.analysis.replay.verdict",
    "harness.analysis.replay.replay_text",
    "launch.cli.replay",
    "harness.drills.scenario",
    "harness.drills.score",
    "harness.drills.score_card",
    "harness.drills.campaign",
    "harness.drills.infrastructure_campaign",
    "harness.drills.recovery_times",
    "harness.drills.directories",
    "harness.analysis.postmortem.write",
    "harness.analysis.postmortem.endings",
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
    "launch.cli.sample",
    "launch.local.banner",
    "launch.cli.data",
    "launch.cli.checkpoint",
    "launch.cli.ctl",
    "launch.cli.drill",
    "launch.drills.runner",
    "launch.drills.fault_environment",
    "launch.drills.infrastructure_run",
    "launch.cli.campaign",
    "launch.cli.judge",
    "launch.cli.diagnose",
    "launch.cli.postmortem",
    "launch.cli.verify",
    "launch.cli.plan",
    "launch.slurm.submit",
    "launch.slurm.job_directory",
    "launch.slurm.requeue",
    "launch.slurm.node_health",
    "launch.health.link_check",
    "launch.health.node_check",
    "launch.cli.health",
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
"""Modules that must not import torch, so that the command line and the offline tools start fast."""

STEP_PATH = (
    *("held_out.py", "recovery.py", "start_check.py", "step.py", "train.py", "checkpoint/ring.py"),
    *("distributed/", "kernels/", "model/", "optim/", "precision/", "sentinel/"),
)
"""Files and packages of harness/ whose code runs in a step: device-to-host copies need a mark there."""

BRANCHING_MODULES = ("build.py", "control/", "recovery.py", "resume.py", "start_check.py", "step.py", "train.py")
"""Modules in which a rank branches on a decision, in addition to the sentinel and the checkpoints."""

SHARED_NAMES = {"main", "build_parser", "render", "read", "write", "draw", "load", "as_json", "as_text", "as_markdown"}
"""Public functions that mean the same in every module."""
OPERATORS = {"forward", "backward"}
"""Parts of a custom operator."""
NAMED_BY_SUBJECT = ("harness/config/", "launch/cli/", "harness/kernels/", "harness/distributed/torch_private/")
"""Packages with one file per config section, command, kernel or torch API."""

FUNCTION_LINES, NUM_ARGUMENTS = 80, 8
TRAIN_LOOP_LINES = 60


def sources() -> list[Path]:
    return sorted([*ROOT.glob("harness/**/*.py"), *ROOT.glob("launch/**/*.py")])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Full names that a file imports, at any depth."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(parse_file(path)):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)


def package_of(path: Path) -> str:
    return path.relative_to(ROOT / "harness").parts[0].removesuffix(".py")


def test_every_package_has_a_layer() -> None:
    packages = {package_of(path) for path in ROOT.glob("harness/**/*.py")} - {"__init__"}
    assert packages == set().union(*LAYERS)


def assert_none(violations: Iterable[str]) -> None:
    """Report all violations of a rule at once."""
    found = list(violations)
    assert not found, "\n" + "\n".join(found)


def test_imports_are_absolute() -> None:
    assert_none(
        f"{name_of(path)}:{node.lineno}: relative import"
        for path in sources()
        for node in ast.walk(parse_file(path))
        if isinstance(node, ast.ImportFrom) and node.level
    )


def upward_imports(path: Path) -> Iterator[str]:
    """Packages that a file of harness/ imports from a higher layer or from another leaf."""
    yield from {name.split(".")[0] for name in imports(path)} & {"launch", "tests"}
    package = package_of(path)
    if package == "__init__":
        return
    level = next(index for index, packages in enumerate(LAYERS) if package in packages)
    allowed = set().union(*LAYERS[: level + 1])
    if package in LEAVES:
        allowed -= LEAVES - {package}
    yield from {name.split(".")[1] for name in imports(path) if name.startswith("harness.")} - allowed


def test_imports_point_down() -> None:
    assert_none(
        f"{name_of(path)} imports {upward}"
        for path in sorted(ROOT.glob("harness/**/*.py"))
        for upward in upward_imports(path)
    )


def test_there_are_no_import_cycles() -> None:
    """Between modules, imports inside functions included."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources()}
    imported = {module: {name for name in imports(path) if name in modules} for module, path in modules.items()}
    while independent := [module for module, others in imported.items() if not others & imported.keys()]:
        for module in independent:
            del imported[module]
    assert_none(
        f"{module} imports {', '.join(sorted(others & imported.keys()))}" for module, others in imported.items()
    )


def test_training_does_not_import_the_offline_tools() -> None:
    assert_none(
        f"{name_of(path)} imports {name}"
        for path in sorted(ROOT.glob("harness/**/*.py"))
        if package_of(path) not in LAYERS[-1]
        for name in imports(path)
        if name.startswith(tuple(f"harness.{offline}" for offline in LAYERS[-1]))
    )


def test_each_library_is_imported_in_one_place() -> None:
    assert_none(
        f"{name_of(path)} imports {name}; only {', '.join(sorted(importers))} may import {library}"
        for path in sources()
        for name in imports(path)
        for library, importers in LIBRARY_IMPORTERS.items()
        if (name == library or name.startswith(f"{library}.")) and name_of(path) not in importers
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


def test_python_is_started_in_one_place() -> None:
    """`harness.core.processes` keeps the working directory out of the import path of a child process."""
    assert_none(
        f"{name_of(path)}:{node.lineno}: starts Python; only harness.core.processes may"
        for path in sources()
        for node in ast.walk(parse_file(path))
        if isinstance(node, ast.List)
        and name_of(path) != "harness/core/processes.py"
        and "sys.executable" in map(ast.unparse, node.elts)
    )


def test_functions_stay_small() -> None:
    def violations_in(path: Path) -> Iterator[str]:
        for node in ast.walk(parse_file(path)):
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

    assert_none(violation for path in sources() for violation in violations_in(path))


def test_the_train_loop_is_short() -> None:
    train = next(
        node
        for node in ast.walk(parse_file(ROOT / "harness/train.py"))
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    )
    assert train.end_lineno is not None
    assert train.end_lineno - train.lineno < TRAIN_LOOP_LINES


def test_modules_have_docstrings() -> None:
    """An `__init__.py` is one line of docstring and nothing else."""

    def violations_in(path: Path) -> Iterator[str]:
        docstring = ast.get_docstring(parse_file(path))
        if not docstring:
            yield f"{name_of(path)} has no docstring"
        elif path.name == "__init__.py" and (len(parse_file(path).body) > 1 or "\n" in docstring):
            yield f"{name_of(path)} is more than one docstring line"

    assert_none(violation for path in sources() for violation in violations_in(path))


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


def test_a_sync_mark_is_on_a_line_that_copies() -> None:
    """The mark allows a copy (`tests/no_sync.py`); it must not be on any other line."""
    copies = (".item()", ".tolist()", ".synchronize(", ".numpy()", "int(", "bool(")
    assert_none(
        f"{place}: {line.strip()}"
        for path in sources()
        for place, line in numbered(path)
        if "# sync:" in line and not any(copy in line for copy in copies)
    )


def test_decisions_do_not_depend_on_rank_local_facts() -> None:
    """Detectors, policy, checkpoints, recovery and the loop take a `ReducedRecord`; a `StepRecord` also has the
    times, the memory and the rows of one rank."""
    logged = {
        "harness/sentinel/device/step_report.py",
        "harness/sentinel/policy/log_events.py",
        "harness/control/order_checks.py",
        "harness/control/order_effect.py",
    }
    packages = ("harness/sentinel/", "harness/checkpoint/", *(f"harness/{name}" for name in BRANCHING_MODULES))
    assert_none(
        f"{name_of(path)} imports StepRecord"
        for path in sources()
        if name_of(path).startswith(packages) and name_of(path) not in logged
        if "harness.core.events.StepRecord" in imports(path)
    )


def test_torch_free_modules_do_not_import_torch() -> None:
    program = f"import sys, {', '.join(TORCH_FREE_MODULES)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_data_and_loss_agree_on_the_ignored_target() -> None:
    """Data writes it and the loss reads it; neither may import the other."""
    from harness.data import batch
    from harness.model import loss

    assert batch.IGNORED == loss.IGNORED


def places_by_name(places: Iterable[tuple[str, str]]) -> Iterator[str]:
    """One line for each name with more than one place."""
    found: dict[str, list[str]] = {}
    for name, place in places:
        found.setdefault(name, []).append(place)
    yield from (f"{name}: {', '.join(where)}" for name, where in found.items() if len(where) > 1)


def test_public_names_have_one_meaning() -> None:
    """No two public functions or classes share a name."""
    assert_none(
        places_by_name(
            (node.name, name_of(path))
            for path in sources()
            for node in parse_file(path).body
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
