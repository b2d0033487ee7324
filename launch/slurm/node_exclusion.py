"""Chooses the nodes that the next start of a run does not use because of their faults. Pure; needs no Slurm.

Why: Slurm gives a node back to the job that just left it unless somebody drains it. One broken GPU then fails every
start of a healthy run.
How: the health check blames a node only for its own fault (`HealthProblem.blames`). A full shared disk and a peer that
does not answer blame no node. Failed checks of a Slurm job are recorded in RUN/requeues.jsonl, all other faults in
RUN/nodes.json (`launch.node_record`). A node is out after NUM_FAULTS faults of one kind within
`launch.slurm.exclude_hours`, until that time has passed since the last of them. A node that was lost once is out only
until it has joined again and passed its health check. A Slurm job excludes at most `launch.slurm.max_excluded` nodes,
and never so many that Slurm could not start the job.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType
from typing import Any, NamedTuple, final

from harness.config.launch import SlurmConfig

HOUR_S = 3600.0
BLAME = re.compile(r"^harness: health: node (\S+): (.*)$", re.MULTILINE)


class NodeFaultKind(StrEnum):
    """What a node did, the worst first."""

    lost = "lost"
    """Its launcher died, or its machine was silent."""
    corrupting = "corrupting"
    """The sentinel found that weights of its ranks changed without an update, or that a rank computes wrong numbers."""
    hung = "hung"
    """One of its ranks hung."""
    health = "health"
    """It failed a health check."""
    outlier = "outlier"
    """The sentinel found that loss or gradient of one of its ranks was far from those of the others."""
    slow = "slow"
    """The sentinel found that its ranks slow down the run."""


NUM_FAULTS = {
    NodeFaultKind.lost: 1,
    NodeFaultKind.corrupting: 1,
    NodeFaultKind.hung: 2,
    NodeFaultKind.health: 2,
    NodeFaultKind.outlier: 2,
    NodeFaultKind.slow: 2,
}
"""Faults of one kind after which a node is out."""
NUM_LOSSES = 2
"""A node that was lost this often stays out although it has joined again."""


class HealthProblem(NamedTuple):
    """What a health check found."""

    node: str
    """The node at fault, or the one that reported it."""
    text: str
    blames: bool = True
    """False if the cause may be elsewhere."""

    def render(self) -> str:
        """A line of the job log; `parse_blamed_nodes` reads it."""
        return f"harness: health: {'node' if self.blames else 'seen from node'} {self.node}: {self.text}"


def parse_blamed_nodes(log: str) -> dict[str, str]:
    """The nodes that a health check blamed, each with its first problem."""
    exclusions: dict[str, str] = {}
    for node, text in BLAME.findall(log):
        exclusions.setdefault(node, text)
    return exclusions


class NodeFault(NamedTuple):
    """One fault of a node."""

    time: float
    """Seconds since 1970."""
    node: str
    """Name of the machine."""
    reason: str
    """The fault in one line."""
    kind: NodeFaultKind = NodeFaultKind.health
    evidence: str = ""
    """Where to look: an iteration of the log, or the logs of a start."""
    returned: float | None = None
    """When the node was lost and has joined again: the time of that, in seconds since 1970."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExclusion:
    """A node that is excluded."""

    node: str
    reason: str
    """Its last fault."""
    num_failures: int
    until: float
    """When it may be used again, in seconds since 1970."""
    kind: str = NodeFaultKind.health
    """Kind of the faults."""
    since: float = 0.0
    """Time of its last fault, in seconds since 1970; 0: not recorded."""
    evidence: str = ""

    def render(self) -> str:
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.until))
        if self.kind == NodeFaultKind.lost and self.num_failures < NUM_LOSSES:
            end = f"it joins again and passes its health check, or {end}"
        found = f"failed {self.num_failures} health checks, last: " if self.kind == NodeFaultKind.health else ""
        again = f" ({self.num_failures} times {self.kind})" if not found and self.num_failures > 1 else ""
        return f"node {self.node} is excluded until {end}: {found}{self.reason}{again}"


def find_out_nodes(faults: Iterable[NodeFault], *, now: float, hours: float) -> list[NodeExclusion]:
    """The nodes that are out now, worst first: most faults, then the latest. Each is named with its worst kind."""
    keep_s = hours * HOUR_S
    recent: dict[tuple[str, NodeFaultKind], list[NodeFault]] = defaultdict(list)
    for fault in sorted(faults, key=lambda fault: fault.time):
        if fault.time + keep_s > now:
            recent[fault.node, fault.kind].append(fault)
    found: dict[str, NodeExclusion] = {}
    for kind in NodeFaultKind:
        for (node, its_kind), node_faults in recent.items():
            if its_kind is kind and node not in found and is_out(node_faults):
                last = node_faults[-1]
                found[node] = NodeExclusion(
                    node=node,
                    reason=last.reason,
                    num_failures=len(node_faults),
                    until=last.time + keep_s,
                    kind=str(kind),
                    since=last.time,
                    evidence=last.evidence,
                )
    return sorted(found.values(), key=lambda exclusion: (-exclusion.num_failures, -exclusion.until, exclusion.node))


def is_out(faults: Sequence[NodeFault]) -> bool:
    """Whether these faults of one kind put a node out."""
    kind = faults[0].kind
    if kind is NodeFaultKind.lost:
        return len(faults) >= NUM_LOSSES or faults[-1].returned is None
    return len(faults) >= NUM_FAULTS[kind]


def choose_exclusions(faults: Iterable[NodeFault], *, now: float, limits: SlurmConfig) -> list[NodeExclusion]:
    """The nodes that a Slurm job excludes now, worst first."""
    return find_out_nodes(faults, now=now, hours=limits.exclude_hours)[: limits.max_excluded]


def limit_exclusions(
    exclusions: Sequence[NodeExclusion], can_start: Callable[[list[str]], bool]
) -> list[NodeExclusion]:
    """As many of them, worst first, as leave enough nodes for the job to start."""
    kept = list(exclusions)
    while kept and not can_start([exclusion.node for exclusion in kept]):
        kept.pop()
    return kept


def drop_expired(exclusions: Iterable[NodeExclusion], *, now: float) -> list[NodeExclusion]:
    """Those that have not expired."""
    return [exclusion for exclusion in exclusions if exclusion.until > now]


FIELD_KINDS: dict[str, tuple[type, ...]] = {
    "time": (int, float),
    "returned": (int, float, NoneType),
    "num_failures": (int,),
    "until": (int, float),
    "since": (int, float),
}
"""Types of the fields of a fault or an exclusion in JSON; all others are texts."""


def faults_from_json(items: Iterable[Mapping[str, Any]]) -> list[NodeFault]:
    """Raises TypeError or ValueError if a field is missing, unknown or of a wrong type."""
    faults = [NodeFault(**check_fields(item)) for item in items]
    return [fault._replace(kind=NodeFaultKind(fault.kind)) for fault in faults]


def exclusions_from_json(items: Iterable[Mapping[str, Any]]) -> tuple[NodeExclusion, ...]:
    """Raises TypeError or ValueError if a field is missing, unknown or of a wrong type."""
    return tuple(NodeExclusion(**check_fields(item)) for item in items)


def check_fields(item: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in (fields := dict(item)).items():
        if type(value) not in FIELD_KINDS.get(name, (str,)):
            raise TypeError(f"{name} is {value!r}")
    return fields
