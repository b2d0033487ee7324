"""Config section `telemetry`: sinks (MLflow, W&B, TensorBoard, Prometheus, alerts), pictures, post-mortems."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from harness.config.alerts import AlertsConfig
from harness.config.errors import require, require_duration

LEAST_SYSTEM_EVERY_S = 0.1
MOST_SYSTEM_EVERY_S = 1e8
"""The longest waits of a thread are not much longer."""


class WandbMode(StrEnum):
    """Where W&B keeps the run."""

    online = "online"
    """Send to the server while the run trains. Needs WANDB_API_KEY, or `wandb login`; WANDB_BASE_URL chooses another
    server."""
    offline = "offline"
    """Write to the run directory; `wandb sync` sends it later."""


@dataclass(slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    enabled: bool = False
    """Send the events to W&B. Needs the extra `wandb`."""
    project: str = "pretraining"
    """W&B project of the run."""
    entity: str | None = None
    """W&B user or team; null: the default of the API key."""
    mode: WandbMode = WandbMode.online
    """Send to a server, with the key of WANDB_API_KEY or `wandb login`; or write to the run directory."""

    def __post_init__(self) -> None:
        require(bool(self.project), "telemetry.wandb.project", "must not be empty")


@dataclass(slots=True, kw_only=True)
class TensorboardConfig:
    """TensorBoard."""

    enabled: bool = False
    """Write TensorBoard's event file to the run directory, in tensorboard/. Needs the extra `tensorboard`."""


@dataclass(slots=True, kw_only=True)
class PrometheusConfig:
    """An HTTP endpoint with the newest values, for Prometheus to scrape."""

    enabled: bool = False
    """Serve /metrics on the machine of rank 0 while the run trains."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: every interface. Whoever reaches it can read the metrics."""
    port: int = 0
    """Port to listen on; 0: a free one. The address is in prometheus-target.json of the run directory."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "telemetry.prometheus.port", f"must be from 0 to 65535, got {self.port}")


@dataclass(slots=True, kw_only=True)
class TelemetryConfig:
    """What a run reports besides its event log."""

    mlflow: bool
    """Send the events to MLflow."""
    tracking_uri: str | None
    """Any MLflow tracking URI without a password or token; env:NAME: the value of that environment variable, which is
    not written to disk; null: sqlite in run.dir."""
    experiment: str
    """MLflow experiment of the run."""
    exit_wait_s: float
    """Seconds for which a finished run waits until everything is sent to its sinks; the rest can be sent later."""
    picture: bool
    """Write loss.png when the run ends, unless it was interrupted (exit code 75)."""
    postmortem: bool
    """Write incidents/NNN/ when an incident ends, in a separate process."""
    replay_s: float = 60.0
    """Seconds for which a finished run replays the guilty steps of its incidents on the CPU, for their post-mortems; 0:
    no replay. Harmless incidents are not replayed."""
    system_every_s: float = 10.0
    """Seconds between samples of GPU utilisation, memory, power and temperature, host memory and CPU load, taken by a
    thread of each machine's first rank; 0: no samples. Above 1,000 ranks at least num_ranks / 100."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)

    def __post_init__(self) -> None:
        for name in ("exit_wait_s", "replay_s"):
            value = getattr(self, name)
            require(value >= 0, f"telemetry.{name}", f"must be 0 or more, got {value}")
            require_duration(value, f"telemetry.{name}")
        least, most = LEAST_SYSTEM_EVERY_S, MOST_SYSTEM_EVERY_S
        message = f"must be 0 (no samples) or from {least:g} to {most:g}, got {self.system_every_s:g}"
        is_valid = self.system_every_s == 0 or least <= self.system_every_s <= most
        require(is_valid, "telemetry.system_every_s", message)
        require(bool(self.experiment), "telemetry.experiment", "must not be empty")
