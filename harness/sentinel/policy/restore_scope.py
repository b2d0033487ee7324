"""How far back a restore goes, and which batches are never seen again.

Why: a batch that is excluded must also be unlearned, or the run is not the one that never saw it. And a place that
failed again after a restore must be left further back than before, or the run turns in circles.
How: the guilty batch is that of the onset or the one before it: an update that does harm shows in the next step. A
first rewind excludes these two and what the findings name, a further one their neighbours too, a rollback a window.
The state must be older than the first excluded batch, and older than everything the case was set back to before. Where
no such state is left, and the run had passed the place since the last restore, any from before the onset will do.
"""

from __future__ import annotations

from harness.config.sentinel import PolicyConfig
from harness.sentinel.policy.lineage import Lineage
from harness.sentinel.policy.open_incident import OpenIncident, Rung


def excluded_batches(incident: OpenIncident, rung: Rung, *, lineage: Lineage, cfg: PolicyConfig) -> list[int]:
    """First and last batch never to be seen again; empty where no batch is to blame or none is remembered."""
    guilty = lineage.last_seen(incident.onset)
    if guilty is None or not incident.blames_data:
        return []
    before = lineage.last_seen(guilty.iteration - 1) or guilty
    furthest = max(cfg.rollback_window_batches, cfg.neighbours)
    blamed = [before.cursor, guilty.cursor]
    blamed += [cursor for cursor in incident.cursors if abs(cursor - guilty.cursor) <= furthest]
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
    """The state must be from before this iteration."""
    bounds = [incident.onset]
    if exclude:
        learned = lineage.consumed_at(exclude[0])
        assert learned is not None, "only what is remembered is excluded"
        bounds.append(learned)
    if rung >= Rung.rollback and not incident.without_margin:
        bounds.append(lineage.before_step(incident.onset_step - cfg.rollback_margin_steps))
    if incident.target_step is not None and not (incident.is_passed and incident.without_margin):
        bounds.append(lineage.before_step(incident.target_step))
    return min(bounds)
