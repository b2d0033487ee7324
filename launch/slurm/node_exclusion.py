"""Chooses the nodes that the next start of a job excludes because they failed its health check. Pure; needs no Slurm.

Why: Slurm gives a node back to the job that just left it unless somebody drains it. One broken GPU then fails every
start of a healthy run.
How: the health check blames a node only for its own fault (`HealthProblem.blames`). A full shared disk and a
peer that does not answer blame no node. Each failure is recorded in RUN/requeues.jsonl. A node that failed
NUM_FAILURES times within `launch.slurm.exclude_hours` is excluded until that time has passed since its last failure.
At most `launch.slurm.max_excluded` nodes are excluded, and never so many that Slurm could not start the job.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from harness.config.launch import SlurmConfig

NUM_FAILURES = 2
HOUR_S = 3600.0
BLAME = re.compile(r"^harness: health: node (\S+): (.*)$", re.MULTILINE)


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


class HealthCheckFailure(NamedTuple):
    """A health check that a node failed."""

    time: float
    """Seconds since 1970."""
    node: str
    reason: str


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

    def render(self) -> str:
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.until))
        return (
            f"node {self.node} is excluded until {end}: failed {self.num_failures} health checks, last: {self.reason}"
        )


def choose_exclusions(
    failures: Iterable[HealthCheckFailure], *, now: float, limits: SlurmConfig
) -> list[NodeExclusion]:
    """The nodes to exclude now, worst first: most failures, then the latest."""
    keep_s = limits.exclude_hours * HOUR_S
    recent: dict[str, list[HealthCheckFailure]] = defaultdict(list)
    for failure in sorted(failures):
        if failure.time + keep_s > now:
            recent[failure.node].append(failure)
    exclusions = [
        NodeExclusion(
            node=node,
            reason=node_failures[-1].reason,
            num_failures=len(node_failures),
            until=node_failures[-1].time + keep_s,
        )
        for node, node_failures in recent.items()
        if len(node_failures) >= NUM_FAILURES
    ]
    exclusions.sort(key=lambda exclusion: (-exclusion.num_failures, -exclusion.until, exclusion.node))
    return exclusions[: limits.max_excluded]


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


def exclusions_from_json(items: Iterable[Mapping[str, object]]) -> tuple[NodeExclusion, ...]:
    """Raises TypeError if a field is missing or unknown."""
    return tuple(NodeExclusion(**item) for item in items)  # type: ignore[arg-type]
