"""The common part of runs that differ only after some step: trained once, stopped, copied and continued.

A run resumes bit-identically, so a copy that is continued equals a run of its own.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness import train
from harness.config import compose
from harness.config.errors import EXIT_INTERRUPTED
from harness.config.schema import Config
from harness.core import event_json
from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from harness.run import Run
from tests.distributed.pool import Pool


def run_until(cfg: Config, num_steps: int) -> int:
    """Run one rank that is asked to stop so that it ends after this many steps; returns its exit code."""
    started: list[Run] = []
    compute: Callable[..., None] = getattr(train, "forward_backward")  # noqa: B009  (which train only imports)

    def wrap(run: Run) -> Run:
        started.append(run)
        return run

    def compute_and_stop(*arguments: Any, **options: Any) -> None:
        (run,) = started
        if run.state.iteration == num_steps - cfg.sentinel.lag - 1:
            run.stop(signal.SIGTERM, None)
        compute(*arguments, **options)

    with patch.object(train, "forward_backward", compute_and_stop):
        return train.run_worker(cfg, wrap)


def copy_common_part(ranks: Pool, root: Path, cfg: Config, num_steps: int, target: RunDir, *, size: int = 2) -> None:
    """Copy a run of this config that was stopped after `num_steps` steps. It is trained if `root` has none.

    The copy has no config yet, because it has another name. A ledger in the target is kept.
    """
    unnamed = replace(cfg, run=replace(cfg.run, name=None, dir="runs"))
    key = hashlib.sha256(compose.to_yaml(unnamed).encode()).hexdigest()
    common = RunDir(root / f"common-{key[:12]}-{num_steps}-{size}")
    if not common.path.exists():
        named = replace(cfg, run=replace(cfg.run, name=common.path.name, dir=str(root)))
        assert ranks.run(size, run_until, named, num_steps) == [EXIT_INTERRUPTED] * size
        *_, last = (event for event in event_json.read(common.events) if isinstance(event, StepRecord))
        assert last.iteration == num_steps
    left_out = [common.config.name] + [common.ledger.name] * target.ledger.exists()
    shutil.copytree(common.path, target.path, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)
