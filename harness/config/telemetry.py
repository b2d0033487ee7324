"""Config section `telemetry`: console, MLflow, post-mortems."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.errors import require


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
    """Seconds for which a finished run waits until everything is sent to MLflow; the rest can be sent later."""
    picture: bool
    """Write loss.png when the run ends, unless it was interrupted (exit code 75)."""
    postmortem: bool
    """Write incidents/NNN/ when an incident ends, in a separate process."""
    replay_s: float = 60.0
    """Seconds for which a finished run replays the guilty steps of its incidents on the CPU, for their post-mortems; 0:
    no replay."""

    def __post_init__(self) -> None:
        require(self.exit_wait_s >= 0, "telemetry.exit_wait_s", f"must be 0 or more, got {self.exit_wait_s}")
        require(self.replay_s >= 0, "telemetry.replay_s", f"must be 0 or more, got {self.replay_s}")
        require(bool(self.experiment), "telemetry.experiment", "must not be empty")
