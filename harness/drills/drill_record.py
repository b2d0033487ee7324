"""Reads and writes `drill.json`, and gathers the evidence of a drill from its run directory.

    runs/drill-NAME/        a normal run, with drill.json and faults.jsonl
    runs/drill-NAME-twin/   the same run without faults, marked by twin.json

`drill.json` holds the scenario, the fault plan, the name of the twin, and the exit code and launcher output of each
start. The worker reads the plan; the runner appends the starts. `gather` reads a directory into plain data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, final

from harness.config import compose
from harness.config.errors import ConfigError
from harness.core import event_json
from harness.core.batch_sizes import TokenSchedule, read_token_schedule
from harness.core.events import EvalRecord, Event, FaultInjected, RunEnded, RunStarted, StepRecord
from harness.core.rundir import RunDir, write_atomically
from harness.data.order.ledger import Ledger
from harness.drills.scenario import Scenario, scenario_from_tree
from harness.faults.fault_plan import FaultPlan, read_plan
from harness.telemetry.console import event_line


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run, as seen by the drill runner."""

    exit_code: int
    """Exit code of the launcher; negative: the signal that killed it."""
    said: list[str] = field(default_factory=list)
    """Output lines of the launcher, without those of the ranks."""
    seconds: float = 0.0
    """Duration of the start."""
    ended: float = 0.0
    """When the runner saw the launcher end, in seconds since 1970; 0: in a record of an older version."""


@final
@dataclass(slots=True, kw_only=True)
class DrillRecord:
    """Content of `drill.json`."""

    name: str
    scenario: Scenario
    plan: FaultPlan
    twin: str
    """Name of the directory beside this one."""
    starts: list[Start] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Observations of the runner, shown on the score card."""

    def write(self, run: RunDir) -> None:
        tree = {
            "name": self.name,
            "scenario": self.scenario.as_dict(),
            "plan": self.plan.as_dict(),
            "twin": self.twin,
            "starts": [asdict(start) for start in self.starts],
            "notes": self.notes,
        }
        write_atomically(run.drill, json.dumps(tree, indent=2) + "\n")


def read_drill_record(run: RunDir) -> DrillRecord:
    """Read the drill record of a directory."""
    plan = read_plan(run)
    if plan is None:
        raise ConfigError(str(run.path), f"is not a drill: it has no {run.drill.name}")
    try:
        tree = json.loads(run.drill.read_text(encoding="utf-8"))
        return DrillRecord(
            name=tree["name"],
            scenario=scenario_from_tree(tree["scenario"]),
            plan=plan,
            twin=tree["twin"],
            starts=_starts(tree),
            notes=tree.get("notes", []),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(run.drill), f"is not a drill record: {error}") from None


def _starts(tree: dict[str, Any]) -> list[Start]:
    return [Start(**start) for start in tree.get("starts", [])]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrillEvidence:
    """Everything that a score needs from one run."""

    events: list[Event]
    faults: list[FaultInjected] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Observations of the runner."""
    schedule: TokenSchedule | None = None
    """Tokens of each batch; None: unknown."""
    num_excluded: int = 0
    """Batches that the ledger excludes."""

    def of(self, *kinds: type[Event]) -> Iterator[Any]:
        """Events of these kinds, in order."""
        return (event for event in self.events if isinstance(event, kinds))

    @property
    def is_single_rank(self) -> bool:
        """Whether world_size is 1: the affected rank is known without detection."""
        return any(event.world_size == 1 for event in self.of(RunStarted))

    @property
    def records(self) -> list[StepRecord]:
        return list(self.of(StepRecord))

    @property
    def end(self) -> RunEnded | None:
        """The `run_ended` event of the last start; None if it died without one."""
        last = next((event for event in reversed(self.events) if isinstance(event, RunEnded | RunStarted)), None)
        return last if isinstance(last, RunEnded) else None

    @property
    def step(self) -> int:
        """Updates applied at the end."""
        last = self.end or next(reversed(self.records), None)
        return 0 if last is None else last.step

    @property
    def num_steps(self) -> int:
        """Updates that the run should apply, by its last start: a run can be continued with another number."""
        return next((event.num_steps for event in reversed(self.events) if isinstance(event, RunStarted)), 0)

    @property
    def num_starts(self) -> int:
        return max(len(self.starts), sum(1 for _ in self.of(RunStarted)))

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last start: from the run's log, else from its launcher."""
        if self.end is not None:
            return self.end.exit_code
        return self.starts[-1].exit_code if self.starts else None

    @property
    def held_out_loss(self) -> float | None:
        return next((record.loss for record in reversed(list(self.of(EvalRecord)))), None)

    @property
    def last_numbers(self) -> tuple[float | int | None, ...] | None:
        """The last step and losses, which are bit-identical in two runs that computed the same."""
        last = next(reversed(self.records), None)
        return None if last is None else (last.step, last.cursor, last.loss, last.grad_norm, self.held_out_loss)

    @property
    def stopped_s(self) -> float:
        """Seconds from the last event of each start to the first step of the next start, summed."""
        kept = [event for event in self.events if isinstance(event, RunStarted | StepRecord | RunEnded)]
        total_s, last_s, is_new = 0.0, None, False
        for event in kept:
            if isinstance(event, RunStarted):
                is_new = True
                continue
            if is_new and last_s is not None:
                total_s += event.time - last_s
            last_s, is_new = event.time, False
        return total_s

    @property
    def output_lines(self) -> list[str]:
        """Every line that an operator would have seen: of the run, the launcher and the runner."""
        own = [line for event in self.events if (line := event_line(event)) is not None]
        return [*own, *(line for start in self.starts for line in start.said), *self.notes]


def gather(run: RunDir) -> DrillEvidence:
    """Read the evidence of a run directory. Raises ConfigError if it is not one."""
    cfg = compose.read(run.config)
    record = json.loads(run.drill.read_text(encoding="utf-8")) if run.drill.exists() else {}
    faults = event_json.read(run.faults) if run.faults.exists() else ()
    return DrillEvidence(
        events=list(event_json.read(run.events)) if run.events.exists() else [],
        faults=[event for event in faults if isinstance(event, FaultInjected)],
        starts=_starts(record),
        notes=record.get("notes", []),
        schedule=read_token_schedule(run, compose.plain(cfg.train)),
        num_excluded=Ledger.load(run.ledger, writer=False).num_excluded,
    )
