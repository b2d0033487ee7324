"""`harness status`: shows which ranks are alive, the progress of a run, and slow ranks.

Why: one command must say whether a run needs attention before anybody logs in to a node; scripts use it too.
How: only the run directory is read: status.json, the heartbeat of every rank, the end of the event log, and the nodes
that nodes.json and requeues.jsonl exclude. A rank is *fresh* while its loop makes progress, *late* if it writes
heartbeats but its loop is stalled, *silent* without recent heartbeats, *ended* once it has exited. Exit code 0: all
ranks are alive or being restarted, or the run ended with 0 or 75; 1: a rank is silent, no rank has started, or the run
failed; 2: invalid input.
Left out: the clocks of other machines are assumed to agree with this one to within seconds.
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
from types import NoneType
from typing import Any, final

from harness.checkpoint.listing import age_text
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, require
from harness.core.events import ABOUT_SPEED, Finding
from harness.core.rundir import RunDir
from harness.core.stderr_lines import print_warning
from harness.telemetry import heartbeat
from harness.telemetry.event_log import tail
from harness.telemetry.heartbeat import MOVING, Beat, RunStatus
from launch.cli.parser import CommandParser
from launch.cli.remote_runs import require_local
from launch.node_record import read_out_nodes
from launch.slurm import requeue
from launch.slurm.node_exclusion import NodeExclusion, drop_expired

EXIT_SILENT = 1
LATE_S = 30.0
LATE_WRITES = 2
"""Heartbeat intervals that a loop may seem stalled: progress is only visible at a write."""
SILENT_S = 30.0
SILENT_WRITES = 5
"""Missing heartbeats in a row before a rank that writes rarely counts as silent."""
RESTART_S = 120.0
"""How long a restart may take until the first heartbeat of its ranks; later the run counts as silent."""
RECENT_ITERATIONS = 100
RECENT_BYTES = 1 << 20

FIELD_KINDS: dict[str, tuple[type, ...]] = {
    "state": (str,),
    "step": (int,),
    "num_steps": (int,),
    "iteration": (int,),
    "loss": (int, float, str),
    "eta_s": (int, float),
    "exit_code": (int,),
    "reason": (str,),
    "world_size": (int,),
    "time": (int, float),
}
"""Types of the fields of status.json; each may be null or missing."""

DESCRIPTION = """\
Show which ranks are alive, the progress of a run, and slow ranks. Reads only the run directory.

fresh: the loop makes progress; late: the process writes heartbeats, but its loop is stalled; silent: no heartbeat;
ended: the rank has exited. Exit code 0: all ranks are alive or being restarted, or the run ended with 0 or 75; 1: a
rank is silent, no rank has started, or the run failed.
"""


class Life(StrEnum):
    """Whether a rank is alive."""

    fresh = "fresh"
    late = "late"
    silent = "silent"
    ended = "ended"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The state of one rank."""

    rank: int
    life: Life
    host: str | None
    """None if the rank has never written a heartbeat."""
    pid: int | None
    phase: str | None
    iteration: int | None
    moved_s: float | None
    """Seconds since its loop made progress."""
    heard_s: float | None
    """Seconds since its last heartbeat."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a run."""

    run: str
    state: str | None
    """running, paused or ended, as rank 0 last wrote, or restarting; None if it has not."""
    step: int | None
    num_steps: int | None
    iteration: int | None
    loss: float | str | None
    eta_s: float | None
    exit_code: int | None
    reason: str
    ranks: list[RankStatus]
    slow: list[str]
    """The sentinel's recent findings about speed."""
    excluded: list[NodeExclusion]
    """Machines that are out because of their faults; the next start of a Slurm job excludes them."""
    is_restarting: bool = False
    """The launcher has just stopped all ranks after a failure, and starts them again."""

    def status_exit_code(self) -> int:
        """Exit code of the command."""
        if self.state == RunStatus.ended:
            return EXIT_DONE if self.exit_code in (EXIT_DONE, EXIT_INTERRUPTED) else EXIT_SILENT
        alive = self.is_restarting or (bool(self.ranks) and all(rank.life is not Life.silent for rank in self.ranks))
        return EXIT_DONE if alive else EXIT_SILENT


def main(argv: Sequence[str]) -> int:
    """Print the status; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        require_local(args.run, why="which has no heartbeats; `harness dashboard` reads it")
        run = RunDir(Path(args.run))
        require(run.config.is_file(), str(run.path), "is not a run directory: it has no config.yaml")
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    status = read_run_status(run, now=time.time())
    print(json.dumps(asdict(status)) if args.json else render(status))
    return status.status_exit_code()


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="harness status", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser


def read_run_status(run: RunDir, *, now: float) -> Status:
    """The state of a run at a given time."""
    fields = read_status(run.status)
    beats = {beat.rank: beat for beat in heartbeat.read_all(run)}
    num_ranks = max([fields.get("world_size") or 0, *(beat.world_size for beat in beats.values())])
    iteration = fields.get("iteration")
    return Status(
        run=str(run.path),
        state=fields.get("state"),
        step=fields.get("step"),
        num_steps=fields.get("num_steps"),
        iteration=iteration,
        loss=fields.get("loss"),
        eta_s=fields.get("eta_s"),
        exit_code=fields.get("exit_code"),
        reason=fields.get("reason") or "",
        ranks=[rank_status(rank, beats.get(rank), now=now) for rank in range(num_ranks)],
        slow=[] if iteration is None else recent_slow_findings(run, iteration),
        excluded=excluded_nodes(run, now=now),
        is_restarting=fields.get("state") == RunStatus.restarting and now - (fields.get("time") or 0.0) < RESTART_S,
    )


def read_status(path: Path) -> dict[str, Any]:
    """The fields of status.json; empty if it is missing. A damaged file counts as missing, and a warning names it."""
    try:
        fields = json.loads(path.read_bytes())
        problem = find_bad_field(fields)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error)
    if problem:
        print_warning(f"{path} is left out, because it is damaged: {problem}")
        return {}
    return dict(fields)


def find_bad_field(fields: Any) -> str:
    """The first field that has another type than rank 0 writes, in one line; empty if none has."""
    if not isinstance(fields, dict):
        return "it is not a mapping"
    bad = [name for name, kinds in FIELD_KINDS.items() if type(fields.get(name)) not in (*kinds, NoneType)]
    return f"{bad[0]} is {fields[bad[0]]!r}" if bad else ""


def rank_status(rank: int, beat: Beat | None, *, now: float) -> RankStatus:
    if beat is None:
        nothing = dict.fromkeys(("host", "pid", "phase", "iteration", "moved_s", "heard_s"))
        return RankStatus(rank=rank, life=Life.silent, **nothing)
    return RankStatus(
        rank=rank,
        life=find_life(beat, now=now),
        host=beat.host,
        pid=beat.pid,
        phase=beat.phase,
        iteration=beat.iteration,
        moved_s=max(0.0, now - beat.beat_time),
        heard_s=max(0.0, now - beat.time),
    )


def find_life(beat: Beat, *, now: float) -> Life:
    if beat.exit_code is not None:
        return Life.ended
    if now - beat.time > max(SILENT_S, SILENT_WRITES * beat.every_s):
        return Life.silent
    is_late = beat.phase in MOVING and now - beat.beat_time > max(LATE_S, LATE_WRITES * beat.every_s)
    return Life.late if is_late else Life.fresh


def excluded_nodes(run: RunDir, *, now: float) -> list[NodeExclusion]:
    """The machines that are out by nodes.json, and the exclusions of the last job end, without expired ones."""
    ends = requeue.read_ends(run)
    found = [*read_out_nodes(run), *(ends[-1].excluded if ends else ())]
    return drop_expired({exclusion.node: exclusion for exclusion in reversed(found)}.values(), now=now)[::-1]


def recent_slow_findings(run: RunDir, iteration: int) -> list[str]:
    """The sentinel's recent findings about speed, with their kinds."""
    return [
        f"iteration {event.iteration}: {event.kind}: {event.message}"
        for event in tail(run.events, RECENT_BYTES)
        if isinstance(event, Finding) and event.kind in ABOUT_SPEED and event.iteration > iteration - RECENT_ITERATIONS
    ]


def render(status: Status) -> str:
    """A headline, and a row for every rank."""
    lines = [headline(status)]
    names = ("rank", "host", "pid", "state", "phase", "iteration", "progress", "heartbeat")
    rows = [names, *(rank_row(rank, status.state == RunStatus.ended) for rank in status.ranks)]
    if status.ranks:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        to_left = {1, 3, 4}
        for row in rows:
            cells = (
                f"{text:{'<' if number in to_left else '>'}{width}}"
                for number, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *status.slow, *(exclusion.render() for exclusion in status.excluded)])


def headline(status: Status) -> str:
    if status.state is None and not status.ranks:
        return f"{status.run}: no rank has started yet"
    parts = [f"{status.run}: {status.state or 'starting'}"]
    if status.step is not None and status.num_steps:
        parts.append(f"step {status.step}/{status.num_steps} ({status.step / status.num_steps:.1%})")
    if isinstance(status.loss, float):
        parts.append(f"loss {status.loss:.4f}")
    elif status.loss is not None:
        parts.append(f"loss {status.loss}")
    if status.exit_code is not None:
        parts.append(f"exit code {status.exit_code}: {status.reason}")
        return ", ".join(parts)
    if status.is_restarting:
        return ", ".join([*parts, status.reason])
    if status.eta_s is not None:
        parts.append(f"{age_text(status.eta_s)} left")
    num_alive = sum(rank.life is not Life.silent for rank in status.ranks)
    parts.append(f"{num_alive} of {len(status.ranks)} ranks alive")
    return ", ".join(parts)


def rank_row(rank: RankStatus, has_ended: bool) -> tuple[str, ...]:
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
