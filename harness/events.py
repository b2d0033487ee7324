"""What happened in a run, one JSON object a line: the only thing every tool reads.

Why: a run must be understood from its directory alone, long after its processes are gone.
How: an event is a dataclass with a name, the wall-clock `time` (seconds since 1970) and the `iteration` it belongs to.
NaN and Inf are written as strings, because JSON has no word for them; a line cut short by a crash is passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar


@dataclass(slots=True, kw_only=True)
class Event:
    name: ClassVar[str]
    time: float
    iteration: int


@dataclass(slots=True, kw_only=True)
class RunStarted(Event):
    name: ClassVar[str] = "run_started"
    world_size: int
    num_steps: int
    step: int
    """Updates already applied: 0 in a new run, more after a resume."""
    resumed_from: str | None = None
    """Name of the checkpoint directory."""


@dataclass(slots=True, kw_only=True)
class StepRecord(Event):
    """One iteration, as every rank saw it after the all-reduce."""

    name: ClassVar[str] = "step"
    step: int
    """Updates applied, this one included unless it was refused."""
    cursor: int
    """Batch index consumed."""
    tokens: int
    """Tokens consumed since the start of the run."""
    loss: float
    grad_norm: float
    """Global, before clipping."""
    lr: float
    tokens_per_s: float
    refused: bool
    stop_requested: bool
    """Some rank was asked to stop; all stop after the same iteration."""
    step_time_s: float
    flops_per_s: float
    """Model FLOP/s of all ranks together."""
    mfu: float | None = None
    z_loss: float | None = None
    loss_scale: float | None = None
    memory_bytes: int | None = None
    """Peak memory of rank 0's device, or of its process on CPU."""
    group_grad_norms: dict[str, float] = field(default_factory=dict)
    """Pre-clip gradient norm of each layer group."""
    param_norm: float | None = None
    v_norm: float | None = None
    """Norm of Adam's second moment."""
    activation_rms: dict[str, float] = field(default_factory=dict)
    """Root mean square of the residual stream after each sampled layer."""
    source_losses: dict[str, float] = field(default_factory=dict)
    """Mean loss of each source that was in the batch."""
    batch: dict[str, Any] = field(default_factory=dict)
    """Facts of the batch: fingerprint, entropy, rarest tokens, rows of each source."""


@dataclass(slots=True, kw_only=True)
class EvalRecord(Event):
    name: ClassVar[str] = "eval"
    step: int
    loss: float
    tokens: int
    """Held-out tokens the loss is the mean of."""


@dataclass(slots=True, kw_only=True)
class CheckpointSaved(Event):
    name: ClassVar[str] = "checkpoint"
    step: int
    directory: str
    seconds: float


@dataclass(slots=True, kw_only=True)
class Intervention(Event):
    """Something a person changed in a running experiment."""

    name: ClassVar[str] = "intervention"
    who: str
    reason: str
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class RunEnded(Event):
    name: ClassVar[str] = "run_ended"
    step: int
    exit_code: int
    reason: str


EVENTS: dict[str, type[Event]] = {
    kind.name: kind for kind in (RunStarted, StepRecord, EvalRecord, CheckpointSaved, Intervention, RunEnded)
}


def to_json(event: Event) -> str:
    """One line without its newline; NaN and Inf as strings."""
    return json.dumps(_encode({"event": event.name} | asdict(event)), separators=(",", ":"), allow_nan=False)


def from_json(line: str) -> Event:
    """The event a line holds; keys this version does not know are passed over."""
    data = json.loads(line)
    kind = EVENTS[data["event"]]
    known = {f.name: _decode(data[f.name], str(f.type)) for f in fields(kind) if f.name in data}
    return kind(**known)


def read(path: Path) -> Iterator[Event]:
    """All events of a log in order; a last line that a crash cut short is passed over."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield from parse(line)


def parse(line: str) -> Iterator[Event]:
    """The event of a whole line, or nothing where the line is torn or its event unknown."""
    try:
        yield from_json(line)
    except (ValueError, KeyError, TypeError):
        return


def _encode(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _encode(child) for key, child in value.items()}
        case list() | tuple():
            return [_encode(child) for child in value]
        case _:
            return value


def _decode(value: Any, kind: str) -> Any:
    if "float" not in kind:
        return value
    if isinstance(value, dict):
        return {key: _decode(child, "float") for key, child in value.items()}
    return float(value) if isinstance(value, str | int) and not isinstance(value, bool) else value
