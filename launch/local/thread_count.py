"""How many threads a rank takes, told in the environment before torch is loaded: it reads it only then.

Why: ranks are forked from a launcher that has loaded torch (`launch.local.worker_pool`), and to tell torch afterwards
is not the same: it takes from MKL the freedom to use fewer threads, and results change in their last bits.
How: the launcher loads torch in the environment of its ranks, for as many of them as it expects here: as was asked for,
or one for each GPU that the system shows. Torch may count otherwise; then the ranks are started anew and load it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.config.parallel import DeviceKind
from harness.config.schema import Config

THREADS = "OMP_NUM_THREADS"


@contextmanager
def threads_of_a_rank(cfg: Config, nproc: int) -> Iterator[None]:
    """The environment in which torch is loaded, for so many ranks on this machine."""
    before = os.environ.get(THREADS)
    share = max(1, num_cores() // nproc)
    os.environ[THREADS] = str(cfg.launch.threads or before or share)
    try:
        yield
    finally:
        del os.environ[THREADS]
        if before is not None:
            os.environ[THREADS] = before


def num_cores() -> int:
    """Those this process may use: a cgroup or a cpuset may leave it fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ranks_expected(cfg: Config) -> int:
    """How many ranks will be started here, as far as that can be said without torch."""
    if cfg.launch.nproc:
        return cfg.launch.nproc
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(Path("/dev").glob("nvidia[0-9]*")) if named is None else [each for each in named.split(",") if each]
    return (0 if cfg.parallel.device is DeviceKind.cpu else len(gpus)) or 2
