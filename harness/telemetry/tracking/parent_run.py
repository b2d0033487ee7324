"""The sweep that a run belongs to, as its MLflow run needs to know it; torch-free and MLflow-free.

Why: a sweep is one line in MLflow that unfolds into its jobs, and no process lives as long as a sweep does: its jobs
may run on many machines, today and next week.
How: `sweep.yaml` beside a run's directory says that the run is a job of a sweep. Whichever sender comes first creates
the run of the sweep, whose progress lies in the sweep's directory as a run's lies in its own; the last job to end, or the
launcher that waited for all of them, says how the sweep ended.
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
    """The directory of the sweep that a run is a job of; None where it stands alone."""
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
    """What was swept, and over which values."""
    values: dict[str, dict[str, None]] = {}
    for job in jobs(sweep):
        for key, value in job["overrides"].items():
            values.setdefault(f"swept.{key}", {})[str(value)] = None
    return {key: ", ".join(each) for key, each in values.items()}


def status(sweep: RunDir, *, is_over: bool) -> str:
    """What MLflow calls the state of a sweep; once it is over, a job without a last word has failed."""
    codes = [1 if job["problem"] else exit_code(RunDir(sweep.path / job["name"])) for job in jobs(sweep)]
    if None in codes and not is_over:
        return "RUNNING"
    if any(code not in (EXIT_DONE, EXIT_INTERRUPTED) for code in codes):
        return "FAILED"
    return "KILLED" if EXIT_INTERRUPTED in codes else "FINISHED"


def exit_code(run: RunDir) -> int | None:
    """How a run ended; None while it goes on, or where it died without a word."""
    last = next(reversed(tail(run.events)), None)
    return last.exit_code if isinstance(last, RunEnded) else None


@contextmanager
def one_parent(sweep: RunDir) -> Iterator[None]:
    """One sender at a time looks for the run of a sweep, because the first creates it."""
    with exclusive(sweep.path / ".mlflow.lock", keep_trying=lambda: True):
        yield
