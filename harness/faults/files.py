"""Faults of files: a full disk, and checkpoints that are no longer what was written.

How: a disk is full because a file fills it, and a checkpoint is damaged by writing to its file, so that everything that
reads, hashes, moves or deletes there meets the real thing. The disk that is filled must be one of its own: `harness
drill` lays a small one over `checkpoints/` in a mount namespace that ends with the run.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import final

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Checkpoint
from harness.config.errors import require
from harness.faults.plan import FaultKind
from harness.faults.site import Site

FILLER = ".filler"
CHUNK_BYTES = 1 << 20
WRITTEN_WITHIN_S = 60.0
POLL_S = 0.05


@final
class FullDisk:
    """No byte more fits beside the checkpoints, as long as it lasts."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._path = site.run.directory.checkpoints / FILLER
        if site.is_here:
            message = "is no disk of its own; start this drill with harness drill"
            require(os.path.ismount(self._path.parent), str(self._path.parent), message)

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            self._site.tell(f"fills the disk of {self._path.parent.name}")
            fill(self._path)
        elif self._site.is_here:
            self._path.unlink(missing_ok=True)

    def after(self, iteration: int) -> None:
        """The disk stays full until the next iteration that is not struck."""


def fill(path: Path) -> None:
    """Let a file grow until the file system takes no byte more."""
    with path.open("ab", buffering=0) as file:
        num_bytes = CHUNK_BYTES
        while num_bytes:
            try:
                file.write(bytes(num_bytes))
            except OSError:
                num_bytes //= 2


@final
class DamagedCheckpoint:
    """The newest checkpoint is damaged behind the run's back, and then the run dies and needs it."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if not self._site.strikes(iteration):
            return
        checkpoint = self._newest()
        path = max((each for each in checkpoint.path.iterdir() if each.is_file()), key=lambda each: each.stat().st_size)
        where = f"{checkpoint.name}/{path.name}"
        if self._site.fault.kind is FaultKind.truncated_checkpoint:
            self._site.tell(f"cuts {where} in half, then kills itself")
            os.truncate(path, path.stat().st_size // 2)
        else:
            dice = self._site.fault.dice(self._site.seed, iteration, self._site.run.parts.world.rank)
            bit = dice.randrange(8 * path.stat().st_size)
            self._site.tell(f"turns over bit {bit} of {where}, then kills itself")
            flip_bit(path, bit)
        os.kill(os.getpid(), signal.SIGKILL)

    def after(self, iteration: int) -> None:
        """Nobody is left to undo it."""

    def _newest(self) -> Checkpoint:
        """The newest one that is due; a slow disk is waited for, so that the same one is struck everywhere. One is not
        written before its step was reported, which takes `lag` steps that waiting would hold up."""
        run = self._site.run
        reported = run.state.step - run.cfg.sentinel.lag
        due_step = reported // every * every if (every := run.cfg.checkpoint.every_steps) else 0
        deadline_s = time.monotonic() + WRITTEN_WITHIN_S
        while not (found := catalog.list_checkpoints(run.directory.checkpoints)) or found[-1].step < due_step:
            message = f"no checkpoint of step {due_step} came within {WRITTEN_WITHIN_S:g} s"
            require(time.monotonic() < deadline_s, str(run.directory.checkpoints), message)
            time.sleep(POLL_S)
        return found[-1]


def flip_bit(path: Path, bit: int) -> None:
    """Turn over one bit of a file, in place; its times stay what they were, as where a disk rots."""
    times = path.stat()
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))
    with suppress(OSError):
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
