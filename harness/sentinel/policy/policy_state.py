"""The state of the policy, folded from the events of a run: open incidents, budgets, lineage, held-out levels.

Why: decisions must follow from the log only. After a restart the state is rebuilt from the actions that were really
taken, not from those that today's config would choose.
How: only `on_record`, `on_action`, `on_outcome`, `on_trial_measured`, `on_held_out_measured` and `resume` change it.
`on_record` also derives the response to the record (`harness.sentinel.policy.record_responses`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Self, final

from harness.config.sentinel import PolicyConfig
from harness.core.events import Action, ActionKind, Finding, HeldOutMeasured, Outcome, ReducedRecord, TrialMeasured
from harness.sentinel.policy.budgets import Budgets
from harness.sentinel.policy.held_out_level import HeldOutLevel, is_at_level
from harness.sentinel.policy.incident_table import IncidentTable
from harness.sentinel.policy.lineage import Lineage
from harness.sentinel.policy.open_incident import ClosedIncident, IncidentVerdict, OpenIncident, Rung
from harness.sentinel.policy.precision_fallback import PrecisionFallback
from harness.sentinel.policy.record_responses import BROKEN_BATCHES, RecordResponder, only_watches
from harness.sentinel.policy.responses import Rejections, Response
from harness.sentinel.policy.suspect_sources import SuspectSources
from harness.sentinel.policy.trial_choice import OpenTrial, TrialCandidate

RESTORES = (ActionKind.rewind, ActionKind.rollback)
UNBUDGETED = (ActionKind.watch, ActionKind.accept, ActionKind.qk_clip, ActionKind.halt)
"""Actions without a budget."""

PLAIN_FIELDS = (
    "progress",
    "is_awaiting",
    "checking",
    "accept_for",
    "is_halted",
    "lr_scale",
    "cooled_at",
    "cooled_for",
    "clips_logits",
    "in_fp8",
)
"""Fields of `PolicyState` that are plain numbers, or None."""


@final
@dataclass(slots=True, kw_only=True)
class PolicyState:
    cfg: PolicyConfig
    budgets: Budgets
    incidents: IncidentTable
    lineage: Lineage = field(default_factory=Lineage)
    suspects: SuspectSources = field(default_factory=SuspectSources)
    fallback: PrecisionFallback = field(default_factory=PrecisionFallback)
    held_out: HeldOutLevel = field(default_factory=HeldOutLevel)
    progress: int = 0
    """Net progress: the highest step the run ever reached."""
    rejections: Rejections = field(default_factory=Rejections)
    response: Response | None = None
    """What the last record or outcome calls for, or what led to the check that is under way."""
    deferred: list[Response] = field(default_factory=list)
    """What else the last record calls for, or those in flight at a check or a trial. It is acted on after `response`,
    unless a restore makes it void."""
    cure_for: int | None = None
    """The incident that may need a cure after the last outcome."""
    is_awaiting: bool = False
    """A restore was chosen and has no outcome yet. Records until then describe a state that is being discarded."""
    checking: int | None = None
    """The incident whose held-out check was chosen and has no outcome yet. Records until then belong to iterations
    issued before the check; they are stored. What the check cannot judge is answered after it."""
    accept_for: int | None = None
    """The incident whose new loss level is to be accepted."""
    is_halted: bool = False
    lr_scale: float = 1.0
    cooled_at: int = 0
    """Net progress at the last change of `lr_scale`."""
    cooled_for: int = 0
    """The incident of the last change of `lr_scale`."""
    clips_logits: bool = False
    """Attention logits are clipped to the end of the run (`qk_clip`)."""
    in_fp8: bool = False
    """The last step computed in fp8."""
    trial: OpenTrial | None = None
    """A trial that was chosen and has no outcome yet. Records until then were issued before it; the responses to them
    are kept, and make the trial fail."""
    remedy: tuple[int, TrialCandidate] | None = None
    """The incident and the winner of the trial whose outcome came last."""

    @classmethod
    def new(cls, cfg: PolicyConfig) -> Self:
        return cls(cfg=cfg, budgets=Budgets(cfg.budgets, cfg.window_steps), incidents=IncidentTable(cfg=cfg))

    def on_record(self, record: ReducedRecord, findings: Sequence[Finding]) -> None:
        """Process one iteration with its findings: update the open incidents and derive the response."""
        self.incidents.closed = []
        if self.is_halted or self.is_awaiting:
            return
        if self.checking is not None:
            self._add_during_check(record, findings)
            return
        if self.trial is None:
            self.response, self.deferred = None, []
        self.cure_for = self.remedy = None
        self.in_fp8 = record.in_fp8 is True
        self._add_to_lineage(record)
        responses = self._make_responder().respond(record, findings)
        self.incidents.close_passed(record.step)
        if not self.open_incidents and not record.refused:
            self.suspects.on_clean_record(record)
        self._add_responses(responses)

    def on_held_out_measured(self, event: HeldOutMeasured) -> None:
        """Record a held-out loss, measured at the start or for a checkpoint; ignored while an incident is watched."""
        self.held_out.use_rows(event.rows)
        if not self.rejections.num_in_row and not any(incident.is_watched for incident in self.open_incidents):
            self.held_out.add(event, self.lineage)

    def on_trial_measured(self, event: TrialMeasured) -> None:
        """Record the result of one candidate of the trial that is under way."""
        if self.trial is not None:
            self.trial.add(event)

    def on_action(self, action: Action) -> None:
        """Record an action that was chosen by the policy or (incident 0) by an operator."""
        incident = self.find_incident(action.incident)
        is_remedy, self.remedy = self.remedy is not None, None
        is_trial = action.kind is ActionKind.trial
        self.trial = OpenTrial(incident=action.incident, candidates=action.candidates) if is_trial else None
        is_permanent = action.kind is ActionKind.precision and action.until is None
        if incident is not None and not is_permanent and action.kind not in UNBUDGETED:
            self.budgets.spend(action.kind, progress=self.progress)
        self.is_awaiting = action.kind in RESTORES
        self.checking = action.incident if action.kind is ActionKind.check else None
        if action.kind is ActionKind.accept or self.is_awaiting:
            self.accept_for = None
        if not self.is_awaiting and self.checking is None:
            owed = [] if is_trial else [each for each in self.due if each.is_owed and not each.is_answered_by(action)]
            self.deferred = [each.without_restore() for each in owed]
            self.response = self.cure_for = None
        match action.kind:
            case ActionKind.halt:
                self.is_halted = True
            case ActionKind.cool if action.incident:
                self.lr_scale = 1.0 if action.lr_scale is None else action.lr_scale
                self.cooled_at, self.cooled_for = self.progress, action.incident
            case ActionKind.swap if action.source is not None:
                self.suspects.remove(action.source)
            case ActionKind.precision:
                self.fallback.on_action(action)
            case ActionKind.qk_clip:
                self.clips_logits = True
        self.incidents.give_back(action.give_back)
        if incident is not None:
            incident.on_action(action, cfg=self.cfg)
            if action.kind in (ActionKind.skip, *RESTORES) and not action.give_back and not is_remedy:
                self.suspects.blame(incident.source, progress=self.progress)

    def on_outcome(self, outcome: Outcome) -> None:
        """Process the outcome of an action."""
        self.incidents.closed = []
        incident = self.find_incident(outcome.incident)
        if outcome.kind is ActionKind.check:
            self.checking = None
            if incident is not None:
                self._on_check_outcome(incident, outcome)
            return
        self.remedy = None
        if outcome.kind is ActionKind.trial:
            trial, self.trial = self.trial, None
            if trial is not None and outcome.succeeded:
                self.remedy = (trial.incident, trial.winner)
            return
        self.cure_for = None
        if outcome.kind is ActionKind.precision and not outcome.succeeded:
            self.fallback.on_failure()
        if outcome.kind in RESTORES:
            self.is_awaiting = False
            if outcome.succeeded:
                self._on_restored(outcome, incident)
            elif incident is not None:
                self._on_restore_failed(incident, outcome.kind)
        elif incident is not None and outcome.kind is ActionKind.accept:
            if outcome.succeeded:
                self._on_accepted(incident)
        elif incident is not None and not outcome.succeeded:
            incident.failed_cures.append(outcome.kind)
            if outcome.kind is ActionKind.cool:
                self.lr_scale = min(1.0, self.lr_scale / self.cfg.cool_factor)
            self.cure_for = incident.number if incident.is_treated else None
        elif incident is not None and outcome.kind is ActionKind.skip:
            self.cure_for = incident.number if self.guilty_source else None

    def resume(self, iteration: int, step: int) -> None:
        """Process a restart of the run. A restart after a halt is an operator's: incidents and budget window reset."""
        if self.is_halted:
            self.incidents.opened = []
            self.budgets.reset_window()
        self.is_halted = self.is_awaiting = False
        self.response = self.cure_for = self.accept_for = self.checking = self.trial = self.remedy = None
        self.deferred = []
        self.rejections = Rejections()
        self.lineage.restart_at(iteration, step)
        self.held_out.drop_after(step)
        self.incidents.forget_rejections()

    @property
    def open_incidents(self) -> list[OpenIncident]:
        """Oldest first."""
        return self.incidents.opened

    @property
    def closed(self) -> list[ClosedIncident]:
        """Incidents closed by the last record or outcome."""
        return self.incidents.closed

    def find_incident(self, number: int) -> OpenIncident | None:
        return self.incidents.find(number)

    @property
    def due(self) -> list[Response]:
        """The responses to act on, in this order."""
        return [*([] if self.response is None else [self.response]), *self.deferred]

    @property
    def only_watches(self) -> bool:
        """Whether the config allows no action but watch, and skip for non-finite updates."""
        return only_watches(self.cfg)

    @property
    def guilty_source(self) -> str | None:
        since = self.progress - self.cfg.window_steps
        return self.suspects.shared_source(self.cfg.swap_after, since=since)

    def _on_restored(self, outcome: Outcome, incident: OpenIncident | None) -> None:
        self.lineage.restart_at(outcome.iteration, outcome.step)
        self.held_out.drop_after(outcome.step)
        self.response, self.deferred = None, []
        self.rejections = Rejections()
        self.incidents.forget_rejections()
        self.incidents.close_undone(outcome.step)
        if incident is not None:
            incident.is_restored = incident.is_finite = True
            incident.trial_step = incident.onset_step
            incident.is_checked = incident.is_healthy = False
            target_step = outcome.step if incident.target_step is None else incident.target_step
            incident.target_step = min(target_step, outcome.step)
            self.cure_for = incident.number

    def _add_to_lineage(self, record: ReducedRecord) -> None:
        self.lineage.add(record)
        self.held_out.on_record(record, self.lineage)
        self.progress = max(self.progress, record.step)

    def _make_responder(self) -> RecordResponder:
        return RecordResponder(
            cfg=self.cfg,
            incidents=self.incidents,
            lineage=self.lineage,
            suspects=self.suspects,
            rejections=self.rejections,
            clips_logits=self.clips_logits,
        )

    def _add_responses(self, responses: Iterable[Response]) -> None:
        """The most urgent response is acted on first; of the others only what is owed."""
        found = [*self.due, *responses]
        self.response = max(found, key=lambda response: response.urgency, default=None)
        self.deferred = [each for each in found if each is not self.response and each.is_owed]

    def _add_during_check(self, record: ReducedRecord, findings: Sequence[Finding]) -> None:
        """Store a record that was issued before the check. A halt or a restore that the check cannot judge replaces
        what led to it; what else is owed follows the outcome."""
        assert self.checking is not None
        self._add_to_lineage(record)
        checked = self.find_incident(self.checking)
        responses = self._make_responder().respond_during_check(record, findings, checked=checked)
        self.deferred += [response for response in responses if not response.outranks_check]
        if outranking := [response for response in responses if response.outranks_check]:
            self._add_responses(outranking)

    def _on_check_outcome(self, incident: OpenIncident, outcome: Outcome) -> None:
        """Evaluate the held-out loss. Healthy: keep the state, and accept the data unless the batches are bad. Damaged:
        climb the ladder. An incident that is watched first may recover by itself (the first updates on new data do
        damage that later ones repair); it is checked again before a restore. What is owed is acted on before the data
        is accepted, which closes the incident, and otherwise after the response; a restore makes it void. A healthy
        state needs no restore for another incident either."""
        incident.is_checked = self.response is None or self.response.rung is not Rung.watch
        tolerance = self.cfg.held_out_tolerance
        at_level = is_at_level(outcome.held_out_loss, incident.expected, tolerance=tolerance)
        incident.is_healthy = outcome.succeeded and incident.is_finite and at_level
        if self.response is not None and self.response.outranks_check:
            return
        rejected = [each for each in self.due if each.incident == incident.number and each.excludes_batch]
        owed = [each.without_restore() for each in self.due if each.is_owed and each not in rejected]
        if incident.is_healthy and incident.looks_like_data:  # the rejected batches are given back then
            self.accept_for = incident.number
            self.response, self.deferred, self.cure_for = None, owed, None
        elif incident.is_healthy and self.response is not None:
            skips = [each.without_restore()._replace(reason=BROKEN_BATCHES) for each in rejected]
            self.response, self.deferred = None, [*skips, *owed]
        elif not incident.is_healthy and self.response is not None:
            has_cause = self.response.rung is Rung.skip or bool(incident.unfit)
            rung = max(self.response.rung, Rung.rewind) if has_cause else self.response.rung
            self.response = self.response._replace(rung=rung, check_first=False)

    def _on_accepted(self, incident: OpenIncident) -> None:
        """Close an incident whose data was accepted; its skips are refunded and no source is blamed for it."""
        self.budgets.refund(ActionKind.skip, num=len(incident.refused), progress=self.progress)
        self.suspects.clear_blame()
        self.rejections = Rejections()
        self.incidents.close(incident, IncidentVerdict.accepted)

    def _on_restore_failed(self, incident: OpenIncident, kind: ActionKind) -> None:
        """No state could be restored: climb a rung; on the last one, drop the margin before the onset."""
        if kind is ActionKind.rewind:
            incident.rung = Rung.wide
        elif incident.without_margin:
            incident.is_hopeless = True
        else:
            incident.without_margin = True
            incident.rung = Rung.wide if incident.rung == Rung.rollback else Rung.rollback

    def state(self) -> dict[str, Any]:
        """Plain data that JSON can hold. The keys are part of the checkpoint format and keep their old names."""
        return {
            "budgets": self.budgets.state(),
            "branch": self.lineage.state(),
            "suspects": self.suspects.state(),
            "fallback": self.fallback.state(),
            "health": self.held_out.state(),
            "planned": self.held_out.state_of_edges(),
            "held_out_rows": self.held_out.rows,
            "refusals": asdict(self.rejections),
            "cases": [incident.state() for incident in self.open_incidents],
            "demand": None if self.response is None else list(self.response),
            "deferred": [list(response) for response in self.deferred],
            "trial": None if self.trial is None else asdict(self.trial),
            "numbers": {"num_incidents": self.incidents.num_incidents}
            | {name: getattr(self, name) for name in PLAIN_FIELDS},
        }

    @classmethod
    def restore(cls, cfg: PolicyConfig, state: dict[str, Any]) -> Self:
        trial, numbers = state.get("trial"), dict(state["numbers"])
        opened = [OpenIncident.restore(incident) for incident in state["cases"]]
        incidents = IncidentTable(cfg=cfg, opened=opened, num_incidents=numbers.pop("num_incidents"))
        return cls(
            cfg=cfg,
            budgets=Budgets.restore(cfg.budgets, cfg.window_steps, state["budgets"]),
            incidents=incidents,
            lineage=Lineage.restore(state["branch"]),
            suspects=SuspectSources.restore(state["suspects"]),
            fallback=PrecisionFallback.restore(state.get("fallback", {})),
            held_out=HeldOutLevel.restore(
                state.get("health", []), state.get("planned", []), state.get("held_out_rows", "")
            ),
            rejections=Rejections(**state["refusals"]),
            response=None if state["demand"] is None else Response.restore(state["demand"]),
            deferred=[each for saved in state.get("deferred", []) if (each := Response.restore(saved)) is not None],
            trial=None if trial is None else OpenTrial(**deepcopy(trial)),
            **numbers,
        )
