"""The MLflow sink: metrics, params, tags and artifacts of one run.

A batch that is sent twice has the same timestamps, and MLflow keeps identical rows once. The MLflow run is created
once: it carries a key that is stored before the first request, so it is found even if the reply was lost.
MLflow's step is the iteration, which never decreases. A run ends as FINISHED (exit code 0), KILLED (75: interrupted,
resumable) or FAILED (any other code, or no `run_ended` event). A restart inside the job does not end it. A resumed run
keeps its id; changed config values become tags `changed.<key>`, because MLflow's params cannot be overwritten.
Left out: picture and score card are sent once, without a retry; they are in the run directory anyway.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED
from harness.core.events import DrillScored, Event, Incident, RunEnded, RunStarted, SystemSampled
from harness.core.rundir import RunDir
from harness.telemetry.event_log import Chunk
from harness.telemetry.sinks import parent_run
from harness.telemetry.sinks.metrics import metrics_of
from harness.telemetry.sinks.mlflow_progress import MlflowProgress, configured_uri
from harness.telemetry.sinks.mlflow_run import (
    create_run,
    end_sweep_after_last_job,
    find_sweep_run,
    is_active,
    log_params,
    milliseconds,
    nest_under_sweep,
    open_client,
    set_running,
)
from harness.telemetry.sinks.sink import configuration
from harness.telemetry.sinks.sink_log import EXIT_NOT_SENT, first_line, log
from harness.telemetry.sinks.store_uri import connection_uri, schema_lock

METRICS_PER_CALL = 1000
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "GIT_PYTHON_REFRESH": "quiet",
}


def set_environment() -> None:
    """Set MLflow's variables, unless the user has set them."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@final
class MlflowSink:
    """Sends one run to one MLflow store."""

    def __init__(self, run: RunDir, progress: MlflowProgress) -> None:
        self._run = run
        self.state = progress
        self._client: Any = None

    def connect(self) -> None:
        if self._client is not None:
            return
        set_environment()
        settings = configuration(self._run)
        uri = connection_uri(self.state.tracking_uri)
        with schema_lock(uri):
            client = open_client(uri)
            if not is_active(client, self.state.run_id):
                create_run(client, self._run, self.state, settings["telemetry"]["experiment"])
                self.save()
        log_params(client, self._run, self.state.run_id, settings)
        nest_under_sweep(client, self._run, self.state, settings["telemetry"]["experiment"])
        self._client = client

    def send(self, chunk: Chunk) -> None:
        self._send_metrics(chunk.events)
        for event in chunk.events:
            match event:
                case RunStarted():
                    set_running(self._client, self._run, self.state)
                case RunEnded():
                    self._end_run(event)
                case Incident():
                    text = f"{', '.join(event.kinds)} from iteration {event.onset}: {event.verdict}"
                    self._client.set_tag(self.state.run_id, f"incident.{event.number:03d}", text)
                case DrillScored():
                    self._send_file(self._run.score_card)
                    result = "passed" if event.passed else "failed"
                    self._client.set_tag(self.state.run_id, f"drill.{event.scenario}", result)
                case _:
                    pass

    def send_samples(self, samples: list[SystemSampled]) -> None:
        self._send_metrics(samples)

    def poll(self) -> None:
        """Nothing to do."""

    def save(self) -> None:
        self.state.save(self._run)

    def end(self, *, has_ended: bool) -> None:
        """Set the run to FAILED if no process trains it and the log has neither its end nor its restart."""
        if not has_ended:
            self._send_incidents()
            self._client.set_terminated(self.state.run_id, "FAILED")

    def _send_metrics(self, events: list[Event] | list[SystemSampled]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, milliseconds(event.time), event.iteration)
            for event in events
            for name, value in metrics_of(event).items()
        ]
        for first in range(0, len(metrics), METRICS_PER_CALL):
            self._client.log_batch(self.state.run_id, metrics=metrics[first : first + METRICS_PER_CALL])

    def _send_file(self, path: Path) -> None:
        if path.exists():
            try:
                self._client.log_artifact(self.state.run_id, str(path))
            except Exception as error:
                log(f"mlflow: {path.name} was not sent: {first_line(error)}")

    def _send_incidents(self) -> None:
        """Send post-mortems, evidence and pictures of all incidents."""
        for folder in sorted(self._run.incidents.glob("*")):
            try:
                self._client.log_artifacts(self.state.run_id, str(folder), f"{self._run.incidents.name}/{folder.name}")
            except Exception as error:
                log(f"mlflow: incident {folder.name} was not sent: {first_line(error)}")

    def _end_run(self, event: RunEnded) -> None:
        self._send_file(self._run.picture)
        self._send_incidents()
        match event.exit_code:
            case 0:
                status = "FINISHED"
            case code if code == EXIT_INTERRUPTED:
                status = "KILLED"
            case _:
                status = "FAILED"
        self._client.set_terminated(self.state.run_id, status, milliseconds(event.time))
        end_sweep_after_last_job(self._client, self._run, self.state)


def end_sweep(sweep: RunDir) -> int:
    """Set the final status of a sweep without running jobs; returns the exit code."""
    set_environment()
    runs = [RunDir(sweep.path / job["name"]) for job in parent_run.jobs(sweep)]
    try:
        first = next(run for run in runs if run.config.is_file())
        uri, settings = configured_uri(first), configuration(first)
        with schema_lock(connection_uri(uri)):
            client = open_client(connection_uri(uri))
        parent_id = find_sweep_run(client, sweep, uri, settings["telemetry"]["experiment"])
        client.set_terminated(parent_id, parent_run.status(sweep, is_over=True))
    except StopIteration:
        log(f"{sweep.path} holds no run")
        return EXIT_BAD_CONFIG
    except Exception as error:
        log(f"mlflow: {first_line(error)}; gave up")
        return EXIT_NOT_SENT
    return EXIT_DONE
