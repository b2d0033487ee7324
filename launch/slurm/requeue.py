"""Decides whether a job that ended is requeued and which nodes it excludes, and records every end.

Why: a run that was interrupted or crashed on a bad node must continue by itself. One that is done, halted, cancelled or
stopped by a person must not, and one that always crashes at the same place must end with a message.
How: `decide_requeue` is a pure function of how the job ended and of the record, RUN/requeues.jsonl. The script calls it
at every end, and at every start, because Slurm itself restarts a job whose node failed. The launcher inside the job has
restarted failed ranks before that (`launch.local.restart`); both use the budget of `launch.restart_budget`. Progress is
a newer checkpoint that a start would resume from; it resets every limit. Nodes with faults are excluded
(`launch.slurm.node_exclusion`). A start also checks that no other active job has the same run and that no
other process holds its lease; otherwise it exits with 2 before it could stop that run. It removes the file STOP of the
last start, which the job script writes near a time limit.
On a full disk no end can be recorded. The decision stands, and the number of starts limits the requeues.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast, final

from harness.checkpoint.catalog import Health
from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError
from harness.config.launch import SlurmConfig
from harness.control import stop_requests
from harness.core.locking.run_lease import io_error, require_free
from harness.core.rundir import RunDir, append_line
from harness.core.safe_stream import SafeStream
from launch.node_record import read_node_faults
from launch.restart_budget import (
    FINAL,
    Reached,
    RestartDecision,
    RunAttempt,
    count_since_progress,
    newest_checkpoint,
)
from launch.slurm import job_directory
from launch.slurm.controller import can_start, hostnames, show_job
from launch.slurm.node_exclusion import (
    NodeExclusion,
    NodeFault,
    choose_exclusions,
    exclusions_from_json,
    limit_exclusions,
    parse_blamed_nodes,
)

EXIT_UNHEALTHY = 69
"""Exit code of the job script if the health check failed, not the run."""
SLURM = "slurm"
"""Requester of a stop that the job script asks for."""
RESTARTED_BY_SLURM = "restarted by Slurm: a node failed, or the job was preempted"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """One end of a job, as a line of requeues.jsonl."""

    time: float
    job: str
    start: int
    """How often the job had started, including this time."""
    exit_code: int | None
    """None if the job ended without reporting one."""
    good: Reached | None
    """Newest good checkpoint at that time."""
    requeued: bool
    reason: str
    saved: Reached | None = None
    """Newest good or candidate checkpoint: where the next start resumes."""
    unhealthy: Mapping[str, str] = field(default_factory=dict)
    """Node -> fault, for nodes that failed the health check of this start."""
    excluded: tuple[NodeExclusion, ...] = ()
    """Nodes that the next start excludes."""

    @property
    def reached(self) -> Reached | None:
        return max((age for age in (self.good, self.saved) if age is not None), default=None)


class JobExit(NamedTuple):
    """How a job ended just now."""

    exit_code: int | None
    state: str
    """Slurm's state of the job: RUNNING while its script runs."""
    slurm_reason: str
    """Slurm's reason for that state."""
    stopped_by: str
    """The person who asked for a stop, and why; empty if nobody did."""


def decide_requeue(
    job_exit: JobExit, history: Sequence[JobEnd], reached: Reached | None, limits: SlurmConfig
) -> RestartDecision:
    """Decide whether the job runs again.

    `history` holds the earlier ends of the same job, oldest first; `reached` is the newest checkpoint now.
    """
    code = job_exit.exit_code
    if code in FINAL:
        return RestartDecision(False, FINAL[code])
    if not job_exit.state:
        return RestartDecision(False, "Slurm does not report the state of the job")
    if job_exit.state != "RUNNING" and job_exit.slurm_reason != "TimeLimit":
        return RestartDecision(False, "ended by scancel or by another requeue")
    if job_exit.stopped_by:
        return RestartDecision(False, f"stopped on purpose, {job_exit.stopped_by}")
    if limits.max_requeues == 0:
        return RestartDecision(False, "launch.slurm.max_requeues=0 allows no requeue")
    attempts = [RunAttempt(end.reached, end.requeued, is_stall(end.exit_code)) for end in history]
    requeues, stalls = count_since_progress([*attempts, RunAttempt(reached, False, is_stall(code))])
    where = f"the newest is of step {reached[1]}" if reached else "there is none"
    if requeues >= limits.max_requeues:
        limit = f"launch.slurm.max_requeues={limits.max_requeues}"
        return RestartDecision(False, f"requeued {requeues} times without a newer checkpoint ({where}), {limit}")
    if stalls >= limits.max_stalled:
        limit = f"launch.slurm.max_stalled={limits.max_stalled}"
        return RestartDecision(False, f"{stalls} starts in a row ended without a newer checkpoint ({where}), {limit}")
    if code == EXIT_INTERRUPTED:
        return RestartDecision(True, "interrupted, resumable")
    if code == EXIT_UNHEALTHY:
        return RestartDecision(True, "a node failed its health check")
    return RestartDecision(True, RESTARTED_BY_SLURM if code is None else f"crashed with exit code {code}")


def is_stall(exit_code: int | None) -> bool:
    """Whether the run had its nodes and ended by itself: such an end without progress counts against it."""
    return exit_code not in (None, EXIT_UNHEALTHY)


def requeue_log(run: RunDir) -> Path:
    return run.path / "requeues.jsonl"


def read_ends(run: RunDir) -> list[JobEnd]:
    """Every end of every job of this run; a truncated line is ignored."""
    try:
        lines = requeue_log(run).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise io_error(requeue_log(run), "cannot read", error) from None
    ends = []
    for line in lines:
        try:
            ends.append(parse_end(json.loads(line)))
        except (ValueError, TypeError, IndexError, AttributeError):
            continue
    return ends


def parse_end(fields: Mapping[str, Any]) -> JobEnd:
    """Parse a line of requeues.jsonl; raises TypeError or ValueError if it is invalid."""
    end = JobEnd(**fields)
    good, saved = ((age[0], age[1]) if age else None for age in (end.good, end.saved))
    return replace(end, good=good, saved=saved, excluded=exclusions_from_json(fields.get("excluded", ())))


def find_stop_request(run: RunDir) -> str:
    """The person who asked the run to stop, and why; a job script's own request does not count."""
    if not run.stop.exists():
        return ""
    asked = stop_requests.read(run)
    if asked is None:
        return "by the file STOP"
    return "" if asked.who == SLURM else asked.in_words()


def record_end(
    run: RunDir,
    job_exit: JobExit,
    *,
    job: str,
    start: int,
    unhealthy: Mapping[str, str] | None = None,
    sbatch: Sequence[str] = (),
    user_excluded: Sequence[str] = (),
) -> JobEnd:
    """Decide about one end and record it; if the storage does not take the record, warn.

    `sbatch` holds the arguments with which Slurm is asked whether the job could start without some nodes. The run adds
    no reason of its own to exclude the nodes of `user_excluded`: theirs expire, and the user's do not.
    """
    limits, ends, now = compose.read(run.config).launch.slurm, list[JobEnd](), time.time()
    with warn_without_record(run):
        ends = read_ends(run)
    good, saved = newest_checkpoint(run, Health.good), newest_checkpoint(run, Health.good, Health.candidate)
    history = [end for end in ends if end.job == job]
    history += assume_unrecorded_ends(history, job=job, start=start, reached=saved)
    decision = decide_requeue(job_exit, history, saved, limits)
    end = JobEnd(
        time=now,
        job=job,
        start=start,
        exit_code=job_exit.exit_code,
        good=good,
        requeued=decision.again,
        reason=decision.reason,
        saved=saved,
        unhealthy=dict(unhealthy or {}),
    )
    faults = [fault for fault in list_node_faults(run, [*ends, end]) if fault.node not in user_excluded]
    found = choose_exclusions(faults, now=now, limits=limits)
    if sbatch:
        found = limit_exclusions(found, lambda nodes: can_start(sbatch, [*user_excluded, *nodes]))
    end = replace(end, excluded=tuple(found))
    with warn_without_record(run):
        append_line(requeue_log(run), json.dumps(asdict(end)))
    return end


@contextmanager
def warn_without_record(run: RunDir) -> Iterator[None]:
    """Context in which an I/O error of the record is a warning: a job is requeued on a full disk too."""
    try:
        yield
    except OSError as error:
        problem = error if isinstance(error, StorageError) else f"{requeue_log(run)}: cannot write it: {error.strerror}"
        print(f"harness: warning: {problem}; the number of starts limits the requeues", file=sys.stderr)


def assume_unrecorded_ends(history: Sequence[JobEnd], *, job: str, start: int, reached: Reached | None) -> list[JobEnd]:
    """The ends before this start that have no line, for example because the disk was full.

    Each counts as a requeue. They have reached what there is now, so that no checkpoint resets the count twice.
    """
    known = max((end.start for end in history), default=0)
    return [
        JobEnd(
            time=0.0,
            job=job,
            start=missed,
            exit_code=None,
            good=None,
            requeued=True,
            reason=RESTARTED_BY_SLURM,
            saved=reached,
        )
        for missed in range(known + 1, start)
    ]


def list_node_faults(run: RunDir, ends: Iterable[JobEnd]) -> list[NodeFault]:
    """Every health check that a node failed before a start, and the faults that the launcher recorded in the job."""
    failed = [NodeFault(end.time, node, reason) for end in ends for node, reason in end.unhealthy.items()]
    return [*failed, *read_node_faults(run)]


def record_missed_ends(run: RunDir, job: str, start: int) -> RestartDecision:
    """Record the ends of starts that could not do it themselves; returns whether the job may continue."""
    known = max((end.start for end in read_ends(run) if end.job == job), default=0)
    decision = RestartDecision(True, "")
    for missed in range(known + 1, start):
        end = record_end(run, JobExit(None, "RUNNING", "", find_stop_request(run)), job=job, start=missed)
        decision = RestartDecision(end.requeued, end.reason)
    return decision


def exclusion_update(present: Sequence[str], by_user: Iterable[str], wanted: Iterable[NodeExclusion]) -> str:
    """The argument of `scontrol update` that excludes `wanted` and the user's own exclusions; empty for no change.

    `present` are the nodes that Slurm excludes now.
    """
    nodes = [*by_user, *(exclusion.node for exclusion in wanted)]
    return "" if set(nodes) == set(present) else f"ExcNodeList={','.join(nodes)}"


def list_user_excluded(
    present: Sequence[str],
    ends: Sequence[JobEnd],
    *,
    job: str,
    submitted: Mapping[str, float] | None = None,
    now: float = 0.0,
) -> list[str]:
    """The nodes that Slurm excludes because the user asked: not those that the last end of this job excluded, nor those
    that its submission excluded until now. Its submission may exclude nodes that other tasks of the array blamed; they
    count as the user's until then."""
    told = [end for end in ends if end.job == job and end.exit_code is not None]  # Slurm is told of no other end
    ours = {exclusion.node for end in told[-1:] for exclusion in end.excluded}
    blamed = {node for end in ends for node in [*end.unhealthy, *(exclusion.node for exclusion in end.excluded)]}
    for node, until in (submitted or {}).items():
        if node in blamed or until <= now:
            ours.add(node)
    return [node for node in present if node not in ours]


def end_job(run: RunDir, job: str, start: int, exit_code: int, health_log: str, sbatch: Sequence[str]) -> JobEnd:
    """Record an end, and print what the script must update in the job before it restarts."""
    shown = show_job(job)
    job_exit = JobExit(exit_code, shown.get("JobState", ""), shown.get("Reason", ""), find_stop_request(run))
    present, before = hostnames(shown.get("ExcNodeList", "")), list[JobEnd]()
    with suppress(StorageError):  # record_end warns of it
        before = read_ends(run)
    known = job_directory.read_job(run)
    submitted = known.excluded if known is not None and known.job == job else {}
    by_user = list_user_excluded(present, before, job=job, submitted=submitted, now=time.time())
    end = record_end(
        run,
        job_exit,
        job=job,
        start=start,
        unhealthy=parse_blamed_nodes(health_log),
        sbatch=sbatch,
        user_excluded=by_user,
    )
    if end.requeued:
        print(exclusion_update(present, by_user, end.excluded), end="")
    for exclusion in end.excluded:
        print(f"harness: {exclusion.render()}", file=sys.stderr)
    return end


def main(argv: Sequence[str] | None = None) -> int:
    """Called by the job script; exit code 0: start, or requeue; 75: the storage failed.

    begin RUN JOB, or end RUN JOB EXIT_CODE COMPLAINTS [SBATCH ARGUMENTS]. COMPLAINTS is the file with the output of the
    health check, or empty. `end` prints an argument for `scontrol update` if the job must change.
    """
    verb, directory, job, *more = sys.argv[1:] if argv is None else argv
    run = RunDir(Path(directory))
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    try:
        if verb == "begin":
            require_free(run.path, wait=True)
            job_directory.claim_run(run, job)
            decision = record_missed_ends(run, job, start)
            if decision.again:  # STOP is of an earlier start, and the missed ends have been judged by it
                stop_requests.clear_stop_file(run)
        else:
            code, health_log, *sbatch = more
            end = end_job(run, job, start, int(code), read_health_log(health_log), sbatch)
            decision = RestartDecision(end.requeued, end.reason)
    except (ConfigError, StorageError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG
    if decision.reason:
        allowed = "continues" if verb == "begin" else "is requeued"
        print(f"harness: job {job} {allowed if decision.again else 'ends'}: {decision.reason}", file=sys.stderr)
    return EXIT_DONE if decision.again else 1


def read_health_log(path: str) -> str:
    """The output of the health check; empty if there is none, or if the disk had no room for the file."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
    except OSError:
        return ""


if __name__ == "__main__":
    sys.stderr = cast(TextIO, SafeStream(sys.stderr))  # the log of the job may be on a full disk
    sys.exit(main())
