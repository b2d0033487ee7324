"""What remains of a start that failed: the message on the terminal, its end in the status and the log, and nothing of a
run that was rejected.
"""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

from harness.config.errors import (
    EXIT_CRASHED,
    EXIT_INTERRUPTED,
    ConfigError,
    StorageError,
)
from harness.core.events import EndCause
from harness.core.locking.lease_holder import DEFAULT_LEASE_S
from harness.core.locking.run_lease import hold, holding
from harness.core.node_name import machine_name
from harness.core.rundir import RunDir
from harness.telemetry.event_log import log_size, record_crash
from harness.telemetry.heartbeat import mark_ended
from launch.local import hang_report
from launch.local.node_group import NodeFailure, NodeGroup
from launch.local.ranks import RankFailure, RankLogs, render_failure, run_exit_code

HANG_FILE = "hang.txt"


def record_failure(run: RunDir, code: int, failure: NodeFailure) -> bool:
    """Write to status and log how a start ended that could not do it itself; all ranks are gone by now.

    Returns whether the log has the end.
    """
    mark_ended(run, code, failure.line)
    cause = EndCause(failure.cause)
    if code in (EXIT_CRASHED, EXIT_INTERRUPTED) and cause is not EndCause.unknown:
        return record_crash(run, code, failure.line, cause)
    return False


def remove_rejected_run(run: RunDir, existing: set[Path], start_name: str) -> None:
    """Remove what a rejected start has created: its run directory, if it is new, nothing was logged, and no other start
    uses it. The launcher holds the lease meanwhile, so that no other start can train there."""
    if run.path in existing:
        return
    with suppress(ConfigError, StorageError), holding():
        hold(run.path, DEFAULT_LEASE_S)
        if log_size(run.events) > 0:
            return
        with suppress(OSError):
            for directory in run.logs.glob(f"{start_name}*"):
                shutil.rmtree(directory)
            run.logs.rmdir()  # fails if another start has logs here: its ranks may not have the lease yet
            for path in run.path.iterdir():
                if path != run.lease:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            shutil.rmtree(run.lease)
            for directory in (run.path, *run.path.parents):
                if directory not in existing:
                    directory.rmdir()


def existing_parents(path: Path) -> set[Path]:
    """A directory and those above it, as far as they exist."""
    return {parent for parent in (path, *path.parents) if parent.exists()}


def print_failure(
    failure: RankFailure,
    logs: RankLogs,
    group: NodeGroup,
    *,
    stopping: bool,
    hung: str | None,
    explainer: Executor,
) -> int:
    """Print why the run ended: in full on the node where it began, one line on the others.

    `explainer` reads what all ranks wrote about a hang, while the nodes agree on a restart.
    """
    node_failure = group.failure
    is_elsewhere = node_failure is not None and node_failure.node_rank != group.node_rank
    if node_failure is not None and (is_elsewhere or node_failure.cause == EndCause.planned):
        where = f"node {group.node_rank} ({machine_name()}) stops"
        print(f"harness: {where}: {node_failure.line}", file=sys.stderr)
        return node_failure.exit_code
    if hung:
        print(f"harness: {hung}; stacks of all threads: {logs.directory}/*.stacks", file=sys.stderr)
        explainer.submit(print_explanation, logs, world_size=group.num_nodes * len(logs.ranks))
        return EXIT_CRASHED
    if text := render_failure(failure, stopping=stopping):
        print(text, file=sys.stderr)
    return run_exit_code(failure, stopping=stopping)


def print_explanation(logs: RankLogs, *, world_size: int) -> None:
    """Print and keep which collective hangs, and which ranks did not call it, by what all ranks wrote.

    It runs in a thread whose result nobody reads, so it prints its own errors.
    """
    try:
        line = hang_report.explain_hang(hang_report.read_answers(logs.directory, range(world_size)))
    except Exception as error:
        line, problem = "", f"{type(error).__name__}: {error}"
        print(f"harness: warning: the hang cannot be explained: {problem}", file=sys.stderr)
    if line:
        print(f"harness: {line}", file=sys.stderr)
        with suppress(OSError):
            (logs.directory / HANG_FILE).write_text(f"{line}\n", encoding="utf-8")
