"""Progress of sending a run to MLflow (`mlflow.json`): the store, the run in it, and the bytes of the log it has.

The file is replaced atomically after each batch that MLflow accepted, so it never claims more than was sent.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass

from harness.core.credentials import is_same_store
from harness.core.rundir import RunDir, write_atomically
from harness.telemetry.sinks.sink import SinkState, configuration, read_sink_state
from harness.telemetry.sinks.store_uri import absolute_uri


@dataclass(slots=True, kw_only=True)
class MlflowProgress(SinkState):
    """Content of `mlflow.json`."""

    tracking_uri: str
    key: str
    """Tag of the MLflow run; stored before the first request, so that a run is never created twice."""
    experiment_id: str | None = None
    run_id: str | None = None

    def save(self, run: RunDir) -> None:
        write_atomically(run.mlflow, json.dumps(asdict(self), indent=2) + "\n")


def load_progress(run: RunDir, tracking_uri: str | None) -> MlflowProgress:
    """The stored progress; progress from byte 0 for a new run, a damaged file, or if `tracking_uri` names another
    store."""
    progress = read_sink_state(run.mlflow, MlflowProgress)
    if progress is not None and (tracking_uri is None or is_same_store(progress.tracking_uri, tracking_uri)):
        if tracking_uri not in (None, progress.tracking_uri):  # an earlier version wrote the password with it
            progress.tracking_uri = tracking_uri
            progress.save(run)
        return progress
    progress = MlflowProgress(tracking_uri=tracking_uri or configured_uri(run), key=uuid.uuid4().hex)
    progress.save(run)
    return progress


def configured_uri(run: RunDir) -> str:
    """The store in the configuration of a run, with an absolute path."""
    return absolute_uri(configuration(run)["telemetry"]["tracking_uri"], runs=run.path.parent)
