"""How a run answered what was injected: a pure function of the two run directories, the victim's and its twin's.

How: `score` measures, `judge` holds what was measured against the scenario. What a scenario asks for and could not be
measured counts as broken: a drill whose fault never struck, or whose twin is missing, must not look like a success.
A step is lost when it was trained or tried and does not count in the end: steps told minus steps reached. So a refusal,
a rewind, a rollback and a killed start are counted alike; the one or two steps that a killed run had not told are not.
Left out: findings of `slow` in the twin. They speak of the machine, not of the run, and are told as remarks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, final

from harness.config.errors import EXIT_DONE
from harness.core.events import ABOUT_SPEED, Action, ActionKind, DrillScored, Finding, Outcome
from harness.core.rundir import RunDir
from harness.drills.drill_record import DrillEvidence, gather, read_drill_record
from harness.drills.scenario import Expected, Scenario
from harness.faults.plan import Fault


class BoundStatus(StrEnum):
    held = "held"
    broken = "broken"
    unmeasured = "not measured"
    """Asked for, and there was nothing to measure."""
    free = "free"
    """Not asked for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One line of the card."""

    name: str
    measured: float | bool | None
    wanted: str
    """In words; empty: anything."""
    verdict: BoundStatus


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What was measured; None: there was nothing to measure."""

    struck: int
    """How often the fault struck."""
    detected: bool | None
    latency_steps: int | None
    right_rank: bool | None
    right_layer: bool | None
    right_action: bool
    steps_lost: int
    tokens_lost: int
    seconds: float
    loss_gap: float | None
    identical: bool | None
    false_alarms: int | None
    starts: int
    exit_code: int | None
    survived: bool
    """It ended as it should: with all steps done and a finite loss, or halted where that was the right answer."""
    remarks: list[str] = field(default_factory=list)
    excluded: int = 0
    """Batches that are excluded for good."""


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
    """The card of a drill that lies on disk, as often as one likes."""
    record = read_drill_record(run)
    twin_run = RunDir(run.path.parent / record.twin)
    twin = gather(twin_run) if twin_run.config.exists() else None
    measured = score(record.scenario, gather(run), twin)
    return Card(
        scenario=record.name,
        summary=record.scenario.summary,
        score=measured,
        bounds=judge(record.scenario, measured),
    )


def score(scenario: Scenario, victim: DrillEvidence, twin: DrillEvidence | None) -> Score:
    """Measure one drill."""
    expected, fault = scenario.expected, scenario.fault
    detection = detect(expected, fault, 0, victim)
    steps_lost = len(victim.records) - victim.step
    finished = victim.exit_code != EXIT_DONE or (victim.step == victim.num_steps > 0 and has_sound_end(victim))
    return Score(
        struck=len(strikes(victim, 0)),
        detected=detection.found,
        latency_steps=detection.latency_steps,
        right_rank=detection.right_rank,
        right_layer=detection.right_layer,
        right_action=is_right(expected.actions, actions_since(victim, detection.since)),
        steps_lost=steps_lost,
        tokens_lost=steps_lost * victim.batch_tokens,
        seconds=round(sum(outcome.seconds for outcome in victim.of(Outcome)) + victim.restart_s, 3),
        loss_gap=loss_gap(victim, twin),
        identical=None if twin is None else victim.last_numbers == twin.last_numbers,
        false_alarms=None if twin is None else len(alarms(twin)),
        starts=victim.num_starts,
        exit_code=victim.exit_code,
        survived=victim.exit_code == expected.exit_code and finished,
        remarks=remarks(expected, victim, twin, since=detection.since),
        excluded=victim.num_excluded,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """How one fault was noticed."""

    since: int
    """The iteration of its first strike."""
    found: bool | None = None
    latency_steps: int | None = None
    right_rank: bool | None = None
    right_layer: bool | None = None


def detect(expected: Expected, fault: Fault, number: int, victim: DrillEvidence) -> Detection:
    """Whether and how a run noticed the fault at one place of its plan."""
    struck = strikes(victim, number)
    if not struck:
        return Detection(since=0)
    since, rank = struck[0].iteration, struck[0].rank
    if not expected.findings and not expected.notices:
        return Detection(since=since)
    found = [each for each in victim.of(Finding) if each.kind in expected.findings and each.iteration >= since]
    lines = victim.said
    noticed = [any(words.format(rank=rank) in line for line in lines) for words in expected.notices]
    told_by_finding = [set(each.ranks) == {rank} for each in found if each.ranks][:1]
    told_by_notice = [seen for seen, words in zip(noticed, expected.notices, strict=True) if "{rank}" in words]
    layers = [set(each.groups) == set(expected.groups) for each in found]
    names_rank = victim.is_alone or any(told_by_finding or told_by_notice)
    return Detection(
        since=since,
        found=(bool(found) or not expected.findings) and all(noticed),
        latency_steps=found[0].iteration - since if found else None,
        right_rank=None if fault.rank is None or not expected.names_rank else names_rank,
        right_layer=any(layers) if expected.groups else None,
    )


def strikes(victim: DrillEvidence, number: int) -> list[Any]:
    """When the fault at one place of the plan struck, and whom."""
    return sorted((each for each in victim.faults if each.number == number), key=lambda each: each.iteration)


def actions_since(victim: DrillEvidence, iteration: int) -> list[ActionKind]:
    """What was done from an iteration on; watching and checking change nothing and are left out."""
    taken = (each for each in victim.of(Action) if each.iteration >= iteration)
    return [each.kind for each in taken if each.kind not in (ActionKind.watch, ActionKind.check)]


def is_right(expected: Sequence[ActionKind], taken: Sequence[ActionKind]) -> bool:
    """The first answer is the expected one, and no other kind of answer follows than those expected."""
    return list(taken[:1]) == list(expected[:1]) and set(taken) <= set(expected)


def alarms(twin: DrillEvidence) -> list[Finding]:
    """What was found where nothing was broken; a slow machine is no invention of the sentinel."""
    return [finding for finding in twin.of(Finding) if finding.kind not in ABOUT_SPEED]


def loss_gap(victim: DrillEvidence, twin: DrillEvidence | None) -> float | None:
    """Held-out loss at the end above the twin's, in nats."""
    if twin is None or victim.held_out_loss is None or twin.held_out_loss is None:
        return None
    return victim.held_out_loss - twin.held_out_loss


def has_sound_end(run: DrillEvidence) -> bool:
    """The last loss is a number."""
    return bool(run.records) and math.isfinite(run.records[-1].loss)


def remarks(expected: Expected, victim: DrillEvidence, twin: DrillEvidence | None, *, since: int) -> list[str]:
    """What no bound speaks of and a person would want to know."""
    lines = list(victim.notes)
    if twin is not None:
        told = [("twin", finding) for finding in twin.of(Finding)]
        if twin.exit_code != EXIT_DONE:
            lines.append(f"the twin ended with exit code {twin.exit_code}")
    else:
        told = []
        lines.append("there is no twin to compare with")
    told += [("victim", each) for each in victim.of(Finding) if each.kind not in expected.findings]
    for who, finding in told:
        when = " before anything was broken" if who == "victim" and finding.iteration < since else ""
        lines.append(f"{who}, iteration {finding.iteration}: {finding.kind}, {finding.message}{when}")
    return lines


def judge(scenario: Scenario, score: Score) -> list[Bound]:
    """Hold what was measured against what the scenario asks for."""
    expected, bounds = scenario.expected, scenario.bounds
    asks_to_detect = bool(expected.findings or expected.notices)
    return [
        _exactly("struck", score.struck > 0, True),
        _exactly("survived", score.survived, True),
        _exactly("exit_code", score.exit_code, expected.exit_code),
        _exactly("starts", score.starts, expected.starts),
        _exactly("detected", score.detected, True if asks_to_detect else None),
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
    ]


def _exactly(name: str, measured: bool | int | None, wanted: bool | int | None) -> Bound:
    words = "" if wanted is None else in_words(wanted)
    return Bound(name=name, measured=measured, wanted=words, verdict=_verdict(measured, wanted, measured == wanted))


def _at_most(name: str, measured: float | None, limit: float | None) -> Bound:
    words = "" if limit is None else f"at most {limit:g}"
    holds = measured is not None and limit is not None and measured <= limit
    return Bound(name=name, measured=measured, wanted=words, verdict=_verdict(measured, limit, holds))


def _verdict(measured: float | None, wanted: float | None, holds: bool) -> BoundStatus:
    if wanted is None:
        return BoundStatus.free
    if measured is None:
        return BoundStatus.unmeasured
    return BoundStatus.held if holds else BoundStatus.broken


def in_words(value: float | bool | None) -> str:
    """A number of the card as a person reads it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case _:
            return f"{value:.3g}"
