"""The chart: everything the policy knows of a run, folded from its events.

Why: decisions must follow from the log alone, and a policy that is rebuilt after a restart must know what was really
done, not what it would do today.
How: `see` a record with its findings, `note` an action, `absorb` an outcome, `resume` after a restart; nothing else
changes it. `see` also says what the record calls for, from the table in `harness.sentinel.policy.responses` and from
what was seen and done before at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, final

from harness.config.sentinel import PolicyConfig
from harness.core.events import Action, ActionKind, Finding, FindingKind, HeldOutMeasured, Outcome, ReducedRecord
from harness.sentinel.policy.budgets import Budgets
from harness.sentinel.policy.held_out_level import Health, is_at_level
from harness.sentinel.policy.lineage import Branch
from harness.sentinel.policy.open_incident import CAUSES, OMENS, Case, Closed, Rung, Verdict
from harness.sentinel.policy.precision_fallback import Fallback
from harness.sentinel.policy.responses import (
    FIRST_RUNG,
    OF_THE_BATCH,
    Demand,
    Refusals,
    has_broken_weights,
    is_finite,
    is_within_gradient_bound,
)
from harness.sentinel.policy.suspect_sources import Suspects

RESTORES = (ActionKind.rewind, ActionKind.rollback)
FREE = (ActionKind.watch, ActionKind.accept, ActionKind.halt)
"""Actions without a budget."""
BROKEN_BATCHES = "the held-out loss is at its level and the gradients are out of proportion: the batches are broken"

NUMBERS = (
    "num_incidents",
    "progress",
    "is_awaiting",
    "checking",
    "accept_for",
    "is_halted",
    "lr_scale",
    "cooled_at",
    "cooled_for",
)
"""Fields of a chart that are plain numbers, or None."""


@final
@dataclass(slots=True, kw_only=True)
class Chart:
    cfg: PolicyConfig
    budgets: Budgets
    branch: Branch = field(default_factory=Branch)
    suspects: Suspects = field(default_factory=Suspects)
    fallback: Fallback = field(default_factory=Fallback)
    health: Health = field(default_factory=Health)
    cases: list[Case] = field(default_factory=list)
    """Open ones, oldest first."""
    num_incidents: int = 0
    progress: int = 0
    """The furthest step the run ever reached."""
    refusals: Refusals = field(default_factory=Refusals)
    demand: Demand | None = None
    cure_for: int | None = None
    """The incident that the record or outcome just heard may call for a cure of."""
    is_awaiting: bool = False
    """A restore was decided and its outcome is not known; until then records tell of a state that is given up."""
    checking: int | None = None
    """The incident whose check of the held-out loss was decided and has no outcome yet. Records that come until then
    were issued before it; they are kept, and nothing is decided about them."""
    accept_for: int | None = None
    """The incident whose data is accepted."""
    is_halted: bool = False
    lr_scale: float = 1.0
    cooled_at: int = 0
    """Net progress at the last change of the scale."""
    cooled_for: int = 0
    """Incident."""
    closed: list[Closed] = field(default_factory=list)
    """Incidents that ended with the last record or outcome."""

    @classmethod
    def new(cls, cfg: PolicyConfig) -> Self:
        return cls(cfg=cfg, budgets=Budgets(cfg.budgets, cfg.window_steps))

    def see(self, record: ReducedRecord, findings: Sequence[Finding]) -> None:
        """One iteration, and what was suspected of it."""
        self.closed = []
        if self.is_halted or self.is_awaiting:
            return
        if self.checking is not None:
            self._keep(record)
            return
        self.demand = self.cure_for = None
        self.branch.add(record)
        self.progress = max(self.progress, record.step)
        causes_first = sorted(findings, key=lambda finding: finding.kind not in CAUSES)
        demands = [*self._of_range(record, findings)]
        demands += [*self._of_update(record), *self._of_findings(record, causes_first)]
        answered = {demand.incident for demand in demands if demand.rung > Rung.watch}
        demands += self._of_watch(record, other_than=answered)
        self._close_left_behind(record.step)
        if not self.cases and not record.refused:
            self.suspects.learn(record)
        self.demand = max(demands, key=lambda demand: demand.rung, default=None)
        if self.demand is not None and self.demand.rung > Rung.skip:
            self.cure_for = None  # it follows the restore

    def measure(self, event: HeldOutMeasured) -> None:
        """The held-out loss was measured, at the start or for a checkpoint; under suspicion it is no clean level."""
        if not self.refusals.num_in_row and not any(case.is_watched for case in self.cases):
            self.health.add(event, self.branch)

    def note(self, action: Action) -> None:
        """An action was decided, by the policy or (incident 0) by a person."""
        case = self.case(action.incident)
        is_free = action.kind is ActionKind.precision and action.until is None
        if case is not None and not is_free and action.kind not in FREE:
            self.budgets.spend(action.kind, progress=self.progress)
        self.is_awaiting = action.kind in RESTORES
        self.checking = action.incident if action.kind is ActionKind.check else None
        self.accept_for = None
        if not self.is_awaiting and self.checking is None:
            self.demand = self.cure_for = None
        match action.kind:
            case ActionKind.halt:
                self.is_halted = True
            case ActionKind.check if case is not None:
                case.pending = [self.branch.seen[-1].cursor] if self.refusals.num_in_row else []
            case ActionKind.cool if action.incident:
                self.lr_scale = 1.0 if action.lr_scale is None else action.lr_scale
                self.cooled_at, self.cooled_for = self.progress, action.incident
            case ActionKind.swap if action.source is not None:
                self.suspects.remove(action.source)
            case ActionKind.precision:
                self.fallback.note(action)
        if case is not None:
            case.note(action, cfg=self.cfg)
            if action.kind in (ActionKind.skip, *RESTORES):
                self.suspects.blame(case.source, progress=self.progress)

    def absorb(self, outcome: Outcome) -> None:
        """What an action came to."""
        self.closed = []
        case = self.case(outcome.incident)
        if outcome.kind is ActionKind.check:
            self.checking = None
            if case is not None:
                self._conclude(case, outcome)
            return
        self.cure_for = None
        if outcome.kind is ActionKind.precision and not outcome.succeeded:
            self.fallback.fail()
        if outcome.kind in RESTORES:
            self.is_awaiting = False
            if outcome.succeeded:
                self._set_down(outcome, case)
            elif case is not None:
                self._fail(case, outcome.kind)
        elif case is not None and outcome.kind is ActionKind.accept:
            if outcome.succeeded:
                self._accept(case)
        elif case is not None and not outcome.succeeded:
            case.failed_cures.append(outcome.kind)
            if outcome.kind is ActionKind.cool:
                self.lr_scale = min(1.0, self.lr_scale / self.cfg.cool_factor)
            self.cure_for = case.number if case.is_treated else None
        elif case is not None and outcome.kind is ActionKind.skip:
            self.cure_for = case.number if self.guilty_source else None
            if case.pending:
                self.demand = Demand(Rung.skip, case.number, BROKEN_BATCHES)

    def resume(self, iteration: int, step: int) -> None:
        """The run was started again; after a halt only a person does that, and means a new beginning."""
        if self.is_halted:
            self.cases = []
            self.budgets.forgive()
        self.is_halted = self.is_awaiting = False
        self.demand = self.cure_for = self.accept_for = self.checking = None
        self.refusals = Refusals()
        self.branch.set_down(iteration, step)
        self.health.set_down(step)
        for case in self.cases:
            case.refused, case.pending, case.num_excessive = [], [], 0

    def case(self, number: int) -> Case | None:
        return next((case for case in self.cases if case.number == number), None)

    @property
    def guilty_source(self) -> str | None:
        since = self.progress - self.cfg.window_steps
        return self.suspects.guilty(self.cfg.swap_after, since=since)

    def _set_down(self, outcome: Outcome, case: Case | None) -> None:
        self.branch.set_down(outcome.iteration, outcome.step)
        self.health.set_down(outcome.step)
        self.demand = None
        self.refusals = Refusals()
        for each in self.cases:
            each.refused, each.pending, each.num_excessive = [], [], 0
        for other in [other for other in self.cases if not other.is_treated and other.onset_step > outcome.step]:
            self._close(other, Verdict.undone)
        if case is not None:
            case.is_restored = case.is_finite = True
            case.is_checked = case.is_healthy = False
            case.target_step = outcome.step if case.target_step is None else min(case.target_step, outcome.step)
            self.cure_for = case.number

    def _keep(self, record: ReducedRecord) -> None:
        """A record of an iteration that was issued before a check: what it says counts for the check's case."""
        self.branch.add(record)
        self.progress = max(self.progress, record.step)
        case = None if self.checking is None else self.case(self.checking)
        if self.refusals.add(record) and case is not None:
            self._refuse(case, record)
            case.pending.append(record.cursor)

    def _refuse(self, case: Case, record: ReducedRecord) -> None:
        if is_finite(record):
            is_excessive = not is_within_gradient_bound(record)
            case.refuse(cursor=record.cursor, loss=record.loss, grad_norm=record.grad_norm, is_excessive=is_excessive)
        else:
            case.is_finite = False

    def _conclude(self, case: Case, outcome: Outcome) -> None:
        """What the held-out loss says: a healthy state is kept, and its data accepted unless it is garbage; a damaged
        one climbs the ladder. One that is watched first may recover by itself, as the first updates on new data do harm
        that the next ones mend; it is checked again before it is restored."""
        case.is_checked = self.demand is None or self.demand.rung is not Rung.watch
        tolerance = self.cfg.held_out_tolerance
        at_level = is_at_level(outcome.held_out_loss, case.expected, tolerance=tolerance)
        case.is_healthy = outcome.succeeded and case.is_finite and at_level
        if case.is_healthy and case.looks_like_data:
            self.accept_for, case.pending = case.number, []
            self.demand = self.cure_for = None
        elif case.is_healthy and self.demand is not None:
            self.demand = Demand(Rung.skip, case.number, BROKEN_BATCHES) if case.pending else None
        elif not case.is_healthy:
            case.pending = []
            if self.demand is not None:
                rung = Rung.rewind if self.demand.rung is Rung.skip else self.demand.rung
                self.demand = self.demand._replace(rung=rung, asks=False)

    def _accept(self, case: Case) -> None:
        """Its data is the new normal: nothing that was skipped for it counts."""
        self.budgets.refund(ActionKind.skip, num=len(case.refused), progress=self.progress)
        self.suspects.acquit()
        self.refusals = Refusals()
        self._close(case, Verdict.accepted)

    def _fail(self, case: Case, kind: ActionKind) -> None:
        """There was nothing to go back to: the next rung, and from the last one without its margin."""
        if kind is ActionKind.rewind:
            case.rung = Rung.wide
        elif case.without_margin:
            case.is_hopeless = True
        else:
            case.without_margin = True
            case.rung = Rung.wide if case.rung == Rung.rollback else Rung.rollback

    def _of_range(self, record: ReducedRecord, findings: Iterable[Finding]) -> Iterator[Demand]:
        """What does not fit into fp8 is known before anything else of a record is judged: it is the cause of that."""
        for finding in [each for each in findings if each.kind is FindingKind.fp8_range]:
            case = self._join(finding.kind, record, onset=min(finding.onset, record.iteration))
            case.unfit, self.cure_for = finding.message, case.number
            if not case.is_treated:
                yield Demand(Rung.rewind if case.is_harmed else Rung.watch, case.number, finding.message)

    def _of_update(self, record: ReducedRecord) -> Iterator[Demand]:
        """What the record itself calls for, whatever the detectors say."""
        is_refusal = self.refusals.add(record)
        before = (self.refusals.since if self.refusals.num_in_row else record.iteration) - 1
        if has_broken_weights(record):
            case = self._join("nonfinite weights", record, onset=before)
            yield Demand(Rung.rollback, case.number, "the weights are not finite")
        elif is_refusal and self.refusals.num_in_row >= self.cfg.refused_in_row:
            case = self._join("refusals", record, onset=before)
            self._refuse(case, record)
            reason = f"{self.refusals.num_in_row} updates refused in a row: the state is broken, not the batches"
            if case.is_refused_alone and case.is_healthy and is_finite(record):
                yield Demand(Rung.skip, case.number, BROKEN_BATCHES)
            elif case.is_refused_alone and case.target_step is not None and is_finite(record):
                reason = f"the update of batch {record.cursor} was refused by an older state too"
                yield Demand(Rung.skip, case.number, reason, asks=True)
            else:
                yield Demand(Rung.rewind, case.number, reason)
        elif is_refusal:
            case = self._join("refusal", record, onset=record.iteration)
            self._refuse(case, record)
            rung = Rung.skip if case.blames_data else Rung.rewind
            is_often = len(case.refused) >= self.cfg.refused_in_row and case.looks_like_data
            asks = is_finite(record) and (is_often or record.in_planned_change)
            yield Demand(rung, case.number, f"the update of batch {record.cursor} was refused", asks)

    def _of_findings(self, record: ReducedRecord, findings: Iterable[Finding]) -> Iterator[Demand]:
        for finding in findings:
            rung = FIRST_RUNG.get(finding.kind)
            if rung is None or (record.refused and finding.kind in OF_THE_BATCH):
                continue
            is_drift = finding.kind is FindingKind.weight_drift
            onset = record.iteration if is_drift else min(finding.onset, record.iteration)
            case = self._join(finding.kind, record, onset=onset, cursors=finding.cursors)
            if case.is_treated and rung is not Rung.halt:
                rung = Rung.none if finding.kind in OMENS else Rung.rewind
            elif finding.kind is FindingKind.loss_spike and case.has_cause:
                rung = Rung.rewind
            elif finding.kind is FindingKind.level_shift and not case.is_tolerable(self.branch, cfg=self.cfg):
                rung = Rung.rollback
            if rung is not Rung.none:
                yield Demand(rung, case.number, finding.message, asks=finding.kind is FindingKind.loss_spike)

    def _of_watch(self, record: ReducedRecord, *, other_than: set[int]) -> Iterator[Demand]:
        for case in [case for case in self.cases if case.is_watched and case.number not in other_than]:
            match case.judge(self.branch, record.iteration, cfg=self.cfg):
                case None:
                    continue
                case Verdict.stuck:
                    yield Demand(Rung.rewind, case.number, f"{case.kinds[0]} does not turn by itself")
                case Verdict.lingering:
                    yield Demand(Rung.rollback, case.number, f"{case.kinds[0]} lingers")
                case verdict:
                    self._close(case, verdict)

    def _join(self, kind: str, record: ReducedRecord, *, onset: int, cursors: Sequence[int] = ()) -> Case:
        """The open case at the place of a trouble, or a new one."""
        onset = max(onset, 0)
        there = self.branch.at(onset)
        onset_step = max(record.step - (record.iteration - onset), 0) if there is None else there.step
        case = next((case for case in reversed(self.cases) if self._is_near(case, onset_step, record.step)), None)
        if case is None:
            self.num_incidents += 1
            case = Case(number=self.num_incidents, onset=onset, onset_step=onset_step, end_step=record.step)
            self.cases.append(case)
        case.extend(kind, onset=onset, onset_step=onset_step, step=record.step, cursors=cursors)
        if case.onset == onset:
            normal = self.branch.normal(onset)
            case.level, case.sigma = (None, 0.0) if normal is None else normal
        if onset == record.iteration:
            case.source = self.suspects.source_of(record)
        return case

    def _is_near(self, case: Case, first_step: int, last_step: int) -> bool:
        region = self.cfg.region_steps
        return case.onset_step - region <= last_step and first_step <= case.end_step + region

    def _close_left_behind(self, step: int) -> None:
        for case in [case for case in self.cases if not case.is_watched]:
            if step >= case.end_step + self.cfg.clean_steps:
                self._close(case, Verdict.cured)

    def _close(self, case: Case, verdict: Verdict) -> None:
        self.cases.remove(case)
        spike_type = 1 if verdict is Verdict.recovered else case.spike_type
        self.closed.append(Closed(case.number, verdict, spike_type))

    def state(self) -> dict[str, Any]:
        """Plain data, as JSON knows it."""
        return {
            "budgets": self.budgets.state(),
            "branch": self.branch.state(),
            "suspects": self.suspects.state(),
            "fallback": self.fallback.state(),
            "health": self.health.state(),
            "refusals": asdict(self.refusals),
            "cases": [case.state() for case in self.cases],
            "demand": None if self.demand is None else list(self.demand),
            "numbers": {name: getattr(self, name) for name in NUMBERS},
        }

    @classmethod
    def restore(cls, cfg: PolicyConfig, state: dict[str, Any]) -> Self:
        demand = state["demand"]
        return cls(
            cfg=cfg,
            budgets=Budgets.restore(cfg.budgets, cfg.window_steps, state["budgets"]),
            branch=Branch.restore(state["branch"]),
            suspects=Suspects.restore(state["suspects"]),
            fallback=Fallback.restore(state.get("fallback", {})),
            health=Health.restore(state.get("health", [])),
            refusals=Refusals(**state["refusals"]),
            cases=[Case.restore(case) for case in state["cases"]],
            demand=None if demand is None else Demand(Rung(demand[0]), *demand[1:]),
            **state["numbers"],
        )
