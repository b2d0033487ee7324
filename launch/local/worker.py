"""Which worker a run directory calls for: the trainer, or the trainer with something broken on purpose.

Imports torch only when asked, because everything that starts processes imports this.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.config.schema import Config
from harness.core.rundir import RunDir

Worker = Callable[[Config], int]


def worker_of(run: RunDir) -> Worker:
    """What every rank of this run does."""
    if run.drill.exists():
        from harness.faults.worker import run_worker as drilled

        return drilled
    from harness.train import run_worker

    return run_worker
