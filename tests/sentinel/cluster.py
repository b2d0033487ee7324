"""A simulated cluster without a model that raises random findings and failures, to test the policy.

A state is a step, a cursor and the batches it was trained on. A restore picks the newest state before the onset of the
action, as the ring and the store do. Findings are random, in any order.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field, replace

from harness.config.sentinel import BudgetConfig, BudgetsConfig, PolicyConfig
from harness.core.events import (
    Action,
    ActionKind,
    Event,
    Finding,
    FindingKind,
    HeldOutMeasured,
    Outcome,
    RunStarted,
    StepRecord,
    TrialMeasured,
)
from harness.sentinel.policy.open_incident import ClosedIncident
from harness.sentinel.policy.policy import Policy
from harness.sentinel.policy.trial_choice import is_decided
from tests.sentinel.policy_runs import finding, record

NUM_STEPS = 120
NOT_DRAWN = ("never_learned", "corruption", "corrupting_rank", "corruption_passed")
"""Without them the draws of the golden output stay the same; the first has no response, the others have tests of their
own."""
KINDS = [kind for kind in FindingKind if kind not in NOT_DRAWN]
RESTORES = (ActionKind.rewind, ActionKind.rollback)

CFG = PolicyConfig(
    watch_iterations=20,
    patience_iterations=12,
    accept_rise_nats=0.6,
    refused_in_row=3,
    neighbours=2,
    rollback_margin_steps=10,
    rollback_window_batches=12,
    region_steps=5,
    clean_steps=15,
    window_steps=40,
    recur_after=3,
    swap_after=2,
    cool_factor=0.5,
    min_lr_scale=0.2,
    cool_steps=20,
    fall_back_precision=True,
    precision_iterations=10,
    budgets=BudgetsConfig(
        skip=BudgetConfig(per_window=4, per_run=10),
        rewind=BudgetConfig(per_window=3, per_run=6),
        rollback=BudgetConfig(per_window=2, per_run=4),
        cool=BudgetConfig(per_window=1, per_run=3),
        swap=BudgetConfig(per_window=1, per_run=1),
        precision=BudgetConfig(per_window=1, per_run=1),
        check=BudgetConfig(per_window=3, per_run=20),
        trial=BudgetConfig(per_window=2, per_run=8),
    ),
)


@dataclass(frozen=True)
class Hostility:
    """How often findings, failures and restarts occur; all but the first two are probabilities."""

    seed: int
    lag: int
    refuse: float
    find: float
    late: float
    """Probability that the onset of a finding is in the past."""
    fail: float
    damage: float
    """Probability that a finding comes with a lasting rise of the loss."""
    measure: float
    """Probability that the held-out loss is measured after an iteration."""
    restart: float
    round_trip: float
    """Probability that the policy is saved to JSON and restored between two iterations."""
    odd: float = 0.0
    """Probability of a record with an overflow, non-finite weights or loss, a planned change, or other sources."""
    healing: float = 1.0
    """Share of a rise of the loss that is left after an iteration."""
    trials: int = 0
    """Remedies that are tried at most after a restore."""
    in_flight: bool = False
    """Steps are in flight at a check or a trial, the policy is saved to JSON and restored between them, and some
    updates are rejected because a rank was wrong."""

    @property
    def cfg(self) -> PolicyConfig:
        return replace(CFG, trials=self.trials, trial_steps=8)


@dataclass(frozen=True)
class State:
    """The simulated weights."""

    iteration: int = 0
    step: int = 0
    cursor: int = 0
    trained: frozenset[int] = frozenset()
    rise: float = 0.0


@dataclass
class Cluster:
    hostility: Hostility
    policy: Policy
    dice: random.Random
    iteration: int = 0
    now: State = field(default_factory=State)
    saved: list[State] = field(default_factory=lambda: [State()])
    excluded: set[int] = field(default_factory=set)
    given_back: set[int] = field(default_factory=set)
    log: list[Event] = field(default_factory=list)
    progress: int = 0
    spent: list[tuple[ActionKind, int]] = field(default_factory=list)
    """Kind of action and net progress at that time."""
    targets: dict[int, list[int]] = field(default_factory=dict)
    """Incident -> steps that were restored for it."""
    is_halted: bool = False
    in_bf16: bool = False
    closed: list[ClosedIncident] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    def train(self) -> None:
        """Run one iteration and all actions that the policy chooses."""
        now, findings = self.issue()
        action = self.policy.decide(now, findings)
        self.closed += self.policy.closed
        self.carry_out(action)
        if self.iteration % 5 == 0 and not now.refused:
            self.saved.append(self.now)
        if self.chance(self.hostility.measure):
            self.measure_held_out()

    def issue(self) -> tuple[StepRecord, list[Finding]]:
        """Run one iteration; returns its record and findings."""
        cursor = self.now.cursor
        while cursor in self.excluded:
            cursor += 1
        refused = self.chance(self.hostility.refuse)
        self.iteration += 1
        trained = self.now.trained if refused else self.now.trained | {cursor}
        self.now = replace(
            self.now, iteration=self.iteration, step=self.now.step + (not refused), cursor=cursor + 1, trained=trained
        )
        self.progress = max(self.progress, self.now.step)
        now = self.measure(cursor, refused)
        findings = self.suspect(now)
        self.log += [now, *findings]
        return now, findings

    def issue_in_flight(self) -> None:
        """Run the iterations that are issued before a check or a trial begins."""
        for _ in range(self.hostility.lag):
            assert self.policy.decide(*self.issue()) is None
            self.closed += self.policy.closed
            self.policy = restored(self.policy, self.hostility)

    def measure_held_out(self) -> None:
        event = HeldOutMeasured(time=0.0, iteration=self.iteration, step=self.now.step, loss=3.0 + self.now.rise)
        self.log.append(event)
        self.policy.on_held_out_measured(event)

    def measure(self, cursor: int, refused: bool) -> StepRecord:
        loss = 3.0 + self.now.rise + 0.01 * self.dice.random()
        sources = {"web": 3.0, "code": float("nan") if refused else 1.0}
        now = record(self.iteration, step=self.now.step, cursor=cursor, loss=loss, refused=refused, sources=sources)
        if self.hostility.in_flight and refused and self.chance(0.3):
            now.corrupted_ranks, now.corrupted = [1], "the output of blocks.0"
        self.now = replace(self.now, rise=self.hostility.healing * self.now.rise)
        if self.chance(self.hostility.odd):
            self.make_unusual(now)
        return now

    def make_unusual(self, now: StepRecord) -> None:
        match self.dice.randrange(12):
            case 0 if now.refused:
                now.loss_scale, now.grad_norm = self.dice.choice([0.5, 1.0, 1024.0]), math.inf
            case 1 if now.refused:
                now.loss = math.nan
            case 2 if self.chance(0.2):
                now.group_param_norms = {"head": math.inf}
            case 3:
                now.in_planned_change = True
            case 4 | 5:
                now.bounds = {"grad_norm": self.dice.choice([0.5, 1.0, 2.0])}
            case _:
                now.source_losses = {"web": 3.0 + self.dice.random(), "code": 1.0 + 2.0 * self.dice.random()}

    def suspect(self, now: StepRecord) -> list[Finding]:
        found = []
        while self.chance(self.hostility.find):
            back = self.dice.randrange(30) if self.chance(self.hostility.late) else 0
            cursors = [max(0, now.cursor - self.dice.randrange(40))] if self.chance(0.3) else []
            found.append(finding(self.dice.choice(KINDS), now, onset=max(0, now.iteration - back), cursors=cursors))
            if self.chance(self.hostility.damage):
                self.now = replace(self.now, rise=self.dice.choice([0.0, 0.3, 2.0]))
        return found

    def carry_out(self, action: Action | None) -> None:
        while action is not None:
            self.log.append(action)
            self.check(action)
            if action.kind is ActionKind.halt:
                self.is_halted = True
                return
            done = self.execute(action)
            self.log.append(done)
            action = self.policy.on_outcome(done)
            self.closed += self.policy.closed

    def execute(self, action: Action) -> Outcome:
        succeeded = not self.chance(self.hostility.fail) or action.in_fp8 is True
        if self.hostility.in_flight and action.kind in (ActionKind.check, ActionKind.trial):
            self.issue_in_flight()
        if action.kind in RESTORES:
            older = [state for state in self.saved if state.iteration < action.onset]
            succeeded = succeeded and bool(older)
            if succeeded:
                self.restore(action, older[-1])
        if action.kind is ActionKind.precision and succeeded:
            assert action.in_fp8 is self.in_bf16, "it changes the precision"
            self.in_bf16 = not action.in_fp8
        if action.kind is ActionKind.trial:
            succeeded = self.try_remedies(action) and succeeded
        if action.exclude and (succeeded or action.kind is ActionKind.skip):
            self.excluded |= set(range(action.exclude[0], action.exclude[1] + 1))
            assert self.now.trained.isdisjoint(self.excluded), "an excluded batch was trained on"
        if action.give_back:
            given = {batch for first, last in action.give_back for batch in range(first, last + 1)}
            assert self.now.trained.isdisjoint(given), "a batch that was given back was trained on"
            self.given_back |= given
        return Outcome(
            time=0.0,
            iteration=self.iteration,
            held_out_loss=self.dice.choice([3.0, 4.0, float("nan")]) if action.kind is ActionKind.check else None,
            kind=action.kind,
            incident=action.incident,
            succeeded=succeeded,
            step=self.now.step,
        )

    def try_remedies(self, action: Action) -> bool:
        """Log random results of the candidates; False if the trial breaks off."""
        assert action.num_steps is not None
        if self.policy.policy_state.due:
            return False
        results: list[TrialMeasured] = []
        for candidate in action.candidates:
            if self.chance(0.1):
                return False
            result = TrialMeasured(
                time=0.0,
                iteration=self.iteration,
                incident=action.incident,
                remedy=candidate["remedy"],
                steps=action.num_steps,
                num_refused=self.dice.choice([0, 0, action.num_steps]),
                findings=self.dice.choice([[], [], ["loss_spike"]]),
                held_out_before=3.0,
                held_out_loss=self.dice.choice([2.9, 3.0, 3.5, math.inf]),
                grad_norm_before=1.0,
                grad_norm=self.dice.choice([1.0, 9.0]),
                seconds=self.dice.random(),
            )
            results.append(result)
            self.log.append(result)
            self.policy.on_trial_measured(result)
            if is_decided(results):
                break
        return True

    def restore(self, action: Action, target: State) -> None:
        earlier = self.targets.setdefault(action.incident, [])
        assert all(target.step < step for step in earlier), "an incident restored the same step twice"
        earlier.append(target.step)
        self.saved = [state for state in self.saved if state.iteration <= target.iteration]
        self.iteration += self.hostility.lag
        self.now = replace(target, iteration=self.iteration)

    def check(self, action: Action) -> None:
        """Assert what must hold for every action."""
        assert 0 <= action.onset <= action.iteration, "a restore goes back, never forward"
        assert not action.exclude or 0 <= action.exclude[0] <= action.exclude[1]
        is_raise = action.kind is ActionKind.cool and self.policy.policy_state.find_incident(action.incident) is None
        is_permanent = action.kind is ActionKind.precision and action.until is None
        unbudgeted = (ActionKind.watch, ActionKind.halt, ActionKind.accept)
        if action.kind in unbudgeted or is_raise or is_permanent:
            return
        if action.kind is ActionKind.skip:  # skips of an incident that is accepted do not count
            assert self.policy.policy_state.budgets.num_spent["skip"] <= CFG.budgets.skip.per_run
            return
        self.spent.append((action.kind, self.progress))
        limit: BudgetConfig = getattr(self.hostility.cfg.budgets, action.kind)
        spent = [progress for kind, progress in self.spent if kind is action.kind]
        assert len(spent) <= limit.per_run
        assert sum(self.progress - progress < CFG.window_steps for progress in spent) <= limit.per_window

    def restart(self) -> None:
        """The job crashes and resumes from its newest state, with a policy that is rebuilt from the log."""
        self.now = self.saved[-1]
        self.log.append(
            RunStarted(time=0.0, iteration=self.iteration, world_size=1, num_steps=NUM_STEPS, step=self.now.step)
        )
        self.policy = Policy.replay(self.hostility.cfg, self.log, lag=self.hostility.lag)


def restored(policy: Policy, hostility: Hostility) -> Policy:
    """The policy, saved to JSON and restored."""
    state = json.loads(json.dumps(policy.state(), allow_nan=False))
    return Policy.restore(hostility.cfg, state, lag=hostility.lag)


def run_cluster(hostility: Hostility) -> Cluster:
    """Train until all steps are done or the policy halts; fails if neither happens."""
    cluster = Cluster(hostility, Policy.start(hostility.cfg, lag=hostility.lag), random.Random(hostility.seed))
    round_trips = random.Random(hostility.seed + 1)
    num_restarts = 0
    for _ in range(30 * NUM_STEPS):
        if cluster.now.step >= NUM_STEPS or cluster.is_halted:
            return cluster
        cluster.train()
        if round_trips.random() < hostility.round_trip:
            cluster.policy = restored(cluster.policy, hostility)
        if not cluster.is_halted and num_restarts < 5 and cluster.chance(hostility.restart):
            num_restarts += 1
            cluster.restart()
    raise AssertionError("the run neither finishes nor halts")


def actions_of(cluster: Cluster) -> list[Action]:
    return [event for event in cluster.log if isinstance(event, Action)]
