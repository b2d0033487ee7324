"""Cost of an incident in steps, seconds, tokens, and money if a price is configured.

A step is counted once, under the first that holds: a restore undid it; its update was rejected; it was applied and
kept while the loss was above its level before the incident. Seconds are those of these steps plus the recovery time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from harness.analysis.postmortem.evidence import Cost, Evidence
from harness.core.events import StepRecord
from harness.sentinel.policy.policy_state import RESTORES

RAISED_SIGMAS = 2.0
LEVEL_RECORDS, SPREAD_RECORDS = 25, 100


def level_of(records: Sequence[StepRecord], onset: int) -> tuple[float, float] | None:
    """Mean and spread of the loss before the onset; None if there are too few applied records.

    Early in training the loss falls. Therefore the mean covers only the last records, and the spread comes from
    differences between neighbouring records.
    """
    losses = [r.loss for r in records if r.iteration < onset and not r.refused and math.isfinite(r.loss)]
    losses = losses[-SPREAD_RECORDS:]
    if len(losses) < 3:
        return None
    mean = sum(losses[-LEVEL_RECORDS:]) / len(losses[-LEVEL_RECORDS:])
    sigma = math.sqrt(sum((b - a) ** 2 for a, b in pairwise(losses)) / (2 * (len(losses) - 1)))
    return (mean, sigma) if math.isfinite(mean + sigma) else None


def cost_of(evidence: Evidence, records: Sequence[StepRecord]) -> Cost:
    """Total cost of one incident; `records` are all records of its window, not thinned."""
    incident, run = evidence.incident, evidence.run
    during = [record for record in records if incident.onset <= record.iteration <= incident.last]
    restores = [outcome for outcome in evidence.outcomes if outcome.kind in RESTORES and outcome.succeeded]
    undone = sum(max(0, outcome.steps_lost) for outcome in restores)
    refused = sum(record.refused for record in during)
    level = level_of(records, incident.onset)
    since = max((outcome.iteration for outcome in restores), default=incident.onset)
    raised = 0
    if level is not None:
        bound = level[0] + RAISED_SIGMAS * level[1]
        kept = [record for record in during if record.iteration >= since and not record.refused]
        raised = sum(not record.loss <= bound for record in kept)
    times = [record.step_time_s for record in records if 0 < record.step_time_s < math.inf]
    steps = undone + refused + raised
    seconds = steps * (median(times) if times else 0.0)
    seconds += sum(outcome.seconds for outcome in evidence.outcomes if 0 < outcome.seconds < math.inf)
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
