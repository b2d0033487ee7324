"""Cost of an incident in steps, seconds, tokens, and money if a price is configured.

A step is counted once, under the first that holds: a restore undid it; its update was rejected; it was applied and
kept while the loss was above its level before the incident, until it was back there. Seconds are those of these steps
plus the recovery time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from harness.analysis.postmortem.evidence import Cost, IncidentNumbers, RunFacts
from harness.core.events import Incident, Outcome, StepRecord
from harness.sentinel.policy.policy_state import RESTORES

RAISED_SIGMAS = 2.0


def cost_of(
    incident: Incident,
    numbers: IncidentNumbers,
    records: Sequence[StepRecord],
    outcomes: Sequence[Outcome],
    run: RunFacts,
) -> Cost:
    """Total cost of one incident; `records` are all records of its window, not thinned."""
    onset = incident.onset if numbers.onset is None else numbers.onset
    during = [record for record in records if onset <= record.iteration <= incident.last]
    restores = [outcome for outcome in outcomes if outcome.kind in RESTORES and outcome.succeeded]
    undone = sum(max(0, outcome.steps_lost) for outcome in restores)
    refused = sum(record.refused for record in during)
    raised = 0
    if numbers.level is not None:
        since = max((outcome.iteration for outcome in restores), default=onset)
        end = numbers.resumed_iteration or max(incident.last, incident.iteration)
        bound = numbers.level + RAISED_SIGMAS * numbers.sigma
        kept = [r for r in records if since <= r.iteration <= max(end, incident.last) and not r.refused]
        raised = sum(not record.loss <= bound for record in kept)
    times = [record.step_time_s for record in records if 0 < record.step_time_s < math.inf]
    steps = undone + refused + raised
    seconds = steps * (median(times) if times else 0.0)
    seconds += sum(outcome.seconds for outcome in outcomes if 0 < outcome.seconds < math.inf)
    gpu_hours = seconds * run.world_size / 3600
    price = run.settings.get("cluster.price_per_gpu_hour")
    return Cost(
        undone_steps=undone,
        refused_steps=refused,
        raised_steps=raised,
        seconds=seconds,
        tokens=steps * run.batch_tokens,
        gpu_hours=gpu_hours,
        money=None if price is None else gpu_hours * float(price),
    )
