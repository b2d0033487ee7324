"""The taint log: the rewinds and rollbacks that tainted checkpoints.

Why: the run deletes tainted checkpoints soon, and their marks with them. Copies in an object store may not have the
mark yet, or may be of checkpoints that were deleted before the rollback. The log tells which copies are tainted.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final

from harness.checkpoint.integrity import Manifest, storage_error
from harness.core.rundir import append_line

TAINT_LOG = "tainted.jsonl"


@final
class Taint(NamedTuple):
    """A rewind or rollback, and which checkpoints it tainted."""

    iteration: int
    """The run went back to the state after it."""
    generation: int
    """The newest generation of the tainted checkpoints."""
    reason: str
    time: float
    """In seconds since the epoch; not before that of any checkpoint that it tainted on disk."""

    def covers(self, manifest: Manifest) -> bool:
        """Whether a checkpoint was taken after `iteration`, and saved before the rewind or rollback.

        The time is compared because names and iterations can come again: a run that is killed before its next save
        resumes in the old generation.
        """
        is_later = manifest.iteration > self.iteration
        return is_later and manifest.generation <= self.generation and manifest.time <= self.time


def record_taint(root: Path, taint: Taint) -> None:
    """Append to the log, which is beside the checkpoints; on disk when this returns."""
    append_line(root / TAINT_LOG, json.dumps(taint._asdict()))


def read_taints(root: Path) -> list[Taint]:
    """The whole log, without lines that a crash cut short; `StorageError` if it cannot be read."""
    file = root / TAINT_LOG
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(file, error) from None
    found = []
    for line in lines:
        with suppress(ValueError, TypeError):
            found.append(Taint(**json.loads(line)))
    return found
