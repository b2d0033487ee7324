"""Removes the snapshots of a run from the memory of this machine when no later start here needs them.

Why: snapshots outlive their processes (`harness.core.snapshot_files`), and on a cluster the next job may be somebody
else's.
How: they stay only after a crash or an interruption outside a Slurm job, where the next `harness train` on this machine
resumes from them. A Slurm job removes them when its launcher ends; until then a restart inside the job finds them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from harness.config.errors import EXIT_CRASHED, EXIT_INTERRUPTED
from harness.config.schema import Config
from harness.core.rundir import locate
from harness.core.snapshot_files import held_bytes, remove_run, snapshot_folder


def keeps_snapshots(code: int, environ: Mapping[str, str]) -> bool:
    """Whether a later start on this machine may resume from the snapshots of a run that ended with this exit code."""
    return code in (EXIT_CRASHED, EXIT_INTERRUPTED) and "SLURM_JOB_ID" not in environ


def run_and_clean_up(cfg: Config, run: Callable[[], int]) -> int:
    """Call `run`, which starts the ranks and returns the exit code; then remove snapshots that nobody needs."""
    code = run()
    if cfg.checkpoint.ring.shared_path is not None and not keeps_snapshots(code, os.environ):
        remove_run(snapshot_folder(cfg.checkpoint.ring.shared_path, locate(cfg).path))
    return code


def snapshot_bytes(cfg: Config) -> int:
    """Memory that snapshots of an earlier start take on this machine; the next start reuses it."""
    shared_dir = cfg.checkpoint.ring.shared_path
    if shared_dir is None or cfg.run.name is None:
        return 0
    return held_bytes(snapshot_folder(shared_dir, locate(cfg).path))
