"""MLflow calls for one run: find or create it, set params and tags, nest it under the run of its sweep.

`mlflow_sink` decides when to call them. Every function can be called again after a failure, and raises if the store
does not answer.
"""

from __future__ import annotations

import time
from typing import Any

from harness.config.compose import flat
from harness.config.errors import ConfigError
from harness.core.credentials import without_credentials
from harness.core.event_json import read
from harness.core.fast_imports import loading
from harness.core.rundir import RunDir
from harness.core.stderr_lines import log_with_time
from harness.telemetry.manifest_file import read_run_manifest
from harness.telemetry.sinks import parent_run
from harness.telemetry.sinks.mlflow_progress import MlflowProgress, load_progress
from harness.telemetry.sinks.sink import BadSinkError
from harness.telemetry.sinks.sink_log import first_line
from harness.telemetry.sinks.store_uri import connection_uri, sqlite_path

PARAMS_PER_CALL = 100
LONGEST_PARAM = 500
KEY_TAG = "harness.key"
PARENT_TAG = "mlflow.parentRunId"
CHANGED = "changed."
"""Prefix of the tags of config values that differ from the params, which MLflow cannot overwrite."""


def open_client(uri: str) -> Any:
    """Open MLflow's client. Raises BadSinkError for an invalid URI, other errors for a store that does not answer."""
    with loading():
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except MlflowException as error:
        if error.error_code == "INVALID_PARAMETER_VALUE":
            raise BadSinkError(f"telemetry.tracking_uri: {first_line(error)}") from None
        raise


def is_active(client: Any, run_id: str | None) -> bool:
    """Whether the store has this run and it was not deleted."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return False
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def create_run(client: Any, run: RunDir, progress: MlflowProgress, experiment_name: str) -> None:
    """Find or create the MLflow run, and restart sending at the first event.

    The run is searched by its key first: an earlier call may have created it without receiving the answer.
    """
    progress.offset, progress.sampled = 0, {}
    progress.experiment_id = find_experiment(client, connection_uri(progress.tracking_uri), experiment_name)
    found = client.search_runs([progress.experiment_id], f"tags.`{KEY_TAG}` = '{progress.key}'", max_results=1)
    if found:
        progress.run_id = found[0].info.run_id
        return
    first = next(read(run.events), None) if run.events.exists() else None
    start_time = milliseconds(time.time() if first is None else first.time)
    tags = {KEY_TAG: progress.key, "run_dir": str(run.path), "mlflow.source.name": "harness.train"}
    created = client.create_run(progress.experiment_id, start_time=start_time, tags=tags, run_name=run.path.name)
    progress.run_id = created.info.run_id


def find_experiment(client: Any, uri: str, name: str) -> str:
    """The id of the experiment, created if missing. Artifacts of a sqlite store lie beside its file."""
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is None:
        database = sqlite_path(uri)
        artifacts = None if database is None else (database.parent / "mlartifacts").as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=artifacts))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            known = client.get_experiment_by_name(name)
    return str(known.experiment_id)


def log_params(client: Any, run: RunDir, run_id: str | None, settings: dict[str, Any]) -> None:
    """Log the configuration as params, changed values as tags, and the commit."""
    from mlflow.entities import Param, RunTag

    wanted = {key: without_credentials(str(value))[:LONGEST_PARAM] for key, value in flat(settings).items()}
    stored = client.get_run(run_id).data
    known = stored.params
    params = [Param(key, value) for key, value in wanted.items() if key not in known]
    tags = [RunTag(f"{CHANGED}{key}", value) for key, value in wanted.items() if known.get(key, value) != value]
    if commit := read_commit(run):
        tags += [RunTag("commit", commit), RunTag("mlflow.source.git.commit", commit)]
    for first in range(0, len(params), PARAMS_PER_CALL):
        client.log_batch(run_id, params=params[first : first + PARAMS_PER_CALL])
    for first in range(0, len(tags), PARAMS_PER_CALL):
        client.log_batch(run_id, tags=tags[first : first + PARAMS_PER_CALL])
    for key, value in wanted.items():
        if known.get(key) == value and f"{CHANGED}{key}" in stored.tags:
            client.delete_tag(run_id, f"{CHANGED}{key}")


def read_commit(run: RunDir) -> str:
    """The commit of the newest start; empty if the manifest does not tell."""
    try:
        manifest = read_run_manifest(run.manifest)
    except ConfigError as error:
        log_with_time(str(error))
        return ""
    return str([manifest, *(manifest.get("starts") or [])][-1].get("commit") or "")


def milliseconds(time_s: float) -> int:
    return round(time_s * 1000)


def nest_under_sweep(client: Any, run: RunDir, progress: MlflowProgress, experiment_name: str) -> None:
    """Nest the run of a sweep's job under the run of the sweep. Other runs are unchanged."""
    sweep = parent_run.sweep_of(run)
    if sweep is not None:
        parent_id = find_sweep_run(client, sweep, progress.tracking_uri, experiment_name)
        client.set_tag(progress.run_id, PARENT_TAG, parent_id)


def set_running(client: Any, run: RunDir, progress: MlflowProgress) -> None:
    """Set a run, and the sweep it is a job of, to RUNNING."""
    client.update_run(progress.run_id, status="RUNNING")
    sweep = parent_run.sweep_of(run)
    if sweep is not None:
        client.update_run(load_progress(sweep, progress.tracking_uri).run_id, status="RUNNING")


def find_sweep_run(client: Any, sweep: RunDir, tracking_uri: str, experiment_name: str) -> str:
    """The id of a sweep's own run, created if missing, with the swept values as its tags."""
    with parent_run.parent_lock(sweep):
        progress = load_progress(sweep, tracking_uri)
        if not is_active(client, progress.run_id):
            create_run(client, sweep, progress, experiment_name)
            progress.save(sweep)
    assert progress.run_id is not None
    for key, value in parent_run.tags(sweep).items():
        client.set_tag(progress.run_id, key, value[:LONGEST_PARAM])
    return progress.run_id


def end_sweep_after_last_job(client: Any, run: RunDir, progress: MlflowProgress) -> None:
    """Set the final status of the sweep of a run if this was its last job."""
    sweep = parent_run.sweep_of(run)
    if sweep is None:
        return
    status = parent_run.status(sweep, is_over=False)
    if status != "RUNNING":
        client.set_terminated(load_progress(sweep, progress.tracking_uri).run_id, status)
