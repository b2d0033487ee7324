"""What one rejected update calls for, after others were rejected at the same place."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.sentinel.policy.incident_table import IncidentTable
from harness.sentinel.policy.lineage import Lineage
from harness.sentinel.policy.open_incident import OpenIncident, Rung
from harness.sentinel.policy.record_responses import RecordResponder
from harness.sentinel.policy.responses import Rejections
from harness.sentinel.policy.suspect_sources import SuspectSources
from tests.sentinel.cluster import CFG
from tests.sentinel.policy_runs import record

REJECTED = record(7, refused=True)


def responder_after(num_rejected: int, *, is_healthy: bool = False) -> RecordResponder:
    """Rejected updates in a row are one open incident, whose held-out loss may have been at its expected level."""
    incident = OpenIncident(
        number=1, onset=6, onset_step=6, end_step=6, kinds=["refusal"], new_kinds=["refusal"], is_healthy=is_healthy
    )
    return RecordResponder(
        cfg=CFG,
        incidents=IncidentTable(cfg=CFG, opened=[incident], num_incidents=1),
        lineage=Lineage(),
        suspects=SuspectSources(),
        rejections=Rejections(num_in_row=num_rejected, since=6),
        clips_logits=False,
    )


@pytest.mark.parametrize(("grad_norm", "rung"), [(1.0, Rung.skip), (math.inf, Rung.rewind)])
def test_only_finite_updates_of_a_healthy_state_are_skipped_on_and_on(grad_norm: float, rung: Rung) -> None:
    responder = responder_after(CFG.refused_in_row - 1, is_healthy=True)
    (response,) = responder.respond(replace(REJECTED, grad_norm=grad_norm), [])
    assert (response.rung, response.incident) == (rung, 1)


@pytest.mark.parametrize("is_healthy", [False, True])
def test_fewer_rejections_than_the_limit_are_skips(is_healthy: bool) -> None:
    responder = responder_after(CFG.refused_in_row - 2, is_healthy=is_healthy)
    assert [response.rung for response in responder.respond(REJECTED, [])] == [Rung.skip]


def test_an_overflow_after_many_rejections_calls_for_nothing() -> None:
    responder = responder_after(CFG.refused_in_row)
    assert responder.respond(replace(REJECTED, grad_norm=math.inf, loss_scale=1024.0), []) == []
    (response,) = responder.respond(REJECTED, [])
    assert response.rung is Rung.rewind


def test_a_finding_near_an_open_incident_opens_no_other() -> None:
    responder = responder_after(0)
    far = 6 + CFG.region_steps
    for step, number in ((far, 1), (far + 1 + CFG.region_steps, 2)):
        (response,) = responder.respond(record(step, refused=True), [])
        assert response.incident == number
