"""The door to MLflow, with `mlflow_run`: a process that tails `events.jsonl` and sends it.

    python -m harness.telemetry.tracking.mlflow_sink RUN_DIR      sends what a run left unsent, then exits
    python -m harness.telemetry.tracking.mlflow_sink SWEEP_DIR    says how a sweep ended

Why: a tracking server may be slow, down or gone, and none of that is the trainer's business.
How: `mlflow.json` remembers the MLflow run and how many bytes of the log it has. The number moves only after MLflow
took the batch, so nothing is lost; a batch sent twice is sent with the same timestamps, and MLflow keeps identical
rows once. The MLflow run is created once too: it carries a key written down before the first contact, by which a lost
answer is found again.
While the trainer lives, every failure is tried again, ever less often; once it is gone, what is there is sent once.
MLflow's step is the iteration, which never goes back. A run ends as FINISHED (exit code 0), KILLED (75: interrupted,
may be resumed) or FAILED (any other code, or no last word at all). A resumed run goes on under the same id; options
that changed become tags `changed.<key>`, because MLflow's params are written once.
Left out: the picture and a drill's card are sent once, without a second try; they lie in the run directory anyway.
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
    describe,
    first_line,
    is_active,
    milliseconds,
    nest,
    open_client,
    run_of_sweep,
    settle,
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
        say(f"{run.path} is not a run directory: it has no {run.config.name}")
        return EXIT_BAD_CONFIG
    for number in (signal.SIGINT, signal.SIGUSR1):  # meant for the run, sent to everybody
        signal.signal(number, signal.SIG_IGN)
    trainer = None if options.trainer is None else Trainer(options.trainer, options.log_bytes)
    with sole_sender(run, trainer) as alone:
        if not alone:
            say(f"{run.path} is being sent by another process")
            return EXIT_NOT_SENT
        return follow(run, trainer)


def follow(run: RunDir, trainer: Trainer | None) -> int:
    """Send until the run has ended and all of it is sent; the exit code."""
    progress = load_progress(run, None if trainer is None else configured_uri(run))
    delivery = Delivery(run, progress)
    num_failures = 0
    while True:
        last_call = trainer is None or not trainer.is_alive()
        try:
            delivery.send()
            if last_call:
                delivery.end_without_last_word()
            if last_call or (trainer is not None and delivery.has_ended(trainer)):
                return EXIT_DONE
            num_failures = 0
        except BadStoreError as error:
            say(f"telemetry.tracking_uri: {error}")
            return EXIT_BAD_CONFIG
        except ConfigError as error:
            say(str(error))
            return EXIT_BAD_CONFIG
        except Exception as error:
            num_failures += 1
            after = "gave up" if last_call else f"next try in {pause_s(num_failures):g} s"
            say(f"{first_line(error)}; {after}; sent {progress.offset} bytes of {run.events.name}")
            if last_call:
                return EXIT_NOT_SENT
        time.sleep(pause_s(num_failures))


def end_sweep(sweep: RunDir) -> int:
    """Say once how a sweep ended of which no job goes on any more; the exit code."""
    runs = [RunDir(sweep.path / job["name"]) for job in parent_run.jobs(sweep)]
    try:
        first = next(run for run in runs if run.config.is_file())
        uri, settings = configured_uri(first), configuration(first)
        with schema_lock(connection_uri(uri)):
            client = open_client(connection_uri(uri))
        parent_id = run_of_sweep(client, sweep, uri, settings["telemetry"]["experiment"])
        client.set_terminated(parent_id, parent_run.status(sweep, is_over=True))
    except StopIteration:
        say(f"{sweep.path} holds no run")
        return EXIT_BAD_CONFIG
    except Exception as error:
        say(f"{first_line(error)}; gave up")
        return EXIT_NOT_SENT
    return EXIT_DONE


def pause_s(num_failures: int) -> float:
    """Doubles with each failure in a row, up to a limit."""
    return min(POLL_S * 2.0 ** min(num_failures, 10), LONGEST_PAUSE_S)


@final
class Delivery:
    """One run on its way to one MLflow store."""

    def __init__(self, run: RunDir, progress: SinkProgress) -> None:
        self._run = run
        self._progress = progress
        self._client: Any = None

    def send(self) -> None:
        """Everything the log holds; raises where MLflow does not take it, and can be called again."""
        if self._client is None:
            self._client = self._connect()
        while chunk := read_chunk(self._run.events, self._progress.offset):
            self._send_events(chunk.events)
            self._progress.offset = chunk.end
            self._progress.save(self._run)

    def has_ended(self, trainer: Trainer) -> bool:
        """Whether the trainer's own last word is among what was sent."""
        if self._progress.offset <= trainer.log_bytes or self._progress.offset < self._run.events.stat().st_size:
            return False
        return isinstance(last_event(self._run), RunEnded)

    def end_without_last_word(self) -> None:
        """A trainer that is gone and did not say why has failed."""
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
        describe(client, self._run, self._progress.run_id, settings)
        nest(client, self._run, self._progress, settings["telemetry"]["experiment"])
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
                    words = f"{', '.join(event.kinds)} from iteration {event.onset}: {event.verdict}"
                    self._client.set_tag(self._progress.run_id, f"incident.{event.number:03d}", words)
                case DrillScored():
                    self._send_file(self._run.score_card)
                    verdict = "passed" if event.passed else "failed"
                    self._client.set_tag(self._progress.run_id, f"drill.{event.scenario}", verdict)
                case _:
                    pass

    def _send_file(self, path: Path) -> None:
        if path.exists():
            try:
                self._client.log_artifact(self._progress.run_id, str(path))
            except Exception as error:
                say(f"{path.name} was not sent: {first_line(error)}")

    def _send_incidents(self) -> None:
        """Post-mortems, evidence and pictures, as they lie in the run directory."""
        for folder in sorted(self._run.incidents.glob("*")):
            try:
                self._client.log_artifacts(
                    self._progress.run_id, str(folder), f"{self._run.incidents.name}/{folder.name}"
                )
            except Exception as error:
                say(f"incident {folder.name} was not sent: {first_line(error)}")

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
        settle(self._client, self._run, self._progress)


def last_event(run: RunDir) -> Event | None:
    """The last word of the run itself; what was scored afterwards is not its own."""
    return next((event for event in reversed(tail(run.events)) if not isinstance(event, DrillScored)), None)


def say(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {without_credentials(message)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
