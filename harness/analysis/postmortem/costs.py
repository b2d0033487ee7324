"""Cost of an incident in steps, seconds, tokens, and money if a price is configured.

A step is counted once, under the first that holds: a restore undid it; its update was rejected; it was applied and
kept while the loss was above its level before the incident, until it was back there. A step that was in flight when a
restore began counts too, though it follows the last iteration of the incident. Seconds are those of these steps plus
the recovery time. Tokens are those of their batches, whose size may change during the run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median

from harness.analysis.postmortem.evidence import Cost, IncidentNumbers, RunFacts
from harness.core.batch_sizes import TokenSchedule
from harness.core.events import Incident, Outcome, StepRecord
from harness.sentinel.policy.policy_state import RESTORES

RAISED_SIGMAS = 2.0


def cost_of(
    incident: Incident,
    numbers: IncidentNumbers,
    records: Sequence[StepRecord],
    outcomes: Sequence[Outcome],
    run: RunFacts,
    schedule: TokenSchedule | None,
    repeated: Collection[int],
) -> Cost:
    """Total cost of one incident; `records` are all records of its window, not thinned. Tokens are 0 without a
    schedule. Steps from before the incident that were trained again (`repeated`) do not count as raised."""
    onset = incident.onset if numbers.onset is None else numbers.onset
    restores = [outcome for outcome in outcomes if outcome.kind in RESTORES and outcome.succeeded]
    undone = [cursor for restore in restores for cursor in _undone_batches(restore, records)]
    last = max([incident.last, *(restore.iteration for restore in restores)])
    refused = [
        record.cursor
        for record in records
        if record.refused and not record.is_empty and onset <= record.iteration <= last
    ]
    raised: list[int] = []
    if numbers.level is not None:
        since = max((outcome.iteration for outcome in restores), default=onset)
        end = numbers.resumed_iteration or max(incident.last, incident.iteration)
        bound = numbers.level + RAISED_SIGMAS * numbers.sigma
        kept = [r for r in records if since <= r.iteration <= max(end, incident.last) and not r.refused]
        raised = [r.cursor for r in kept if not r.loss <= bound and r.iteration not in repeated]
    times = [record.step_time_s for record in records if 0 < record.step_time_s < math.inf]
    batches = [*undone, *refused, *raised]
    seconds = len(batches) * (median(times) if times else 0.0)
    seconds += sum(outcome.seconds for outcome in outcomes if 0 < outcome.seconds < math.inf)
    gpu_hours = seconds * run.num_gpus / 3600
    price = run.settings.get("cluster.price_per_gpu_hour")
    return Cost(
        undone_steps=len(undone),
        refused_steps=len(refused),
        raised_steps=len(raised),
        seconds=seconds,
        tokens=0 if schedule is None else schedule.tokens_of(batches),
        gpu_hours=gpu_hours,
        money=None if price is None else gpu_hours * float(price),
    )


def _undone_batches(restore: Outcome, records: Sequence[StepRecord]) -> list[int]:
    """Batch indices of the steps that a restore undid; those from before the records are counted back from there."""
    applied: list[StepRecord] = []
    for record in records:
        if record.refused or record.iteration > restore.iteration:
            continue
        while applied and applied[-1].step >= record.step:  # an earlier restore undid them
            applied.pop()
        applied.append(record)
    count = max(0, restore.steps_lost)
    found = [record.cursor for record in applied[max(0, len(applied) - count) :]]
    first = found[0] if found else 0
    return [*range(first - (count - len(found)), first), *found]
