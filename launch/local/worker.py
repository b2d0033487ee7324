"""Selects the worker function of a run: the trainer, or the trainer with injected faults.

Imports torch only on call, because everything that starts processes imports this module.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.config.schema import Config
from harness.core.rundir import RunDir

Worker = Callable[[Config], int]


def select_worker(run: RunDir) -> Worker:
    """The function that every rank of this run calls."""
    if run.drill.exists():
        from harness.faults.drill_worker import run_drill_worker as run_drill_worker

        return run_drill_worker
    from harness.train import run_worker

    return run_worker
