"""Evidence of one incident, as it lies in `evidence.json`; `docs/evidence.md` describes every key.

Why: the post-mortem, its pictures and whoever writes a tool of their own must be able to work from this file alone,
when the run directory is long gone.
How: dataclasses that are written as they are. Events keep the form they have in `events.jsonl`, so one reader serves
both; `SCHEMA` grows when a key changes its meaning, and a file of another schema is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, final

from harness.config.errors import ConfigError
from harness.core import events
from harness.core.events import (
    Action,
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
)
from harness.core.rundir import write_atomically

SCHEMA = 1

EVENT_LISTS = ("records", "findings", "actions", "outcomes", "faults", "others")


@final
@dataclass(slots=True, kw_only=True)
class RunFacts:
    name: str
    path: str
    settings: dict[str, Any] = field(default_factory=dict)
    """The whole configuration, with dotted keys."""
    overrides: list[str] = field(default_factory=list)
    """Words for `harness train` that give this configuration again, without its name; empty: not known."""
    world_size: int = 1
    commit: str = ""
    device: str = ""
    tracking: str = ""
    """Where MLflow has the run."""
    ended: str = ""
    """Why, where it has ended."""

    @property
    def batch_tokens(self) -> int:
        return int(self.settings.get("train.batch_size") or 0) * int(self.settings.get("train.sequence_length") or 0)

    @property
    def precision(self) -> str:
        return str(self.settings.get("precision.kind", "not known"))


@final
@dataclass(slots=True, kw_only=True)
class Token:
    token: int
    text: str
    """As its tokenizer spells it; empty where none is known."""
    num_in_batch: int
    num_in_corpus: int | None = None


@final
@dataclass(slots=True, kw_only=True)
class GuiltyBatch:
    """A batch that was blamed: what its record said, and what its tokens are when they are read again."""

    index: int
    iteration: int | None = None
    """Where it was first seen in the window; None: not within it."""
    refused: bool = False
    loss: float | None = None
    fingerprint: str = ""
    entropy_nats: float | None = None
    rows: dict[str, int] = field(default_factory=dict)
    """Sequences of each source."""
    source_losses: dict[str, float] = field(default_factory=dict)
    rarest: list[Token] = field(default_factory=list)
    token_loss_counts: list[int] = field(default_factory=list)
    """As in a step record; empty where that step was not probed."""
    reread: str = ""
    """The fingerprint of the tokens that the configuration and the ledger give for it now; empty: could not be read."""
    common: list[Token] = field(default_factory=list)
    """The most frequent tokens, of what was read again."""
    num_counts: list[int] = field(default_factory=list)
    """How often each token occurs that occurs at all, the most frequent first, of what was read again."""
    samples: list[str] = field(default_factory=list)
    """The beginnings of some rows, decoded or as token ids, of what was read again."""

    @property
    def is_changed(self) -> bool:
        """What the run was shown is not what lies there."""
        return bool(self.reread) and bool(self.fingerprint) and self.reread != self.fingerprint


@final
@dataclass(slots=True, kw_only=True)
class Cost:
    undone_steps: int = 0
    """Applied, and taken back by a restore."""
    refused_steps: int = 0
    raised_steps: int = 0
    """Applied and kept while the loss stood above its level of before."""
    seconds: float = 0.0
    """Of these steps, and of the recovery itself."""
    tokens: int = 0
    gpu_hours: float = 0.0
    money: float | None = None
    """Where `cluster.price_per_gpu_hour` is set, in its currency."""

    @property
    def steps(self) -> int:
        return self.undone_steps + self.refused_steps + self.raised_steps


@final
@dataclass(slots=True, kw_only=True)
class Evidence:
    schema: int = SCHEMA
    folder: str
    """Name of the folder: the number of the incident in three digits, or remark-NNN."""
    run: RunFacts
    incident: Incident
    records: list[StepRecord] = field(default_factory=list)
    """Around the incident; thinned where there are many."""
    num_thinned: int = 0
    """Records of the window that were left out."""
    findings: list[Finding] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[FaultInjected] = field(default_factory=list)
    """What was broken on purpose; only a drill has any."""
    others: list[Event] = field(default_factory=list)
    """Starts, checkpoints, orders of persons and the end of the run, within the window."""
    earlier: list[Incident] = field(default_factory=list)
    """Incidents of the run before this one."""
    batches: list[GuiltyBatch] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)

    @property
    def onset(self) -> int:
        return self.incident.onset

    def of(self, *kinds: type[Event]) -> Iterator[Any]:
        """Other events of these kinds, in order."""
        return (event for event in self.others if isinstance(event, kinds))

    def kinds(self) -> list[str]:
        """Of all findings, and what the policy called the incident."""
        return list(dict.fromkeys([*self.incident.kinds, *(str(finding.kind) for finding in self.findings)]))


OTHERS = (RunStarted, CheckpointSaved, CheckpointJudged, Intervention, RunEnded)


def to_tree(evidence: Evidence) -> dict[str, Any]:
    """Plain data, as it is written; NaN and Inf as strings."""
    tree = {
        each.name: getattr(evidence, each.name) for each in fields(evidence) if each.name not in ("incident", "earlier")
    }
    for name in ("run", "cost"):
        tree[name] = asdict(tree[name])
    tree["batches"] = [asdict(batch) for batch in evidence.batches]
    for name in EVENT_LISTS:
        tree[name] = _written(tree[name])
    (tree["incident"],) = _written([evidence.incident])
    tree["earlier"] = _written(evidence.earlier)
    encoded = events.encode(tree)
    assert isinstance(encoded, dict)
    return encoded


def from_tree(tree: dict[str, Any], *, path: str = "evidence.json") -> Evidence:
    """The evidence that was written; `ConfigError` where it is none, or of another schema."""
    if tree.get("schema") != SCHEMA:
        raise ConfigError(path, f"has schema {tree.get('schema')!r}, this version reads {SCHEMA}")
    try:
        lists: dict[str, Any] = {name: _read(tree[name]) for name in (*EVENT_LISTS, "earlier")}
        (incident,) = _read([tree["incident"]])
        assert isinstance(incident, Incident)
        return Evidence(
            folder=tree["folder"],
            run=RunFacts(**tree["run"]),
            incident=incident,
            num_thinned=tree["num_thinned"],
            batches=[_batch(each) for each in tree["batches"]],
            cost=Cost(**tree["cost"]),
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
    return from_tree(tree, path=str(path))


def _written(told: Sequence[Event]) -> list[Any]:
    return [json.loads(events.to_json(event)) for event in told]


def _read(written: Sequence[Any]) -> list[Any]:
    return [events.from_json(json.dumps(each)) for each in written]


def _batch(tree: dict[str, Any]) -> GuiltyBatch:
    tokens = {name: [Token(**each) for each in tree[name]] for name in ("rarest", "common")}
    numbers = {
        name: None if tree[name] is None else float(tree[name]) for name in ("loss", "entropy_nats") if name in tree
    }
    losses = {name: float(loss) for name, loss in tree["source_losses"].items()}
    return GuiltyBatch(**tree | tokens | numbers | {"source_losses": losses})
