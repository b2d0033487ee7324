"""How far a run has come on its way to MLflow: what must be remembered between processes, and who may send.

`mlflow.json` is replaced as a whole after each batch that MLflow took, so it never claims more than was taken. A lock
on the run directory keeps two senders apart: the one of a restarted trainer waits for the one that its predecessor
left behind.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from harness.core.credentials import is_same_store
from harness.core.locking.file_lock import exclusive
from harness.core.rundir import RunDir, write_atomically
from harness.telemetry.tracking.store_uri import absolute_uri

LOCK = ".mlflow.lock"


@dataclass(frozen=True, slots=True)
class Trainer:
    """The process whose log is being followed."""

    pid: int
    log_bytes: int
    """How long the log was when it started: what is older is not its own."""

    def is_alive(self) -> bool:
        """Asked by its child: an orphan gets another parent at once."""
        return os.getppid() == self.pid


@dataclass(slots=True, kw_only=True)
class SinkProgress:
    tracking_uri: str
    key: str
    """Marks the MLflow run; written down before the first contact, so that a run is never created twice."""
    experiment_id: str | None = None
    run_id: str | None = None
    offset: int = 0
    """Bytes of the event log that MLflow has taken."""

    def save(self, run: RunDir) -> None:
        write_atomically(run.mlflow, json.dumps(asdict(self), indent=2) + "\n")


def load_progress(run: RunDir, tracking_uri: str | None) -> SinkProgress:
    """The stored progress; a new one, to send all of the log, for a new run or where `tracking_uri` is another store."""
    if run.mlflow.exists():
        progress = SinkProgress(**json.loads(run.mlflow.read_text(encoding="utf-8")))
        if tracking_uri is None or is_same_store(progress.tracking_uri, tracking_uri):
            if tracking_uri not in (None, progress.tracking_uri):  # an earlier version wrote the password with it
                progress.tracking_uri = tracking_uri
                progress.save(run)
            return progress
    progress = SinkProgress(tracking_uri=tracking_uri or configured_uri(run), key=uuid.uuid4().hex)
    progress.save(run)
    return progress


def configuration(run: RunDir) -> dict[str, Any]:
    """The run's configuration as it lies on disk: of whichever version wrote it."""
    tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


def configured_uri(run: RunDir) -> str:
    """The store that the run's configuration names."""
    return absolute_uri(configuration(run)["telemetry"]["tracking_uri"], runs=run.path.parent)


@contextmanager
def sole_sender(run: RunDir, trainer: Trainer | None) -> Iterator[bool]:
    """Hold the run's lock, or yield False: a living trainer's sender waits for it, a sender by hand does not."""
    with exclusive(run.path / LOCK, keep_trying=lambda: trainer is not None and trainer.is_alive()) as lock:
        yield lock is not None
