"""Progress of sending a run to MLflow (`mlflow.json`), and the lock that allows one sink process per run.

`mlflow.json` is replaced atomically after each batch that MLflow accepted, so it never claims more than was sent. The
sink process of a restarted trainer waits until the one of the previous start has finished.
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
    """The training process whose log is being sent."""

    pid: int
    log_bytes: int
    """Size of the log when it started; older events are of earlier starts."""

    def is_alive(self) -> bool:
        """Whether the trainer lives. Call in its child process: an orphan gets another parent at once."""
        return os.getppid() == self.pid


@dataclass(slots=True, kw_only=True)
class SinkProgress:
    """Content of `mlflow.json`."""

    tracking_uri: str
    key: str
    """Tag of the MLflow run; stored before the first request, so that a run is never created twice."""
    experiment_id: str | None = None
    run_id: str | None = None
    offset: int = 0
    """Bytes of the event log that MLflow has accepted."""

    def save(self, run: RunDir) -> None:
        write_atomically(run.mlflow, json.dumps(asdict(self), indent=2) + "\n")


def load_progress(run: RunDir, tracking_uri: str | None) -> SinkProgress:
    """The stored progress; progress from byte 0 for a new run, or if `tracking_uri` names another store."""
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
    """The stored configuration of a run, unchecked: an older version may have written it."""
    tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


def configured_uri(run: RunDir) -> str:
    """The store in the configuration of a run, with an absolute path."""
    return absolute_uri(configuration(run)["telemetry"]["tracking_uri"], runs=run.path.parent)


@contextmanager
def sole_sender(run: RunDir, trainer: Trainer | None) -> Iterator[bool]:
    """Hold the run's lock and yield True, or yield False. The sink process of a living trainer waits for the lock; one
    that was started by hand does not."""
    with exclusive(run.path / LOCK, keep_trying=lambda: trainer is not None and trainer.is_alive()) as lock:
        yield lock is not None
