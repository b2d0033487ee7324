"""Restarts a healthy run on better machines, right after a checkpoint; only on node 0.

Why: a run that lost a machine and went on with fewer nodes must take it back when it is there again, without waiting
for the next failure. A restart right after a checkpoint loses only the steps since then.
How: while a machine is missing and another one waits, the launcher looks for a new checkpoint every few seconds. When
there is one, it stops all ranks as after a failure; the decision (`launch.local.restart`) takes the machine into the
roster. With `launch.replace_running`, machines that the sentinel named are replaced in the same way. Such a restart
does not count against `launch.max_restarts`. If a stop request comes between, the run ends with 75.
"""

from __future__ import annotations

import math
from typing import final

from harness.checkpoint.catalog import Health
from harness.config.errors import EXIT_INTERRUPTED
from harness.core.events import EndCause
from harness.core.node_name import machine_name
from launch.local.node_group import NodeFailure, NodeGroup
from launch.local.restart import RestartHistory, describe_change
from launch.restart_budget import Reached, newest_checkpoint

CHECK_EVERY_S = 2.0


@final
class RestartPlanner:
    """Looks for a reason to restart a healthy run."""

    def __init__(self, group: NodeGroup, history: RestartHistory) -> None:
        self._group, self._history = group, history
        self._checked_s = -math.inf
        self._saved: Reached | None = None
        self._is_waiting = False

    def check(self, now_s: float) -> NodeFailure | None:
        """At most once every CHECK_EVERY_S: the planned restart, as a failure that stops all ranks; else None."""
        group, history = self._group, self._history
        if not group.is_coordinator or history.elastic is None or now_s - self._checked_s < CHECK_EVERY_S:
            return None
        self._checked_s = now_s
        has_spare = len(group.links) > len(group.active_links())
        is_missing = group.num_nodes < history.elastic.num_nodes
        if not has_spare or not (is_missing or history.limits.replace_running):
            self._is_waiting = False
            return None
        saved = newest_checkpoint(history.run, Health.good, Health.candidate)
        if not self._is_waiting or saved == self._saved:
            self._is_waiting, self._saved = True, saved
            return None
        self._saved = saved
        return self._plan()

    def _plan(self) -> NodeFailure | None:
        group, history = self._group, self._history
        assert history.elastic is not None
        if history.limits.replace_running:
            history.record_faults(group)
        roster = history.elastic.choose(group, group.roster)
        is_better = roster is not None and roster != group.roster and len(roster) >= group.num_nodes
        if not is_better or any(link.is_done for link in group.active_links().values()):
            return None
        assert roster is not None
        return NodeFailure(
            node_rank=0,
            host=machine_name(),
            exit_code=EXIT_INTERRUPTED,
            line=f"planned restart after a checkpoint: {describe_change(group, roster, history).text}",
            cause=EndCause.planned,
        )
