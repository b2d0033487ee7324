"""A simulated training run without a model: chosen loss curves, the baseline of the gate, real sentinel and ledger.

The weights are one number, the factor by which damage raises every loss. The data is another, the factor by which a
batch is harder. Both raise the training loss alike. Only damage raises the held-out loss; only a restore removes it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from harness.analysis.judge.foreign_logs import empty_record
from harness.config.schema import Config
from harness.core.events import Action, ActionKind, Event, HeldOutMeasured, Outcome, StepRecord
from harness.core.state import RunState
from harness.data.order.ledger import Ledger
from harness.planned_changes import PlannedChanges
from harness.sentinel.detect.baseline import (
    CAPPED_FROM_COUNT,
    FLOATS,
    State,
    advance,
    beyond,
    gate_bounds,
    initial_state,
    reopen,
)
from harness.sentinel.sentinel import Sentinel

GRAD = 0.5
RESTORES = (ActionKind.rewind, ActionKind.rollback)


def base_loss(step: int) -> float:
    """A healthy run: steep at first, then flat."""
    return 2.2 * (1 + 2 * math.exp(-step / 80))


@dataclass(frozen=True)
class Snapshot:
    state: RunState
    gate: tuple[State, State]
    damage: float
    memory: dict[str, Any]


@dataclass
class Plant:
    cfg: Config
    hardness: Callable[[int], float] = lambda _: 1.0
    """Batch -> factor on its loss."""
    norm_factor: Callable[[int], float] = lambda _: 1.0
    """Batch -> factor on its gradient norm."""
    damaged_at: int | None = None
    """The iteration whose update damages the weights, once."""
    damaged_again_at: int | None = None
    damage_factor: float = 1.0
    noise: float = 0.01
    save_every: int = 50
    seed: int = 1
    ledger: Ledger = field(default_factory=Ledger)
    state: RunState = field(default_factory=RunState)
    damage: float = 1.0
    log: list[Event] = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    """Batches whose updates were applied, on the present lineage."""
    is_halted: bool = False

    def __post_init__(self) -> None:
        self.sentinel = Sentinel.start(self.cfg.sentinel)
        self.planned = PlannedChanges(self.cfg, self.ledger)
        self.gate: tuple[State, State] = (initial_state(), initial_state())
        self.snapshots: list[Snapshot] = []
        self.waiting: deque[StepRecord] = deque()
        self.measure()

    def actions(self) -> Counter[str]:
        return Counter(str(event.kind) for event in self.log if isinstance(event, Action))

    def train(self, num_steps: int) -> None:
        """Train until `num_steps` steps are done or the policy halts."""
        most = self.state.iteration + 4 * num_steps
        while self.state.step < num_steps and not self.is_halted:
            assert self.state.iteration < most, "the run makes no progress"
            self.issue()
            while len(self.waiting) > self.cfg.sentinel.lag:
                self.process_next()

    def noise_of(self, batch: int, what: int, size: float) -> float:
        return math.exp(size * Random(batch * 10 + what + 10**6 * self.seed).gauss(0, 1))

    def issue(self) -> None:
        """Run one iteration with the gate."""
        place = self.ledger.next_batch(self.state.cursor, self.state.given_back)
        planned = self.planned.at(place.position, self.state) is not None
        batch, detect = place.batch, self.cfg.sentinel.detect
        loss = base_loss(len(self.consumed)) * self.hardness(batch) * self.damage * self.noise_of(batch, 0, self.noise)
        norm = GRAD * self.norm_factor(batch) * self.noise_of(batch, 1, 0.1)
        bounds = gate_bounds(*self.gate, detect, FLOATS, planned=float(planned))
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        refused = not is_finite or bool(beyond(loss, norm, bounds))
        self.gate = tuple(
            advance(state, value, not refused, detect, FLOATS)
            for state, value in zip(self.gate, (loss, norm), strict=True)
        )  # type: ignore[assignment]
        self.state.advance(next_cursor=place.cursor, given_back=place.given_back, tokens=0)
        if not refused:
            self.consumed.append(batch)
            if self.state.iteration in (self.damaged_at, self.damaged_again_at):
                self.damage = self.damage_factor
        record = empty_record()
        record.iteration, record.step, record.cursor = self.state.iteration, len(self.consumed), batch
        record.loss, record.grad_norm, record.lr, record.refused = loss, norm, 1e-3, refused
        record.bounds, record.in_planned_change = {"loss": bounds[0], "grad_norm": bounds[1]}, planned
        self.waiting.append(record)
        if self.state.iteration % 10 == 0:
            self.snapshots.append(Snapshot(replace(self.state), self.gate, self.damage, self.sentinel.memory()))
        if self.state.step % self.save_every == 0 and not refused:
            self.measure()

    def held_out(self) -> float:
        return base_loss(len(self.consumed)) * self.damage

    def measure(self) -> None:
        event = HeldOutMeasured(time=0.0, iteration=self.state.iteration, step=self.state.step, loss=self.held_out())
        self.log.append(event)
        self.sentinel.on_held_out_measured(event)

    def process_next(self) -> None:
        action = self.process_record()
        while action is not None:
            action = self.carry_out(action)

    def process_record(self) -> Action | None:
        record = self.waiting.popleft()
        self.state.correct_step(refused=record.refused)
        self.log.append(record)
        findings, action = self.sentinel.process_record(record)
        self.log += findings
        return action

    def carry_out(self, action: Action) -> Action | None:
        """Execute an action as `harness.recovery` does; returns the follow-up action."""
        self.log.append(action)
        held_out, succeeded, before = None, True, self.state.step
        match action.kind:
            case ActionKind.halt:
                self.is_halted = True
                return None
            case ActionKind.check:
                while self.waiting:
                    assert self.process_record() is None, "nothing is decided before the outcome of the check"
                held_out = self.held_out()
            case ActionKind.accept:
                if action.give_back:
                    self.ledger.give_back(action.give_back, self.state.cursor, action.reason)
                if action.level is not None:
                    levels = (action.level, action.grad_level or math.exp(self.gate[1][-1]))
                    self.gate = tuple(
                        reopen(state, level, True, FLOATS, num_seen=CAPPED_FROM_COUNT)
                        for state, level in zip(self.gate, levels, strict=True)
                    )  # type: ignore[assignment]
            case ActionKind.skip:
                first, last = action.exclude
                self.ledger.exclude(first, last, action.reason)
            case ActionKind.rewind | ActionKind.rollback:
                succeeded = self.restore(action)
        outcome = Outcome(
            time=0.0,
            iteration=self.state.iteration,
            kind=action.kind,
            incident=action.incident,
            succeeded=succeeded,
            step=self.state.step,
            steps_lost=before - self.state.step,
            held_out_loss=held_out,
        )
        self.log.append(outcome)
        return self.sentinel.on_outcome(outcome)

    def restore(self, action: Action) -> bool:
        targets = [each for each in self.snapshots if each.state.iteration < action.onset]
        if not targets:
            return False
        self.waiting.clear()
        target = targets[-1]
        self.snapshots = targets
        self.state.return_to(target.state)
        self.gate, self.damage = target.gate, target.damage
        del self.consumed[self.state.step :]
        self.sentinel.rewind(target.memory)
        if action.exclude:
            first, last = action.exclude
            self.ledger.exclude(first, last, action.reason)
        return True
