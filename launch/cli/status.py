"""`harness status`: who is alive, how far the run is, and which ranks hold it up.

Why: before anybody logs in on a machine, one command must say whether there is a reason to; a script asks the same.
How: the run directory is all that is read: status.json, the heartbeat of every rank, the end of the event log, and
the nodes that requeues.jsonl excludes. A rank is *fresh* while its loop moves, *late* when its process writes but its
loop stands still, *silent* when nothing was heard of it for a while, *ended* once it has said so. Exit code 0:
everybody is alive, or the run ended in order; 1: somebody is silent, nobody has begun, or the run ended badly; 2: a
complaint.
Left out: clocks of other machines are taken to agree with this one's to within seconds.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, final

from harness.checkpoint.listing import age_text
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, require
from harness.core.events import ABOUT_SPEED, Finding
from harness.core.rundir import RunDir
from harness.telemetry import heartbeat
from harness.telemetry.event_log import tail
from harness.telemetry.heartbeat import MOVING, Beat, RunStatus
from launch.cli.parser import Parser
from launch.slurm import requeue
from launch.slurm.node_exclusion import Exclusion, still

EXIT_SILENT = 1
LATE_S = 30.0
LATE_WRITES = 2
"""Intervals of the heartbeat file that a loop may seem to stand still: between two writes nobody sees it move."""
SILENT_S = 30.0
SILENT_WRITES = 5
"""Writes in a row that must be missing before a rank that writes rarely is called silent."""
RECENT_ITERATIONS = 100
RECENT_BYTES = 1 << 20

DESCRIPTION = """\
Say who is alive in a run, how far it is, and which ranks hold it up. Reads the run directory and nothing else.

fresh: its loop moves; late: its process is alive, but its loop stands still; silent: nothing was heard of it; ended: it
said so. Exit code 0: all are alive, or the run ended in order (0 or 75); 1: somebody is silent, nobody has begun, or
the run ended badly.
"""


class Life(StrEnum):
    fresh = "fresh"
    late = "late"
    silent = "silent"
    ended = "ended"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    rank: int
    life: Life
    host: str | None
    """None where nothing was ever heard of this rank."""
    pid: int | None
    phase: str | None
    iteration: int | None
    moved_s: float | None
    """Seconds since its loop moved."""
    heard_s: float | None
    """Seconds since it wrote."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    run: str
    state: str | None
    """running, paused or ended, as rank 0 said last; None where it has not said anything."""
    step: int | None
    num_steps: int | None
    iteration: int | None
    loss: float | str | None
    eta_s: float | None
    exit_code: int | None
    reason: str
    ranks: list[RankStatus]
    slow: list[str]
    """What the sentinel said lately about ranks that hold the others up."""
    excluded: list[Exclusion]
    """Nodes that the next start of a job of Slurm leaves out."""

    def verdict(self) -> int:
        """Exit code of the command."""
        if self.state == RunStatus.ended:
            return EXIT_DONE if self.exit_code in (EXIT_DONE, EXIT_INTERRUPTED) else EXIT_SILENT
        alive = bool(self.ranks) and all(rank.life is not Life.silent for rank in self.ranks)
        return EXIT_DONE if alive else EXIT_SILENT


def main(argv: Sequence[str]) -> int:
    """Print the status; returns the exit code."""
    try:
        words = parser().parse_args(argv)
        run = RunDir(Path(words.run))
        require(run.config.is_file(), str(run.path), "is no run directory: it has no config.yaml")
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    status = status_of(run, now=time.time())
    print(json.dumps(asdict(status)) if words.json else render(status))
    return status.verdict()


def parser() -> ArgumentParser:
    parser = Parser(prog="harness status", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    return parser


def status_of(run: RunDir, *, now: float) -> Status:
    """How a run stands at a time."""
    words = read_status(run.status)
    beats = {beat.rank: beat for beat in heartbeat.read_all(run)}
    num_ranks = max([words.get("world_size") or 0, *(beat.world_size for beat in beats.values())])
    iteration = words.get("iteration")
    return Status(
        run=str(run.path),
        state=words.get("state"),
        step=words.get("step"),
        num_steps=words.get("num_steps"),
        iteration=iteration,
        loss=words.get("loss"),
        eta_s=words.get("eta_s"),
        exit_code=words.get("exit_code"),
        reason=words.get("reason", ""),
        ranks=[rank_status(rank, beats.get(rank), now=now) for rank in range(num_ranks)],
        slow=[] if iteration is None else slow_lately(run, iteration),
        excluded=excluded_nodes(run, now=now),
    )


def read_status(path: Path) -> dict[str, Any]:
    """Nothing where there is none, or none that can be read."""
    try:
        words = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return words if isinstance(words, dict) else {}


def rank_status(rank: int, beat: Beat | None, *, now: float) -> RankStatus:
    if beat is None:
        nothing = dict.fromkeys(("host", "pid", "phase", "iteration", "moved_s", "heard_s"))
        return RankStatus(rank=rank, life=Life.silent, **nothing)
    return RankStatus(
        rank=rank,
        life=life_of(beat, now=now),
        host=beat.host,
        pid=beat.pid,
        phase=beat.phase,
        iteration=beat.iteration,
        moved_s=max(0.0, now - beat.beat_time),
        heard_s=max(0.0, now - beat.time),
    )


def life_of(beat: Beat, *, now: float) -> Life:
    if beat.exit_code is not None:
        return Life.ended
    if now - beat.time > max(SILENT_S, SILENT_WRITES * beat.every_s):
        return Life.silent
    is_late = beat.phase in MOVING and now - beat.beat_time > max(LATE_S, LATE_WRITES * beat.every_s)
    return Life.late if is_late else Life.fresh


def excluded_nodes(run: RunDir, *, now: float) -> list[Exclusion]:
    """What the last end of a job says, without what has expired."""
    ends = requeue.read(run)
    return still(ends[-1].excluded, now=now) if ends else []


def slow_lately(run: RunDir, iteration: int) -> list[str]:
    """The sentinel's words about ranks that hold the others up."""
    return [
        f"iteration {event.iteration}: {event.message}"
        for event in tail(run.events, RECENT_BYTES)
        if isinstance(event, Finding) and event.kind in ABOUT_SPEED and event.iteration > iteration - RECENT_ITERATIONS
    ]


def render(status: Status) -> str:
    """A headline, and a row for every rank."""
    lines = [headline(status)]
    names = ("rank", "host", "pid", "", "phase", "iteration", "moved", "heard of")
    rows = [names, *(cells(rank, status.state == RunStatus.ended) for rank in status.ranks)]
    if status.ranks:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        to_left = {1, 3, 4}
        for row in rows:
            parts = (
                f"{text:{'<' if number in to_left else '>'}{width}}"
                for number, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(parts).rstrip())
    return "\n".join([*lines, *status.slow, *(exclusion.render() for exclusion in status.excluded)])


def headline(status: Status) -> str:
    if status.state is None and not status.ranks:
        return f"{status.run}: no rank has written anything yet"
    words = [f"{status.run}: {status.state or 'starting'}"]
    if status.step is not None and status.num_steps:
        words.append(f"step {status.step}/{status.num_steps} ({status.step / status.num_steps:.1%})")
    if isinstance(status.loss, float):
        words.append(f"loss {status.loss:.4f}")
    elif status.loss is not None:
        words.append(f"loss {status.loss}")
    if status.exit_code is not None:
        words.append(f"exit code {status.exit_code}: {status.reason}")
        return ", ".join(words)
    if status.eta_s is not None:
        words.append(f"{age_text(status.eta_s)} left")
    num_alive = sum(rank.life is not Life.silent for rank in status.ranks)
    words.append(f"{num_alive} of {len(status.ranks)} ranks alive")
    return ", ".join(words)


def cells(rank: RankStatus, has_ended: bool) -> tuple[str, ...]:
    def ago(seconds: float | None) -> str:
        return "never" if seconds is None else f"{age_text(seconds)} ago"

    life = "" if has_ended and rank.life is Life.silent else rank.life
    return (
        str(rank.rank),
        rank.host or "?",
        "?" if rank.pid is None else str(rank.pid),
        life,
        rank.phase or "?",
        "?" if rank.iteration is None else str(rank.iteration),
        ago(rank.moved_s),
        ago(rank.heard_s),
    )
