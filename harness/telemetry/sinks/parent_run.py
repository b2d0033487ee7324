"""The sweep that a run belongs to: jobs, swept values and status, without importing torch or MLflow.

Why: in MLflow a sweep is one parent run with a child run per job. No process lives as long as a sweep: its jobs may run
on many machines, days apart.
How: `sweep.yaml` beside the directory of a run marks the run as a job of a sweep. The first sink process creates the
parent run; its progress file lies in the directory of the sweep. The last job, or the launcher that waited for all
jobs, sets the final status.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from harness.config.errors import EXIT_DONE, EXIT_INTERRUPTED
from harness.core.events import RunEnded
from harness.core.locking.file_lock import exclusive
from harness.core.rundir import RunDir
from harness.telemetry.event_log import tail

SWEEP_FILE = "sweep.yaml"


def sweep_of(run: RunDir) -> RunDir | None:
    """The directory of the sweep that a run is a job of; None if it is not part of a sweep."""
    sweep = RunDir(run.path.parent)
    return sweep if is_sweep(sweep) and run.path.name in (job["name"] for job in jobs(sweep)) else None


def is_sweep(directory: RunDir) -> bool:
    return (directory.path / SWEEP_FILE).is_file()


def jobs(sweep: RunDir) -> list[dict[str, Any]]:
    """Name, overrides and problem of each job."""
    tree = yaml.safe_load((sweep.path / SWEEP_FILE).read_text(encoding="utf-8"))
    listed = tree["jobs"]
    assert isinstance(listed, list)
    return listed


def tags(sweep: RunDir) -> dict[str, str]:
    """Tags of the parent run: each swept key with its values."""
    values: dict[str, dict[str, None]] = {}
    for job in jobs(sweep):
        for key, value in job["overrides"].items():
            values.setdefault(f"swept.{key}", {})[str(value)] = None
    return {key: ", ".join(distinct) for key, distinct in values.items()}


def status(sweep: RunDir, *, is_over: bool) -> str:
    """MLflow status of a sweep. With `is_over`, a job without a `run_ended` event counts as failed."""
    codes = [1 if job["problem"] else exit_code(RunDir(sweep.path / job["name"])) for job in jobs(sweep)]
    if None in codes and not is_over:
        return "RUNNING"
    if any(code not in (EXIT_DONE, EXIT_INTERRUPTED) for code in codes):
        return "FAILED"
    return "KILLED" if EXIT_INTERRUPTED in codes else "FINISHED"


def exit_code(run: RunDir) -> int | None:
    """Exit code of a run; None while it runs, or if it died without a `run_ended` event."""
    last = next(reversed(tail(run.events)), None)
    return last.exit_code if isinstance(last, RunEnded) else None


@contextmanager
def parent_lock(sweep: RunDir) -> Iterator[None]:
    """Serialize the search for the parent run, because the first process creates it."""
    with exclusive(sweep.path / ".mlflow.lock", keep_trying=lambda: True):
        yield
