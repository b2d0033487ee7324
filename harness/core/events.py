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
from enum import StrEnum
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


TOKEN_LOSS_EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0)
"""Nats; between neighbouring edges lies one bin of the histogram of token losses."""

RankSpread = dict[str, Any]
"""One number of every rank, in brief: `median`, `spread` (a robust sigma) and `worst`: [[rank, value], ...], the
farthest from the median first, at most four; a log line must not grow with the cluster."""

Fp8Health = dict[str, Any]
"""How the numbers of one kind fit into fp8: `underflow` (share of those that were not zero and became it), `saturated`
(share of the tensors with a number at twice the range or beyond) and `scale_log2`: [least, most] exponent of their
scales."""


@dataclass(slots=True, kw_only=True)
class ReducedRecord(Event):
    """One iteration, as every rank knows it after the all-reduce: all that detectors and policy may see.

    Every field comes from the reduced vector or from state that all ranks hold alike. The exception is `time`: it goes
    into the log and decides nothing. What one rank alone knows belongs into `StepRecord`.
    """

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
    refused: bool
    stop_requested: bool
    """Some rank was asked to stop; all stop after the same iteration."""
    save_requested: bool = False
    """A checkpoint is due by the clock; all save after the same iteration."""
    command_waits: bool = False
    """An operator asks for something; all ranks hear what at the same iteration."""
    z_loss: float | None = None
    loss_scale: float | None = None
    group_grad_norms: dict[str, float] = field(default_factory=dict)
    """Pre-clip gradient norm of each layer group."""
    param_norm: float | None = None
    group_param_norms: dict[str, float] = field(default_factory=dict)
    """Norm of the weights of each layer group."""
    v_norm: float | None = None
    """Norm of Adam's second moment."""
    beta2: float | None = None
    """What an update leaves of that moment, at least; where probed."""
    update_ratio: float | None = None
    """Norm of the update that the moments stand for, over the norm of the weights."""
    square_ratio: float | None = None
    """Clipped gradient over the root of Adam's second moment, in the layer group where that is largest: about 1; far
    above, the moment is stale."""
    activation_rms: dict[str, float] = field(default_factory=dict)
    """Root mean square of the residual stream after each sampled layer."""
    source_losses: dict[str, float] = field(default_factory=dict)
    """Mean loss of each source that was in the batch."""
    bounds: dict[str, float] = field(default_factory=dict)
    """What the gate would have refused beyond: loss, grad_norm."""
    ranks: dict[str, RankSpread] = field(default_factory=dict)
    """How loss, grad_norm (before the reduction), step_time_s (of the host, outside collectives) and, on CUDA,
    device_time_s (kernels of the loss head) spread over the ranks."""
    nonfinite_ranks: list[int] = field(default_factory=list)
    """Ranks whose own loss or own gradient, before the reduction, was not finite."""
    mismatched_ranks: list[int] = field(default_factory=list)
    """Ranks whose weights differ from those of their replicas."""
    digests: dict[str, list[int]] = field(default_factory=dict)
    """Digest of all decisions and of this step's branches -> ranks that hold it (at most four); empty where all ranks
    agree."""
    median_step_s: float = 0.0
    """Median over the ranks of the last step time that each measured with its own clock; 0: not measured."""
    fingerprint: str = ""
    """Sum of the fingerprints of all rows of the global batch, hexadecimal; empty: not measured."""
    other_data: dict[str, list[int]] = field(default_factory=dict)
    """What differs -> ranks that read other data than the rest. `plan`: corpus, order or ledger; `rows`: the tokens of
    a row that two ranks read."""
    in_planned_change: bool = False
    """The batch lies within the window that follows a planned change of the data or of the schedule."""
    in_fp8: bool | None = None
    """Whether this step was computed in fp8; None in a run that never is."""
    fp8: dict[str, Fp8Health] = field(default_factory=dict)
    """How activations, weights and gradients fit into fp8; only where probed."""
    fp8_underflow: dict[str, float] = field(default_factory=dict)
    """Share of the numbers that fp8 made zero, in the worst of the three, of each layer group; only where probed."""
    token_loss_counts: list[int] = field(default_factory=list)
    """How many tokens had a loss below each edge of `TOKEN_LOSS_EDGES`, and the rest; only where probed."""


@dataclass(slots=True, kw_only=True)
class StepRecord(ReducedRecord):
    """One iteration as it is logged: what all ranks know, and what rank 0 adds from its own clock, memory and rows.

    The fields of this class differ between ranks. They are for people and decide nothing.
    """

    name: ClassVar[str] = "step"
    tokens_per_s: float
    step_time_s: float
    flops_per_s: float
    """Model FLOP/s of all ranks together."""
    mfu: float | None = None
    memory_bytes: int | None = None
    """Peak memory of rank 0's device, or of its process on CPU."""
    batch: dict[str, Any] = field(default_factory=dict)
    """Facts of the batch: `fingerprint` and `rows` (of each source) of the global batch, `entropy_nats` and `rarest`
    (tokens) of rank 0's own rows."""


@dataclass(slots=True, kw_only=True)
class EvalRecord(Event):
    name: ClassVar[str] = "eval"
    step: int
    loss: float
    tokens: int
    """Held-out tokens the loss is the mean of."""


@dataclass(slots=True, kw_only=True)
class HeldOutMeasured(Event):
    """Loss on the fixed held-out rows, measured as the run starts and when a checkpoint is taken; the level that a
    check at an incident is compared with."""

    name: ClassVar[str] = "held_out"
    step: int
    loss: float


@dataclass(slots=True, kw_only=True)
class ChangePlanned(Event):
    """A planned change of the data or of the schedule begins: the gate's bounds are wider until it ends."""

    name: ClassVar[str] = "planned_change"
    step: int
    cursor: int
    until: int
    """The window ends before this batch, or before this step where the schedule changes."""
    reason: str


@dataclass(slots=True, kw_only=True)
class CheckpointSaved(Event):
    name: ClassVar[str] = "checkpoint"
    step: int
    directory: str
    seconds: float
    """From the moment its numbers were known until it was safe on disk."""
    blocked_s: float = 0.0
    """How long training waited for it."""
    bytes: int = 0


@dataclass(slots=True, kw_only=True)
class CheckpointFailed(Event):
    """Training goes on; the next one is tried when it is due."""

    name: ClassVar[str] = "checkpoint_failed"
    step: int
    reason: str


@dataclass(slots=True, kw_only=True)
class CheckpointJudged(Event):
    """What later steps, or its own files, showed of a checkpoint."""

    name: ClassVar[str] = "checkpoint_judged"
    directory: str
    health: str
    """good, tainted or damaged."""
    reason: str


class FindingKind(StrEnum):
    """What a detector can suspect."""

    nonfinite = "nonfinite"
    loss_spike = "loss_spike"
    grad_spike = "grad_spike"
    divergence = "divergence"
    level_shift = "level_shift"
    weight_drift = "weight_drift"
    v_stale = "v_stale"
    lr_jump = "lr_jump"
    duplicate_batch = "duplicate_batch"
    optimizer_reset = "optimizer_reset"
    scale_collapse = "scale_collapse"
    fp8_range = "fp8_range"
    slow = "slow"
    speed_recovered = "speed_recovered"
    """The end of `slow`."""
    rank_outlier = "rank_outlier"
    replica_mismatch = "replica_mismatch"
    data_mismatch = "data_mismatch"


ABOUT_SPEED = frozenset({FindingKind.slow, FindingKind.speed_recovered})
"""Findings on the speed of a run, not on what it computes."""


@dataclass(slots=True, kw_only=True)
class Finding(Event):
    """A suspicion, raised once at the iteration whose record gave rise to it."""

    name: ClassVar[str] = "finding"
    kind: FindingKind
    step: int
    onset: int
    """The iteration where it probably began, at or before this one."""
    value: float
    """The number that gave rise to it."""
    bound: float
    """What it was held against."""
    message: str
    """One line for a person."""
    ranks: list[int] = field(default_factory=list)
    """Guilty ranks, where known."""
    groups: list[str] = field(default_factory=list)
    """Guilty layer groups, where known."""
    cursors: list[int] = field(default_factory=list)
    """Batches that may have caused it."""


class ActionKind(StrEnum):
    """The ladder, from doing nothing to giving up."""

    watch = "watch"
    skip = "skip"
    check = "check"
    """Measure the held-out loss of the current weights: is the state damaged, or is the data different?"""
    accept = "accept"
    """The state is healthy and the data changed: take its loss as the new level and give skipped batches back."""
    rewind = "rewind"
    rollback = "rollback"
    cool = "cool"
    swap = "swap"
    precision = "precision"
    halt = "halt"


@dataclass(slots=True, kw_only=True)
class Action(Event):
    """What the policy decided, alike on every rank; what came of it is an `Outcome`."""

    name: ClassVar[str] = "action"
    kind: ActionKind
    step: int
    incident: int
    """Number of the incident it answers, counted from 1."""
    reason: str
    onset: int
    """Rewind and rollback: the state must be from before this iteration."""
    exclude: list[int] = field(default_factory=list)
    """First and last batch index that must never be seen again; empty: none."""
    lr_scale: float | None = None
    """Cool: what the learning rate is multiplied with from now on; 1 restores it."""
    source: str | None = None
    """Swap: the source of data to turn off."""
    in_fp8: bool | None = None
    """Precision: whether products are taken in fp8 from now on, or in bf16."""
    until: int | None = None
    """Cool and precision: the iteration at which it ends; where precision has none, it lasts to the end of the run."""
    level: float | None = None
    """Check: the held-out loss that a healthy state has. Accept: the loss that the gate takes as its new level."""
    grad_level: float | None = None
    """Accept: the gradient norm that the gate takes as its new level."""
    give_back: list[list[int]] = field(default_factory=list)
    """Accept: first and last batch of each range that was skipped or rejected and is consumed next."""


@dataclass(slots=True, kw_only=True)
class Outcome(Event):
    """What an action came to."""

    name: ClassVar[str] = "outcome"
    kind: ActionKind
    incident: int
    succeeded: bool
    """False: there was nothing to go back to, or it could not be done; the policy must choose again."""
    step: int
    """Where the run stands after it."""
    target: str = ""
    """What was restored: a snapshot's iteration or a checkpoint's directory."""
    steps_lost: int = 0
    tokens_lost: int = 0
    seconds: float = 0.0
    reason: str = ""
    """Why it failed, where that is known."""
    is_torn: bool = False
    """A restore failed halfway: the weights are neither the old nor the restored ones, and the run must halt."""
    held_out_loss: float | None = None
    """Check: the loss of the current weights on the fixed held-out rows."""


@dataclass(slots=True, kw_only=True)
class Incident(Event):
    """One anomaly from its onset to what became of it; told when the policy closes it, and at the end of the run where
    it is still open."""

    name: ClassVar[str] = "incident"
    number: int
    """As actions and outcomes name it, counted from 1."""
    kinds: list[str]
    """Of its findings in order of appearance, those of refused updates included."""
    onset: int
    """The iteration where it probably began."""
    onset_step: int
    last: int
    """The last iteration at which it showed."""
    last_step: int
    verdict: str
    """What became of it: harmless, recovered, accepted, cured, undone, or open."""
    spike_type: int | None = None
    """1 recovered by itself, 2 lingering, 3 divergent; None: no spike, or cured before it could show."""
    is_open: bool = False
    ranks: list[int] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    cursors: list[int] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Intervention(Event):
    """Something a person changed in a running experiment."""

    name: ClassVar[str] = "intervention"
    who: str
    reason: str
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class FaultInjected(Event):
    """A drill is about to break something on purpose; in `faults.jsonl`, written by the rank that does it."""

    name: ClassVar[str] = "fault"
    number: int
    """Place of the fault in the drill's plan, counted from 0."""
    kind: str
    rank: int
    message: str
    """One line for a person: what is touched, and how."""


@dataclass(slots=True, kw_only=True)
class DrillScored(Event):
    """How a run answered what was injected; told after its end."""

    name: ClassVar[str] = "drill"
    scenario: str
    passed: bool
    scores: dict[str, float] = field(default_factory=dict)
    """Yes and no are 1 and 0; what could not be measured is left out."""


@dataclass(slots=True, kw_only=True)
class RunEnded(Event):
    name: ClassVar[str] = "run_ended"
    step: int
    exit_code: int
    reason: str


EVENTS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        RunStarted,
        StepRecord,
        EvalRecord,
        HeldOutMeasured,
        ChangePlanned,
        CheckpointSaved,
        CheckpointFailed,
        CheckpointJudged,
        Finding,
        Action,
        Outcome,
        Incident,
        Intervention,
        FaultInjected,
        DrillScored,
        RunEnded,
    )
}


def to_json(event: Event) -> str:
    """One line without its newline; NaN and Inf as strings."""
    return json.dumps(encode({"event": event.name} | asdict(event)), separators=(",", ":"), allow_nan=False)


def from_json(line: str) -> Event:
    """The event a line holds; keys this version does not know are passed over."""
    data = json.loads(line)
    kind = EVENTS[data["event"]]
    known = {f.name: _decode(data[f.name], str(f.type)) for f in fields(kind) if f.name in data}
    if kind is StepRecord:
        known = _of_old_logs(known) | known
    return kind(**known)


def _of_old_logs(known: dict[str, Any]) -> dict[str, Any]:
    """What logs held under other names before ranks shared it, so that detectors can read them again."""
    batch = known.get("batch") or {}
    return {"median_step_s": known.get("step_time_s", 0.0), "fingerprint": str(batch.get("fingerprint", ""))}


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


def encode(value: Any) -> Any:
    """Plain data as JSON can hold it: what is not finite as text."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: encode(child) for key, child in value.items()}
        case list() | tuple():
            return [encode(child) for child in value]
        case _:
            return value


_CHOICES: dict[str, type[StrEnum]] = {"FindingKind": FindingKind, "ActionKind": ActionKind}


def _decode(value: Any, kind: str) -> Any:
    if kind in _CHOICES:
        return _CHOICES[kind](value)
    if "RankSpread" in kind or "Fp8Health" in kind:
        return _numbers(value)
    if "float" not in kind:
        return value
    if isinstance(value, dict):
        return {key: _decode(child, "float") for key, child in value.items()}
    return float(value) if isinstance(value, str | int) and not isinstance(value, bool) else value


def _numbers(value: Any) -> Any:
    """Plain data in which every text is a number, at any depth."""
    match value:
        case dict():
            return {key: _numbers(child) for key, child in value.items()}
        case list():
            return [_numbers(child) for child in value]
        case str():
            return float(value)
        case _:
            return value
