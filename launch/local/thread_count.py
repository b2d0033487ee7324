"""Sets the number of CPU threads of a rank through the environment, before torch is imported.

Why: ranks are forked from a launcher that has imported torch (`launch.local.worker_pool`). Setting the number later is
not equivalent: MKL may then no longer use fewer threads, and results change in the last bits.
How: the launcher imports torch in the environment of its ranks, for the number of ranks it expects: `launch.nproc`, or
one for each GPU that the system shows. If torch counts differently, the ranks are spawned and import torch themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.config.parallel import DeviceKind
from harness.config.schema import Config

THREADS_VARIABLE = "OMP_NUM_THREADS"


@contextmanager
def rank_thread_environment(cfg: Config, nproc: int) -> Iterator[None]:
    """Set OMP_NUM_THREADS for this many ranks on this machine."""
    inherited = os.environ.get(THREADS_VARIABLE)
    share = max(1, num_cores() // nproc)
    os.environ[THREADS_VARIABLE] = str(cfg.launch.threads or inherited or share)
    try:
        yield
    finally:
        del os.environ[THREADS_VARIABLE]
        if inherited is not None:
            os.environ[THREADS_VARIABLE] = inherited


def num_cores() -> int:
    """Cores this process may use; a cgroup or cpuset may allow fewer than exist."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_expected_ranks(cfg: Config) -> int:
    """How many ranks will start here, determined without torch."""
    if cfg.launch.nproc:
        return cfg.launch.nproc
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(Path("/dev").glob("nvidia[0-9]*")) if named is None else [name for name in named.split(",") if name]
    return (0 if cfg.parallel.device is DeviceKind.cpu else len(gpus)) * cfg.launch.ranks_per_gpu or 2
