"""What a sink is: the target of a run's events, with its own progress on disk.

Every sink remembers in one file of the run directory how far it has got (`mlflow.json`, `wandb.json`, ...). The number
advances only after the target accepted the events, so a target that was down misses nothing. How each sink keeps a
batch that was sent twice from counting twice is in its own file.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from harness.config.compose import load_typed
from harness.config.explain import keys_of
from harness.config.telemetry import TelemetryConfig
from harness.core.events import SystemSampled
from harness.core.rundir import RunDir, write_atomically
from harness.telemetry.event_log import Chunk
from harness.telemetry.sinks.sink_log import log


class SinkKind(StrEnum):
    """The targets of a run's events."""

    mlflow = "mlflow"
    wandb = "wandb"
    tensorboard = "tensorboard"
    prometheus = "prometheus"
    alerts = "alerts"


class BadSinkError(Exception):
    """The target can never accept the run as it is configured; the message names the key."""


@dataclass(slots=True, kw_only=True)
class SinkState:
    """Progress of a sink; a sink with more to remember has a subclass."""

    offset: int = 0
    """Bytes of the event log that the target has accepted."""
    sampled: dict[str, float] = field(default_factory=dict)
    """Rank -> time of the newest system sample that the target has accepted."""

    def rewind(self, offset: int) -> None:
        """Continue at this byte of a log that has lost its end."""
        self.offset = offset


class Sink(Protocol):
    """One target. A method raises if the target does not answer; the same call then follows again."""

    @property
    def state(self) -> SinkState: ...

    def connect(self) -> None:
        """Open the target; does nothing if it is open."""

    def send(self, chunk: Chunk) -> None:
        """Send events."""

    def send_samples(self, samples: list[SystemSampled]) -> None:
        """Send system samples."""

    def poll(self) -> None:
        """Do what does not depend on new events; called about once a second."""

    def save(self) -> None:
        """Store the progress; called after each accepted batch."""

    def end(self, *, has_ended: bool) -> None:
        """The trainer is gone or done, and everything was sent. `has_ended`: the log has its end or its restart.

        It is also called by hand, without a trainer; then `has_ended` is True, too, for a run that still trains.
        """


State = TypeVar("State", bound=SinkState)


def progress_file(run: RunDir, kind: SinkKind) -> Path:
    return run.path / f"{kind}.json"


def load_sink_state(run: RunDir, kind: SinkKind, state_type: type[State]) -> State:
    """The stored progress of a sink; its initial state if there is none, or if the file is damaged."""
    return read_sink_state(progress_file(run, kind), state_type) or state_type()


def read_sink_state(path: Path, state_type: type[State]) -> State | None:
    """The progress in a file, without keys of a later version; None if there is none, or if the file is damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        known = [each.name for each in fields(state_type)]
        return state_type(**{name: value for name, value in dict(stored).items() if name in known})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        log(f"{path} is damaged: the sink starts as in a new run")
        return None


def stored_offset(run: RunDir, kind: SinkKind) -> int:
    """Bytes of the log that a sink has sent; 0 if there is no progress that can be read."""
    with suppress(OSError):
        state = read_sink_state(progress_file(run, kind), SinkState)
        return 0 if state is None else state.offset
    return 0


def save_state(run: RunDir, kind: SinkKind, state: SinkState) -> None:
    write_atomically(progress_file(run, kind), json.dumps(asdict(state), indent=2) + "\n")


def configuration(run: RunDir) -> dict[str, Any]:
    """The stored configuration of a run, unchecked: an older version may have written it."""
    tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


def read_telemetry(run: RunDir) -> TelemetryConfig:
    """The section `telemetry` of a run's stored configuration; keys that this version does not know are ignored."""
    tree = configuration(run)["telemetry"]
    known = {key: value for key, value in tree.items() if key in keys_of("telemetry")}
    return load_typed(TelemetryConfig, "telemetry", [known], [])


def enabled_sinks(cfg: TelemetryConfig) -> list[SinkKind]:
    """The sinks of a run."""
    enabled = {
        SinkKind.mlflow: cfg.mlflow,
        SinkKind.wandb: cfg.wandb.enabled,
        SinkKind.tensorboard: cfg.tensorboard.enabled,
        SinkKind.prometheus: cfg.prometheus.enabled,
        SinkKind.alerts: cfg.alerts.has_channel,
    }
    return [kind for kind, is_on in enabled.items() if is_on]
