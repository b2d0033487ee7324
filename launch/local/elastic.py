"""Which machines an elastic run (`launch.spares`, `launch.min_nodes`) may continue on, and which it uses next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from launch.local.node_group import NodeGroup
from launch.local.roster import Roster, choose_roster
from launch.node_record import NodeRecord
from launch.slurm.node_exclusion import NodeFaultKind


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """On which machines a run may continue that can lose some."""

    allowed: tuple[int, ...]
    """Numbers of nodes on which the run can continue, in ascending order; it prefers the last."""
    record: NodeRecord
    """Faults of the machines; written by node 0."""
    problems: list[str]
    """What the health check of this machine found."""

    @property
    def num_nodes(self) -> int:
        """Nodes that run ranks, if enough machines are there."""
        return self.allowed[-1]

    def choose(self, group: NodeGroup, roster: Roster) -> Roster | None:
        """The roster of the next start, by the machines that are connected now and their faults; only on node 0.

        A spare is used only if its last health check found nothing.
        """
        out = self.record.find_out()
        out.pop(group.hosts[group.number], None)  # several launchers on one machine, to rehearse: it is not lost
        present: dict[int, NodeFaultKind | None] = {group.number: None}
        used = set(roster)
        for number, link in group.links.items():
            exclusion = out.get(link.host)
            if number in used or link.problems is not None:
                fault = NodeFaultKind.health if link.problems else None
                present[number] = NodeFaultKind(exclusion.kind) if exclusion is not None else fault
        return choose_roster(roster, present, allowed=self.allowed, coordinator=group.number)
