"""Computes which batches a restore excludes, and which iteration the restored state must precede.

Why: the restored state must not have trained on an excluded batch, or the run differs from one that never saw it. A
place that failed again after a restore needs an older state than before, or the run loops.
How: the batch of the onset and the one before it are blamed, because a bad update shows in the next step. A first
rewind excludes these two and the batches that the findings name, a wider one their neighbours too, a rollback a window.
The state must precede the excluded batches and every state that was restored for this incident before. If there is
no such state, and the run had passed the place since the last restore, any state before the onset is allowed.
Batches that were given back are consumed between others with far higher indices. Where indices jump like that, the
batch of the onset is blamed at first, and the one before it if the incident recurs after a restore. The range around a
batch that was given back holds only batches that were given back with it: its other neighbours were consumed long ago.
"""

from __future__ import annotations

from harness.config.sentinel import PolicyConfig
from harness.sentinel.policy.lineage import Lineage, SeenStep
from harness.sentinel.policy.open_incident import OpenIncident, Rung

MOST_WINDOWS = 3
"""Windows of excluded batches that may lie between two batches consumed one after the other."""


def excluded_batches(incident: OpenIncident, rung: Rung, *, lineage: Lineage, cfg: PolicyConfig) -> list[int]:
    """First and last batch to exclude; empty if no batch is blamed or the onset is no longer stored."""
    at_onset = lineage.last_seen(incident.onset)
    if at_onset is None or not incident.blames_data:
        return []
    before = lineage.last_seen(at_onset.iteration - 1) or at_onset
    furthest = max(cfg.rollback_window_batches, cfg.neighbours)
    if _are_close(before, at_onset, lineage, cfg=cfg):
        center, blamed = at_onset, [before.cursor, at_onset.cursor]
    else:
        center = at_onset if incident.target_step is None else before
        blamed = [center.cursor]
    blamed += [cursor for cursor in incident.cursors if abs(cursor - center.cursor) <= furthest]
    match rung:
        case Rung.rewind:
            backward = forward = 0
        case Rung.wide:
            backward = forward = cfg.neighbours
        case _:
            forward = cfg.rollback_window_batches // 2
            backward = 0 if incident.without_margin else forward
    newest = lineage.newest_batch(center.iteration)
    if max(blamed) >= newest.cursor and center.cursor > lineage.newest_forgotten:
        first = max(min(blamed) - backward, lineage.newest_forgotten + 1, lineage.lowest_batch())
        last = max(blamed) + forward
    else:
        given_back = {seen.cursor for seen in lineage.seen if seen.iteration > newest.iteration} | {center.cursor}
        first = last = center.cursor
        while first - 1 in given_back and first > min(blamed) - backward:
            first -= 1
        while last + 1 in given_back and last < max(blamed) + forward:
            last += 1
    assert first <= center.cursor <= last, "the range holds the blamed batch"
    return [first, last]


def _are_close(before: SeenStep, after: SeenStep, lineage: Lineage, *, cfg: PolicyConfig) -> bool:
    """Whether one range can blame two batches consumed one after the other: they are neighbours, or what lies between
    them is excluded already."""
    gap = after.cursor - before.cursor
    if abs(gap) <= max(cfg.neighbours, 1):
        return True
    is_near = 0 < gap <= MOST_WINDOWS * max(cfg.rollback_window_batches, cfg.neighbours)
    return is_near and not any(before.cursor < seen.cursor < after.cursor for seen in lineage.seen)


def restore_bound(
    incident: OpenIncident, rung: Rung, exclude: list[int], *, lineage: Lineage, cfg: PolicyConfig
) -> int:
    """The iteration that the restored state must precede. If updates were rejected in a row, the update applied just
    before the first of them may have done the damage."""
    bounds = [max(incident.onset - 1, 0) if "refusals" in incident.kinds else incident.onset]
    if exclude:
        consumed = lineage.consumed_at(*exclude)
        assert consumed is not None, "only stored batches are excluded"
        bounds.append(consumed)
    if rung >= Rung.rollback and not incident.without_margin:
        bounds.append(lineage.before_step(incident.onset_step - cfg.rollback_margin_steps))
    if incident.target_step is not None and not (incident.is_passed and incident.without_margin):
        bounds.append(lineage.before_step(incident.target_step))
    return min(bounds)
