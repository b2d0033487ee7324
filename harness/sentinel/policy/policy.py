"""The policy: chooses the action for each record and each outcome, as a pure function of the event log.

The actions form a ladder, from doing nothing to halting. `harness.sentinel.policy.responses` maps each finding to its
first rung.

| rung | action | when |
|---|---|---|
| A | watch | a spike that may recover by itself; a warning sign; a small lasting rise, as new data causes it |
|   | qk_clip | attention logits grow towards their bound: scale query and key weights from now on |
| B | skip | the gate rejected the update: exclude its batch, or, if a rank was wrong, consume it again next |
|   | check | a loss spike without a known cause, or before a restore: measure the held-out loss |
|   | accept | the held-out loss is at its expected level: accept the new loss level, give the skipped batches back |
|   | rewind | rejected updates in a row, a spike with a known cause, or a spike that does not recover |
| C | rollback | lasting or divergent loss, non-finite weights, frequent rejections, or rewinds that did not help |
|   | trial | after a restore, just before the onset: try remedies on the same batches, continue with the best |
| D | cool | restores recur, or a rollback did not help: lower the lr, raise it again after clean steps |
| E | swap | as D, if the bad batches come from one source; also after skips |
| F | precision | fp8 underflows or saturates: bf16 for a while, at once or after a restore; then fp8 again |
| G | halt | replicas differ; a rank computes wrong again; budget spent; no state to restore; every cure was tried |

- D and E follow a restore. F follows a restore if the weights were damaged. Each bf16 window is twice as long as the
  one before. Once the budget is spent, bf16 lasts to the end of the run: it only costs speed.
- A new finding near an incident that was treated climbs a rung and restores an older state than before. An incident is
  closed after `clean_steps` without a finding; the next one starts at the first rung.
- A trial (`harness.sentinel.policy.trial_choice`) may answer with D, F or a larger window at once; off by default.
- Budgets count net progress: retrained steps do not count, so a run that loops spends its budgets and halts.
- `sentinel.policy.actions=nonfinite_only` limits the ladder to watch, and skip for non-finite updates.

`decide` and `on_outcome` first update the `PolicyState`, then choose an action, then record it.
Left out: which snapshot or checkpoint is restored. An action only states the iteration that the state must precede.
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
    TrialMeasured,
)
from harness.sentinel.policy.held_out_level import NUM_LEVEL
from harness.sentinel.policy.log_events import JudgedRecord, PolicyEvent, pair_findings
from harness.sentinel.policy.open_incident import ClosedIncident, OpenIncident, Rung
from harness.sentinel.policy.policy_state import RESTORES, PolicyState
from harness.sentinel.policy.precision_fallback import fallback_iterations
from harness.sentinel.policy.responses import CURES, Response
from harness.sentinel.policy.restore_scope import excluded_batches, restore_bound
from harness.sentinel.policy.trial_choice import CURED_BY_RESTORE, LEAD_STEPS, TrialCandidate, TrialKind


class DecisionPoint(NamedTuple):
    """Time, iteration and step of the record or outcome that is being decided on."""

    time: float
    iteration: int
    step: int


class FoldedEvent(NamedTuple):
    """An event of a log, and what the policy would choose after it."""

    event: JudgedRecord | PolicyEvent
    chosen: Action | None


@final
@dataclass(slots=True)
class Policy:
    policy_state: PolicyState
    lag: int
    """Iterations issued between an iteration and the processing of its record."""

    @classmethod
    def start(cls, cfg: PolicyConfig, *, lag: int) -> Self:
        return cls(PolicyState.new(cfg), lag)

    def decide(self, record: ReducedRecord, findings: Sequence[Finding]) -> Action | None:
        """Return the action for one iteration, or None."""
        self.policy_state.on_record(record, findings)
        return self._record_action(self.choose_action(DecisionPoint(record.time, record.iteration, record.step)))

    def on_outcome(self, outcome: Outcome) -> Action | None:
        """Return the follow-up of an action, or None: the next rung if it failed, a cure after a restore."""
        self.policy_state.on_outcome(outcome)
        return self._record_action(self.choose_action(DecisionPoint(outcome.time, outcome.iteration, outcome.step)))

    def on_held_out_measured(self, event: HeldOutMeasured) -> None:
        """Record a held-out loss that was measured outside of an incident."""
        self.policy_state.on_held_out_measured(event)

    def on_trial_measured(self, event: TrialMeasured) -> None:
        """Record the result of one candidate of a trial."""
        self.policy_state.on_trial_measured(event)

    @property
    def closed(self) -> list[ClosedIncident]:
        """Incidents closed by the last record or outcome."""
        return self.policy_state.closed

    @property
    def lr_scale(self) -> float:
        """Factor on the learning rate. A restore does not reset it."""
        return self.policy_state.lr_scale

    @property
    def in_fallback(self) -> bool:
        """Whether an fp8 run computes in bf16 from now on. A restore does not reset it."""
        return self.policy_state.fallback.is_on

    @property
    def clips_logits(self) -> bool:
        """Whether attention logits are clipped from now on. A restore does not reset it."""
        return self.policy_state.clips_logits

    @property
    def doubtful_since(self) -> int | None:
        """Earliest onset of the watched incidents: states from this iteration on are not known to be clean."""
        return min(
            (incident.onset for incident in self.policy_state.open_incidents if incident.is_watched), default=None
        )

    @property
    def is_busy(self) -> bool:
        """Whether a check or a trial is under way. What the records in flight call for is done after it."""
        return self.policy_state.checking is not None or self.policy_state.trial is not None

    def choose_action(self, now: DecisionPoint) -> Action | None:
        """Choose the action without recording it."""
        state = self.policy_state
        if state.is_halted or state.is_awaiting or state.checking is not None or state.trial is not None:
            return None
        if state.remedy is not None and (incident := state.find_incident(state.remedy[0])) is not None:
            return self._apply_remedy(incident, state.remedy[1], now)
        accepted = None if state.accept_for is None else state.find_incident(state.accept_for)
        if accepted is None and state.cure_for is not None:
            incident = state.find_incident(state.cure_for)
            if incident is not None and (cure := self._cure(incident, now)) is not None:
                return cure
        for response in state.due:
            incident = state.find_incident(response.incident)
            if incident is not None and (action := self._act_on(response, incident, now)) is not None:
                return action
        if accepted is not None:
            return self._accept_data(accepted, now)
        return self._start_trial(now) or self._raise_lr(now) or self._return_to_fp8(now)

    def state(self) -> dict[str, Any]:
        """Plain data that JSON can hold. The keys are part of the checkpoint format."""
        return {"lag": self.lag, "chart": self.policy_state.state()}

    @classmethod
    def restore(cls, cfg: PolicyConfig, state: dict[str, Any], *, lag: int) -> Self:
        """Restore from `state()`. The lag is that of the present config, because a resume may change it."""
        return cls(PolicyState.restore(cfg, state["chart"]), lag)

    @classmethod
    def replay(cls, cfg: PolicyConfig, events: Iterable[Event], *, lag: int) -> Self:
        """The policy after the events of a log: records, findings, actions and outcomes in order."""
        policy = cls.start(cfg, lag=lag)
        for _ in policy.choose_actions(events):
            pass
        return policy

    def highest_held_out_loss(self, *, before: int) -> float | None:
        """The highest held-out loss of a state that is no worse than at the newest measurement before an iteration;
        None: there is none. The fall of the training loss since then does not count, so that only damage is above."""
        clean = self.policy_state.held_out.newest_before(before)
        return None if clean is None else clean.loss * (1 + self.policy_state.cfg.held_out_tolerance)

    def _record_action(self, action: Action | None) -> Action | None:
        if action is not None:
            self.policy_state.on_action(action)
        return action

    def choose_actions(self, events: Iterable[Event]) -> Iterator[Action]:
        """Yield what would be chosen at each point of a log; the state follows the actions that were really taken."""
        return (chosen for _, chosen in self.fold(events) if chosen is not None)

    def fold(self, events: Iterable[Event]) -> Iterator[FoldedEvent]:
        """Process the events of a log; yield each with what would be chosen after it."""
        for event in pair_findings(events):
            chosen: Action | None = None
            match event:
                case JudgedRecord(record, findings):
                    self.policy_state.on_record(record, findings)
                    chosen = self.choose_action(DecisionPoint(record.time, record.iteration, record.step))
                case Outcome():
                    self.policy_state.on_outcome(event)
                    chosen = self.choose_action(DecisionPoint(event.time, event.iteration, event.step))
                case Action():
                    self.policy_state.on_action(event)
                case HeldOutMeasured():
                    self.policy_state.on_held_out_measured(event)
                case TrialMeasured():
                    self.policy_state.on_trial_measured(event)
                case RunStarted():
                    self.policy_state.resume(event.iteration, event.step)
            yield FoldedEvent(event, chosen)

    def _act_on(self, response: Response, incident: OpenIncident, now: DecisionPoint) -> Action | None:
        state = self.policy_state
        match response.rung:
            case Rung.halt:
                return self._halt(incident, response.reason, now)
            case Rung.none | Rung.watch | Rung.skip if (
                response.leaves_fp8 and (cure := self._cure(incident, now)) is not None
            ):
                return cure
            case Rung.none | Rung.watch if response.clips_logits and not self.clips_logits:
                return self._make_action(ActionKind.qk_clip, incident, response.reason, now)
            case Rung.watch if incident.watched_since is None:
                check = self._check_held_out(incident, response.reason, now) if response.check_first else None
                return check or self._make_action(ActionKind.watch, incident, response.reason, now)
            case Rung.none | Rung.watch:
                return None
            case Rung.skip if (
                response.check_first and (check := self._check_held_out(incident, response.reason, now)) is not None
            ):
                return check
            case Rung.skip if state.only_watches or state.budgets.allows(ActionKind.skip, progress=state.progress):
                assert response.batch is not None, "it answers a rejected update"
                batches = [response.batch, response.batch]
                skip = self._make_action(ActionKind.skip, incident, response.reason, now)
                return replace(skip, give_back=[batches]) if response.gives_back else replace(skip, exclude=batches)
            case Rung.skip:
                return self._restore(incident, Rung.rollback, f"{response.reason}; the skip budget is spent", now)
            case rung:
                return self._restore(incident, rung, response.reason, now)

    def _restore(self, incident: OpenIncident, rung: Rung, reason: str, now: DecisionPoint) -> Action:
        """Restore with at least `rung`. An incident that was treated before climbs a rung and goes further back."""
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
                problem = f"structural, needs a human: {', '.join(incident.kinds)} came back after every cure"
                return self._halt(incident, f"{problem}; {reason}", now)
        exclude = excluded_batches(incident, rung, lineage=state.lineage, cfg=state.cfg)
        onset = restore_bound(incident, rung, exclude, lineage=state.lineage, cfg=state.cfg)
        kind = ActionKind.rewind if rung < Rung.rollback else ActionKind.rollback
        return replace(self._make_action(kind, incident, reason, now), exclude=exclude, onset=onset)

    def _check_held_out(self, incident: OpenIncident, reason: str, now: DecisionPoint) -> Action | None:
        """Measure the held-out loss before a restore; None if it cannot tell, or there is nothing to compare with."""
        state = self.policy_state
        expected = state.held_out.expected(incident.onset, state.lineage) if incident.may_be_checked else None
        if expected is None or not state.budgets.allows(ActionKind.check, progress=state.progress):
            return None
        at_most = expected * (1 + state.cfg.held_out_tolerance)
        check = f"{reason}; checking the held-out loss: expected {expected:.4f}, healthy up to {at_most:.4f}"
        return replace(self._make_action(ActionKind.check, incident, check, now), level=expected)

    def _start_trial(self, now: DecisionPoint) -> Action | None:
        """Try remedies where an incident began, on the way back there after a restore."""
        state, cfg = self.policy_state, self.policy_state.cfg
        if not cfg.trials or state.only_watches or state.rejections.num_in_row:
            return None
        issued = now.step + self.lag
        due = (each for each in state.open_incidents if each.is_trial_due(issued, lead_steps=LEAD_STEPS + self.lag))
        incident = next((each for each in due if CURED_BY_RESTORE.isdisjoint(each.kinds)), None)
        if incident is None or not state.budgets.allows(ActionKind.trial, progress=state.progress):
            return None
        candidates = self._list_candidates(incident)[: cfg.trials]
        if len(candidates) < 2:
            return None
        names = ", ".join(candidate.remedy for candidate in candidates)
        return replace(
            self._make_action(ActionKind.trial, incident, f"back at the onset: trying {names}", now),
            candidates=[candidate.as_dict() for candidate in candidates],
            num_steps=cfg.trial_steps,
        )

    def _list_candidates(self, incident: OpenIncident) -> list[TrialCandidate]:
        """The remedies that apply and are within budget, the least intrusive first."""
        state, cfg = self.policy_state, self.policy_state.cfg
        found = [TrialCandidate(remedy=TrialKind.unchanged)]

        def is_allowed(kind: ActionKind) -> bool:
            return kind not in incident.failed_cures and state.budgets.allows(kind, progress=state.progress)

        if incident.excluded and state.lineage.seen and is_allowed(ActionKind.skip):
            width = cfg.neighbours if incident.rung < Rung.rollback else cfg.rollback_window_batches // 2
            first = max(incident.excluded[1], *(seen.cursor for seen in state.lineage.seen)) + 1 + self.lag
            if width:
                found.append(TrialCandidate(remedy=TrialKind.wider, exclude=[first, first + width - 1]))
        lr_scale = state.lr_scale * cfg.cool_factor
        if lr_scale >= cfg.min_lr_scale and is_allowed(ActionKind.cool):
            found.append(TrialCandidate(remedy=TrialKind.lower_lr, lr_scale=lr_scale))
        if state.in_fp8 and cfg.fall_back_precision and not self.in_fallback and is_allowed(ActionKind.precision):
            found.append(TrialCandidate(remedy=TrialKind.bf16))
        return found

    def _apply_remedy(self, incident: OpenIncident, winner: TrialCandidate, now: DecisionPoint) -> Action | None:
        """The action that makes the winner of a trial permanent; None if it changes nothing."""
        reason = f"the best of the remedies that were tried: {winner.remedy}"
        match winner.remedy:
            case TrialKind.unchanged:
                return None
            case TrialKind.wider:
                first, last = winner.exclude
                first = max([first, *(seen.cursor + 1 for seen in self.policy_state.lineage.seen)])
                if first > last:
                    return None  # the batches in flight lay behind excluded ones, and were trained before the trial
                return replace(self._make_action(ActionKind.skip, incident, reason, now), exclude=[first, last])
            case TrialKind.lower_lr:
                assert winner.lr_scale is not None
                return self._scale_lr(incident.number, incident.onset, winner.lr_scale, reason, now)
            case TrialKind.bf16:
                return self._fall_back_to_bf16(incident, now, reason=reason)

    def _accept_data(self, incident: OpenIncident, now: DecisionPoint) -> Action:
        """Accept the loss of the new data: that of the rejected updates, or else of the last applied ones."""
        rejected = incident.refused[-NUM_LEVEL:]
        level = self.policy_state.lineage.level_since(incident.onset, NUM_LEVEL)
        level = median(loss for _, loss, _ in rejected) if rejected else level
        grad_level = median(norm for _, _, norm in rejected) if rejected else None
        reason = "the held-out loss is at its expected level: the weights are healthy, the data changed"
        return replace(
            self._make_action(ActionKind.accept, incident, reason, now),
            level=level,
            grad_level=grad_level,
            give_back=incident.rejected_batches,
        )

    def _give_up(self, incident: OpenIncident, reason: str, now: DecisionPoint) -> Action:
        """No state can be restored. Lost moments are rebuilt by training on, and fp8 can be left; else halt."""
        if self._can_fall_back(incident):
            return self._fall_back_to_bf16(incident, now)
        if incident.kinds == [FindingKind.optimizer_reset] and incident.watched_since is None:
            return self._make_action(ActionKind.watch, incident, f"{reason}; no state to restore", now)
        return self._halt(incident, f"no state to restore; {reason}", now)

    def _cure(self, incident: OpenIncident, now: DecisionPoint) -> Action | None:
        """The cure that an incident needs, or the check that comes before it; None if there is none."""
        is_needed = self._needs_cure(incident) and not self.policy_state.only_watches
        cure = self._choose_cure(incident, now) if is_needed else None
        if cure is not None and cure.kind is ActionKind.swap and incident.looks_like_data:
            return self._check_held_out(incident, cure.reason, now) or cure
        return cure

    def _needs_cure(self, incident: OpenIncident) -> bool:
        """Whether a cure follows: after a skip always, after a restore if restores recur or failed before."""
        state = self.policy_state
        if FindingKind.corrupting_rank in incident.kinds:  # neither the learning rate nor the data is to blame
            return self._can_fall_back(incident)
        if not incident.is_treated or incident.rung >= Rung.cure or self._can_fall_back(incident):
            return True
        if FindingKind.scale_collapse in incident.kinds:
            return True
        num = state.budgets.num_since(RESTORES, last=CURES, progress=state.progress)
        return num >= state.cfg.recur_after or state.guilty_source is not None

    def _choose_cure(self, incident: OpenIncident, now: DecisionPoint) -> Action | None:
        """The first cure that applies, is within budget, and has not failed in this incident."""
        state, cfg = self.policy_state, self.policy_state.cfg
        for kind in CURES:
            match kind:
                case ActionKind.precision if self._can_fall_back(incident):
                    return self._fall_back_to_bf16(incident, now)
                case _ if kind in incident.failed_cures or not state.budgets.allows(kind, progress=state.progress):
                    continue
                case ActionKind.swap if state.guilty_source is not None:
                    reason = f"the last {cfg.swap_after} bad batches all come from source {state.guilty_source}"
                    return replace(self._make_action(kind, incident, reason, now), source=state.guilty_source)
                case ActionKind.cool if incident.is_treated and state.lr_scale * cfg.cool_factor >= cfg.min_lr_scale:
                    lr_scale = state.lr_scale * cfg.cool_factor
                    return self._scale_lr(incident.number, incident.onset, lr_scale, "incidents recur", now)
        return None

    def _can_fall_back(self, incident: OpenIncident) -> bool:
        is_unfit = FindingKind.fp8_range in incident.kinds and ActionKind.precision not in incident.failed_cures
        return self.policy_state.cfg.fall_back_precision and is_unfit and not self.in_fallback

    def _fall_back_to_bf16(self, incident: OpenIncident, now: DecisionPoint, *, reason: str = "") -> Action:
        """Compute in bf16 for a window; to the end of the run once the budget is spent."""
        state, kind = self.policy_state, ActionKind.precision
        exhausted = state.budgets.exhausted_reason(kind, progress=state.progress)
        until, period = None, f"{exhausted}, bf16 to the end of the run"
        if exhausted is None:
            num_before = state.budgets.num_spent.get(kind, 0)
            window = fallback_iterations(state.cfg.precision_iterations, num_before=num_before)
            until = now.iteration + self.lag + window
            period = f"bf16 until iteration {until}"
        return replace(
            self._make_action(kind, incident, f"{reason or incident.unfit}; {period}", now), in_fp8=False, until=until
        )

    def _return_to_fp8(self, now: DecisionPoint) -> Action | None:
        """Compute in fp8 again after the bf16 window."""
        fallback, seen = self.policy_state.fallback, self.policy_state.lineage.seen
        if not seen or not fallback.is_over(seen[-1].iteration + self.lag):
            return None
        return Action(
            time=now.time,
            iteration=now.iteration,
            kind=ActionKind.precision,
            step=now.step,
            incident=fallback.incident,
            reason="the bf16 window is over: back to fp8",
            onset=now.iteration,
            in_fp8=True,
        )

    def _raise_lr(self, now: DecisionPoint) -> Action | None:
        """Undo one cooling after `cool_steps` clean steps of net progress."""
        state = self.policy_state
        is_due = state.lr_scale < 1 and not state.open_incidents and now.step >= state.cooled_at + state.cfg.cool_steps
        if not is_due:
            return None
        scale = min(1.0, state.lr_scale / state.cfg.cool_factor)
        reason = f"{state.cfg.cool_steps} clean steps: raising the learning rate again"
        return self._scale_lr(state.cooled_for, now.iteration, scale, reason, now)

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
    """Recompute the actions of a log from its records and outcomes; operator actions (incident 0) are left out."""
    return list(Policy.start(cfg, lag=lag).choose_actions(events))
