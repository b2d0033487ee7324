"""The only door to MLflow: a process that tails `events.jsonl` and sends it.

    python -m harness.telemetry.mlflow_sink RUN_DIR      sends what a run left unsent, then exits

Why: a tracking server may be slow, down or gone, and none of that is the trainer's business.
How: `mlflow.json` remembers the MLflow run and how many bytes of the log it has. The number moves only after MLflow
took the batch, so nothing is lost; a batch sent twice is sent with the same timestamps, and MLflow keeps identical
rows once. The MLflow run is created once too: it carries a key written down before the first contact, by which a lost
answer is found again.
While the trainer lives, every failure is tried again, ever less often; once it is gone, what is there is sent once.
MLflow's step is the iteration, which never goes back. A run ends as FINISHED (exit code 0), KILLED (75: interrupted,
may be resumed) or FAILED (any other code, or no last word at all). A resumed run goes on under the same id; options
that changed become tags `changed.<key>`, because MLflow's params are written once.
Left out: the picture is sent once, without a second try; it lies in the run directory anyway.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from harness.compose import flat
from harness.config import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED
from harness.events import Event, RunEnded, RunStarted, read
from harness.rundir import RunDir
from harness.telemetry.metrics import metrics_of
from harness.telemetry.sinks import read_chunk, tail
from harness.telemetry.store import schema_lock, sqlite_path, without_credentials
from harness.telemetry.ticket import Ticket, Trainer, configuration, configured_uri, load_ticket, sole_sender

EXIT_NOT_SENT = 1
POLL_S = 1.0
LONGEST_PAUSE_S = 15.0
METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
LONGEST_PARAM = 500
KEY_TAG = "harness.key"
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "GIT_PYTHON_REFRESH": "quiet",
}


class BadStoreError(Exception):
    """The tracking URI names nothing MLflow could ever write to."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.telemetry.mlflow_sink", description="Send a run to MLflow."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log-bytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    run = RunDir(options.run_dir.resolve())
    if not run.config.is_file():
        say(f"{run.path} is not a run directory: it has no {run.config.name}")
        return EXIT_BAD_CONFIG
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
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
    ticket = load_ticket(run, None if trainer is None else configured_uri(run))
    delivery = Delivery(run, ticket)
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
        except Exception as error:
            num_failures += 1
            after = "gave up" if last_call else f"next try in {pause_s(num_failures):g} s"
            say(f"{first_line(error)}; {after}; sent {ticket.offset} bytes of {run.events.name}")
            if last_call:
                return EXIT_NOT_SENT
        time.sleep(pause_s(num_failures))


def pause_s(num_failures: int) -> float:
    """Doubles with each failure in a row, up to a limit."""
    return min(POLL_S * 2.0 ** min(num_failures, 10), LONGEST_PAUSE_S)


@final
class Delivery:
    """One run on its way to one MLflow store."""

    def __init__(self, run: RunDir, ticket: Ticket) -> None:
        self._run = run
        self._ticket = ticket
        self._client: Any = None

    def send(self) -> None:
        """Everything the log holds; raises where MLflow does not take it, and can be called again."""
        if self._client is None:
            self._client = self._connect()
        while chunk := read_chunk(self._run.events, self._ticket.offset):
            self._send_events(chunk.events)
            self._ticket.offset = chunk.end
            self._ticket.save(self._run)

    def has_ended(self, trainer: Trainer) -> bool:
        """Whether the trainer's own last word is among what was sent."""
        if self._ticket.offset <= trainer.log_bytes or self._ticket.offset < self._run.events.stat().st_size:
            return False
        return isinstance(last_event(self._run), RunEnded)

    def end_without_last_word(self) -> None:
        """A trainer that is gone and did not say why has failed."""
        if not isinstance(last_event(self._run), RunEnded):
            self._client.set_terminated(self._ticket.run_id, "FAILED")

    def _connect(self) -> Any:
        settings = configuration(self._run)
        with schema_lock(self._ticket.tracking_uri):
            client = open_client(self._ticket.tracking_uri)
            if not is_active(client, self._ticket.run_id):
                create_run(client, self._run, self._ticket, settings["telemetry"]["experiment"])
                self._ticket.save(self._run)
        describe(client, self._run, self._ticket.run_id, settings)
        return client

    def _send_events(self, events: list[Event]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, milliseconds(event.time), event.iteration)
            for event in events
            for name, value in metrics_of(event).items()
        ]
        for first in range(0, len(metrics), METRICS_PER_CALL):
            self._client.log_batch(self._ticket.run_id, metrics=metrics[first : first + METRICS_PER_CALL])
        for event in events:
            match event:
                case RunStarted():
                    self._client.update_run(self._ticket.run_id, status="RUNNING")
                case RunEnded():
                    self._end(event)
                case _:
                    pass

    def _end(self, event: RunEnded) -> None:
        if self._run.picture.exists():
            try:
                self._client.log_artifact(self._ticket.run_id, str(self._run.picture))
            except Exception as error:
                say(f"{self._run.picture.name} was not sent: {first_line(error)}")
        match event.exit_code:
            case 0:
                status = "FINISHED"
            case code if code == EXIT_INTERRUPTED:
                status = "KILLED"
            case _:
                status = "FAILED"
        self._client.set_terminated(self._ticket.run_id, status, milliseconds(event.time))


def open_client(uri: str) -> Any:
    """MLflow's client; a URI it can never use is told apart from a store that does not answer now."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except MlflowException as error:
        if error.error_code == "INVALID_PARAMETER_VALUE":
            raise BadStoreError(first_line(error)) from None
        raise


def is_active(client: Any, run_id: str | None) -> bool:
    """Whether the store has this run, and nobody deleted it."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return False
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def create_run(client: Any, run: RunDir, ticket: Ticket, experiment_name: str) -> None:
    """Give the ticket a run, to be sent from the first event on; one that was created before, unconfirmed, is found."""
    ticket.offset = 0
    ticket.experiment_id = experiment(client, ticket.tracking_uri, experiment_name)
    found = client.search_runs([ticket.experiment_id], f"tags.`{KEY_TAG}` = '{ticket.key}'", max_results=1)
    if found:
        ticket.run_id = found[0].info.run_id
        return
    first = next(read(run.events), None) if run.events.exists() else None
    start_time = milliseconds(time.time() if first is None else first.time)
    tags = {KEY_TAG: ticket.key, "run_dir": str(run.path), "mlflow.source.name": "harness.train"}
    created = client.create_run(ticket.experiment_id, start_time=start_time, tags=tags, run_name=run.path.name)
    ticket.run_id = created.info.run_id


def experiment(client: Any, uri: str, name: str) -> str:
    """The id of the experiment, created where there is none; a sqlite store keeps its artifacts beside it."""
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


def describe(client: Any, run: RunDir, run_id: str | None, settings: dict[str, Any]) -> None:
    """The configuration as params, what changed since as tags, and the commit."""
    from mlflow.entities import Param, RunTag

    wanted = {key: without_credentials(str(value))[:LONGEST_PARAM] for key, value in flat(settings).items()}
    known = client.get_run(run_id).data.params
    params = [Param(key, value) for key, value in wanted.items() if key not in known]
    tags = [RunTag(f"changed.{key}", value) for key, value in wanted.items() if known.get(key, value) != value]
    if run.manifest.exists():
        manifest = json.loads(run.manifest.read_text(encoding="utf-8"))
        commit = [manifest, *manifest["starts"]][-1]["commit"]
        tags += [RunTag("commit", commit), RunTag("mlflow.source.git.commit", commit)] if commit else []
    for first in range(0, len(params), PARAMS_PER_CALL):
        client.log_batch(run_id, params=params[first : first + PARAMS_PER_CALL])
    for first in range(0, len(tags), PARAMS_PER_CALL):
        client.log_batch(run_id, tags=tags[first : first + PARAMS_PER_CALL])


def last_event(run: RunDir) -> Event | None:
    return next(reversed(tail(run.events)), None)


def milliseconds(time_s: float) -> int:
    return round(time_s * 1000)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def say(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
