"""The alert sink: turns events, silence and the death of the trainer into alerts, and delivers them.

While the trainer lives, its events and its heartbeats are watched. When it is gone without `run_ended`, which neither
it nor its launcher could write, that is an alert too. Alerts that no channel accepted stay in `alerts.json`; the next
start of the run, or `python -m harness.telemetry.sinks RUN`, sends them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from socket import gethostname
from typing import Any, final

from harness.config.alerts import AlertKind, AlertsConfig
from harness.config.compose import load_typed
from harness.config.launch import LaunchConfig
from harness.core.events import Action, RunEnded, RunStarted, SystemSampled
from harness.core.plural import pluralize
from harness.core.rundir import RunDir
from harness.telemetry.alerts.alert import Alert, alerts_of, postmortem_link, render_alert
from harness.telemetry.alerts.channels import PROGRAM_TIMEOUT_S, ChannelKind, DeliveryError, deliver
from harness.telemetry.alerts.outbox import EXPIRES_S, WAIT_S, AlertState, Outbox
from harness.telemetry.alerts.stall_watch import StallWatch
from harness.telemetry.event_log import Chunk, last_iteration, log_size, read_chunk
from harness.telemetry.rank_progress import HangLimits
from harness.telemetry.sinks import parent_run
from harness.telemetry.sinks.sink import SinkKind, configuration, load_sink_state, save_state
from harness.telemetry.sinks.sink_log import log
from harness.telemetry.sinks.trainer_watch import Trainer

LAST_WAIT_S = 1.5 * PROGRAM_TIMEOUT_S
"""How long the end waits for deliveries; longer than one may take."""
REQUEUES = "requeues.jsonl"
"""Record of a Slurm job's ends, with the machines that failed its health check."""


@final
class AlertSink:
    """Sends the alerts of one run."""

    def __init__(self, run: RunDir, cfg: AlertsConfig, trainer: Trainer | None) -> None:
        self._run, self._cfg, self._trainer = run, cfg, trainer
        self.state = load_sink_state(run, SinkKind.alerts, AlertState)
        self._outbox = Outbox(cfg, self.state, self._deliver)
        self._stalls: StallWatch | None = None
        self._has_reported_death = False

    def connect(self) -> None:
        """Skip what the log holds from before the first start with alerts, and begin to watch the heartbeats."""
        if self.state.is_new:
            self.state.is_new = False
            self.state.offset = log_size(self._run.events) if self._trainer is None else self._trainer.log_bytes
            self.save()
        if self.state.newest_incident < 0:
            self.state.newest_incident = newest_incident_before(self._run, self.state.offset)
        if self._stalls is None and self._trainer is not None:
            settings = configuration(self._run)
            limits = HangLimits(
                load_typed(LaunchConfig, "launch", [settings["launch"]], []), settings["parallel"]["timeout_s"]
            )
            no_progress_s = 60 * self._cfg.no_progress_minutes
            self._stalls = StallWatch(self._run, limits, no_progress_s=no_progress_s, now_s=time.monotonic())

    def send(self, chunk: Chunk) -> None:
        """Queue the alerts of these events; `poll` delivers them."""
        for event in chunk.events:
            if isinstance(event, RunStarted):
                self._outbox.forget_start()
            for alert in alerts_of(event, newest_incident=self.state.newest_incident):
                self._outbox.add(alert, time.time())
            if isinstance(event, Action):
                self.state.newest_incident = max(self.state.newest_incident, event.incident)
            if isinstance(event, RunEnded):
                self._stalls = None  # no heartbeat follows

    def send_samples(self, samples: list[SystemSampled]) -> None:
        """System samples cause no alert."""

    def poll(self) -> None:
        """Look at the heartbeats and at Slurm's record, and deliver what is due."""
        if self._stalls is not None and self._trainer is not None and self._trainer.is_alive():
            for alert in self._stalls.check(time.monotonic()):
                self._outbox.add(alert, time.time())
        self._read_requeues()
        self._deliver_due(WAIT_S)

    def save(self) -> None:
        save_state(self._run, SinkKind.alerts, self.state)

    def end(self, *, has_ended: bool) -> None:
        """Alert that the trainer is gone without a word, and raise if alerts still wait."""
        is_gone = self._trainer is not None and (not has_ended or self._trainer.is_replaced(self._run))
        if is_gone and self._trainer is not None and not self._has_reported_death:
            self._has_reported_death = True
            launcher = "its launcher logged no reason" if self._trainer.has_launcher() else "so is its launcher"
            message = f"rank 0 is gone without an end, {launcher}"
            place: dict[str, Any] = {"time": time.time(), "iteration": max(last_iteration(self._run.events), 0)}
            self._outbox.add(Alert(kind=AlertKind.failed, **place, message=message, topic="gone"), time.time())
            self.save()
        self._read_requeues()
        self._deliver_due(LAST_WAIT_S)
        if self.state.queue:
            raise DeliveryError(f"{pluralize(len(self.state.queue), 'alert')} waiting")

    def _deliver_due(self, wait_s: float) -> None:
        for problem in self._outbox.deliver_due(time.time(), save=self.save, wait_s=wait_s):
            log(f"alerts: {problem}")

    def _deliver(self, channel: ChannelKind, alert: Alert, num_left_out: int) -> None:
        run_dir = self._run.path
        in_sweep = parent_run.is_sweep(RunDir(run_dir.parent))
        link = postmortem_link(alert.incident, run_dir=run_dir, base_url=self._cfg.base_url, in_sweep=in_sweep)
        fields = {
            "kind": str(alert.kind),
            "run": run_dir.name,
            "run_dir": str(run_dir),
            "iteration": alert.iteration,
            "time": alert.time,
            "incident": alert.incident,
            "postmortem": link if alert.incident else "",
            "text": render_alert(alert, run_dir=run_dir, host=gethostname(), link=link, num_left_out=num_left_out),
        }
        deliver(channel, self._cfg, fields)

    def _read_requeues(self) -> None:
        """Queue an alert for each machine that failed the health check of a Slurm job."""
        path = self._run.path / REQUEUES
        if not path.is_file() or path.stat().st_size <= self.state.requeue_bytes:
            return
        with path.open("rb") as file:
            file.seek(self.state.requeue_bytes)
            lines = [line for line in file if line.endswith(b"\n")]
        ends = [end for line in lines for end in parse_object(line)]
        for end in ends:
            match end:
                case {"time": int() | float() as ended, "job": job, "unhealthy": dict() as unhealthy}:
                    if ended > time.time() - EXPIRES_S:
                        self._add_unhealthy(unhealthy, str(job), ended)
                case _:  # no machine was unhealthy, or the line is damaged
                    pass
        self.state.requeue_bytes += sum(map(len, lines))
        self.save()

    def _add_unhealthy(self, unhealthy: dict[str, Any], job: str, ended: float) -> None:
        for node, fault in unhealthy.items():
            message = f"machine {node} failed the health check of job {job}: {fault}"
            place: dict[str, Any] = {"time": ended, "iteration": max(last_iteration(self._run.events), 0)}
            alert = Alert(kind=AlertKind.node_out, **place, message=message, topic=f"node out: {node}")
            self._outbox.add(alert, time.time())


def newest_incident_before(run: RunDir, end: int) -> int:
    """Highest number of the incidents in the first `end` bytes of the log; 0: none."""
    newest = place = 0
    while place < end and (chunk := read_chunk(run.events, place, end)):
        newest = max([newest, *(event.incident for event in chunk.events if isinstance(event, Action))])
        place = chunk.end
    return newest


def parse_object(line: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of a line, or nothing if the line is damaged."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return
    if isinstance(parsed, dict):
        yield parsed
