"""Whether a job that ended begins again, and the book in which every end is written.

Why: a run that is asked to leave, or that crashes on a bad machine, should go on by itself; one that is done, halted,
cancelled or stopped by a person must not, and one that crashes at the same place for ever must stop and say so.
How: `decide` is a pure function of how the job ended and of what is in the book, RUN/requeues.jsonl. The job's script
asks it at every end, and at every beginning, because Slurm itself begins a job again whose node died. Progress is a new
good checkpoint, nothing less.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, final

from harness import compose, requests
from harness.checkpoint import catalog
from harness.config import (
    EXIT_BAD_CONFIG,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_INTERRUPTED,
    ConfigError,
    SlurmConfig,
)
from harness.rundir import RunDir, append_line

EXIT_UNHEALTHY = 69
"""What the script says where the health check, not the run, failed."""
SLURM = "slurm"
"""Who a stop is asked by where the script asks for it."""
ASK_AGAIN_S = (1.0, 5.0, 20.0)
"""Pauses between questions to a controller that does not answer."""
BY_SLURM = "begun again by Slurm: a node died, or the job made room for another"
FINAL = {
    EXIT_DONE: "all steps done",
    EXIT_BAD_CONFIG: "bad configuration",
    EXIT_HALTED: "halted by the sentinel",
}


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
    good: tuple[int, int] | None
    """Generation and step of the newest good checkpoint at that time."""
    requeued: bool
    reason: str


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


def decide(ended: Ended, history: Sequence[End], good: tuple[int, int] | None, limits: SlurmConfig) -> Decision:
    """Whether the job begins again. `history` holds the earlier ends of the same job, oldest first."""
    code = ended.exit_code
    if code in FINAL:
        return Decision(False, FINAL[code])
    if not ended.state:
        return Decision(False, "Slurm does not say how the job stands")
    if ended.state != "RUNNING" and ended.because != "TimeLimit":
        return Decision(False, "ended from outside, by scancel or by a requeue that is not this one's")
    if ended.stopped_by:
        return Decision(False, f"stopped on purpose, {ended.stopped_by}")
    requeues = sum(end.requeued for end in history)
    if requeues >= limits.max_requeues:
        return Decision(False, f"begun again {requeues} times already, launch.slurm.max_requeues={limits.max_requeues}")
    stalled = num_stalled([*(end.good for end in history), good])
    if stalled >= limits.max_stalled:
        where = f"the newest is of step {good[1]}" if good else "there is none"
        limit = f"launch.slurm.max_stalled={limits.max_stalled}"
        return Decision(False, f"{stalled} ends in a row without a new good checkpoint ({where}), {limit}")
    if code == EXIT_INTERRUPTED:
        return Decision(True, "asked to leave")
    if code == EXIT_UNHEALTHY:
        return Decision(True, "a node failed its health check")
    return Decision(True, BY_SLURM if code is None else f"crashed with exit code {code}")


def num_stalled(goods: Sequence[tuple[int, int] | None]) -> int:
    """Ends since the newest good checkpoint last changed."""
    changed = [number for number, good in enumerate(goods) if good != (goods[number - 1] if number else None)]
    return len(goods) - (changed[-1] + 1 if changed else 0)


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
            end = End(**json.loads(line))
        except (ValueError, TypeError):
            continue
        ends.append(replace(end, good=(end.good[0], end.good[1]) if end.good else None))
    return ends


def newest_good(run: RunDir) -> tuple[int, int] | None:
    good = [each for each in catalog.saved(run.checkpoints) if each.health is catalog.Health.good]
    return good[-1].age if good else None


def stopped_by(run: RunDir) -> str:
    """Which person asked the run to stop; a job that is told to leave asks too, and is nobody."""
    if not run.stop.exists():
        return ""
    asked = requests.read(run)
    if asked is None:
        return "by the file STOP"
    return "" if asked.who == SLURM else asked.in_words()


def settle(run: RunDir, ended: Ended, *, job: str, start: int) -> Decision:
    """Decide about one end, and write it down."""
    limits = compose.read(run.config).launch.slurm
    history = [end for end in read(run) if end.job == job]
    good = newest_good(run)
    decision = decide(ended, history, good, limits)
    end = End(
        time=time.time(),
        job=job,
        start=start,
        exit_code=ended.exit_code,
        good=good,
        requeued=decision.again,
        reason=decision.reason,
    )
    append_line(book(run), json.dumps(asdict(end)))
    return decision


def begin(run: RunDir, job: str, start: int) -> Decision:
    """Write down the ends that nobody was left to write, and say whether the job may go on."""
    known = max((end.start for end in read(run) if end.job == job), default=0)
    decision = Decision(True, "")
    for missed in range(known + 1, start):
        decision = settle(run, Ended(None, "RUNNING", "", stopped_by(run)), job=job, start=missed)
    return decision


def state_of(job: str) -> tuple[str, str]:
    """Slurm's word for a job, and its reason; empty where Slurm does not answer for a while."""
    command = ["scontrol", "show", "job", "--oneliner", job]
    words: dict[str, str] = {}
    for pause_s in (0.0, *ASK_AGAIN_S):
        time.sleep(pause_s)
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        if words := dict(re.findall(r"(JobState|Reason)=(\S+)", shown)):
            break
    return words.get("JobState", ""), words.get("Reason", "")


def main(argv: Sequence[str] | None = None) -> int:
    """`begin RUN JOB` or `end RUN JOB EXIT_CODE`, from within the job; exit code 0: go on, or begin again."""
    verb, directory, job, *code = sys.argv[1:] if argv is None else argv
    run = RunDir(Path(directory))
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    try:
        if verb == "begin":
            decision = begin(run, job, start)
        else:
            decision = settle(run, Ended(int(code[0]), *state_of(job), stopped_by(run)), job=job, start=start)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if decision.reason:
        word = "goes on" if verb == "begin" else "begins again"
        print(f"harness: job {job} {word if decision.again else 'ends here'}: {decision.reason}", file=sys.stderr)
    return EXIT_DONE if decision.again else 1


if __name__ == "__main__":
    sys.exit(main())
