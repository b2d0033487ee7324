"""Reads the event log of a run incrementally into columns, timeline marks, incidents and time accounts.

Why: the page, the live server, the terminal view and the index show the same run, so they share one reader.
How: `Story.read_more` reads the complete lines added since the last call. If the last line that it has read is no
longer in its place, another run was begun in the directory, or a power failure took the end of the log: it starts over.
Step lines are read as plain JSON, because parsing a hundred thousand of them into events takes minutes; other lines are
parsed into events. A torn or invalid line is skipped and counted.
The first read of a long log is bounded: of more than 64 MiB of ordinary steps it takes an even sample, with the
extremes of each stretch and with everything that is not an ordinary step (`harness.telemetry.log_index`). Steps left
out of the sample still count in the accounts.
Left out: anything outside the log, `faults.jsonl`, `system/` and the batch sizes;
`harness.analysis.dashboard.page_data` reads incident folders.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, final

from harness.analysis.dashboard.goodput import Accounts
from harness.analysis.dashboard.incidents import IncidentStories
from harness.analysis.dashboard.run_setup import config_tree
from harness.analysis.dashboard.series import NAN, ColumnTable, drawable_number, outlier
from harness.analysis.dashboard.system_load import SystemLoad
from harness.analysis.throughput import median_rate
from harness.core.batch_sizes import TokenSchedule, read_token_schedule
from harness.core.event_json import parse
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
    RunRestarted,
    RunStarted,
    TaskEvaluated,
)
from harness.core.rundir import RunDir
from harness.telemetry.console import event_line
from harness.telemetry.log_index import sample_lines

STEP_MARK = b'{"event":"step",'
CHUNK_BYTES = 1 << 22
MOST_MARKS = 1000
"""Marks kept of each kind, the newest."""
NUM_RECENT = 512
"""Recent batches whose facts are kept, for findings that name them later."""
MOST_GUILTY = 200

STEP_COLUMNS = (
    "loss", "loss_bound", "grad_norm", "grad_bound", "lr", "tokens_per_s", "mfu", "loss_scale", "memory_bytes", "step",
    "rank_grad_median", "rank_grad_worst", "rank_grad_who", "rank_time_median", "rank_time_worst", "rank_time_who",
    "in_bf16", "loader_wait_s", "tokens", "refused",
)  # fmt: skip
PROBE_COLUMNS = ("param_norm", "v_norm", "update_ratio", "square_ratio")
FP8_COLUMNS = ("fp8_underflow", "fp8_saturated", "fp8_scale_least", "fp8_scale_most")
"""Underflow of the worst layer group; saturation of the worst of activations, weights and gradients; smallest and
largest exponent of their scales."""
ACTIVATION, TOKEN_LOSS = "activation:", "token_loss:"
"""Prefixes of column names, before the layer's name or the bin's number."""


class MarkKind(StrEnum):
    start = "start"
    restart = "restart"
    """A rank failed, and the launcher starts all ranks again."""
    end = "end"
    fault = "fault"
    refused = "refused"
    finding = "finding"
    action = "action"
    restored = "restored"
    intervention = "intervention"
    checkpoint = "checkpoint"
    trouble = "trouble"
    """A checkpoint that could not be written, or is damaged."""


@final
@dataclass(frozen=True, slots=True)
class Mark:
    kind: MarkKind
    iteration: int
    time: float
    text: str
    incident: int = 0
    """Number of the incident it belongs to; 0: none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlamedBatch:
    """A batch whose update was rejected, or that a finding names, or that was excluded."""

    cursor: int
    iteration: int
    loss: float
    why: str
    rarest: list[list[int | None]]
    """Token, count in the batch, and count in the corpus if known."""
    rows: dict[str, int]


@final
@dataclass(slots=True)
class Story:
    """Everything a dashboard shows of one run, read from its event log."""

    steps: ColumnTable = field(default_factory=ColumnTable)
    probes: ColumnTable = field(default_factory=ColumnTable)
    evals: ColumnTable = field(default_factory=ColumnTable)
    tasks: ColumnTable = field(default_factory=ColumnTable)
    """Scores of lm-evaluation-harness, a column for each metric of each task."""
    system: SystemLoad = field(default_factory=SystemLoad)
    accounts: Accounts = field(default_factory=Accounts)
    incidents: IncidentStories = field(default_factory=IncidentStories)
    marks: dict[MarkKind, deque[Mark]] = field(default_factory=dict)
    guilty: dict[int, BlamedBatch] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    """The latest step record in its JSON form."""
    started: RunStarted | None = None
    """The latest start."""
    ended: RunEnded | None = None
    """The end of the latest start, if it has ended."""
    first_time: float | None = None
    last_time: float = 0.0
    eval_loss: float | None = None
    num_starts: int = 0
    num_checkpoints: int = 0
    num_lines: int = 0
    num_lines_lost: int = 0
    num_left_out: int = 0
    """Ordinary steps left out by sampling a long log."""
    num_replaced: int = 0
    """How often the log was no longer the one that had been read."""
    schedule: TokenSchedule | None = None
    """Tokens of each batch, as of the latest start; None: neither the configuration nor corpus.json can be read."""
    _is_sample: bool = False
    """Whether the lines being read are a sample."""
    _last_action: Action | None = None
    _recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    _offsets: dict[Path, int] = field(default_factory=dict)
    _last_lines: dict[Path, bytes] = field(default_factory=dict)
    """The line that ends at each offset."""

    def read_more(self, run: RunDir) -> bool:
        """Read the lines added to the log since the last call, and the load of the machines; returns whether there was
        anything new."""
        has_load = self.system.read_more(run)
        if is_replaced := not all(map(self._is_in_place, self._offsets)):
            empty = Story(system=self.system, num_replaced=self.num_replaced + 1)
            for each in fields(self):
                setattr(self, each.name, getattr(empty, each.name))
        num_lines, num_starts = self.num_lines, self.num_starts
        if run.events not in self._offsets:
            self._read_first(run.events)
        for path in (run.events, run.faults):
            for line in self._new_lines(path):
                self.num_lines += 1
                self._add_line(line)
        if self.num_starts > num_starts:  # a start may bring other batch sizes
            self.schedule = read_token_schedule(run, config_tree(run).get("train") or {})
        return has_load or is_replaced or self.num_lines > num_lines

    def _is_in_place(self, path: Path) -> bool:
        """Whether the last line that was read is still where it was."""
        line = self._last_lines[path]
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[path] - len(line))
                return file.read(len(line)) == line
        except FileNotFoundError:
            return False

    def _read_first(self, path: Path) -> None:
        """Read the whole log, or a sample of a long one."""
        lines, end, is_whole = sample_lines(path)
        self._is_sample = not is_whole
        line = b""
        for line in lines:
            self.num_lines += 1
            self._add_line(line)
        self._is_sample = False
        if end:
            self._offsets[path], self._last_lines[path] = end, line

    def _new_lines(self, path: Path) -> Iterator[bytes]:
        """Complete lines added since the last call; a line still being written is read next time."""
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            while lines := file.readlines(CHUNK_BYTES):
                is_torn = not lines[-1].endswith(b"\n")
                if is_torn:
                    lines.pop()
                if lines:
                    self._offsets[path] = self._offsets.get(path, 0) + sum(map(len, lines))
                    self._last_lines[path] = lines[-1]
                yield from lines
                if is_torn:
                    return

    def _add_line(self, line: bytes) -> None:
        try:
            if line.startswith(STEP_MARK):
                self._add_step(json.loads(line))
                return
            for event in parse(line.decode(errors="replace")):
                self.add(event)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError):
            self.num_lines_lost += 1

    def _add_step(self, record: dict[str, Any]) -> None:
        is_empty = record["refused"] and record["loss"] == record["grad_norm"] == 0  # see ReducedRecord.is_empty
        if is_empty:
            record = {**record, "loss": "nan", "grad_norm": "nan"}
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
            *(NAN if get("loader_wait_s") is None else get("loader_wait_s"), record["tokens"]),
            1.0 if record["refused"] else NAN,
        )
        self.steps.add(iteration, time, STEP_COLUMNS, values)
        if get("param_norm") is not None:
            self._add_probe(iteration, time, record)
        self.last = record
        self._update_times(time)
        self._recent.append(record)
        if is_empty:
            text = f"no update: batch {record['cursor']} has no token to predict"
            self._mark(MarkKind.refused, iteration, time, text)
        elif record["refused"] or loss.__class__ is str:
            verb = "update rejected" if record["refused"] else "not finite"
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
            values += _fp8_values(health, record.get("fp8_underflow", {}))
        self.probes.add(iteration, time, names, values)

    def add(self, event: Event) -> None:
        """Add any event except a step record."""
        if isinstance(event, FaultInjected):
            self._mark(
                MarkKind.fault, event.iteration, event.time, f"{event.kind} on rank {event.rank}: {event.message}"
            )
            return
        self.accounts.add(event)
        self.incidents.add(event)
        self._update_times(event.time)
        match event:
            case RunStarted():
                self.started, self.ended = event, None
                self.num_starts += 1
                self._mark_event(MarkKind.start, event)
            case RunRestarted():
                self._mark_event(MarkKind.restart, event)
            case RunEnded():
                self.ended = event
                text = f"ended at step {event.step}: {event.reason} (exit code {event.exit_code})"
                self._mark(MarkKind.end, event.iteration, event.time, text)
            case EvalRecord():
                self.eval_loss = event.loss
                self.evals.add(event.iteration, event.time, ("loss",), (event.loss,))
            case TaskEvaluated():
                named = {f"{event.task} {name}": value for name, value in event.metrics.items()}
                scores = {name: value for name, value in named.items() if "_stderr" not in name}
                self.tasks.add(event.iteration, event.time, tuple(scores), tuple(scores.values()))
            case CheckpointSaved():
                self.num_checkpoints += 1
                self._mark_event(MarkKind.checkpoint, event)
            case CheckpointFailed() | CheckpointJudged():
                self._mark_event(MarkKind.trouble, event)
            case Finding():
                self._mark_event(MarkKind.finding, event)
                for cursor in event.cursors:
                    self._blame(cursor, event.kind)
            case Action():
                self._mark_event(MarkKind.action, event, incident=event.incident)
                self._last_action = event
            case Outcome():
                self._mark_event(MarkKind.restored, event, incident=event.incident)
                self._blame_excluded(event)
            case Intervention():
                self._mark_event(MarkKind.intervention, event)
            case _:
                pass

    def _blame_excluded(self, outcome: Outcome) -> None:
        """Blame the batches that the last action excluded. An action that failed excluded none."""
        action = self._last_action
        if action is None or action.kind is not outcome.kind or not action.exclude or not outcome.has_excluded:
            return
        first, last = action.exclude
        for cursor in range(first, min(last + 1, first + NUM_RECENT)):
            self._blame(cursor, f"excluded by incident {action.incident}" if action.incident else "excluded")

    def median_rate(self, column: str) -> float:
        """The median of `tokens_per_s` or `mfu` over the steps; NaN if none has it."""
        rate = median_rate(self.steps.column(column))
        return NAN if rate is None else rate

    def all_marks(self) -> list[Mark]:
        """All marks, sorted by time."""
        marks = [mark for of_one_kind in self.marks.values() for mark in of_one_kind]
        return sorted(marks, key=lambda mark: (mark.time, mark.iteration))

    def _mark_event(self, kind: MarkKind, event: Event, *, incident: int = 0) -> None:
        text = event_line(event)
        if text is not None:
            text = text.removeprefix(f"iteration {event.iteration}: ")
            self._mark(kind, event.iteration, event.time, text, incident=incident)

    def _mark(self, kind: MarkKind, iteration: int, time: float, text: str, *, incident: int = 0) -> None:
        self.marks.setdefault(kind, deque(maxlen=MOST_MARKS)).append(Mark(kind, iteration, time, text, incident))

    def _update_times(self, time: float) -> None:
        self.first_time = time if self.first_time is None else self.first_time
        self.last_time = max(time, self.last_time)

    def _blame(self, cursor: int, why: str) -> None:
        """Store the facts of a batch and the reason it is blamed; a batch without a recent record is ignored."""
        record = next((recent for recent in reversed(self._recent) if recent["cursor"] == cursor), None)
        known = self.guilty.get(cursor)
        if known is None and (record is None or len(self.guilty) >= MOST_GUILTY):
            return
        if known is not None and why in known.why:
            return
        batch = (record or {}).get("batch", {})
        self.guilty[cursor] = BlamedBatch(
            cursor=cursor,
            iteration=known.iteration if known else (record or {})["iteration"],
            loss=known.loss if known else drawable_number((record or {}).get("loss")),
            why=f"{known.why}, {why}" if known else why,
            rarest=known.rarest if known else batch.get("rarest", []),
            rows=known.rows if known else batch.get("rows", {}),
        )


def _fp8_values(health: Mapping[str, Any], underflow: Mapping[str, Any]) -> list[float]:
    """Values of `FP8_COLUMNS` for one step."""
    roles = list(health.values())
    least, most = zip(*(role["scale_log2"] for role in roles), strict=True)
    return [
        max(map(drawable_number, underflow.values()), default=NAN),
        max(drawable_number(role["saturated"]) for role in roles),
        min(map(drawable_number, least)),
        max(map(drawable_number, most)),
    ]
