"""Scores a drill: a pure function of two run directories, the victim's and its twin's.

`score` measures; `check_bounds` compares the measurements with the scenario. A bound that could not be measured fails:
a drill whose fault never struck, or whose twin is missing, must not pass.
Lost steps are those whose update is not in the final model. A rejected update, a rewind, a rollback and a killed start
count alike; the one or two steps that a killed run had not logged yet do not count. Lost tokens are those of their
batches, whose size may change during the run.
Left out: `slow` findings in the twin. They are caused by the machine, and are shown as remarks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, final

from harness.config.errors import EXIT_DONE
from harness.core.events import (
    ABOUT_SPEED,
    Action,
    ActionKind,
    DrillScored,
    Finding,
    Outcome,
    StepRecord,
)
from harness.core.rundir import RunDir
from harness.drills.drill_record import DrillEvidence, gather, read_drill_record
from harness.drills.recovery_times import list_recoveries
from harness.drills.scenario import Expected, Scenario
from harness.faults.fault_plan import Fault

RESTART_TIMES = ("notice_s", "restart_s", "first_update_s")
"""Rows of the score card that only a drill with a restart has."""
PASSIVE = (ActionKind.watch, ActionKind.check, ActionKind.trial)
"""Actions that change nothing."""


class BoundStatus(StrEnum):
    """Whether a bound holds."""

    held = "held"
    broken = "broken"
    unmeasured = "not measured"
    """The scenario sets a bound, but there was nothing to measure."""
    free = "free"
    """The scenario sets no bound."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One line of the score card."""

    name: str
    measured: float | bool | None
    wanted: str
    """The bound as text; empty: no bound."""
    verdict: BoundStatus


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The measurements of a drill; None: there was nothing to measure."""

    struck: int
    """Number of strikes of the fault."""
    detected: bool | None
    latency_steps: int | None
    right_rank: bool | None
    right_layer: bool | None
    right_action: bool
    steps_lost: int
    tokens_lost: int
    """0 if the run has no token schedule."""
    seconds: float
    loss_gap: float | None
    identical: bool | None
    false_alarms: int | None
    starts: int
    exit_code: int | None
    survived: bool
    """The run ended as expected: all steps done with a finite loss, or halted if the scenario expects that."""
    remarks: list[str] = field(default_factory=list)
    excluded: int = 0
    """Batches that the ledger excludes."""
    notice_s: float | None = None
    """From the strike until the launcher, or the runner, noticed the failure. Of several restarts, the slowest counts,
    here and below; None: there was no restart."""
    restart_s: float | None = None
    """From the notice until all ranks had resumed."""
    first_update_s: float | None = None
    """From the strike until the first step after it was logged by another start; None: there was no other start."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A scored drill."""

    scenario: str
    summary: str
    score: Score
    bounds: list[Bound]

    @property
    def passed(self) -> bool:
        return all(bound.verdict in (BoundStatus.held, BoundStatus.free) for bound in self.bounds)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}

    def as_event(self, *, time: float, iteration: int) -> DrillScored:
        scores = {
            name: float(value)
            for name, value in asdict(self.score).items()
            if isinstance(value, bool | int | float) and math.isfinite(value)
        }
        return DrillScored(time=time, iteration=iteration, scenario=self.scenario, passed=self.passed, scores=scores)


def score_run(run: RunDir) -> Card:
    """Score a drill from its directory; can be repeated at any time."""
    record = read_drill_record(run)
    twin_run = RunDir(run.path.parent / record.twin)
    twin = gather(twin_run) if twin_run.config.exists() else None
    measured = score(record.scenario, gather(run), twin)
    return Card(
        scenario=record.name,
        summary=record.scenario.summary,
        score=measured,
        bounds=check_bounds(record.scenario, measured),
    )


def score(scenario: Scenario, victim: DrillEvidence, twin: DrillEvidence | None) -> Score:
    """Compute the measurements of one drill."""
    expected, fault = scenario.expected, scenario.fault
    detection = detect(expected, fault, 0, victim)
    trials = [outcome for outcome in victim.of(Outcome) if outcome.kind is ActionKind.trial]
    lost = list_lost_records(victim)
    tokens_lost = 0 if victim.schedule is None else victim.schedule.tokens_of(record.cursor for record in lost)
    finished = victim.exit_code != EXIT_DONE or (victim.step == victim.num_steps > 0 and has_finite_loss(victim))
    return Score(
        struck=len(find_strikes(victim, 0)),
        detected=detection.found,
        latency_steps=detection.latency_steps,
        right_rank=detection.right_rank,
        right_layer=detection.right_layer,
        right_action=is_right(expected.actions, actions_since(victim, detection.since)),
        steps_lost=len(lost) + sum(outcome.steps_lost for outcome in trials),
        tokens_lost=tokens_lost + sum(outcome.tokens_lost for outcome in trials),
        seconds=round(sum(outcome.seconds for outcome in victim.of(Outcome)) + victim.stopped_s, 3),
        loss_gap=loss_gap(victim, twin),
        identical=None if twin is None else victim.last_numbers == twin.last_numbers,
        false_alarms=None if twin is None else len(find_false_alarms(twin)),
        starts=victim.num_starts,
        exit_code=victim.exit_code,
        survived=victim.exit_code == expected.exit_code and finished,
        remarks=list_remarks(expected, victim, twin, since=detection.since),
        excluded=victim.num_excluded,
        **measure_restarts(victim),
    )


def list_lost_records(victim: DrillEvidence) -> list[StepRecord]:
    """Records of the steps whose update was rejected, or was applied and is not in the final model."""
    lost: list[StepRecord] = []
    kept: list[StepRecord] = []
    for record in victim.records:
        last_kept = record.step if record.refused else record.step - 1  # a step that is trained again was undone
        while kept and kept[-1].step > last_kept:
            lost.append(kept.pop())
        (lost if record.refused else kept).append(record)
    return lost + [record for record in kept if record.step > victim.step]


def measure_restarts(victim: DrillEvidence) -> dict[str, float]:
    """How long noticing, restarting and the first update took: for each measurement, the slowest of all restarts."""
    restarts = [recovery for recovery in list_recoveries(victim) if recovery.starts]
    found = {name: [getattr(recovery, name) for recovery in restarts] for name in RESTART_TIMES}
    measured = {name: [value for value in values if value is not None] for name, values in found.items()}
    return {name: max(values) for name, values in measured.items() if values}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """How one fault was detected."""

    since: int
    """The iteration of its first strike; 0: it never struck."""
    found: bool | None = None
    latency_steps: int | None = None
    right_rank: bool | None = None
    right_layer: bool | None = None


def detect(expected: Expected, fault: Fault, number: int, victim: DrillEvidence) -> Detection:
    """Whether and how a run detected one fault of its plan."""
    struck = find_strikes(victim, number)
    if not struck:
        return Detection(since=0)
    since, rank = struck[0].iteration, struck[0].rank
    if not expected.findings and not expected.notices:
        return Detection(since=since)
    found = [item for item in victim.of(Finding) if item.kind in expected.findings and item.iteration >= since]
    lines = victim.output_lines
    noticed = [any(text.format(rank=rank) in line for line in lines) for text in expected.notices]
    named_by_finding = [set(item.ranks) == {rank} for item in found if item.ranks][:1]
    named_by_notice = [seen for seen, text in zip(noticed, expected.notices, strict=True) if "{rank}" in text]
    layers = [set(item.groups) == set(expected.groups) for item in found]
    names_rank = victim.is_single_rank or any(named_by_finding or named_by_notice)
    return Detection(
        since=since,
        found=(bool(found) or not expected.findings) and all(noticed),
        latency_steps=found[0].iteration - since if found else None,
        right_rank=None if fault.rank is None or not expected.names_rank else names_rank,
        right_layer=any(layers) if expected.groups else None,
    )


def find_strikes(victim: DrillEvidence, number: int) -> list[Any]:
    """The strikes of one fault of the plan, in order."""
    return sorted((strike for strike in victim.faults if strike.number == number), key=lambda strike: strike.iteration)


def actions_since(victim: DrillEvidence, iteration: int) -> list[ActionKind]:
    """Kinds of the actions from an iteration on, without watch, check and trial, which change nothing."""
    taken = (action for action in victim.of(Action) if action.iteration >= iteration)
    return [action.kind for action in taken if action.kind not in PASSIVE]


def is_right(expected: Sequence[ActionKind], taken: Sequence[ActionKind]) -> bool:
    """Whether the first action is the first expected one, and all others are among the expected ones."""
    return list(taken[:1]) == list(expected[:1]) and set(taken) <= set(expected)


def find_false_alarms(twin: DrillEvidence) -> list[Finding]:
    """Findings in the twin, without those about speed, which the machine causes."""
    return [finding for finding in twin.of(Finding) if finding.kind not in ABOUT_SPEED]


def loss_gap(victim: DrillEvidence, twin: DrillEvidence | None) -> float | None:
    """Held-out loss at the end minus that of the twin, in nats per token."""
    if twin is None or victim.held_out_loss is None or twin.held_out_loss is None:
        return None
    return victim.held_out_loss - twin.held_out_loss


def has_finite_loss(run: DrillEvidence) -> bool:
    """Whether the last loss is finite."""
    return bool(run.records) and math.isfinite(run.records[-1].loss)


def list_remarks(expected: Expected, victim: DrillEvidence, twin: DrillEvidence | None, *, since: int) -> list[str]:
    """Observations that no bound covers: notes of the runner, a failed twin, unexpected findings."""
    lines = list(victim.notes)
    if twin is not None:
        findings = [("twin", finding) for finding in twin.of(Finding)]
        if twin.exit_code != EXIT_DONE:
            lines.append(f"the twin ended with exit code {twin.exit_code}")
    else:
        findings = []
        lines.append("there is no twin to compare with")
    findings += [("victim", finding) for finding in victim.of(Finding) if finding.kind not in expected.findings]
    for who, finding in findings:
        when = " (before the first strike)" if who == "victim" and finding.iteration < since else ""
        lines.append(f"{who}, iteration {finding.iteration}: {finding.kind}, {finding.message}{when}")
    return lines


def check_bounds(scenario: Scenario, score: Score) -> list[Bound]:
    """Compare the measurements with the bounds and expectations of the scenario."""
    expected, bounds = scenario.expected, scenario.bounds
    must_detect = bool(expected.findings or expected.notices)
    return [
        _exactly("struck", score.struck > 0, True),
        _exactly("survived", score.survived, True),
        _exactly("exit_code", score.exit_code, expected.exit_code),
        _exactly("starts", score.starts, expected.starts),
        _exactly("detected", score.detected, True if must_detect else None),
        _at_most("latency_steps", score.latency_steps, bounds.latency_steps),
        _exactly("right_rank", score.right_rank, True if expected.names_rank else None),
        _exactly("right_layer", score.right_layer, True if expected.groups else None),
        _exactly("right_action", score.right_action, True),
        _at_most("steps_lost", score.steps_lost, bounds.steps_lost),
        _at_most("tokens_lost", score.tokens_lost, None),
        _at_most("seconds", score.seconds, bounds.seconds),
        _at_most("loss_gap", score.loss_gap, bounds.loss_gap),
        _exactly("identical", score.identical, True if bounds.identical else None),
        _at_most("false_alarms", score.false_alarms, bounds.false_alarms),
        *([] if bounds.excluded is None else [_at_most("excluded", score.excluded, bounds.excluded)]),
        *(_at_most(name, value, None) for name in RESTART_TIMES if (value := getattr(score, name)) is not None),
    ]


def _exactly(name: str, measured: bool | int | None, wanted: bool | int | None) -> Bound:
    text = "" if wanted is None else format_value(wanted)
    return Bound(name=name, measured=measured, wanted=text, verdict=_status(measured, wanted, measured == wanted))


def _at_most(name: str, measured: float | None, limit: float | None) -> Bound:
    text = "" if limit is None else f"at most {limit:g}"
    holds = measured is not None and limit is not None and measured <= limit
    return Bound(name=name, measured=measured, wanted=text, verdict=_status(measured, limit, holds))


def _status(measured: float | None, wanted: float | None, holds: bool) -> BoundStatus:
    if wanted is None:
        return BoundStatus.free
    if measured is None:
        return BoundStatus.unmeasured
    return BoundStatus.held if holds else BoundStatus.broken


def format_value(value: float | bool | None) -> str:
    """A value of the score card as text."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case _:
            return f"{value:.3g}"
