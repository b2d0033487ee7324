"""A campaign: rounds of random faults at random iterations on random ranks, and how many a run survives.

Why: a scenario tests one known fault. Real failures are often unforeseen combinations.
How: a round is a pure function of (seed, number): one to three scenarios, with their faults moved to other iterations
and ranks, far enough apart to be distinguished. All rounds share one twin, so only scenarios with the common
training config take part. A round is lost if its run does not end as expected, if a promised bound (`PROMISED`) is
broken or was not measured, or if the run passed a planned fault that did not strike. A fault that was survived but not
detected is counted, and is not a loss.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from harness.config import conf_files
from harness.config.command_line import shell_command
from harness.config.errors import require
from harness.core.plural import pluralize
from harness.core.rundir import MAY_DIFFER
from harness.drills import scenario as scenarios
from harness.drills.drill_record import DrillEvidence
from harness.drills.scenario import Bounds, Expected, Scenario
from harness.drills.score import Bound, BoundStatus, check_bounds, detect, format_value, score
from harness.drills.score_card import align_columns, markdown_table
from harness.faults.fault_plan import DATA_FAULTS, Fault, FaultKind, FaultPlan

MOST_FAULTS = 3
EARLIEST = 60
"""First iteration of a fault. Before it the gate's bounds are still wide (`sentinel.detect.warmup_rows`)."""
NUM_STEPS = 150
MARGIN = 15
"""Iterations between two faults, and after the last."""
NOT_MIXABLE = (FaultKind.full_disk, FaultKind.network_down, FaultKind.tracking_down, FaultKind.warmup_cut)
"""These need their own disk, network, server or iteration."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFault:
    """One fault of a round, with the scenario that it comes from."""

    name: str
    scenario: Scenario

    @property
    def fault(self) -> Fault:
        return self.scenario.fault

    def __str__(self) -> str:
        rank = "" if self.fault.rank is None else f" on rank {self.fault.rank}"
        at = self.fault.at if self.fault.at_s is None else f"{self.fault.at_s:.0f} s"
        return f"{self.name} at {at}{rank}"


def mixable_scenarios() -> dict[str, Scenario]:
    """Scenarios that can be combined: common training config, one node, no special environment, and a run that should
    finish."""
    shared = conf_files.read_tree(conf_files.conf_dir() / scenarios.GROUP / f"{conf_files.BASE}.yaml")["train"]
    found = {}
    for name in scenarios.names():
        loaded = scenarios.load_scenario(name)
        trains_alike = all(override.startswith(MAY_DIFFER) for override in loaded.train[len(shared) :])
        has_environment = loaded.fault.kind not in NOT_MIXABLE and not loaded.needs_nodes
        if trains_alike and has_environment and loaded.expected.exit_code == 0:
            found[name] = loaded
    return found


def training_overrides(known: Mapping[str, Scenario]) -> list[str]:
    """Training overrides of every round: those of all scenarios, and enough steps for several faults."""
    shared = dict.fromkeys(override for loaded in known.values() for override in loaded.train)
    return [*shared, f"train.num_steps={NUM_STEPS}"]


def draw_faults(
    known: Mapping[str, Scenario], *, seed: int, number: int, num_steps: int, num_ranks: int
) -> list[DrawnFault]:
    """Draw the faults of one round; a pure function of seed and number."""
    check_length(num_steps)
    rng = random.Random(f"{seed}/{number}")
    span = num_steps - EARLIEST - MARGIN
    num_faults = rng.randint(1, MOST_FAULTS)
    names = rng.sample(sorted(known), min(num_faults, len(known)))
    places = sorted(rng.sample(range(span - (len(names) - 1) * (MARGIN - 1)), len(names)))
    drawn = []
    for place, (offset, name) in enumerate(zip(places, names, strict=True)):
        fault = known[name].fault
        rank = None if fault.rank is None else rng.randrange(num_ranks)
        moved = replace(fault, at=EARLIEST + offset + place * (MARGIN - 1), rank=rank)
        drawn.append(DrawnFault(name=name, scenario=replace(known[name], fault=moved)))
    return drawn


def check_length(num_steps: int) -> None:
    """Reject a run that is too short for the most faults of a round."""
    least = EARLIEST + (MOST_FAULTS + 1) * MARGIN
    require(num_steps >= least, "train.num_steps", f"must be at least {least} for a campaign, got {num_steps}")


def check_evaluation(every_steps: int) -> None:
    """Reject runs without a held-out loss, which the promised bounds compare with that of the twin."""
    require(every_steps > 0, "eval.every_steps", f"must be positive for a campaign, got {every_steps}")


def make_plan(drawn: Sequence[DrawnFault], *, seed: int, number: int) -> FaultPlan:
    return FaultPlan(
        seed=random.Random(f"{seed}/{number}/plan").randrange(2**31), faults=[fault.fault for fault in drawn]
    )


def merge_scenarios(drawn: Sequence[DrawnFault], summary: str) -> Scenario:
    """One scenario with the expectations of all drawn faults."""
    expected = [fault.scenario.expected for fault in drawn]
    bounds = [fault.scenario.bounds for fault in drawn]
    gaps = [bound.loss_gap for bound in bounds if not bound.identical]
    is_bounded = all(gap is not None for gap in gaps)
    return replace(
        drawn[0].scenario,
        summary=summary,
        expected=Expected(
            actions=list(dict.fromkeys(action for one in expected for action in one.actions)),
            starts=1 + sum(one.starts - 1 for one in expected),
        ),
        bounds=Bounds(
            identical=all(bound.identical for bound in bounds),
            loss_gap=sum(gap or 0.0 for gap in gaps) if gaps and is_bounded else None,
        ),
        limit_s=sum(fault.scenario.limit_s for fault in drawn),
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The result of one round."""

    number: int
    faults: list[str]
    """Each fault as text, in order."""
    names: list[str]
    """Scenario of each fault."""
    injected: list[bool]
    """Whether each fault struck."""
    detected: list[bool | None]
    """Whether each fault was detected; None: nothing to detect."""
    steps_lost: int
    seconds: float
    loss_gap: float | None
    starts: int
    failures: list[str]
    """Why the round is lost; empty: the run survived."""


PROMISED = ("survived", "identical", "loss_gap")
"""Bounds whose breach makes a round lost; also if they were not measured."""


def score_round(drawn: Sequence[DrawnFault], victim: DrillEvidence, twin: DrillEvidence, *, number: int) -> Round:
    """Score one round against the shared twin."""
    scenario = merge_scenarios(drawn, "")
    measured = score(scenario, victim, twin)
    detections = [detect(fault.scenario.expected, fault.fault, place, victim) for place, fault in enumerate(drawn)]
    failures = [failure_text(bound) for bound in check_bounds(scenario, measured) if is_lost(bound)]
    if not measured.survived:
        failures.append(f"ended with exit code {victim.exit_code} at step {victim.step} of {victim.num_steps}")
    failures += [
        f"{fault} did not strike"
        for fault, detection in zip(drawn, detections, strict=True)
        if detection.since == 0 and has_passed(fault.fault, victim)
    ]
    return Round(
        number=number,
        faults=[str(fault) for fault in drawn],
        names=[fault.name for fault in drawn],
        injected=[detection.since > 0 for detection in detections],
        detected=[detection.found for detection in detections],
        steps_lost=measured.steps_lost,
        seconds=measured.seconds,
        loss_gap=measured.loss_gap,
        starts=measured.starts,
        failures=failures,
    )


def is_lost(bound: Bound) -> bool:
    """Whether a promised bound was broken or not measured."""
    return bound.name in PROMISED and bound.verdict in (BoundStatus.broken, BoundStatus.unmeasured)


def failure_text(bound: Bound) -> str:
    measured = bound.verdict if bound.verdict is BoundStatus.unmeasured else format_value(bound.measured)
    return f"{bound.name}: {measured}, wanted {bound.wanted}"


def has_passed(fault: Fault, victim: DrillEvidence) -> bool:
    """Whether a fault had to strike: the run reached its iteration, or read one of its batches, which an earlier
    incident may have excluded."""
    if fault.kind in DATA_FAULTS:
        return any(fault.strikes_at(record.cursor) for record in victim.records)
    return any(record.iteration >= fault.at for record in victim.records)


def round_line(done: Round) -> str:
    """Progress line of a finished round."""
    detected = [
        found for found, struck in zip(done.detected, done.injected, strict=True) if struck and found is not None
    ]
    result = "survived" if not done.failures else f"LOST ({'; '.join(done.failures)})"
    return (
        f"round {done.number}: {', '.join(done.faults)}: {result}, {sum(detected)} of {len(detected)} detected, "
        f"{pluralize(done.steps_lost, 'step')} lost, {pluralize(done.starts, 'start')}"
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """All rounds so far."""

    seed: int
    minutes: float
    words: list[str]
    """Overrides of the command line."""
    rounds: list[Round]

    @property
    def survived(self) -> bool:
        """Whether no round was lost."""
        return not any(done.failures for done in self.rounds)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"survived": self.survived, "kinds": {row[0]: row[1:] for row in self.kinds()}}

    def kinds(self) -> list[tuple[str, int, int | None, int, int]]:
        """For each scenario: name, faults injected, detected (None: nothing to detect), recovered from, lost."""
        rows = []
        for name in sorted({name for done in self.rounds for name in done.names}):
            planned = [(done, done.names.index(name)) for done in self.rounds if name in done.names]
            struck = [(done, place) for done, place in planned if done.injected[place]]
            found = [done.detected[place] for done, place in struck if done.detected[place] is not None]
            recovered = sum(not done.failures for done, _ in struck)
            rows.append(
                (name, len(struck), sum(map(bool, found)) if found else None, recovered, len(struck) - recovered)
            )
        return rows

    def repeat(self, number: int) -> str:
        """The command that repeats exactly this round."""
        return shell_command("harness", "drill", "campaign", "--seed", self.seed, "--round", number, *self.words)


HEAD = ("scenario", "injected", "detected", "recovered", "lost")


def as_text(campaign: Campaign) -> str:
    """The report, for a terminal."""
    rows = [HEAD, *_rows(campaign)]
    return "\n".join([*align_columns(rows), *_closing(campaign)]) + "\n"


def as_markdown(campaign: Campaign) -> str:
    """The report as Markdown, stored beside the rounds."""
    lines = [f"# Campaign {campaign.seed}: {'survived' if campaign.survived else 'LOST RUNS'}", ""]
    lines += markdown_table(HEAD, _rows(campaign))
    lines += ["", *(f"- {line}" for line in _closing(campaign)), "", "## Rounds", ""]
    lines += [f"- {round_line(done)}" for done in campaign.rounds]
    return "\n".join(lines) + "\n"


def _rows(campaign: Campaign) -> list[tuple[str, ...]]:
    return [(name, *(format_value(number) for number in numbers)) for name, *numbers in campaign.kinds()]


def _closing(campaign: Campaign) -> list[str]:
    rounds = campaign.rounds
    num_survived = sum(not done.failures for done in rounds)
    gaps = [done.loss_gap for done in rounds if done.loss_gap is not None]
    missed = [
        f"not detected: {done.faults[place]} in round {done.number}"
        for done in rounds
        for place, found in enumerate(done.detected)
        if found is False and done.injected[place]
    ]
    num_lost = sum(done.steps_lost for done in rounds)
    share = f" ({num_survived / len(rounds):.0%})" if rounds else ""
    return [
        f"{num_survived} of {len(rounds)} rounds survived{share} in {campaign.minutes:.1f} minutes",
        f"worst loss gap {format_value(max(gaps, default=None))} nats, {pluralize(num_lost, 'step')} lost",
        *missed,
        *(f"lost, repeat with: {campaign.repeat(done.number)}" for done in rounds if done.failures),
    ]
