"""Which nodes the next start of a job leaves out, because they failed its health check. Pure; needs no Slurm.

Why: Slurm hands a node back to the job that has just left it, as long as nobody drains it. One broken GPU then fails
every start of a healthy run.
How: a health check names a node only for a fault of its own (`Complaint.blames`): a full disk that all nodes share, or
a peer that does not answer, blames nobody. Each failure is kept in RUN/requeues.jsonl. A node that failed
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


class Complaint(NamedTuple):
    """What a health check found."""

    node: str
    """Which node is at fault, or which one saw it."""
    text: str
    blames: bool = True
    """False where the cause may lie elsewhere."""

    def render(self) -> str:
        """A line of the job's log; `blamed` reads it."""
        return f"harness: health: {'node' if self.blames else 'seen from node'} {self.node}: {self.text}"


def blamed(log: str) -> dict[str, str]:
    """The nodes that a health check found at fault, each with its first complaint."""
    found: dict[str, str] = {}
    for node, text in BLAME.findall(log):
        found.setdefault(node, text)
    return found


class Failure(NamedTuple):
    """A health check that a node failed."""

    time: float
    """Seconds since 1970."""
    node: str
    reason: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A node that is left out."""

    node: str
    reason: str
    """Its last complaint."""
    num_failures: int
    until: float
    """When it may be used again, in seconds since 1970."""

    def render(self) -> str:
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.until))
        return (
            f"node {self.node} is excluded until {end}: failed {self.num_failures} health checks, last: {self.reason}"
        )


def excluded(failures: Iterable[Failure], *, now: float, limits: SlurmConfig) -> list[Exclusion]:
    """The nodes to leave out now, worst first: most failures, then the latest."""
    keep_s = limits.exclude_hours * HOUR_S
    recent: dict[str, list[Failure]] = defaultdict(list)
    for failure in sorted(failures):
        if failure.time + keep_s > now:
            recent[failure.node].append(failure)
    found = [
        Exclusion(node=node, reason=each[-1].reason, num_failures=len(each), until=each[-1].time + keep_s)
        for node, each in recent.items()
        if len(each) >= NUM_FAILURES
    ]
    found.sort(key=lambda exclusion: (-exclusion.num_failures, -exclusion.until, exclusion.node))
    return found[: limits.max_excluded]


def bearable(found: Sequence[Exclusion], can_start: Callable[[list[str]], bool]) -> list[Exclusion]:
    """As many of them, worst first, as leave the job enough nodes to start on."""
    kept = list(found)
    while kept and not can_start([exclusion.node for exclusion in kept]):
        kept.pop()
    return kept


def still(found: Iterable[Exclusion], *, now: float) -> list[Exclusion]:
    """Those that have not expired."""
    return [exclusion for exclusion in found if exclusion.until > now]


def from_json(words: Iterable[Mapping[str, object]]) -> tuple[Exclusion, ...]:
    """Raises TypeError where a field is missing or unknown."""
    return tuple(Exclusion(**each) for each in words)  # type: ignore[arg-type]
