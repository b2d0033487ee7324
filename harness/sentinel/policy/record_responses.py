"""Derives what one record calls for: from the table in `harness.sentinel.policy.responses`, and from what was found
and done before at the same place.

How: the parts of a record are answered in the order of cause and effect: fp8_range, the update itself, the findings of
the detectors, then the watched incidents that got no stronger answer. The policy state acts on the most urgent one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from harness.config.sentinel import AllowedActions, PolicyConfig
from harness.core.events import Finding, FindingKind, PrecursorSignal, ReducedRecord
from harness.sentinel.policy.incident_table import IncidentTable
from harness.sentinel.policy.lineage import Lineage
from harness.sentinel.policy.open_incident import (
    CAUSES,
    STATE_FINDINGS,
    WARNING_SIGNS,
    IncidentVerdict,
    OpenIncident,
    Rung,
)
from harness.sentinel.policy.responses import (
    BATCH_FINDINGS,
    FIRST_RUNG,
    Rejections,
    Response,
    has_broken_weights,
    has_excessive_gradient,
    has_finite_update,
    is_corrupted,
)
from harness.sentinel.policy.suspect_sources import SuspectSources

BROKEN_BATCHES = "the held-out loss is at its expected level but the gradients are far too large: the batches are bad"


@final
@dataclass(slots=True, kw_only=True)
class RecordResponder:
    """Answers one record. Opens, updates and closes incidents, and counts rejected updates."""

    cfg: PolicyConfig
    incidents: IncidentTable
    lineage: Lineage
    suspects: SuspectSources
    rejections: Rejections
    clips_logits: bool
    """Attention logits are clipped already."""

    def respond(self, record: ReducedRecord, findings: Sequence[Finding]) -> list[Response]:
        """The responses to a record, already in the lineage."""
        causes_first = sorted(findings, key=lambda finding: finding.kind not in CAUSES)
        to_fp8_range = [*self._respond_to_fp8_range(record, findings)]
        to_update = [*self._respond_to_update(record, findings)]
        to_findings = [*self._respond_to_findings(record, causes_first)]
        if only_watches(self.cfg):
            is_nonfinite = record.refused and not has_finite_update(record)
            to_update = _limit(to_update, Rung.skip if is_nonfinite else Rung.watch)
            to_fp8_range, to_findings = _limit(to_fp8_range, Rung.watch), _limit(to_findings, Rung.watch)
        responses = [*to_fp8_range, *to_update, *to_findings]
        return [*responses, *self._respond_to_watches(record, responses)]

    def respond_during_check(
        self, record: ReducedRecord, findings: Sequence[Finding], *, checked: OpenIncident | None
    ) -> list[Response]:
        """The responses to a record that was issued before a held-out check. Only what the check cannot judge, and what
        no later record calls for again, is answered. A rejected update counts for the checked incident."""
        to_fp8_range = [each.without_restore() for each in self._respond_to_fp8_range(record, findings)]
        to_update = [*self._respond_to_update_during_check(record, checked)]
        certain = [each for each in findings if each.kind in STATE_FINDINGS or FIRST_RUNG.get(each.kind) is Rung.halt]
        growing = [each for each in findings if each.signal == PrecursorSignal.attention_logit]
        to_findings = self._respond_to_findings(record, [*certain, *growing])
        outranking = [each._replace(outranks_check=each.rung > Rung.watch) for each in to_findings]
        return [*to_fp8_range, *to_update, *(each for each in outranking if each.outranks_check or each.is_owed)]

    def _respond_to_fp8_range(self, record: ReducedRecord, findings: Iterable[Finding]) -> Iterator[Response]:
        """Respond to fp8_range before anything else in the record: it is the cause of the rest."""
        for finding in [finding for finding in findings if finding.kind is FindingKind.fp8_range]:
            incident = self._find_or_open(finding.kind, record, onset=min(finding.onset, record.iteration))
            incident.unfit = finding.message
            rung = Rung.rewind if incident.shows_damage else Rung.watch
            yield Response(
                Rung.none if incident.is_treated else rung, incident.number, finding.message, leaves_fp8=True
            )

    def _respond_to_update(self, record: ReducedRecord, findings: Iterable[Finding]) -> Iterator[Response]:
        """Respond to a rejected update or non-finite weights, independently of the detectors."""
        if is_corrupted(record):
            yield self._repeat_batch(record)
            return
        is_rejection = self.rejections.add(record)
        first = self.rejections.since if self.rejections.num_in_row else record.iteration
        if has_broken_weights(record):
            incident = self._find_or_open("nonfinite weights", record, onset=first - 1)
            yield Response(Rung.rollback, incident.number, "the weights are not finite")
        elif is_rejection and self.rejections.num_in_row >= self.cfg.refused_in_row:
            incident = self._find_or_open("refusals", record, onset=first)
            add_rejection(incident, record, self.lineage)
            reason = f"{self.rejections.num_in_row} updates rejected in a row: the state is damaged, not the batches"
            if incident.has_only_rejections and incident.is_healthy and has_finite_update(record):
                yield Response(Rung.skip, incident.number, BROKEN_BATCHES, batch=record.cursor)
            elif incident.has_only_rejections and incident.target_step is not None and has_finite_update(record):
                reason = f"the update of batch {record.cursor} was rejected again after a restore"
                yield Response(Rung.skip, incident.number, reason, check_first=True, batch=record.cursor)
            else:
                yield Response(Rung.rewind, incident.number, reason, batch=record.cursor)
        elif is_rejection:
            incident = self._find_or_open("refusal", record, onset=record.iteration)
            add_rejection(incident, record, self.lineage)
            rung = Rung.skip if incident.blames_data else Rung.rewind
            is_often = len(incident.refused) >= self.cfg.refused_in_row and incident.looks_like_data
            yield Response(
                rung,
                incident.number,
                f"the update of batch {record.cursor} was rejected",
                check_first=has_finite_update(record) and (is_often or record.in_planned_change),
                gives_back=any(finding.kind is FindingKind.fp8_range for finding in findings),  # fp8 is to blame
                batch=record.cursor,
            )

    def _respond_to_update_during_check(
        self, record: ReducedRecord, checked: OpenIncident | None
    ) -> Iterator[Response]:
        if is_corrupted(record):
            yield self._repeat_batch(record)
        elif self.rejections.add(record) and checked is not None:
            add_rejection(checked, record, self.lineage)
            reason = f"the update of batch {record.cursor} was rejected"
            yield Response(Rung.skip, checked.number, reason, batch=record.cursor)

    def _repeat_batch(self, record: ReducedRecord) -> Response:
        """The response to a corrupted update: its batch is innocent."""
        incident = self._find_or_open(FindingKind.corruption, record, onset=record.iteration)
        reason = f"the update of batch {record.cursor} was rejected: {record.corrupted} was computed wrong"
        reason = f"{reason}; the batch is consumed again"
        return Response(Rung.skip, incident.number, reason, gives_back=True, batch=record.cursor)

    def _respond_to_findings(self, record: ReducedRecord, findings: Iterable[Finding]) -> Iterator[Response]:
        for finding in findings:
            rung = FIRST_RUNG.get(finding.kind)
            if rung is None or (record.refused and finding.kind in BATCH_FINDINGS):
                continue
            is_drift = finding.kind in (FindingKind.weight_drift, FindingKind.precursor)
            onset = record.iteration if is_drift else min(finding.onset, record.iteration)
            incident = self._find_or_open(finding.kind, record, onset=onset, cursors=finding.cursors)
            if incident.is_treated and finding.kind is FindingKind.corrupting_rank:
                rung = Rung.halt  # the rank is still in the run
            elif incident.is_treated and rung is not Rung.halt:
                rung = Rung.none if finding.kind in WARNING_SIGNS else Rung.rewind
            elif finding.kind is FindingKind.loss_spike and incident.has_cause:
                rung = Rung.rewind
            elif finding.kind is FindingKind.level_shift and not incident.is_tolerable(
                self.lineage, record.iteration, cfg=self.cfg
            ):
                rung = Rung.rollback
            reason = finding.message
            if rung is Rung.halt and finding.kind is FindingKind.corrupting_rank:
                reason = f"{reason}, also after a restore: restart without its machine"
            clips_logits = finding.signal == PrecursorSignal.attention_logit and not self.clips_logits
            if rung is not Rung.none or clips_logits:
                is_spike = finding.kind is FindingKind.loss_spike
                yield Response(rung, incident.number, reason, check_first=is_spike, clips_logits=clips_logits)

    def _respond_to_watches(self, record: ReducedRecord, others: Sequence[Response]) -> Iterator[Response]:
        """Evaluate the watched incidents to which the record has no stronger response. An incident with a finding in
        this record is not closed: the response to the finding would be lost with it."""
        answered = {response.incident for response in others if response.rung > Rung.watch}
        has_finding = {response.incident for response in others}
        watched = [each for each in self.incidents.opened if each.is_watched and each.number not in answered]
        for incident in watched:
            first = incident.kinds[0]
            match incident.evaluate_watch(self.lineage, record.iteration, cfg=self.cfg):
                case None:
                    continue
                case IncidentVerdict.stuck | IncidentVerdict.lingering as verdict if only_watches(self.cfg):
                    if record.iteration >= incident.watched_until:
                        self.incidents.close(incident, verdict)
                case IncidentVerdict.stuck:
                    yield Response(Rung.rewind, incident.number, f"the loss does not recover by itself after {first}")
                case IncidentVerdict.lingering:
                    yield Response(Rung.rollback, incident.number, f"the loss stays high after {first}")
                case verdict if incident.number not in has_finding:
                    self.incidents.close(incident, verdict)

    def _find_or_open(
        self, kind: str, record: ReducedRecord, *, onset: int, cursors: Sequence[int] = ()
    ) -> OpenIncident:
        lineage, suspects = self.lineage, self.suspects
        return self.incidents.find_or_open(
            kind, record, onset=onset, cursors=cursors, lineage=lineage, suspects=suspects
        )


def only_watches(cfg: PolicyConfig) -> bool:
    """Whether the config allows no action but watch, and skip for non-finite updates."""
    return cfg.actions == AllowedActions.nonfinite_only


def add_rejection(incident: OpenIncident, record: ReducedRecord, lineage: Lineage) -> None:
    """Add a rejected update to its incident."""
    if has_finite_update(record):
        is_excessive = has_excessive_gradient(record, lineage.grad_level())
        incident.add_rejected(
            cursor=record.cursor, loss=record.loss, grad_norm=record.grad_norm, is_excessive=is_excessive
        )
    else:
        incident.is_finite = False
        incident.is_divergent = incident.is_divergent or not math.isfinite(record.loss)


def _limit(responses: Iterable[Response], highest: Rung) -> list[Response]:
    """The responses without a held-out check and with at most this rung; only a response to a rejected update skips."""
    return [
        response._replace(
            rung=min(response.rung, highest if response.batch is not None else Rung.watch),
            check_first=False,
            clips_logits=False,
            batch=response.batch if highest >= Rung.skip else None,
            leaves_fp8=False,
        )
        for response in responses
    ]
