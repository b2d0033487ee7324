"""Computes which batches a restore excludes, and which iteration the restored state must precede.

Why: the restored state must not have trained on an excluded batch, or the run differs from one that never saw it. A
place that failed again after a restore needs an older state than before, or the run loops.
How: the batch of the onset and the one before it are blamed, because a bad update shows in the next step. A first
rewind excludes these two and the batches that the findings name, a wider one their neighbours too, a rollback a window.
The state must precede the first excluded batch and every state that was restored for this incident before. If there is
no such state, and the run had passed the place since the last restore, any state before the onset is allowed.
"""

from __future__ import annotations

from harness.config.sentinel import PolicyConfig
from harness.sentinel.policy.lineage import Lineage
from harness.sentinel.policy.open_incident import OpenIncident, Rung


def excluded_batches(incident: OpenIncident, rung: Rung, *, lineage: Lineage, cfg: PolicyConfig) -> list[int]:
    """First and last batch to exclude; empty if no batch is blamed or the onset is no longer stored."""
    at_onset = lineage.last_seen(incident.onset)
    if at_onset is None or not incident.blames_data:
        return []
    before = lineage.last_seen(at_onset.iteration - 1) or at_onset
    furthest = max(cfg.rollback_window_batches, cfg.neighbours)
    blamed = [before.cursor, at_onset.cursor]
    blamed += [cursor for cursor in incident.cursors if abs(cursor - at_onset.cursor) <= furthest]
    match rung:
        case Rung.rewind:
            backward = forward = 0
        case Rung.wide:
            backward = forward = cfg.neighbours
        case _:
            forward = cfg.rollback_window_batches // 2
            backward = 0 if incident.without_margin else forward
    return [max(min(blamed) - backward, lineage.seen[0].cursor), max(blamed) + forward]


def restore_bound(
    incident: OpenIncident, rung: Rung, exclude: list[int], *, lineage: Lineage, cfg: PolicyConfig
) -> int:
    """The iteration that the restored state must precede. If updates were rejected in a row, the update applied just
    before the first of them may have done the damage."""
    bounds = [max(incident.onset - 1, 0) if "refusals" in incident.kinds else incident.onset]
    if exclude:
        consumed = lineage.consumed_at(exclude[0])
        assert consumed is not None, "only stored batches are excluded"
        bounds.append(consumed)
    if rung >= Rung.rollback and not incident.without_margin:
        bounds.append(lineage.before_step(incident.onset_step - cfg.rollback_margin_steps))
    if incident.target_step is not None and not (incident.is_passed and incident.without_margin):
        bounds.append(lineage.before_step(incident.target_step))
    return min(bounds)
