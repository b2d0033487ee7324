"""Whether a job that ended begins again, without which nodes, and the book in which every end is written.

Why: a run that is asked to leave, or that crashes on a bad machine, should go on by itself; one that is done, halted,
cancelled or stopped by a person must not, and one that crashes at the same place for ever must stop and say so.
How: `decide` is a pure function of how the job ended and of what is in the book, RUN/requeues.jsonl. The job's script
asks it at every end, and at every beginning, because Slurm itself begins a job again whose node died. Progress is a
newer checkpoint that a start would resume from; it resets every limit. Nodes that failed the health check twice are
excluded (`launch.slurm.node_exclusion`). A start also makes sure that no other job that is alive has the same run, and
no other process its lease: it exits with 2 before it could ask the run to stop.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, final

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_HALTED, EXIT_INTERRUPTED, ConfigError, StorageError
from harness.config.launch import SlurmConfig
from harness.control import stop_requests
from harness.core.locking.run_lease import require_free
from harness.core.rundir import RunDir, append_line
from launch.slurm import job_directory
from launch.slurm.controller import can_start, hostnames, show
from launch.slurm.node_exclusion import Exclusion, Failure, bearable, blamed, excluded, from_json

EXIT_UNHEALTHY = 69
"""What the script says where the health check, not the run, failed."""
SLURM = "slurm"
"""Who a stop is asked by where the script asks for it."""
BY_SLURM = "begun again by Slurm: a node died, or the job made room for another"
FINAL = {
    EXIT_DONE: "all steps done",
    EXIT_BAD_CONFIG: "bad configuration, or another start of this run is alive",
    EXIT_HALTED: "halted by the sentinel",
}
Age = tuple[int, int]
"""Generation and step of a checkpoint; grows with every checkpoint, also after a rollback."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a job, as a line of the book."""

    time: float
    job: str
    start: int
    """How often the job had begun, this time included."""
    exit_code: int | None
    """None where nobody was left to tell."""
    good: Age | None
    """Of the newest good checkpoint at that time."""
    requeued: bool
    reason: str
    saved: Age | None = None
    """Of the newest checkpoint that is good or may become so: where the next start resumes."""
    unhealthy: Mapping[str, str] = field(default_factory=dict)
    """Node -> its fault, for nodes that failed the health check of this start."""
    excluded: tuple[Exclusion, ...] = ()
    """Nodes that the next start leaves out."""

    @property
    def reached(self) -> Age | None:
        return max((age for age in (self.good, self.saved) if age is not None), default=None)


class Ended(NamedTuple):
    """How a job ended just now, as far as the outside knows."""

    exit_code: int | None
    state: str
    """Slurm's word for the job: RUNNING where it is still the script's own."""
    because: str
    """Slurm's reason for that word."""
    stopped_by: str
    """The person who asked for a stop, and why; empty where nobody did."""


class Decision(NamedTuple):
    again: bool
    reason: str


def decide(ended: Ended, history: Sequence[End], reached: Age | None, limits: SlurmConfig) -> Decision:
    """Whether the job begins again. `history` holds the earlier ends of the same job, oldest first; `reached` is the
    newest checkpoint now."""
    code = ended.exit_code
    if code in FINAL:
        return Decision(False, FINAL[code])
    if not ended.state:
        return Decision(False, "Slurm does not say how the job stands")
    if ended.state != "RUNNING" and ended.because != "TimeLimit":
        return Decision(False, "ended from outside, by scancel or by a requeue that is not this one's")
    if ended.stopped_by:
        return Decision(False, f"stopped on purpose, {ended.stopped_by}")
    if limits.max_requeues == 0:
        return Decision(False, "launch.slurm.max_requeues=0 allows no requeue")
    since = last_progress([*(end.reached for end in history), reached])
    requeues = sum(end.requeued for end in history[max(since, 0) :])
    stalls = sum(is_stall(each) for each in [*(end.exit_code for end in history), code][since + 1 :])
    where = f"the newest is of step {reached[1]}" if reached else "there is none"
    if requeues >= limits.max_requeues:
        limit = f"launch.slurm.max_requeues={limits.max_requeues}"
        return Decision(False, f"begun again {requeues} times without a newer checkpoint ({where}), {limit}")
    if stalls >= limits.max_stalled:
        limit = f"launch.slurm.max_stalled={limits.max_stalled}"
        return Decision(False, f"{stalls} starts in a row ended without a newer checkpoint ({where}), {limit}")
    if code == EXIT_INTERRUPTED:
        return Decision(True, "asked to leave")
    if code == EXIT_UNHEALTHY:
        return Decision(True, "a node failed its health check")
    return Decision(True, BY_SLURM if code is None else f"crashed with exit code {code}")


def last_progress(ages: Sequence[Age | None]) -> int:
    """Which end was the last with a newer checkpoint than every end before it; -1 where none was."""
    newest, found = None, -1
    for number, age in enumerate(ages):
        if age is not None and (newest is None or age > newest):
            newest, found = age, number
    return found


def is_stall(exit_code: int | None) -> bool:
    """Whether the run had its nodes and ended by itself: an end without progress then counts against it."""
    return exit_code not in (None, EXIT_UNHEALTHY)


def book(run: RunDir) -> Path:
    return run.path / "requeues.jsonl"


def read(run: RunDir) -> list[End]:
    """Every end of every job of this run; a line that was cut short is none."""
    try:
        lines = book(run).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    ends = []
    for line in lines:
        try:
            ends.append(end_in(json.loads(line)))
        except (ValueError, TypeError, IndexError, AttributeError):
            continue
    return ends


def end_in(words: Mapping[str, Any]) -> End:
    """A line of the book; raises TypeError or ValueError where it is none."""
    end = End(**words)
    good, saved = ((age[0], age[1]) if age else None for age in (end.good, end.saved))
    return replace(end, good=good, saved=saved, excluded=from_json(words.get("excluded", ())))


def newest(run: RunDir, *healths: Health) -> Age | None:
    """None where there is none, and where storage does not tell: that start counts as one without progress."""
    try:
        found = [each for each in catalog.list_checkpoints(run.checkpoints) if each.health in healths]
    except StorageError:
        return None
    return found[-1].age if found else None


def stopped_by(run: RunDir) -> str:
    """Which person asked the run to stop; a job that is told to leave asks too, and is nobody."""
    if not run.stop.exists():
        return ""
    asked = stop_requests.read(run)
    if asked is None:
        return "by the file STOP"
    return "" if asked.who == SLURM else asked.in_words()


def settle(
    run: RunDir,
    ended: Ended,
    *,
    job: str,
    start: int,
    unhealthy: Mapping[str, str] | None = None,
    sbatch: Sequence[str] = (),
) -> End:
    """Decide about one end, and write it down. `sbatch` are the arguments by which Slurm is asked whether the job could
    start without some nodes."""
    limits = compose.read(run.config).launch.slurm
    ends, now = read(run), time.time()
    good, saved = newest(run, Health.good), newest(run, Health.good, Health.candidate)
    decision = decide(ended, [end for end in ends if end.job == job], saved, limits)
    end = End(
        time=now,
        job=job,
        start=start,
        exit_code=ended.exit_code,
        good=good,
        requeued=decision.again,
        reason=decision.reason,
        saved=saved,
        unhealthy=dict(unhealthy or {}),
    )
    found = excluded(failures([*ends, end]), now=now, limits=limits)
    end = replace(end, excluded=tuple(bearable(found, lambda nodes: can_start(sbatch, nodes)) if sbatch else found))
    append_line(book(run), json.dumps(asdict(end)))
    return end


def failures(ends: Iterable[End]) -> list[Failure]:
    """Every health check that a node failed."""
    return [Failure(end.time, node, reason) for end in ends for node, reason in end.unhealthy.items()]


def begin(run: RunDir, job: str, start: int) -> Decision:
    """Write down the ends that nobody was left to write, and say whether the job may go on."""
    known = max((end.start for end in read(run) if end.job == job), default=0)
    decision = Decision(True, "")
    for missed in range(known + 1, start):
        end = settle(run, Ended(None, "RUNNING", "", stopped_by(run)), job=job, start=missed)
        decision = Decision(end.requeued, end.reason)
    return decision


def update_of(present: Sequence[str], ends: Iterable[End], wanted: Iterable[Exclusion]) -> str:
    """The argument of `scontrol update` that excludes `wanted` and what the user excludes; empty for no change.

    `present` are the nodes that Slurm excludes now. Those that once failed a check of this run are not the user's.
    """
    ours = {node for end in ends for node in end.unhealthy}
    nodes = [*(node for node in present if node not in ours), *(exclusion.node for exclusion in wanted)]
    return "" if set(nodes) == set(present) else f"ExcNodeList={','.join(nodes)}"


def finish(run: RunDir, job: str, start: int, exit_code: int, complaints: str, sbatch: Sequence[str]) -> End:
    """Settle an end, and print what the script has to update in the job before it begins again."""
    shown = show(job)
    ended = Ended(exit_code, shown.get("JobState", ""), shown.get("Reason", ""), stopped_by(run))
    end = settle(run, ended, job=job, start=start, unhealthy=blamed(complaints), sbatch=sbatch)
    if end.requeued:
        print(update_of(hostnames(shown.get("ExcNodeList", "")), read(run), end.excluded), end="")
    for exclusion in end.excluded:
        print(f"harness: {exclusion.render()}", file=sys.stderr)
    return end


def main(argv: Sequence[str] | None = None) -> int:
    """From within the job; exit code 0: go on, or begin again.

    begin RUN JOB, or end RUN JOB EXIT_CODE COMPLAINTS [SBATCH ARGUMENTS]. COMPLAINTS is the file with what the health
    check said, or empty. `end` prints an argument for `scontrol update` where the job has to change.
    """
    verb, directory, job, *more = sys.argv[1:] if argv is None else argv
    run = RunDir(Path(directory))
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    try:
        if verb == "begin":
            require_free(run.path, wait=True)
            job_directory.claim(run, job)
            decision = begin(run, job, start)
        else:
            code, complaints, *sbatch = more
            log = Path(complaints).read_text(encoding="utf-8", errors="replace") if complaints else ""
            end = finish(run, job, start, int(code), log, sbatch)
            decision = Decision(end.requeued, end.reason)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if decision.reason:
        word = "goes on" if verb == "begin" else "begins again"
        print(f"harness: job {job} {word if decision.again else 'ends here'}: {decision.reason}", file=sys.stderr)
    return EXIT_DONE if decision.again else 1


if __name__ == "__main__":
    sys.exit(main())
