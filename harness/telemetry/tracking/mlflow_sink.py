"""The sink process: tails `events.jsonl` and sends it to MLflow.

    python -m harness.telemetry.tracking.mlflow_sink RUN_DIR      sends the unsent rest of a run, then exits
    python -m harness.telemetry.tracking.mlflow_sink SWEEP_DIR    sets the final status of a sweep

Why: a tracking server may be slow, down or gone, and none of that may affect training.
How: `mlflow.json` holds the MLflow run id and how many bytes of the log were sent. The number advances only after
MLflow accepted a batch, so nothing is lost. A batch that is sent twice has the same timestamps, and MLflow keeps
identical rows once. The MLflow run is created once: it carries a key that is stored before the first request, so it is
found even if the reply was lost.
While the trainer runs, every failure is retried with growing pauses. Once the trainer is gone, the rest is sent with
one attempt. MLflow's step is the iteration, which never decreases. A run ends as FINISHED (exit code 0), KILLED (75:
interrupted, resumable) or FAILED (any other code, or no `run_ended` event). A resumed run keeps its id; changed config
values become tags `changed.<key>`, because MLflow's params cannot be overwritten.
Left out: picture and score card are sent once, without a retry; they are in the run directory anyway.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError
from harness.core.credentials import without_credentials
from harness.core.events import DrillScored, Event, Incident, RunEnded, RunStarted
from harness.core.rundir import RunDir
from harness.telemetry.event_log import read_chunk, tail
from harness.telemetry.tracking import parent_run
from harness.telemetry.tracking.metrics import metrics_of
from harness.telemetry.tracking.mlflow_run import (
    BadStoreError,
    create_run,
    end_sweep_after_last_job,
    find_sweep_run,
    first_line,
    is_active,
    log_params,
    milliseconds,
    nest_under_sweep,
    open_client,
)
from harness.telemetry.tracking.progress import (
    SinkProgress,
    Trainer,
    configuration,
    configured_uri,
    load_progress,
    sole_sender,
)
from harness.telemetry.tracking.store_uri import connection_uri, schema_lock

EXIT_NOT_SENT = 1
POLL_S = 1.0
LONGEST_PAUSE_S = 15.0
METRICS_PER_CALL = 1000
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "GIT_PYTHON_REFRESH": "quiet",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.telemetry.tracking.mlflow_sink", description="Send a run to MLflow."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log-bytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    run = RunDir(options.run_dir.resolve())
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if parent_run.is_sweep(run):
        return end_sweep(run)
    if not run.config.is_file():
        log(f"{run.path} is not a run directory: it has no {run.config.name}")
        return EXIT_BAD_CONFIG
    for number in (signal.SIGINT, signal.SIGUSR1):  # meant for the trainer, but sent to all processes of the job
        signal.signal(number, signal.SIG_IGN)
    trainer = None if options.trainer is None else Trainer(options.trainer, options.log_bytes)
    with sole_sender(run, trainer) as is_sole:
        if not is_sole:
            log(f"{run.path} is being sent by another process")
            return EXIT_NOT_SENT
        return send_until_end(run, trainer)


def send_until_end(run: RunDir, trainer: Trainer | None) -> int:
    """Send until the run has ended and everything is sent; returns the exit code."""
    progress = load_progress(run, None if trainer is None else configured_uri(run))
    sender = RunSender(run, progress)
    num_failures = 0
    while True:
        is_last_try = trainer is None or not trainer.is_alive()
        try:
            sender.send()
            if is_last_try:
                sender.end_if_unfinished()
            if is_last_try or (trainer is not None and sender.has_ended(trainer)):
                return EXIT_DONE
            num_failures = 0
        except BadStoreError as error:
            log(f"telemetry.tracking_uri: {error}")
            return EXIT_BAD_CONFIG
        except ConfigError as error:
            log(str(error))
            return EXIT_BAD_CONFIG
        except Exception as error:
            num_failures += 1
            after = "gave up" if is_last_try else f"next try in {pause_s(num_failures):g} s"
            log(f"{first_line(error)}; {after}; sent {progress.offset} bytes of {run.events.name}")
            if is_last_try:
                return EXIT_NOT_SENT
        time.sleep(pause_s(num_failures))


def end_sweep(sweep: RunDir) -> int:
    """Set the final status of a sweep without running jobs; returns the exit code."""
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
        log(f"{first_line(error)}; gave up")
        return EXIT_NOT_SENT
    return EXIT_DONE


def pause_s(num_failures: int) -> float:
    """Seconds until the next attempt: doubles with each failure in a row, up to a limit."""
    return min(POLL_S * 2.0 ** min(num_failures, 10), LONGEST_PAUSE_S)


@final
class RunSender:
    """Sends one run to one MLflow store."""

    def __init__(self, run: RunDir, progress: SinkProgress) -> None:
        self._run = run
        self._progress = progress
        self._client: Any = None

    def send(self) -> None:
        """Send the unsent part of the log. Raises if MLflow does not accept it, and can be called again."""
        if self._client is None:
            self._client = self._connect()
        while chunk := read_chunk(self._run.events, self._progress.offset):
            self._send_events(chunk.events)
            self._progress.offset = chunk.end
            self._progress.save(self._run)

    def has_ended(self, trainer: Trainer) -> bool:
        """Whether the `run_ended` event of this trainer was sent."""
        if self._progress.offset <= trainer.log_bytes or self._progress.offset < self._run.events.stat().st_size:
            return False
        return isinstance(last_event(self._run), RunEnded)

    def end_if_unfinished(self) -> None:
        """Set the run to FAILED if the trainer is gone without a `run_ended` event."""
        if not isinstance(last_event(self._run), RunEnded):
            self._send_incidents()
            self._client.set_terminated(self._progress.run_id, "FAILED")

    def _connect(self) -> Any:
        settings = configuration(self._run)
        uri = connection_uri(self._progress.tracking_uri)
        with schema_lock(uri):
            client = open_client(uri)
            if not is_active(client, self._progress.run_id):
                create_run(client, self._run, self._progress, settings["telemetry"]["experiment"])
                self._progress.save(self._run)
        log_params(client, self._run, self._progress.run_id, settings)
        nest_under_sweep(client, self._run, self._progress, settings["telemetry"]["experiment"])
        return client

    def _send_events(self, events: list[Event]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, milliseconds(event.time), event.iteration)
            for event in events
            for name, value in metrics_of(event).items()
        ]
        for first in range(0, len(metrics), METRICS_PER_CALL):
            self._client.log_batch(self._progress.run_id, metrics=metrics[first : first + METRICS_PER_CALL])
        for event in events:
            match event:
                case RunStarted():
                    self._client.update_run(self._progress.run_id, status="RUNNING")
                case RunEnded():
                    self._end(event)
                case Incident():
                    text = f"{', '.join(event.kinds)} from iteration {event.onset}: {event.verdict}"
                    self._client.set_tag(self._progress.run_id, f"incident.{event.number:03d}", text)
                case DrillScored():
                    self._send_file(self._run.score_card)
                    result = "passed" if event.passed else "failed"
                    self._client.set_tag(self._progress.run_id, f"drill.{event.scenario}", result)
                case _:
                    pass

    def _send_file(self, path: Path) -> None:
        if path.exists():
            try:
                self._client.log_artifact(self._progress.run_id, str(path))
            except Exception as error:
                log(f"{path.name} was not sent: {first_line(error)}")

    def _send_incidents(self) -> None:
        """Send post-mortems, evidence and pictures of all incidents."""
        for folder in sorted(self._run.incidents.glob("*")):
            try:
                self._client.log_artifacts(
                    self._progress.run_id, str(folder), f"{self._run.incidents.name}/{folder.name}"
                )
            except Exception as error:
                log(f"incident {folder.name} was not sent: {first_line(error)}")

    def _end(self, event: RunEnded) -> None:
        self._send_file(self._run.picture)
        self._send_incidents()
        match event.exit_code:
            case 0:
                status = "FINISHED"
            case code if code == EXIT_INTERRUPTED:
                status = "KILLED"
            case _:
                status = "FAILED"
        self._client.set_terminated(self._progress.run_id, status, milliseconds(event.time))
        end_sweep_after_last_job(self._client, self._run, self._progress)


def last_event(run: RunDir) -> Event | None:
    """The last event of the run itself, without the drill score that is appended later."""
    return next((event for event in reversed(tail(run.events)) if not isinstance(event, DrillScored)), None)


def log(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {without_credentials(message)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
