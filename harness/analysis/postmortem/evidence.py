"""Schema of `evidence.json`, the evidence of one incident; `docs/evidence.md` describes every key.

Why: the post-mortem, its pictures and external tools work from this file alone, also when the run directory is gone.
How: dataclasses are written field by field. Events keep their form from `events.jsonl`, so one reader serves both.
`SCHEMA` increases when a key changes its meaning; a file with another schema is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, final

from harness.config.errors import ConfigError
from harness.core import event_json
from harness.core.events import (
    Action,
    ChangePlanned,
    CheckpointJudged,
    CheckpointSaved,
    Event,
    FaultInjected,
    Finding,
    Incident,
    Intervention,
    Outcome,
    RunEnded,
    RunStarted,
    StepRecord,
    TrialMeasured,
)
from harness.core.rundir import write_atomically

SCHEMA = 1
RECOVERY_STEPS = 50
"""A spike that is over within this many applied steps after its peak has recovered."""

EVENT_LISTS = ("records", "findings", "actions", "outcomes", "faults", "others")


@final
@dataclass(slots=True, kw_only=True)
class RunFacts:
    name: str
    path: str
    settings: dict[str, Any] = field(default_factory=dict)
    """The whole configuration, with dotted keys."""
    overrides: list[str] | None = None
    """Overrides for `harness train` that reproduce this configuration, without the run's name; None: not known."""
    world_size: int = 1
    commit: str = ""
    device: str = ""
    tracking: str = ""
    """MLflow tracking URI and run ID."""
    ended: str = ""
    """Reason and exit code if the run has ended; else empty."""

    @property
    def precision(self) -> str:
        return str(self.settings.get("precision.kind", "not known"))

    @property
    def num_gpus(self) -> float:
        """GPUs that the ranks hold: several ranks may share one (`launch.ranks_per_gpu`)."""
        share = self.settings.get("launch.ranks_per_gpu")
        return self.world_size / share if isinstance(share, int) and share > 0 else self.world_size

    @property
    def num_shares(self) -> int:
        """Into how many shares each batch was divided: the ranks of a context group have the same rows."""
        context = self.settings.get("parallel.context")
        return self.world_size // context if isinstance(context, int) and context > 0 else self.world_size


@final
@dataclass(slots=True, kw_only=True)
class Token:
    token: int
    text: str
    """As the tokenizer decodes it; empty if no tokenizer is known."""
    num_in_batch: int
    num_in_corpus: int | None = None


@final
@dataclass(slots=True, kw_only=True)
class GuiltyBatch:
    """A batch that may have caused the incident: facts from its step record, and its tokens as read again from disk."""

    index: int
    iteration: int | None = None
    """First iteration of the window that trained on it; None: none did."""
    refused: bool = False
    loss: float | None = None
    fingerprint: str = ""
    entropy_nats: float | None = None
    rows: dict[str, int] = field(default_factory=dict)
    """Source -> number of its sequences in the batch."""
    source_losses: dict[str, float] = field(default_factory=dict)
    rarest: list[Token] = field(default_factory=list)
    is_whole: bool = False
    """Whether `rarest` counts the whole batch, as read again; else the rows of rank 0, as recorded."""
    token_loss_counts: list[int] = field(default_factory=list)
    """Histogram of token losses, as in a step record; empty if the step was not probed."""
    reread: str = ""
    """Fingerprint of the batch as read again with the configuration and the ledger; empty: could not be read."""
    common: list[Token] = field(default_factory=list)
    """The most frequent tokens, as read again."""
    num_counts: list[int] = field(default_factory=list)
    """Occurrences of each distinct token, most frequent first, as read again."""
    samples: list[str] = field(default_factory=list)
    """The beginnings of some rows, decoded or as token ids, as read again."""

    @property
    def is_changed(self) -> bool:
        """Whether the batch that was trained on differs from the batch as read again."""
        return bool(self.reread) and bool(self.fingerprint) and self.reread != self.fingerprint


@final
@dataclass(slots=True, kw_only=True)
class Cost:
    undone_steps: int = 0
    """Applied, then undone by a restore."""
    refused_steps: int = 0
    raised_steps: int = 0
    """Applied and kept while the loss was above its level before the incident."""
    seconds: float = 0.0
    """Time of these steps plus the recovery time."""
    tokens: int = 0
    gpu_hours: float = 0.0
    money: float | None = None
    """In the currency of `cluster.price_per_gpu_hour`; None: no price is set."""

    @property
    def steps(self) -> int:
        return self.undone_steps + self.refused_steps + self.raised_steps


@final
@dataclass(slots=True, kw_only=True)
class IncidentNumbers:
    """The numbers of an incident that every report states; computed in `harness.analysis.postmortem.incident_numbers`.

    None: not measured. A loss that is not finite is NaN.
    """

    onset: int | None = None
    """Iteration of the first affected step."""
    onset_step: int | None = None
    """The step that this iteration applied, or would have applied."""
    onset_cursor: int | None = None
    """Batch index of this iteration."""
    level: float | None = None
    """Pre-spike loss: exponential average over about fifty applied steps before the onset, with their trend."""
    sigma: float = 0.0
    """Spread of the loss before the onset, from differences between neighbouring steps."""
    peak: float | None = None
    """Highest loss, or the first that is not finite."""
    peak_iteration: int | None = None
    peak_refused: bool = False
    """The update of that step was rejected, so its loss did no damage."""
    usual_grad: float | None = None
    """Median gradient norm before clipping, before the onset."""
    highest_grad: float | None = None
    """Highest finite one of the same steps."""
    peak_grad: float | None = None
    """Highest gradient norm before clipping; NaN or Inf if one occurred."""
    num_after_peak: int = 0
    """Applied steps after the peak that the log has."""
    loss_after_50: float | None = None
    """Recovery loss: median around the fiftieth applied step after the peak; NaN: it was not finite to the end."""
    loss_after_500: float | None = None
    resumed_step: int | None = None
    """The first step of nine in a row whose median is back within half a sigma of the pre-spike loss."""
    resumed_iteration: int | None = None
    resumed_after: int | None = None
    """Applied steps from the peak to `resumed_step`."""

    @property
    def has_recovered(self) -> bool | None:
        """Whether the loss was back within fifty steps; None: fewer steps followed, or there is no level."""
        if self.loss_after_50 is not None and not math.isfinite(self.loss_after_50):
            return False
        if self.level is None:
            return None
        if self.resumed_after is not None and self.resumed_after <= RECOVERY_STEPS:
            return True
        return False if self.num_after_peak >= RECOVERY_STEPS else None


@final
@dataclass(slots=True, kw_only=True)
class Hypothesis:
    """One possible cause of the incident, as the report ranks it."""

    cause: str
    score: float
    """From 0 to 1; 0.5 or more is enough to act on."""
    status: str
    """likely, possible, ruled out, or not examined."""
    text: str
    """The evidence for the cause, against it, or what is missing."""
    panel: int
    """Number of the picture that shows it; 0: the configuration."""


@final
@dataclass(slots=True, kw_only=True)
class Evidence:
    schema: int = SCHEMA
    folder: str
    """Name of the folder: the number of the incident in three digits, or remark-NNN."""
    run: RunFacts
    incident: Incident
    records: list[StepRecord] = field(default_factory=list)
    """Step records around the incident; thinned if there are many."""
    num_thinned: int = 0
    """Records of the window that were dropped."""
    findings: list[Finding] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[FaultInjected] = field(default_factory=list)
    """Injected faults; only a drill has any."""
    others: list[Event] = field(default_factory=list)
    """Starts, checkpoints, planned changes, interventions and the end of the run, within the window; starts and
    interventions also from before it."""
    earlier: list[Incident] = field(default_factory=list)
    """Incidents of the run before this one."""
    batches: list[GuiltyBatch] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    numbers: IncidentNumbers = field(default_factory=IncidentNumbers)
    reproduced: int | None = None
    """The iteration whose step a replay reproduced; None: it was not replayed, or the replay differs from the log."""
    checkpoint: str = ""
    """The newest checkpoint on disk that was saved before the onset and is neither tainted nor damaged."""
    hypotheses: list[Hypothesis] = field(default_factory=list)
    """All causes that the rules know, the likeliest first."""

    @property
    def onset(self) -> int:
        """Iteration of the first affected step."""
        return self.incident.onset if self.numbers.onset is None else self.numbers.onset

    @property
    def onset_step(self) -> int:
        return self.incident.onset_step if self.numbers.onset_step is None else self.numbers.onset_step

    @property
    def first_weights(self) -> str:
        """The checkpoint that the first start of the run found, as after an import; empty: its seed gave the
        weights."""
        return next((start.resumed_from or "" for start in self.of(RunStarted)), "")

    def of(self, *kinds: type[Event]) -> Iterator[Any]:
        """Events of `others` with one of these types, in order."""
        return (event for event in self.others if isinstance(event, kinds))

    def kinds(self) -> list[str]:
        """Kinds of the incident and of all its findings, without duplicates."""
        return list(dict.fromkeys([*self.incident.kinds, *(str(finding.kind) for finding in self.findings)]))


OTHERS = (RunStarted, ChangePlanned, CheckpointSaved, CheckpointJudged, Intervention, TrialMeasured, RunEnded)


def to_tree(evidence: Evidence) -> dict[str, Any]:
    """JSON-ready data as it is written; NaN and Inf are strings."""
    tree = {
        item.name: getattr(evidence, item.name) for item in fields(evidence) if item.name not in ("incident", "earlier")
    }
    for name in ("run", "cost", "numbers"):
        tree[name] = asdict(tree[name])
    for name in ("batches", "hypotheses"):
        tree[name] = [asdict(item) for item in tree[name]]
    for name in EVENT_LISTS:
        tree[name] = _events_to_json(tree[name])
    (tree["incident"],) = _events_to_json([evidence.incident])
    tree["earlier"] = _events_to_json(evidence.earlier)
    encoded = event_json.encode(tree)
    assert isinstance(encoded, dict)
    return encoded


def evidence_from_tree(tree: dict[str, Any], *, path: str = "evidence.json") -> Evidence:
    """Parse written evidence; `ConfigError` if it is malformed or has another schema."""
    if tree.get("schema") != SCHEMA:
        raise ConfigError(path, f"has schema {tree.get('schema')!r}, this version reads {SCHEMA}")
    try:
        lists: dict[str, Any] = {name: _events_from_json(tree[name]) for name in (*EVENT_LISTS, "earlier")}
        (incident,) = _events_from_json([tree["incident"]])
        assert isinstance(incident, Incident)
        return Evidence(
            folder=tree["folder"],
            run=RunFacts(**tree["run"]),
            incident=incident,
            num_thinned=tree["num_thinned"],
            batches=[_batch_from_json(batch) for batch in tree["batches"]],
            cost=Cost(**tree["cost"]),
            numbers=_numbers_from_json(tree.get("numbers", {})),
            reproduced=tree.get("reproduced"),
            checkpoint=tree.get("checkpoint", ""),
            hypotheses=[Hypothesis(**each) for each in tree.get("hypotheses", [])],
            **lists,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(path, f"is not evidence of an incident: {error}") from None


def write(evidence: Evidence, path: Path) -> None:
    write_atomically(path, json.dumps(to_tree(evidence), indent=1, allow_nan=False) + "\n")


def read(path: Path) -> Evidence:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(str(path), "is not JSON") from None
    return evidence_from_tree(tree, path=str(path))


def _events_to_json(listed: Sequence[Event]) -> list[Any]:
    return [json.loads(event_json.to_json(event)) for event in listed]


def _events_from_json(trees: Sequence[Any]) -> list[Any]:
    return [event_json.from_json(json.dumps(tree)) for tree in trees]


def _numbers_from_json(tree: dict[str, Any]) -> IncidentNumbers:
    """A number that is not finite is a string."""
    numbers: dict[str, Any] = {name: float(each) if isinstance(each, str) else each for name, each in tree.items()}
    return IncidentNumbers(**numbers)


def _batch_from_json(tree: dict[str, Any]) -> GuiltyBatch:
    tokens = {name: [Token(**token) for token in tree[name]] for name in ("rarest", "common")}
    numbers = {
        name: None if tree[name] is None else float(tree[name]) for name in ("loss", "entropy_nats") if name in tree
    }
    losses = {name: float(loss) for name, loss in tree["source_losses"].items()}
    return GuiltyBatch(**tree | tokens | numbers | {"source_losses": losses})
