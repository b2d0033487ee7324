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
from harness.sentinel.policy.log_events import Judged, judged
from harness.sentinel.policy.open_incident import Case, Closed, Rung
from harness.sentinel.policy.precision_fallback import window
from harness.sentinel.policy.responses import Demand
from harness.sentinel.policy.restore_scope import bound, exclusion
from harness.sentinel.policy.state import RESTORES, Chart

CURES = (ActionKind.precision, ActionKind.swap, ActionKind.cool)
"""In the order in which they are tried."""


class Moment(NamedTuple):
    """When a choice is made."""

    time: float
    iteration: int
    step: int


@final
@dataclass(slots=True)
class Policy:
    chart: Chart
    lag: int
    """Iterations that are issued before the record of one is judged."""

    @classmethod
    def start(cls, cfg: PolicyConfig, *, lag: int) -> Self:
        return cls(Chart.new(cfg), lag)

    def decide(self, record: ReducedRecord, findings: Sequence[Finding]) -> Action | None:
        """What to do after an iteration; None: nothing."""
        self.chart.see(record, findings)
        return self._noted(self.choice(Moment(record.time, record.iteration, record.step)))

    def hear(self, outcome: Outcome) -> Action | None:
        """What to do after an action came to something: climb where it failed, cure after a restore; None: nothing."""
        self.chart.absorb(outcome)
        return self._noted(self.choice(Moment(outcome.time, outcome.iteration, outcome.step)))

    def measure(self, event: HeldOutMeasured) -> None:
        """The held-out loss was measured while nothing was wrong."""
        self.chart.measure(event)

    @property
    def closed(self) -> list[Closed]:
        """Incidents that ended with the last record or outcome."""
        return self.chart.closed

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied with; it does not come back with older weights."""
        return self.chart.lr_scale

    @property
    def in_fallback(self) -> bool:
        """Whether a run in fp8 computes in bf16 from now on; it does not come back with older weights either."""
        return self.chart.fallback.is_on

    @property
    def doubtful_since(self) -> int | None:
        """The iteration from which on no state is known to be clean, while something is watched."""
        return min((case.onset for case in self.chart.cases if case.is_watched), default=None)

    def choice(self, now: Moment) -> Action | None:
        """What is to be done, without noting it."""
        chart = self.chart
        if chart.is_halted or chart.is_awaiting or chart.checking is not None:
            return None
        if chart.accept_for is not None and (case := chart.case(chart.accept_for)) is not None:
            return self._accept(case, now)
        if chart.cure_for is not None and (case := chart.case(chart.cure_for)) is not None:
            cure = self._cure(case, now) if self._calls_for_cure(case) else None
            if cure is not None:
                asks = cure.kind is ActionKind.swap and case.looks_like_data
                return (self._check(case, cure.reason, now) if asks else None) or cure
        if chart.demand is not None and (case := chart.case(chart.demand.incident)) is not None:
            return self._answer(chart.demand, case, now)
        return self._warm_up(now) or self._return(now)

    def state(self) -> dict[str, Any]:
        """Plain data, as JSON knows it."""
        return {"lag": self.lag, "chart": self.chart.state()}

    @classmethod
    def restore(cls, cfg: PolicyConfig, state: dict[str, Any]) -> Self:
        return cls(Chart.restore(cfg, state["chart"]), state["lag"])

    @classmethod
    def replay(cls, cfg: PolicyConfig, events: Iterable[Event], *, lag: int) -> Self:
        """The policy as it was after the events of a log: records, findings, actions and outcomes in order."""
        policy = cls.start(cfg, lag=lag)
        for _ in policy.choices(events):
            pass
        return policy

    def _noted(self, action: Action | None) -> Action | None:
        if action is not None:
            self.chart.note(action)
        return action

    def choices(self, events: Iterable[Event]) -> Iterator[Action]:
        """What would be decided at each point of a log, while the chart follows what was."""
        for event in judged(events):
            match event:
                case Judged(record, findings):
                    self.chart.see(record, findings)
                    chosen = self.choice(Moment(record.time, record.iteration, record.step))
                case Outcome():
                    self.chart.absorb(event)
                    chosen = self.choice(Moment(event.time, event.iteration, event.step))
                case Action():
                    self.chart.note(event)
                    continue
                case HeldOutMeasured():
                    self.chart.measure(event)
                    continue
                case RunStarted():
                    self.chart.resume(event.iteration, event.step)
                    continue
            if chosen is not None:
                yield chosen

    def _answer(self, demand: Demand, case: Case, now: Moment) -> Action | None:
        budgets, progress = self.chart.budgets, self.chart.progress
        match demand.rung:
            case Rung.halt:
                return self._halt(case, demand.reason, now)
            case Rung.watch if case.watched_since is None:
                check = self._check(case, demand.reason, now) if demand.asks else None
                return check or self._action(ActionKind.watch, case, demand.reason, now)
            case Rung.watch:
                return None
            case Rung.skip if demand.asks and (check := self._check(case, demand.reason, now)) is not None:
                return check
            case Rung.skip if budgets.allows(ActionKind.skip, progress=progress):
                first = case.pending[0] if case.pending else self.chart.branch.seen[-1].cursor
                skip = self._action(ActionKind.skip, case, demand.reason, now)
                return replace(skip, exclude=[first, first])
            case Rung.skip:
                return self._restore(case, Rung.rollback, f"{demand.reason}; refusals are frequent", now)
            case rung:
                return self._restore(case, rung, demand.reason, now)

    def _restore(self, case: Case, rung: Rung, reason: str, now: Moment) -> Action:
        """Go back, at least by `rung`, further than before where the place was cured before."""
        chart = self.chart
        if (check := self._check(case, reason, now)) is not None:
            return check
        if case.is_hopeless:
            return self._give_up(case, reason, now)
        rung = min(max(rung, Rung(case.rung + 1)), Rung.cure) if case.is_treated else rung
        if rung < Rung.rollback and not chart.budgets.allows(ActionKind.rewind, progress=chart.progress):
            rung = Rung.rollback
        if rung >= Rung.rollback:
            refusal = chart.budgets.refusal(ActionKind.rollback, progress=chart.progress)
            if refusal is not None:
                return self._halt(case, f"{refusal}; {reason}", now)
            if rung is Rung.cure and self._cure(case, now) is None:
                problem = f"structural, tell the human: {', '.join(case.kinds)} came back after every cure"
                return self._halt(case, f"{problem}; {reason}", now)
        exclude = exclusion(case, rung, branch=chart.branch, cfg=chart.cfg)
        onset = bound(case, rung, exclude, branch=chart.branch, cfg=chart.cfg)
        kind = ActionKind.rewind if rung < Rung.rollback else ActionKind.rollback
        return replace(self._action(kind, case, reason, now), exclude=exclude, onset=onset)

    def _check(self, case: Case, reason: str, now: Moment) -> Action | None:
        """Measure the held-out loss before anything is undone; None where that tells nothing, or cannot be compared."""
        chart = self.chart
        expected = chart.health.expected(case.onset, chart.branch) if case.may_be_checked else None
        if expected is None or not chart.budgets.allows(ActionKind.check, progress=chart.progress):
            return None
        at_most = expected * (1 + chart.cfg.held_out_tolerance)
        words = f"{reason}; a healthy state has a held-out loss of {expected:.4f}, at most {at_most:.4f}"
        return replace(self._action(ActionKind.check, case, words, now), level=expected)

    def _accept(self, case: Case, now: Moment) -> Action:
        """The state is healthy: the new level is that of the rejected updates, or else of the last applied ones."""
        rows = case.refused[-NUM_LEVEL:]
        level = median(loss for _, loss, _ in rows) if rows else self.chart.branch.level_since(case.onset, NUM_LEVEL)
        grad_level = median(norm for _, _, norm in rows) if rows else None
        reason = "the held-out loss is at its level: the state is healthy, the data changed"
        return replace(
            self._action(ActionKind.accept, case, reason, now),
            level=level,
            grad_level=grad_level,
            give_back=case.batches_refused,
        )

    def _give_up(self, case: Case, reason: str, now: Moment) -> Action:
        """Moments that are gone come again by training on, and fp8 can be left; anything else needs a person."""
        if self._can_fall_back(case):
            return self._fall_back(case, now)
        if case.kinds == [FindingKind.optimizer_reset] and case.watched_since is None:
            return self._action(ActionKind.watch, case, f"{reason}; nothing to go back to", now)
        return self._halt(case, f"nothing to go back to; {reason}", now)

    def _calls_for_cure(self, case: Case) -> bool:
        """After a skip, a guilty source; after a restore, one that did not help before, or one of many."""
        chart = self.chart
        if not case.is_treated or case.rung >= Rung.cure or self._can_fall_back(case):
            return True
        if FindingKind.scale_collapse in case.kinds:
            return True
        num = chart.budgets.num_since(RESTORES, last=CURES, progress=chart.progress)
        return num >= chart.cfg.recur_after or chart.guilty_source is not None

    def _cure(self, case: Case, now: Moment) -> Action | None:
        """The first cure that fits, is in budget, and did not fail in this case."""
        chart, cfg = self.chart, self.chart.cfg
        for kind in CURES:
            match kind:
                case ActionKind.precision if self._can_fall_back(case):
                    return self._fall_back(case, now)
                case _ if kind in case.failed_cures or not chart.budgets.allows(kind, progress=chart.progress):
                    continue
                case ActionKind.swap if chart.guilty_source is not None:
                    reason = f"the last {cfg.swap_after} guilty batches share source {chart.guilty_source}"
                    return replace(self._action(kind, case, reason, now), source=chart.guilty_source)
                case ActionKind.cool if case.is_treated and chart.lr_scale * cfg.cool_factor >= cfg.min_lr_scale:
                    return self._cool(case.number, case.onset, chart.lr_scale * cfg.cool_factor, "trouble recurs", now)
        return None

    def _can_fall_back(self, case: Case) -> bool:
        is_unfit = FindingKind.fp8_range in case.kinds and ActionKind.precision not in case.failed_cures
        return self.chart.cfg.fall_back_precision and is_unfit and not self.in_fallback

    def _fall_back(self, case: Case, now: Moment) -> Action:
        """Leave fp8 for a while; for good, where that was done too often."""
        chart, kind = self.chart, ActionKind.precision
        refusal = chart.budgets.refusal(kind, progress=chart.progress)
        until, words = None, f"{refusal}, bf16 to the end of the run"
        if refusal is None:
            num_before = chart.budgets.num_spent.get(kind, 0)
            until = now.iteration + self.lag + window(chart.cfg.precision_iterations, num_before=num_before)
            words = f"bf16 until iteration {until}"
        return replace(self._action(kind, case, f"{case.unfit}; {words}", now), in_fp8=False, until=until)

    def _return(self, now: Moment) -> Action | None:
        """Compute in fp8 again when the window is over."""
        fallback, seen = self.chart.fallback, self.chart.branch.seen
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

    def _warm_up(self, now: Moment) -> Action | None:
        """Give one cooling back after a clean stretch of net progress."""
        chart = self.chart
        is_due = chart.lr_scale < 1 and not chart.cases and now.step >= chart.cooled_at + chart.cfg.cool_steps
        if not is_due:
            return None
        scale = min(1.0, chart.lr_scale / chart.cfg.cool_factor)
        return self._cool(chart.cooled_for, now.iteration, scale, f"{chart.cfg.cool_steps} clean steps", now)

    def _cool(self, incident: int, onset: int, lr_scale: float, reason: str, now: Moment) -> Action:
        clean_steps = max(self.chart.progress + self.chart.cfg.cool_steps - now.step, 0)
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

    def _halt(self, case: Case, reason: str, now: Moment) -> Action:
        return self._action(ActionKind.halt, case, reason, now)

    def _action(self, kind: ActionKind, case: Case, reason: str, now: Moment) -> Action:
        return Action(
            time=now.time,
            iteration=now.iteration,
            kind=kind,
            step=now.step,
            incident=case.number,
            reason=reason,
            onset=case.onset,
        )


def replayed(events: Iterable[Event], cfg: PolicyConfig, *, lag: int) -> list[Action]:
    """What the records and outcomes of a log give: its actions once more, but for those of persons (incident 0)."""
    return list(Policy.start(cfg, lag=lag).choices(events))
