"""The Prometheus sink: an HTTP endpoint with the newest value of every metric, in Prometheus' text format.

The format is a few lines of text, so no library is needed. Values and counters are stored with the progress: counters
continue after a restart, and no event counts twice. `prometheus-target.json` names the address in the format of
Prometheus' `file_sd_configs`, so that one entry `runs/*/prometheus-target.json` finds every run; it is removed when the
run ends. All series have the label `run`.
A value that is not finite is NaN until the next finite one. Left out: history (Prometheus keeps it), and OpenTelemetry:
the Prometheus receiver of its collector reads this endpoint.
"""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from threading import Thread
from typing import final

from harness.config.telemetry import PrometheusConfig
from harness.core.events import (
    BY_OPERATOR,
    Action,
    ActionKind,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    Finding,
    Incident,
    RunEnded,
    RunStarted,
    StepRecord,
    SystemSampled,
)
from harness.core.rundir import RunDir, write_atomically
from harness.telemetry.event_log import Chunk
from harness.telemetry.sinks.metrics import metrics_of
from harness.telemetry.sinks.sink import SinkKind, SinkState, load_sink_state, save_state

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NONFINITE = "_nonfinite"
MEMBERS = {
    "loss": "source",
    "grad_norm": "group",
    "activation_rms": "layer",
    "fp8_underflow": "group",
    "fp8_saturated": "tensor",
}
"""Metric with one value per member -> name of the label."""
LR_SCALE = "harness_lr_scale"
"""The sentinel's factor on the learning rate; the factor of an operator is not in it."""
RESTORE_LR = "restore_lr"
"""Kind of an action that raises that factor again; in the log it is a `cool`, too."""
COUNTERS = (
    "harness_starts_total",
    "harness_rejected_updates_total",
    "harness_incidents_total",
    "harness_checkpoints_total",
    "harness_failed_checkpoints_total",
)
"""Counters without labels; they are 0 from the start, so that an increase is visible."""


@dataclass(slots=True, kw_only=True)
class PrometheusState(SinkState):
    """Content of `prometheus.json`."""

    values: dict[str, float | str] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    """Series, with its labels but without `run` -> newest value; NaN is a string."""


@final
class PrometheusSink:
    """Serves the newest values of one run."""

    def __init__(self, run: RunDir, cfg: PrometheusConfig) -> None:
        self._run, self._cfg = run, cfg
        self.state = load_sink_state(run, SinkKind.prometheus, PrometheusState)
        self._server: MetricsServer | None = None

    def connect(self) -> None:
        if self._server is not None:
            return
        try:
            self._server = MetricsServer((self._cfg.host, self._cfg.port), MetricsHandler)
        except OSError as error:
            problem = error.strerror or str(error)
            raise OSError(f"cannot listen on {self._cfg.host}:{self._cfg.port}: {problem}") from None
        self._publish()
        Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        write_atomically(target_file(self._run), json.dumps([{"targets": [self.address]}]) + "\n")

    @property
    def address(self) -> str:
        """Host and port to scrape; for every interface, the name of this machine."""
        assert self._server is not None
        host = socket.gethostname() if self._cfg.host == "0.0.0.0" else self._cfg.host
        return f"{host}:{self._server.server_address[1]}"

    def send(self, chunk: Chunk) -> None:
        values = dict(self.state.values)
        for event in chunk.events:
            update_values(values, event)
        self.state.values = values
        self._publish()

    def send_samples(self, samples: list[SystemSampled]) -> None:
        self.state.values = self.state.values | {
            series_of(name): value for sample in samples for name, value in metrics_of(sample).items()
        }
        self._publish()

    def poll(self) -> None:
        """Nothing to do."""

    def save(self) -> None:
        save_state(self._run, SinkKind.prometheus, self.state)

    def end(self, *, has_ended: bool) -> None:  # noqa: ARG002 -- the endpoint ends with the run
        assert self._server is not None
        target_file(self._run).unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._server = None

    def _publish(self) -> None:
        assert self._server is not None
        self._server.text = render_metrics(self.state.values, run_name=self._run.path.name)


class MetricsServer(ThreadingHTTPServer):
    """Answers every scrape with `text`."""

    daemon_threads = True
    text = ""

    def server_bind(self) -> None:
        """Bind without the reverse lookup of the host name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]


class MetricsHandler(BaseHTTPRequestHandler):
    """GET /metrics."""

    timeout = 10

    def do_GET(self) -> None:
        assert isinstance(self.server, MetricsServer)
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        body = self.server.text.encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def target_file(run: RunDir) -> Path:
    return run.path / "prometheus-target.json"


def update_values(values: dict[str, float | str], event: Event) -> None:
    """Add an event to the newest values and the counters."""
    for name, value in metrics_of(event).items():
        if name.endswith(NONFINITE):
            values[series_of(name.removesuffix(NONFINITE))] = "NaN"
        else:
            values[series_of(name)] = value
    values["harness_last_event_time_seconds"] = event.time
    for series in counted_series(event, lr_scale=float(values.get(LR_SCALE, 1.0))):
        values[series] = float(values.get(series, 0.0)) + 1
    match event:
        case StepRecord():
            values["harness_iteration"] = event.iteration
        case RunStarted():
            values |= {"harness_running": 1, "harness_world_size": event.world_size}
            values["harness_num_steps"] = event.num_steps
            values.pop("harness_exit_code", None)
        case Incident():  # an incident that is still open at the end of a start has more than one event
            known = float(values.get("harness_incidents_total", 0.0))
            values["harness_incidents_total"] = max(known, float(event.number))
        case Action(kind=ActionKind.cool, lr_scale=float(scale)) if event.incident != BY_OPERATOR:
            values[LR_SCALE] = scale
        case RunEnded():
            values |= {"harness_running": 0, "harness_exit_code": event.exit_code}
        case _:
            pass


def counted_series(event: Event, *, lr_scale: float) -> Iterator[str]:
    """The counters that an event increases; `lr_scale` is the sentinel's factor on the learning rate before it."""
    match event:
        case RunStarted():
            yield "harness_starts_total"
        case StepRecord(refused=True):
            yield "harness_rejected_updates_total"
        case Finding():
            yield f'harness_findings_total{{kind="{event.kind}"}}'
        case Action():
            is_raised = event.label == ActionKind.cool and (event.lr_scale or 0.0) > lr_scale
            yield f'harness_actions_total{{kind="{RESTORE_LR if is_raised else event.label}"}}'
        case CheckpointSaved():
            yield "harness_checkpoints_total"
        case CheckpointFailed():
            yield "harness_failed_checkpoints_total"
        case _:
            pass


def series_of(metric: str) -> str:
    """The Prometheus series of a metric: the parts of its name after a slash become labels."""
    match metric.split("/", maxsplit=1):
        case [family, member] if family in MEMBERS:
            label = MEMBERS[family]
            return f'harness_{family}_by_{label}{{{label}="{escape_label(member)}"}}'
        case ["system", rest]:
            rank, *gpu, name = rest.split("/")
            labels = [f'rank="{rank.removeprefix("rank-")}"', *(f'gpu="{each.removeprefix("gpu-")}"' for each in gpu)]
            return f"harness_{'gpu_' if gpu else ''}{name}{{{','.join(labels)}}}"
        case parts:
            return re.sub(r"\W", "_", f"harness_{'_'.join(parts)}", flags=re.ASCII)


def render_metrics(values: dict[str, float | str], *, run_name: str) -> str:
    """The page in Prometheus' text format."""
    families: dict[str, list[str]] = {}
    for series, value in values.items():
        name, _, labels = series.partition("{")
        labels = f'{{run="{escape_label(run_name)}"' + (f",{labels}" if labels else "}")
        families.setdefault(name, []).append(f"{name}{labels} {render_number(value)}")
    lines: list[str] = []
    for name in sorted(families):
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE {name} {kind}", *sorted(families[name])]
    return "\n".join([*lines, ""])


def render_number(value: float | str) -> str:
    number = float(value)
    return "NaN" if math.isnan(number) else repr(number)


def escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
