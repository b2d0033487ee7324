"""The policy: what to do about a finding, as a pure function of what the log holds.

Why: a run must be cured without a person, alike on every rank, never in circles, and so that anyone can check why.
How: the ladder, from doing nothing to giving up; `harness.sentinel.policy.responses` says which finding calls for which
rung.

| rung | action | when |
|---|---|---|
| A | watch | a spike that may turn by itself; a sign of trouble that may stay harmless; a step up, as of other data |
| B | skip | the gate refused the update: exclude its batch, nothing else is needed |
|   | check | a loss spike without a known cause, or before a restore: is the held-out loss at its level? |
|   | accept | it is: the data changed; take its loss as the new level, give the skipped batches back |
|   | rewind | the state is broken (refusals in a row), a spike has a known cause, or does not turn by itself |
| C | rollback | lingering or divergent loss, weights not finite, frequent refusals, or rewinds that did not help |
| D | cool | restores recur, or a rollback did not help: lr scaled down, given back step by step after clean stretches |
| E | swap | as D, where the guilty batches share a source; also where skipped ones do |
| F | precision | the range of fp8 does not do: bf16 for a while, at once or after a restore; then fp8 again |
| G | halt | replicas differ; a budget is spent; nothing to go back to; structural: every cure was tried |

D and E follow a restore, and so does F where harm was done. Each window of bf16 is twice as long as the one before; the
one after the budget is spent lasts to the end of the run, since nothing is wrong with bf16 but its speed.
Trouble at a place that was cured before climbs, and goes further back than before; a place left well behind is closed,
and there the ladder begins anew. All progress is net: steps trained again do not count, so a run that turns in circles
spends its budgets and halts.
`decide` and `hear` first fold what happened into the chart, then choose, reading only; what they return is noted too.
Left out: which snapshot or checkpoint it will be. An action says before which iteration the state must be from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, Self, final

from harness.config.sentinel import PolicyConfig
from harness.core.events import (
    Action,
    ActionKind,
    Event,
    Finding,
    FindingKind,
    HeldOutMeasured,
    Outcome,
    ReducedRecord,
    RunStarted,
)
from harness.sentinel.policy.held_out_level import NUM_LEVEL
from harness.sentinel.policy.log_events import JudgedRecord, pair_findings
from harness.sentinel.policy.open_incident import ClosedIncident, OpenIncident, Rung
from harness.sentinel.policy.precision_fallback import fallback_iterations
from harness.sentinel.policy.responses import Response
from harness.sentinel.policy.restore_scope import excluded_batches, restore_bound
from harness.sentinel.policy.state import RESTORES, PolicyState

CURES = (ActionKind.precision, ActionKind.swap, ActionKind.cool)
"""In the order in which they are tried."""


class DecisionPoint(NamedTuple):
    """When a choice is made."""

    time: float
    iteration: int
    step: int


@final
@dataclass(slots=True)
class Policy:
    policy_state: PolicyState
    lag: int
    """Iterations that are issued before the record of one is judged."""

    @classmethod
    def start(cls, cfg: PolicyConfig, *, lag: int) -> Self:
        return cls(PolicyState.new(cfg), lag)

    def decide(self, record: ReducedRecord, findings: Sequence[Finding]) -> Action | None:
        """What to do after an iteration; None: nothing."""
        self.policy_state.on_record(record, findings)
        return self._record_action(self.choose_action(DecisionPoint(record.time, record.iteration, record.step)))

    def on_outcome(self, outcome: Outcome) -> Action | None:
        """What to do after an action came to something: climb where it failed, cure after a restore; None: nothing."""
        self.policy_state.on_outcome(outcome)
        return self._record_action(self.choose_action(DecisionPoint(outcome.time, outcome.iteration, outcome.step)))

    def on_held_out_measured(self, event: HeldOutMeasured) -> None:
        """The held-out loss was measured while nothing was wrong."""
        self.policy_state.on_held_out_measured(event)

    @property
    def closed(self) -> list[ClosedIncident]:
        """Incidents that ended with the last record or outcome."""
        return self.policy_state.closed

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied with; it does not come back with older weights."""
        return self.policy_state.lr_scale

    @property
    def in_fallback(self) -> bool:
        """Whether a run in fp8 computes in bf16 from now on; it does not come back with older weights either."""
        return self.policy_state.fallback.is_on

    @property
    def doubtful_since(self) -> int | None:
        """The iteration from which on no state is known to be clean, while something is watched."""
        return min(
            (incident.onset for incident in self.policy_state.open_incidents if incident.is_watched), default=None
        )

    def choose_action(self, now: DecisionPoint) -> Action | None:
        """What is to be done, without noting it."""
        state = self.policy_state
        if state.is_halted or state.is_awaiting or state.checking is not None:
            return None
        if state.accept_for is not None and (incident := state.find_incident(state.accept_for)) is not None:
            return self._accept_data(incident, now)
        if state.cure_for is not None and (incident := state.find_incident(state.cure_for)) is not None:
            cure = self._choose_cure(incident, now) if self._needs_cure(incident) else None
            if cure is not None:
                check_first = cure.kind is ActionKind.swap and incident.looks_like_data
                return (self._check_held_out(incident, cure.reason, now) if check_first else None) or cure
        if state.response is not None and (incident := state.find_incident(state.response.incident)) is not None:
            return self._act_on(state.response, incident, now)
        return self._raise_lr(now) or self._return_to_fp8(now)

    def state(self) -> dict[str, Any]:
        """Plain data, as JSON knows it."""
        return {"lag": self.lag, "chart": self.policy_state.state()}

    @classmethod
    def restore(cls, cfg: PolicyConfig, state: dict[str, Any]) -> Self:
        return cls(PolicyState.restore(cfg, state["chart"]), state["lag"])

    @classmethod
    def replay(cls, cfg: PolicyConfig, events: Iterable[Event], *, lag: int) -> Self:
        """The policy as it was after the events of a log: records, findings, actions and outcomes in order."""
        policy = cls.start(cfg, lag=lag)
        for _ in policy.choose_actions(events):
            pass
        return policy

    def _record_action(self, action: Action | None) -> Action | None:
        if action is not None:
            self.policy_state.on_action(action)
        return action

    def choose_actions(self, events: Iterable[Event]) -> Iterator[Action]:
        """What would be decided at each point of a log, while the chart follows what was."""
        for event in pair_findings(events):
            match event:
                case JudgedRecord(record, findings):
                    self.policy_state.on_record(record, findings)
                    chosen = self.choose_action(DecisionPoint(record.time, record.iteration, record.step))
                case Outcome():
                    self.policy_state.on_outcome(event)
                    chosen = self.choose_action(DecisionPoint(event.time, event.iteration, event.step))
                case Action():
                    self.policy_state.on_action(event)
                    continue
                case HeldOutMeasured():
                    self.policy_state.on_held_out_measured(event)
                    continue
                case RunStarted():
                    self.policy_state.resume(event.iteration, event.step)
                    continue
            if chosen is not None:
                yield chosen

    def _act_on(self, response: Response, incident: OpenIncident, now: DecisionPoint) -> Action | None:
        budgets, progress = self.policy_state.budgets, self.policy_state.progress
        match response.rung:
            case Rung.halt:
                return self._halt(incident, response.reason, now)
            case Rung.watch if incident.watched_since is None:
                check = self._check_held_out(incident, response.reason, now) if response.check_first else None
                return check or self._make_action(ActionKind.watch, incident, response.reason, now)
            case Rung.watch:
                return None
            case Rung.skip if (
                response.check_first and (check := self._check_held_out(incident, response.reason, now)) is not None
            ):
                return check
            case Rung.skip if budgets.allows(ActionKind.skip, progress=progress):
                first = incident.pending[0] if incident.pending else self.policy_state.lineage.seen[-1].cursor
                skip = self._make_action(ActionKind.skip, incident, response.reason, now)
                return replace(skip, exclude=[first, first])
            case Rung.skip:
                return self._restore(incident, Rung.rollback, f"{response.reason}; refusals are frequent", now)
            case rung:
                return self._restore(incident, rung, response.reason, now)

    def _restore(self, incident: OpenIncident, rung: Rung, reason: str, now: DecisionPoint) -> Action:
        """Go back, at least by `rung`, further than before where the place was cured before."""
        state = self.policy_state
        if (check := self._check_held_out(incident, reason, now)) is not None:
            return check
        if incident.is_hopeless:
            return self._give_up(incident, reason, now)
        rung = min(max(rung, Rung(incident.rung + 1)), Rung.cure) if incident.is_treated else rung
        if rung < Rung.rollback and not state.budgets.allows(ActionKind.rewind, progress=state.progress):
            rung = Rung.rollback
        if rung >= Rung.rollback:
            exhausted = state.budgets.exhausted_reason(ActionKind.rollback, progress=state.progress)
            if exhausted is not None:
                return self._halt(incident, f"{exhausted}; {reason}", now)
            if rung is Rung.cure and self._choose_cure(incident, now) is None:
                problem = f"structural, tell the human: {', '.join(incident.kinds)} came back after every cure"
                return self._halt(incident, f"{problem}; {reason}", now)
        exclude = excluded_batches(incident, rung, lineage=state.lineage, cfg=state.cfg)
        onset = restore_bound(incident, rung, exclude, lineage=state.lineage, cfg=state.cfg)
        kind = ActionKind.rewind if rung < Rung.rollback else ActionKind.rollback
        return replace(self._make_action(kind, incident, reason, now), exclude=exclude, onset=onset)

    def _check_held_out(self, incident: OpenIncident, reason: str, now: DecisionPoint) -> Action | None:
        """Measure the held-out loss before anything is undone; None where that tells nothing, or cannot be compared."""
        state = self.policy_state
        expected = state.held_out.expected(incident.onset, state.lineage) if incident.may_be_checked else None
        if expected is None or not state.budgets.allows(ActionKind.check, progress=state.progress):
            return None
        at_most = expected * (1 + state.cfg.held_out_tolerance)
        words = f"{reason}; a healthy state has a held-out loss of {expected:.4f}, at most {at_most:.4f}"
        return replace(self._make_action(ActionKind.check, incident, words, now), level=expected)

    def _accept_data(self, incident: OpenIncident, now: DecisionPoint) -> Action:
        """The state is healthy: the new level is that of the rejected updates, or else of the last applied ones."""
        rows = incident.refused[-NUM_LEVEL:]
        level = (
            median(loss for _, loss, _ in rows)
            if rows
            else self.policy_state.lineage.level_since(incident.onset, NUM_LEVEL)
        )
        grad_level = median(norm for _, _, norm in rows) if rows else None
        reason = "the held-out loss is at its level: the state is healthy, the data changed"
        return replace(
            self._make_action(ActionKind.accept, incident, reason, now),
            level=level,
            grad_level=grad_level,
            give_back=incident.rejected_batches,
        )

    def _give_up(self, incident: OpenIncident, reason: str, now: DecisionPoint) -> Action:
        """Moments that are gone come again by training on, and fp8 can be left; anything else needs a person."""
        if self._can_fall_back(incident):
            return self._fall_back_to_bf16(incident, now)
        if incident.kinds == [FindingKind.optimizer_reset] and incident.watched_since is None:
            return self._make_action(ActionKind.watch, incident, f"{reason}; nothing to go back to", now)
        return self._halt(incident, f"nothing to go back to; {reason}", now)

    def _needs_cure(self, incident: OpenIncident) -> bool:
        """After a skip, a guilty source; after a restore, one that did not help before, or one of many."""
        state = self.policy_state
        if not incident.is_treated or incident.rung >= Rung.cure or self._can_fall_back(incident):
            return True
        if FindingKind.scale_collapse in incident.kinds:
            return True
        num = state.budgets.num_since(RESTORES, last=CURES, progress=state.progress)
        return num >= state.cfg.recur_after or state.guilty_source is not None

    def _choose_cure(self, incident: OpenIncident, now: DecisionPoint) -> Action | None:
        """The first cure that fits, is in budget, and did not fail in this case."""
        state, cfg = self.policy_state, self.policy_state.cfg
        for kind in CURES:
            match kind:
                case ActionKind.precision if self._can_fall_back(incident):
                    return self._fall_back_to_bf16(incident, now)
                case _ if kind in incident.failed_cures or not state.budgets.allows(kind, progress=state.progress):
                    continue
                case ActionKind.swap if state.guilty_source is not None:
                    reason = f"the last {cfg.swap_after} guilty batches share source {state.guilty_source}"
                    return replace(self._make_action(kind, incident, reason, now), source=state.guilty_source)
                case ActionKind.cool if incident.is_treated and state.lr_scale * cfg.cool_factor >= cfg.min_lr_scale:
                    return self._scale_lr(
                        incident.number, incident.onset, state.lr_scale * cfg.cool_factor, "trouble recurs", now
                    )
        return None

    def _can_fall_back(self, incident: OpenIncident) -> bool:
        is_unfit = FindingKind.fp8_range in incident.kinds and ActionKind.precision not in incident.failed_cures
        return self.policy_state.cfg.fall_back_precision and is_unfit and not self.in_fallback

    def _fall_back_to_bf16(self, incident: OpenIncident, now: DecisionPoint) -> Action:
        """Leave fp8 for a while; for good, where that was done too often."""
        state, kind = self.policy_state, ActionKind.precision
        exhausted = state.budgets.exhausted_reason(kind, progress=state.progress)
        until, words = None, f"{exhausted}, bf16 to the end of the run"
        if exhausted is None:
            num_before = state.budgets.num_spent.get(kind, 0)
            until = (
                now.iteration + self.lag + fallback_iterations(state.cfg.precision_iterations, num_before=num_before)
            )
            words = f"bf16 until iteration {until}"
        return replace(self._make_action(kind, incident, f"{incident.unfit}; {words}", now), in_fp8=False, until=until)

    def _return_to_fp8(self, now: DecisionPoint) -> Action | None:
        """Compute in fp8 again when the window is over."""
        fallback, seen = self.policy_state.fallback, self.policy_state.lineage.seen
        if not seen or not fallback.is_over(seen[-1].iteration + self.lag):
            return None
        return Action(
            time=now.time,
            iteration=now.iteration,
            kind=ActionKind.precision,
            step=now.step,
            incident=fallback.incident,
            reason="the window of bf16 is over: fp8 again",
            onset=now.iteration,
            in_fp8=True,
        )

    def _raise_lr(self, now: DecisionPoint) -> Action | None:
        """Give one cooling back after a clean stretch of net progress."""
        state = self.policy_state
        is_due = state.lr_scale < 1 and not state.open_incidents and now.step >= state.cooled_at + state.cfg.cool_steps
        if not is_due:
            return None
        scale = min(1.0, state.lr_scale / state.cfg.cool_factor)
        return self._scale_lr(state.cooled_for, now.iteration, scale, f"{state.cfg.cool_steps} clean steps", now)

    def _scale_lr(self, incident: int, onset: int, lr_scale: float, reason: str, now: DecisionPoint) -> Action:
        clean_steps = max(self.policy_state.progress + self.policy_state.cfg.cool_steps - now.step, 0)
        return Action(
            time=now.time,
            iteration=now.iteration,
            kind=ActionKind.cool,
            step=now.step,
            incident=incident,
            reason=reason,
            onset=onset,
            lr_scale=lr_scale,
            until=now.iteration + self.lag + clean_steps if lr_scale < 1 else None,
        )

    def _halt(self, incident: OpenIncident, reason: str, now: DecisionPoint) -> Action:
        return self._make_action(ActionKind.halt, incident, reason, now)

    def _make_action(self, kind: ActionKind, incident: OpenIncident, reason: str, now: DecisionPoint) -> Action:
        return Action(
            time=now.time,
            iteration=now.iteration,
            kind=kind,
            step=now.step,
            incident=incident.number,
            reason=reason,
            onset=incident.onset,
        )


def replay_actions(events: Iterable[Event], cfg: PolicyConfig, *, lag: int) -> list[Action]:
    """What the records and outcomes of a log give: its actions once more, but for those of persons (incident 0)."""
    return list(Policy.start(cfg, lag=lag).choose_actions(events))
