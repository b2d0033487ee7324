"""A campaign of infrastructure faults: one long run that lives through faults of processes, network and disk.

Why: a cluster of thousands of machines fails several times a day. What counts is the share of the time in which a run
trains in spite of it, and that it loses nothing.
How: the schedule is a pure function of the seed: a fault every `every_s` seconds, moved by up to a quarter of that. The
kinds are dealt like cards: each comes once before any comes again. Faults are planned by the clock until long after
the expected end, so a run that takes longer meets more of them. The effective training time is the goodput of the
dashboard (`harness.analysis.dashboard.goodput`). The final weights and moments must equal those of a twin without
faults, byte for byte.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from harness.analysis.dashboard.goodput import Goodput
from harness.checkpoint import catalog, integrity
from harness.config import conf_files
from harness.config.command_line import shell_command
from harness.config.errors import EXIT_DONE, require
from harness.core.plural import pluralize
from harness.core.rundir import RunDir
from harness.drills import scenario as scenarios
from harness.drills.campaign import DrawnFault
from harness.drills.drill_record import DrillEvidence
from harness.drills.recovery_times import FaultRecovery, list_recoveries
from harness.drills.scenario import Scenario
from harness.drills.score import format_value
from harness.drills.score_card import align_columns, markdown_table
from harness.faults.fault_plan import FaultKind

NAMES = (
    "kill_rank",
    "hung_rank",
    "raised_error",
    "kill_node",
    "preemption",
    "corrupted_checkpoint",
    "truncated_checkpoint",
    "full_disk",
    "network_down",
    "tracking_down",
)
"""Scenarios whose faults a campaign deals."""
GOAL = 0.9
"""Least effective training time."""
JITTER = 0.25
"""Largest shift of a fault, as a share of the interval."""
LONGEST = 3.0
"""Faults are planned for this multiple of the requested time."""
FULL_DISK_S = 15.0
NETWORK_DOWN_S = 5.0
LEAST_HANG_S, HANG_AFTER_S = 10.0, 15.0
FIRST_AT_S = 30.0
"""When a single fault strikes that is repeated."""
TENSOR_FILES = ".distcp"
"""Suffix of the files of a checkpoint that hold weights and moments."""


def infrastructure_scenarios() -> dict[str, Scenario]:
    """The scenarios of `NAMES`."""
    return {name: scenarios.load_scenario(name) for name in NAMES}


def long_training_overrides(every_s: float) -> list[str]:
    """Training overrides: those of all drills, with the cadence of a long run."""
    shared = conf_files.read_tree(conf_files.conf_dir() / scenarios.GROUP / f"{conf_files.BASE}.yaml")["train"]
    return [
        *shared,
        "model.dim=64",
        "train.sequence_length=128",
        "checkpoint.every_steps=50",
        "checkpoint.ring.every_steps=10",
        f"launch.hang_after_s={max(LEAST_HANG_S, min(HANG_AFTER_S, every_s / 2)):g}",
        f"launch.restart_window={2 * every_s:g}",  # with every_s of 120 less than the default of 300
        "parallel.timeout_s=60",
        "telemetry.exit_wait_s=2",
    ]


def draw_schedule(
    known: Mapping[str, Scenario], *, seed: int, every_s: float, minutes: float, num_ranks: int
) -> list[DrawnFault]:
    """Draw all faults of a campaign; a pure function of its arguments."""
    rng = random.Random(f"{seed}/infrastructure")
    drawn: list[DrawnFault] = []
    cards: list[str] = []
    while (at_s := every_s * (len(drawn) + 1)) <= LONGEST * 60 * minutes:
        if not cards:
            cards = sorted(known)
            rng.shuffle(cards)
        name = cards.pop()
        shift_s = rng.uniform(-JITTER, JITTER) * every_s
        rank = rng.randrange(num_ranks)
        drawn.append(plan_by_clock(name, known[name], at_s=at_s + shift_s, rank=rank, every_s=every_s))
    return drawn


def plan_by_clock(name: str, scenario: Scenario, *, at_s: float, rank: int, every_s: float) -> DrawnFault:
    """The fault of a scenario, planned by the clock on one rank; a fault of rank 0 stays there."""
    fault = scenario.fault
    lasts_s = min(FULL_DISK_S, every_s / 4) if fault.kind is FaultKind.full_disk else 0.0
    factor = min(NETWORK_DOWN_S, every_s / 6) if fault.kind is FaultKind.network_down else fault.factor
    moved = replace(
        fault,
        at=0,
        duration=1,
        at_s=round(at_s, 1),
        duration_s=round(lasts_s, 1),
        factor=round(factor, 1),
        rank=0 if fault.rank == 0 else rank,
    )
    return DrawnFault(name=name, scenario=replace(scenario, fault=moved))


def only_fault(schedule: Sequence[DrawnFault], number: int, *, every_s: float) -> list[DrawnFault]:
    """One fault of the schedule, moved to the beginning of the run."""
    allowed = f"must be from 0 to {len(schedule) - 1} for this --minutes and --every, got {number}"
    require(0 <= number < len(schedule), "--fault", allowed)
    drawn = schedule[number]
    fault = replace(drawn.fault, at_s=min(FIRST_AT_S, every_s))
    return [replace(drawn, scenario=replace(drawn.scenario, fault=fault))]


def minutes_for_one(every_s: float) -> float:
    """Length of a run that repeats one fault."""
    return 2 * min(FIRST_AT_S, every_s) / 60 + 0.5


def choose_num_steps(calibration: Goodput, *, minutes: float) -> int:
    """Steps that fill the time at the speed of a short run without faults."""
    trained_s = calibration.wall_s - calibration.lost_s
    step_s = trained_s / max(1, calibration.num_kept - 1)
    return max(1, math.floor(60 * minutes / step_s)) if step_s > 0 else 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCard:
    """One fault of the schedule that struck, and how the run recovered."""

    number: int
    name: str
    planned: str
    """The fault as text."""
    struck_s: float
    """Seconds from the first event of the log to the strike."""
    recovery: FaultRecovery


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InfrastructureCampaign:
    """The result of one campaign."""

    seed: int
    every_s: float
    minutes: float
    """Requested length of the whole campaign, which determines the number of its faults."""
    words: list[str]
    """Overrides of the command line."""
    cards: list[FaultCard] = field(default_factory=list)
    wall_s: float = 0.0
    """Of the run, from its first event to the last."""
    effective: float = 0.0
    """Effective training time: the goodput of the run."""
    twin_effective: float = 0.0
    """The same of the twin, which met no fault."""
    lost_s: dict[str, float] = field(default_factory=dict)
    """Cause -> seconds lost, from the log."""
    starts: int = 0
    exit_code: int | None = None
    step: int = 0
    num_steps: int = 0
    identical: bool | None = None
    """Weights and moments at the end are those of the twin; None: one of them has no last checkpoint."""
    goal: float = GOAL
    skipped: list[str] = field(default_factory=list)
    """Faults that this machine cannot inject, with the reason."""
    notes: list[str] = field(default_factory=list)

    @property
    def num_lost(self) -> int:
        return sum(not card.recovery.recovered for card in self.cards)

    @property
    def survived(self) -> bool:
        """Whether the run is done, recovered from every fault, and is identical to its twin."""
        is_done = self.exit_code == EXIT_DONE and self.step == self.num_steps
        return is_done and bool(self.identical) and self.num_lost == 0 and bool(self.cards)

    @property
    def passed(self) -> bool:
        return self.survived and self.effective >= self.goal

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"survived": self.survived, "passed": self.passed}

    def repeat(self, number: int) -> str:
        """The command that repeats one fault of the schedule."""
        schedule = ["--seed", str(self.seed), "--minutes", f"{self.minutes:g}", "--every", f"{self.every_s:g}"]
        options = [*schedule, "--fault", str(number), *self.words]
        return shell_command("harness", "drill", "campaign", "--infrastructure", *options)


def make_cards(schedule: Sequence[DrawnFault], victim: DrillEvidence, *, first: int = 0) -> list[FaultCard]:
    """The faults that struck, in order; `first` is the number of the first fault of the schedule."""
    begun = victim.events[0].time if victim.events else 0.0
    return [
        FaultCard(
            number=first + recovery.number,
            name=schedule[recovery.number].name,
            planned=str(schedule[recovery.number]),
            struck_s=round(recovery.time - begun, 1),
            recovery=recovery,
        )
        for recovery in list_recoveries(victim)
    ]


def are_identical(first: RunDir, second: RunDir) -> bool | None:
    """Whether the last checkpoints of two runs hold the same weights and moments; None if one has no checkpoint."""
    found = [catalog.list_checkpoints(run.checkpoints) for run in (first, second)]
    if not all(found):
        return None
    one, other = (tensor_hashes(checkpoints[-1]) for checkpoints in found)
    return bool(one) and found[0][-1].name == found[1][-1].name and one == other


def tensor_hashes(checkpoint: catalog.Checkpoint) -> dict[str, str]:
    """File -> SHA-256 of everything that holds weights and moments."""
    files = integrity.read_manifest(checkpoint.path).files
    return {name: entry.sha256 for name, entry in files.items() if name.endswith(TENSOR_FILES)}


HEAD = ("fault", "struck", "cause", "noticed", "restarted", "first update", "steps lost", "")


def card_row(card: FaultCard) -> tuple[str, ...]:
    recovery = card.recovery

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} s"

    return (
        f"{card.number} {card.name}",
        f"{card.struck_s:.0f} s",
        recovery.cause or "-",
        seconds(recovery.notice_s),
        seconds(recovery.restart_s),
        seconds(recovery.first_update_s),
        format_value(recovery.steps_lost),
        "" if recovery.recovered else "LOST",
    )


def campaign_text(campaign: InfrastructureCampaign) -> str:
    """The report, for a terminal."""
    table = align_columns([HEAD, *map(card_row, campaign.cards)])
    return "\n".join([*table, *campaign_lines(campaign), "passed" if campaign.passed else "FAILED"]) + "\n"


def campaign_markdown(campaign: InfrastructureCampaign) -> str:
    """The report as Markdown, stored beside the runs."""
    result = "passed" if campaign.passed else "FAILED"
    lines = [f"# Infrastructure campaign {campaign.seed}: {result}", ""]
    lines += markdown_table(HEAD, [card_row(card) for card in campaign.cards])
    lines += ["", *(f"- {line}" for line in campaign_lines(campaign))]
    return "\n".join(lines) + "\n"


def campaign_lines(campaign: InfrastructureCampaign) -> list[str]:
    num_faults = len(campaign.cards)
    minutes = campaign.wall_s / 60
    steps_lost = sum(card.recovery.steps_lost for card in campaign.cards)
    identical = {True: "identical to", False: "DIFFERENT from", None: "NOT COMPARED with"}[campaign.identical]
    shares = [f"{cause} {seconds / campaign.wall_s:.1%}" for cause, seconds in campaign.lost_s.items() if seconds > 0]
    lines = [
        f"{num_faults - campaign.num_lost} of {pluralize(num_faults, 'fault')} survived, {campaign.num_lost} lost, "
        f"in {minutes:.1f} minutes with {pluralize(campaign.starts, 'start')}; "
        f"{pluralize(steps_lost, 'step')} trained again",
        f"effective training time {campaign.effective:.1%}, wanted at least {campaign.goal:.0%}; "
        f"without faults {campaign.twin_effective:.1%}",
        f"lost time: {', '.join(shares) or 'none'}",
        f"weights and moments at step {campaign.step}: {identical} those of the run without faults",
    ]
    if campaign.exit_code != EXIT_DONE or campaign.step != campaign.num_steps:
        lines.append(f"the run ended with exit code {campaign.exit_code} at step {campaign.step}/{campaign.num_steps}")
    lines += [f"skipped: {reason}" for reason in campaign.skipped]
    lines += campaign.notes
    lost = [card.number for card in campaign.cards if not card.recovery.recovered]
    return lines + [f"lost, repeat with: {campaign.repeat(number)}" for number in lost]
