"""The event log of a run, folded as it grows: columns, marks on the time line, incidents and accounts.

Why: the page, the live server, the terminal and the index all show the same run, so they read it once and alike.
How: `Story.read_more` takes the whole lines that were added since it was last called. A step's line is read as plain
JSON, because a hundred thousand of them must not take minutes; everything rarer becomes its event. A line that is torn
or not understood is passed over and counted.
The first reading of a long log is bounded: of more than 64 MiB of ordinary steps it takes an even sample, with the
extremes of each stretch and with everything that is not an ordinary step (`harness.telemetry.log_index`). Steps that
were left out count in the accounts.
Left out: anything that is not in the log or in `faults.jsonl`; `harness.analysis.dashboard.page_data` looks up incident
folders.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, final

from harness.analysis.dashboard.goodput import Accounts
from harness.analysis.dashboard.incidents import Incidents
from harness.analysis.dashboard.series import NAN, Table, number, outlier
from harness.core.events import (
    Action,
    CheckpointFailed,
    CheckpointJudged,
    CheckpointSaved,
    EvalRecord,
    Event,
    FaultInjected,
    Finding,
    Intervention,
    Outcome,
    RunEnded,
    RunStarted,
    parse,
)
from harness.core.rundir import RunDir
from harness.telemetry.console import event_line
from harness.telemetry.log_index import sampled

STEP_MARK = b'{"event":"step",'
CHUNK_BYTES = 1 << 22
MOST_MARKS = 1000
"""Of one kind; of more, the newest are kept."""
NUM_RECENT = 512
"""Batches whose facts are remembered for a finding that will name them."""
MOST_GUILTY = 200

STEP_COLUMNS = (
    "loss", "loss_bound", "grad_norm", "grad_bound", "lr", "tokens_per_s", "mfu", "loss_scale", "memory_bytes", "step",
    "rank_grad_median", "rank_grad_worst", "rank_grad_who", "rank_time_median", "rank_time_worst", "rank_time_who",
    "in_bf16",
)  # fmt: skip
PROBE_COLUMNS = ("param_norm", "v_norm", "update_ratio", "square_ratio")
FP8_COLUMNS = ("fp8_underflow", "fp8_saturated", "fp8_scale_least", "fp8_scale_most")
"""The worst layer group, the worst of activations, weights and gradients, and the exponents of all their scales."""
ACTIVATION, TOKEN_LOSS = "activation:", "token_loss:"
"""Before the name of a layer, or the number of a bin, in the name of a column."""


class MarkKind(StrEnum):
    start = "start"
    end = "end"
    fault = "fault"
    refused = "refused"
    finding = "finding"
    action = "action"
    restored = "restored"
    intervention = "intervention"
    checkpoint = "checkpoint"
    trouble = "trouble"
    """A checkpoint that failed or proved bad."""


@final
@dataclass(frozen=True, slots=True)
class Mark:
    kind: MarkKind
    iteration: int
    time: float
    text: str
    incident: int = 0
    """That it belongs to; 0: none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GuiltyBatch:
    """A batch that was refused, named by a finding, or excluded."""

    cursor: int
    iteration: int
    loss: float
    why: str
    rarest: list[list[int | None]]
    """Token, how often it is in the batch, and how often in the corpus where that is known."""
    rows: dict[str, int]


@final
@dataclass(slots=True)
class Story:
    steps: Table = field(default_factory=Table)
    probes: Table = field(default_factory=Table)
    evals: Table = field(default_factory=Table)
    accounts: Accounts = field(default_factory=Accounts)
    incidents: Incidents = field(default_factory=Incidents)
    marks: dict[MarkKind, deque[Mark]] = field(default_factory=dict)
    guilty: dict[int, GuiltyBatch] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    """The newest step record, as the log has it."""
    started: RunStarted | None = None
    """The newest start."""
    ended: RunEnded | None = None
    """The end of the newest start, where it has one."""
    first_time: float | None = None
    last_time: float = 0.0
    eval_loss: float | None = None
    num_starts: int = 0
    num_lines: int = 0
    num_lines_lost: int = 0
    num_left_out: int = 0
    """Ordinary steps that a sample of a long log did not show."""
    _is_sample: bool = False
    """Whether the lines being read are a sample."""
    _recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    _offsets: dict[Path, int] = field(default_factory=dict)

    def read_more(self, run: RunDir) -> bool:
        """Take what was added to the log since the last time; says whether anything was."""
        num_lines = self.num_lines
        if run.events not in self._offsets:
            self._read_first(run.events)
        for path in (run.events, run.faults):
            for line in self._new_lines(path):
                self.num_lines += 1
                self._take(line)
        return self.num_lines > num_lines

    def _read_first(self, path: Path) -> None:
        """All of a log, or a sample of a long one."""
        lines, end, is_whole = sampled(path)
        self._is_sample = not is_whole
        for line in lines:
            self.num_lines += 1
            self._take(line)
        self._is_sample = False
        if end:
            self._offsets[path] = end

    def _new_lines(self, path: Path) -> Iterator[bytes]:
        """Whole lines only: what is being written now is read the next time."""
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            while lines := file.readlines(CHUNK_BYTES):
                if not lines[-1].endswith(b"\n"):
                    lines.pop()
                self._offsets[path] = self._offsets.get(path, 0) + sum(map(len, lines))
                yield from lines
                if not lines:
                    return

    def _take(self, line: bytes) -> None:
        try:
            if line.startswith(STEP_MARK):
                self._add_step(json.loads(line))
                return
            for event in parse(line.decode(errors="replace")):
                self.add(event)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError):
            self.num_lines_lost += 1

    def _add_step(self, record: dict[str, Any]) -> None:
        get = record.get
        iteration, time = int(record["iteration"]), float(record["time"])
        bounds, ranks, loss = get("bounds", {}), get("ranks", {}), record["loss"]
        left_out = max(0, iteration - self.steps.iterations[-1] - 1) if self._is_sample and self.steps.iterations else 0
        self.num_left_out += left_out
        self.accounts.add_step(record, num_left_out=left_out)
        values = (
            *(loss, bounds.get("loss", NAN), record["grad_norm"], bounds.get("grad_norm", NAN), record["lr"]),
            *(record["tokens_per_s"], get("mfu") or NAN, get("loss_scale") or NAN, get("memory_bytes") or NAN),
            *(record["step"], *outlier(ranks.get("grad_norm")), *outlier(ranks.get("step_time_s"))),
            NAN if get("in_fp8") is None else float(not get("in_fp8")),
        )
        self.steps.add(iteration, time, STEP_COLUMNS, values)
        if get("param_norm") is not None:
            self._add_probe(iteration, time, record)
        self.last = record
        self._see(time)
        self._recent.append(record)
        if record["refused"] or loss.__class__ is str:
            verb = "update refused" if record["refused"] else "not finite"
            norm = float(record["grad_norm"])
            self._mark(MarkKind.refused, iteration, time, f"{verb}: loss {float(loss):.4g}, gradient norm {norm:.4g}")
            self._blame(record["cursor"], verb)

    def _add_probe(self, iteration: int, time: float, record: Mapping[str, Any]) -> None:
        activations = record.get("activation_rms", {})
        counts = record.get("token_loss_counts", [])
        total = sum(counts) or 1
        names = [*PROBE_COLUMNS, *(f"{ACTIVATION}{layer}" for layer in activations)]
        names += [f"{TOKEN_LOSS}{index}" for index in range(len(counts))]
        values = [*(record.get(name) for name in PROBE_COLUMNS), *activations.values(), *(n / total for n in counts)]
        if health := record.get("fp8"):
            names += FP8_COLUMNS
            values += _fit_of(health, record.get("fp8_underflow", {}))
        self.probes.add(iteration, time, names, values)

    def add(self, event: Event) -> None:
        """Anything but a step."""
        if isinstance(event, FaultInjected):
            self._mark(
                MarkKind.fault, event.iteration, event.time, f"{event.kind} on rank {event.rank}: {event.message}"
            )
            return
        self.accounts.add(event)
        self.incidents.add(event)
        self._see(event.time)
        match event:
            case RunStarted():
                self.started, self.ended = event, None
                self.num_starts += 1
                self._tell(MarkKind.start, event)
            case RunEnded():
                self.ended = event
                text = f"ended at step {event.step}: {event.reason} (exit code {event.exit_code})"
                self._mark(MarkKind.end, event.iteration, event.time, text)
            case EvalRecord():
                self.eval_loss = event.loss
                self.evals.add(event.iteration, event.time, ("loss",), (event.loss,))
            case CheckpointSaved():
                self._tell(MarkKind.checkpoint, event)
            case CheckpointFailed() | CheckpointJudged():
                self._tell(MarkKind.trouble, event)
            case Finding():
                self._tell(MarkKind.finding, event)
                for cursor in event.cursors:
                    self._blame(cursor, event.kind)
            case Action():
                self._tell(MarkKind.action, event, incident=event.incident)
                if event.exclude:
                    first, last = event.exclude
                    for cursor in range(first, min(last + 1, first + NUM_RECENT)):
                        self._blame(cursor, f"excluded by incident {event.incident}" if event.incident else "excluded")
            case Outcome():
                self._tell(MarkKind.restored, event, incident=event.incident)
            case Intervention():
                self._tell(MarkKind.intervention, event)
            case _:
                pass

    def all_marks(self) -> list[Mark]:
        """In the order in which they happened."""
        marks = [mark for each in self.marks.values() for mark in each]
        return sorted(marks, key=lambda mark: (mark.time, mark.iteration))

    def _tell(self, kind: MarkKind, event: Event, *, incident: int = 0) -> None:
        text = event_line(event)
        if text is not None:
            text = text.removeprefix(f"iteration {event.iteration}: ")
            self._mark(kind, event.iteration, event.time, text, incident=incident)

    def _mark(self, kind: MarkKind, iteration: int, time: float, text: str, *, incident: int = 0) -> None:
        self.marks.setdefault(kind, deque(maxlen=MOST_MARKS)).append(Mark(kind, iteration, time, text, incident))

    def _see(self, time: float) -> None:
        self.first_time = time if self.first_time is None else self.first_time
        self.last_time = max(time, self.last_time)

    def _blame(self, cursor: int, why: str) -> None:
        """Keep the facts of a batch, once for each reason; a batch that was never seen has none."""
        record = next((each for each in reversed(self._recent) if each["cursor"] == cursor), None)
        known = self.guilty.get(cursor)
        if known is None and (record is None or len(self.guilty) >= MOST_GUILTY):
            return
        if known is not None and why in known.why:
            return
        batch = (record or {}).get("batch", {})
        self.guilty[cursor] = GuiltyBatch(
            cursor=cursor,
            iteration=known.iteration if known else (record or {})["iteration"],
            loss=known.loss if known else number((record or {}).get("loss")),
            why=f"{known.why}, {why}" if known else why,
            rarest=known.rarest if known else batch.get("rarest", []),
            rows=known.rows if known else batch.get("rows", {}),
        )


def _fit_of(health: Mapping[str, Any], underflow: Mapping[str, Any]) -> list[float]:
    """How the numbers of a step fitted into fp8, by `FP8_COLUMNS`."""
    roles = list(health.values())
    least, most = zip(*(role["scale_log2"] for role in roles), strict=True)
    return [
        max(map(number, underflow.values()), default=NAN),
        max(number(role["saturated"]) for role in roles),
        min(map(number, least)),
        max(map(number, most)),
    ]
