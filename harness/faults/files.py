"""Injects file faults: a full disk, and checkpoints whose files change after they were written.

A file fills the disk, and a checkpoint is damaged by writing to its files, so all readers, hashes and deletes meet the
real condition. The disk must be a separate one: `harness drill` mounts a small tmpfs on `checkpoints/` in a mount
namespace that ends with the run.
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
from harness.faults.fault_plan import FaultKind
from harness.faults.site import Site

FILLER = ".filler"
CHUNK_BYTES = 1 << 20
WRITTEN_WITHIN_S = 60.0
POLL_S = 0.05


@final
class FullDisk:
    """full_disk: the file system of the checkpoints has no free byte while the fault lasts."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._path = site.run.directory.checkpoints / FILLER
        if site.is_here:
            message = "must be a separate mount; start this drill with harness drill"
            require(os.path.ismount(self._path.parent), str(self._path.parent), message)

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            self._site.log_strike(f"fills the disk of {self._path.parent.name}")
            fill(self._path)
        elif self._site.is_here:
            self._path.unlink(missing_ok=True)

    def after(self, iteration: int) -> None:
        """The disk stays full until the next iteration that is not struck."""


def fill(path: Path) -> None:
    """Grow a file until the file system has no free byte."""
    with path.open("ab", buffering=0) as file:
        num_bytes = CHUNK_BYTES
        while num_bytes:
            try:
                file.write(bytes(num_bytes))
            except OSError:
                num_bytes //= 2


@final
class DamagedCheckpoint:
    """corrupted_checkpoint, truncated_checkpoint: damages the newest checkpoint, then kills the rank."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if not self._site.strikes(iteration) or not self._is_ready():
            return
        checkpoint = self._newest()
        self._site.run.parts.ring.end_sharing()  # a resume from memory would not read the checkpoint
        path = max((file for file in checkpoint.path.iterdir() if file.is_file()), key=lambda file: file.stat().st_size)
        where = f"{checkpoint.name}/{path.name}"
        if self._site.fault.kind is FaultKind.truncated_checkpoint:
            self._site.log_strike(f"truncates {where} to half its size, then kills itself")
            os.truncate(path, path.stat().st_size // 2)
        else:
            rng = self._site.fault.rng(self._site.seed, iteration, self._site.run.parts.world.rank)
            bit = rng.randrange(8 * path.stat().st_size)
            self._site.log_strike(f"flips bit {bit} of {where}, then kills itself")
            flip_bit(path, bit)
        os.kill(os.getpid(), signal.SIGKILL)

    def after(self, iteration: int) -> None:
        """Never called: the process was killed."""

    def _is_ready(self) -> bool:
        """Whether another checkpoint is left. A fault that is planned by the clock waits until there is one: a run
        whose only checkpoint is damaged does not start over by itself."""
        by_clock = self._site.fault.at_s is not None
        return not by_clock or len(catalog.list_checkpoints(self._site.run.directory.checkpoints)) > 1

    def _newest(self) -> Checkpoint:
        """The newest checkpoint that is due.

        Waits for a slow disk, so that the same checkpoint is damaged on every machine. A checkpoint is written only
        after its step was reported, `lag` steps later, so newer ones are not waited for.
        """
        run = self._site.run
        reported = run.state.step - run.cfg.sentinel.lag
        due_step = reported // every * every if (every := run.cfg.checkpoint.every_steps) else 0
        deadline_s = time.monotonic() + WRITTEN_WITHIN_S
        while not (found := catalog.list_checkpoints(run.directory.checkpoints)) or found[-1].step < due_step:
            message = f"no checkpoint of step {due_step} was written within {WRITTEN_WITHIN_S:g} s"
            require(time.monotonic() < deadline_s, str(run.directory.checkpoints), message)
            time.sleep(POLL_S)
        return found[-1]


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file in place and keep its timestamps, as with bit rot."""
    times = path.stat()
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))
    with suppress(OSError):
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
