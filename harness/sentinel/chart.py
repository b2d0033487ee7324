"""The chart: everything the policy knows of a run, folded from its events.

Why: decisions must follow from the log alone, and a policy that is rebuilt after a restart must know what was really
done, not what it would do today.
How: `see` a record with its findings, `note` an action, `absorb` an outcome, `resume` after a restart; nothing else
changes it. `see` also says what the record calls for, from the table in `harness.sentinel.symptoms` and from what was
seen and done before at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, final

from harness.config import PolicyConfig
from harness.events import Action, ActionKind, Finding, FindingKind, Outcome, ReducedRecord
from harness.sentinel.branch import Branch
from harness.sentinel.budgets import Budgets
from harness.sentinel.case import CAUSES, OMENS, Case, Closed, Rung, Verdict
from harness.sentinel.fallback import Fallback
from harness.sentinel.suspects import Suspects
from harness.sentinel.symptoms import FIRST_RUNG, OF_THE_BATCH, Demand, Refusals, has_broken_weights, is_finite

RESTORES = (ActionKind.rewind, ActionKind.rollback)

NUMBERS = (
    "num_incidents",
    "progress",
    "is_awaiting",
    "is_halted",
    "lr_scale",
    "cooled_at",
    "cooled_for",
)
"""Fields of a chart that are plain numbers."""


@final
@dataclass(slots=True, kw_only=True)
class Chart:
    cfg: PolicyConfig
    budgets: Budgets
    branch: Branch = field(default_factory=Branch)
    suspects: Suspects = field(default_factory=Suspects)
    fallback: Fallback = field(default_factory=Fallback)
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

    def note(self, action: Action) -> None:
        """An action was decided, by the policy or (incident 0) by a person."""
        case = self.case(action.incident)
        is_free = action.kind is ActionKind.precision and action.until is None
        if case is not None and not is_free and action.kind not in (ActionKind.watch, ActionKind.halt):
            self.budgets.spend(action.kind, progress=self.progress)
        self.is_awaiting = action.kind in RESTORES
        if not self.is_awaiting:
            self.demand = self.cure_for = None
        match action.kind:
            case ActionKind.halt:
                self.is_halted = True
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
        self.cure_for = None
        case = self.case(outcome.incident)
        if outcome.kind is ActionKind.precision and not outcome.succeeded:
            self.fallback.fail()
        if outcome.kind in RESTORES:
            self.is_awaiting = False
            if outcome.succeeded:
                self._set_down(outcome, case)
            elif case is not None:
                self._fail(case, outcome.kind)
        elif case is not None and not outcome.succeeded:
            case.failed_cures.append(outcome.kind)
            if outcome.kind is ActionKind.cool:
                self.lr_scale = min(1.0, self.lr_scale / self.cfg.cool_factor)
            self.cure_for = case.number if case.is_treated else None
        elif case is not None and outcome.kind is ActionKind.skip:
            self.cure_for = case.number if self.guilty_source else None

    def resume(self, iteration: int, step: int) -> None:
        """The run was started again; after a halt only a person does that, and means a new beginning."""
        if self.is_halted:
            self.cases = []
            self.budgets.forgive()
        self.is_halted = self.is_awaiting = False
        self.demand = self.cure_for = None
        self.refusals = Refusals()
        self.branch.set_down(iteration, step)

    def case(self, number: int) -> Case | None:
        return next((case for case in self.cases if case.number == number), None)

    @property
    def guilty_source(self) -> str | None:
        since = self.progress - self.cfg.window_steps
        return self.suspects.guilty(self.cfg.swap_after, since=since)

    def _set_down(self, outcome: Outcome, case: Case | None) -> None:
        self.branch.set_down(outcome.iteration, outcome.step)
        self.demand = None
        self.refusals = Refusals()
        for other in [other for other in self.cases if not other.is_treated and other.onset_step > outcome.step]:
            self._close(other, Verdict.undone)
        if case is not None:
            case.is_restored = True
            case.target_step = outcome.step if case.target_step is None else min(case.target_step, outcome.step)
            self.cure_for = case.number

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
            reason = f"{self.refusals.num_in_row} updates refused in a row: the state is broken, not the batches"
            if case.is_refused_alone and case.target_step is not None and is_finite(record):
                reason = f"the update of batch {record.cursor} was refused by an older state too: the batch is broken"
                yield Demand(Rung.skip, case.number, reason)
            else:
                yield Demand(Rung.rewind, case.number, reason)
        elif is_refusal:
            case = self._join("refusal", record, onset=record.iteration)
            rung = Rung.skip if case.blames_data else Rung.rewind
            yield Demand(rung, case.number, f"the update of batch {record.cursor} was refused")

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
                yield Demand(rung, case.number, finding.message)

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
            refusals=Refusals(**state["refusals"]),
            cases=[Case.restore(case) for case in state["cases"]],
            demand=None if demand is None else Demand(Rung(demand[0]), *demand[1:]),
            **state["numbers"],
        )
