"""A campaign: rounds of random faults at random moments on random ranks, and how many of them a run survived.

Why: scenarios try what somebody thought of, one at a time; what kills runs is two things at once that nobody did.
How: a round is a pure function of (seed, number): one to three scenarios whose faults are moved to other iterations and
ranks, far enough apart to be told from each other. All rounds share one twin, so only scenarios that train like all
others take part. A round is lost when its run did not end as it should, or ended elsewhere than was promised; a fault
that was survived but not noticed is counted, and is no loss.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from harness.config import compose
from harness.config.errors import require
from harness.core.rundir import MAY_DIFFER
from harness.drills import scenario as scenarios
from harness.drills.drill_record import DrillEvidence
from harness.drills.scenario import Bounds, Expected, Scenario
from harness.drills.score import BoundStatus, detect, in_words, judge, score
from harness.drills.score_card import aligned, markdown_table
from harness.faults.plan import Fault, FaultKind, FaultPlan

MOST_FAULTS = 3
EARLIEST = 60
"""Before it the bounds are wide on purpose (`sentinel.detect.warmup_rows`): little is normal yet."""
NUM_STEPS = 150
MARGIN = 15
"""Iterations between two faults, and after the last."""
NEED_A_PLACE = (FaultKind.full_disk, FaultKind.tracking_down, FaultKind.warmup_cut)
"""These need a disk, a server or a moment of their own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One fault of a round, and the scenario that says what is expected of it."""

    name: str
    scenario: Scenario

    @property
    def fault(self) -> Fault:
        return self.scenario.fault

    def __str__(self) -> str:
        whom = "" if self.fault.rank is None else f" on rank {self.fault.rank}"
        return f"{self.name} at {self.fault.at}{whom}"


def catalogue() -> dict[str, Scenario]:
    """Scenarios that may be mixed: they train as all others do, need nothing around them, and the run should go on."""
    shared = compose.read_tree(compose.conf_dir() / scenarios.GROUP / f"{compose.BASE}.yaml")["train"]
    found = {}
    for name in scenarios.names():
        loaded = scenarios.load(name)
        trains_alike = all(word.startswith(MAY_DIFFER) for word in loaded.train[len(shared) :])
        if trains_alike and loaded.fault.kind not in NEED_A_PLACE and loaded.expected.exit_code == 0:
            found[name] = loaded
    return found


def training(known: Mapping[str, Scenario]) -> list[str]:
    """What every round trains with: what scenarios share, how long each of them wants to wait, and room for several."""
    shared = dict.fromkeys(word for loaded in known.values() for word in loaded.train)
    return [*shared, f"train.num_steps={NUM_STEPS}"]


def draw(known: Mapping[str, Scenario], *, seed: int, number: int, num_steps: int, num_ranks: int) -> list[Drawn]:
    """The faults of one round; the same for the same seed and number."""
    check_length(num_steps)
    dice = random.Random(f"{seed}/{number}")
    room = num_steps - EARLIEST - MARGIN
    num_faults = dice.randint(1, MOST_FAULTS)
    names = dice.sample(sorted(known), min(num_faults, len(known)))
    places = sorted(dice.sample(range(room - (len(names) - 1) * (MARGIN - 1)), len(names)))
    drawn = []
    for place, (offset, name) in enumerate(zip(places, names, strict=True)):
        fault = known[name].fault
        rank = None if fault.rank is None else dice.randrange(num_ranks)
        moved = replace(fault, at=EARLIEST + offset + place * (MARGIN - 1), rank=rank)
        drawn.append(Drawn(name=name, scenario=replace(known[name], fault=moved)))
    return drawn


def check_length(num_steps: int) -> None:
    """Refuse a training that has no room for as many faults as a round may have."""
    least = EARLIEST + (MOST_FAULTS + 1) * MARGIN
    require(num_steps >= least, "train.num_steps", f"must be at least {least} for a campaign, got {num_steps}")


def plan_of(drawn: Sequence[Drawn], *, seed: int, number: int) -> FaultPlan:
    return FaultPlan(
        seed=random.Random(f"{seed}/{number}/plan").randrange(2**31), faults=[each.fault for each in drawn]
    )


def merged(drawn: Sequence[Drawn], summary: str) -> Scenario:
    """What is expected of a run that meets all of them."""
    expected = [each.scenario.expected for each in drawn]
    bounds = [each.scenario.bounds for each in drawn]
    gaps = [each.loss_gap for each in bounds if not each.identical]
    is_bounded = all(gap is not None for gap in gaps)
    return replace(
        drawn[0].scenario,
        summary=summary,
        expected=Expected(
            actions=list(dict.fromkeys(action for each in expected for action in each.actions)),
            starts=1 + sum(each.starts - 1 for each in expected),
        ),
        bounds=Bounds(
            identical=all(each.identical for each in bounds),
            loss_gap=sum(gap or 0.0 for gap in gaps) if gaps and is_bounded else None,
        ),
        limit_s=sum(each.scenario.limit_s for each in drawn),
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """How one run came through."""

    number: int
    faults: list[str]
    """In words, in order."""
    names: list[str]
    injected: list[bool]
    detected: list[bool | None]
    """None: nothing was to be noticed."""
    steps_lost: int
    seconds: float
    loss_gap: float | None
    starts: int
    failures: list[str]
    """What was promised and did not hold; empty: it survived."""


PROMISED = ("survived", "identical", "loss_gap")
"""Bounds whose breach means that something was lost."""


def judge_round(drawn: Sequence[Drawn], victim: DrillEvidence, twin: DrillEvidence, *, number: int) -> Round:
    """Measure one round against the shared twin."""
    scenario = merged(drawn, "")
    measured = score(scenario, victim, twin)
    found = [detect(each.scenario.expected, each.fault, place, victim) for place, each in enumerate(drawn)]
    broken = [
        each for each in judge(scenario, measured) if each.name in PROMISED and each.verdict is BoundStatus.broken
    ]
    failures = [f"{each.name}: {in_words(each.measured)}, wanted {each.wanted}" for each in broken]
    if not measured.survived:
        failures.append(f"ended with exit code {victim.exit_code} at step {victim.step} of {victim.num_steps}")
    return Round(
        number=number,
        faults=[str(each) for each in drawn],
        names=[each.name for each in drawn],
        injected=[each.since > 0 for each in found],
        detected=[each.found for each in found],
        steps_lost=measured.steps_lost,
        seconds=measured.seconds,
        loss_gap=measured.loss_gap,
        starts=measured.starts,
        failures=failures,
    )


def in_brief(done: Round) -> str:
    """One line for whoever watches."""
    noticed = [
        found for found, struck in zip(done.detected, done.injected, strict=True) if struck and found is not None
    ]
    what = "survived" if not done.failures else f"LOST ({'; '.join(done.failures)})"
    return (
        f"round {done.number}: {', '.join(done.faults)}: {what}, {sum(noticed)} of {len(noticed)} noticed, "
        f"{counted(done.steps_lost, 'step')} lost, {counted(done.starts, 'start')}"
    )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """All rounds so far."""

    seed: int
    minutes: float
    words: list[str]
    """Overrides, as they were given."""
    rounds: list[Round]

    @property
    def survived(self) -> bool:
        return not any(each.failures for each in self.rounds)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"survived": self.survived, "kinds": {row[0]: row[1:] for row in self.kinds()}}

    def kinds(self) -> list[tuple[str, int, int | None, int, int]]:
        """Scenario, faults injected, noticed (None: there was nothing to notice), recovered from, lost."""
        rows = []
        for name in sorted({name for each in self.rounds for name in each.names}):
            met = [(each, each.names.index(name)) for each in self.rounds if name in each.names]
            struck = [(each, place) for each, place in met if each.injected[place]]
            found = [each.detected[place] for each, place in struck if each.detected[place] is not None]
            recovered = sum(not each.failures for each, _ in struck)
            rows.append(
                (name, len(struck), sum(map(bool, found)) if found else None, recovered, len(struck) - recovered)
            )
        return rows

    def repeat(self, number: int) -> str:
        """The command that does exactly this round again."""
        return " ".join(["harness drill campaign", f"--seed {self.seed}", f"--round {number}", *self.words])


HEAD = ("scenario", "injected", "noticed", "recovered", "lost")


def as_text(campaign: Campaign) -> str:
    """The report, for a terminal."""
    rows = [HEAD, *_rows(campaign)]
    return "\n".join([*aligned(rows), *_closing(campaign)]) + "\n"


def as_markdown(campaign: Campaign) -> str:
    """The report, as it lies beside the rounds."""
    lines = [f"# Campaign {campaign.seed}: {'survived' if campaign.survived else 'LOST RUNS'}", ""]
    lines += markdown_table(HEAD, _rows(campaign))
    lines += ["", *(f"- {line}" for line in _closing(campaign)), "", "## Rounds", ""]
    lines += [f"- {in_brief(each)}" for each in campaign.rounds]
    return "\n".join(lines) + "\n"


def _rows(campaign: Campaign) -> list[tuple[str, ...]]:
    return [(name, *(in_words(number) for number in numbers)) for name, *numbers in campaign.kinds()]


def _closing(campaign: Campaign) -> list[str]:
    rounds = campaign.rounds
    alive = sum(not each.failures for each in rounds)
    gaps = [each.loss_gap for each in rounds if each.loss_gap is not None]
    missed = [
        f"not noticed: {each.faults[place]} in round {each.number}"
        for each in rounds
        for place, found in enumerate(each.detected)
        if found is False and each.injected[place]
    ]
    num_lost = sum(each.steps_lost for each in rounds)
    share = f" ({alive / len(rounds):.0%})" if rounds else ""
    return [
        f"{alive} of {len(rounds)} rounds survived{share} in {campaign.minutes:.1f} minutes",
        f"worst loss gap {in_words(max(gaps, default=None))} nats, {counted(num_lost, 'step')} lost",
        *missed,
        *(f"lost: {campaign.repeat(each.number)}" for each in rounds if each.failures),
    ]
