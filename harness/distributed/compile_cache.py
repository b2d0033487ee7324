"""Keeps compiled kernels beside the runs, so that a restarted run need not compile them again.

Why: torch keeps them in /tmp and Triton in the home directory. A run that restarts on another node, in a new container
or after a reboot would compile for most of the time until its first step.
How: Inductor and Triton read a directory from the environment when they compile. Both get one in `run.dir`, which all
ranks and all runs there share. Entries are named by what was compiled and with which versions, and appear by a rename:
ranks that compile the same kernel do not disturb each other. The directory may be deleted at any time.
A variable that the user has set is kept. Inductor locks files in its directory; where the file system has no locks,
torch's own directory remains.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from harness.config.parallel import ParallelConfig

if TYPE_CHECKING:
    import torch

DIRECTORY = ".compile-cache"
"""Hidden, because it lies among run directories and is not one."""
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variable -> directory."""


def compiles(cfg: ParallelConfig, device: torch.device) -> bool:
    """Whether a run compiles anything: its blocks, or the kernels of a GPU."""
    return cfg.compile or device.type == "cuda"


@contextmanager
def compile_cache(runs: Path, *, enabled: bool) -> Iterator[str]:
    """Keep what is compiled in the block in `runs`; yields why that is not possible, empty if it is.

    Does nothing unless `enabled`. Nothing that is computed depends on it: ranks may differ.
    """
    directory = runs.absolute() / DIRECTORY
    missing = VARIABLES.keys() - os.environ.keys() if enabled else set()
    obstacle = cache_obstacle(directory) if missing else ""
    if obstacle:
        missing = set()
    for name in missing:
        os.environ[name] = str(directory / VARIABLES[name])
    try:
        yield obstacle
    finally:
        for name in missing:
            os.environ.pop(name, None)


def cache_obstacle(directory: Path) -> str:
    """Why compiled kernels cannot be kept in this directory; empty if they can. Creates it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return f"{directory}: {error.strerror}"
    return ""
