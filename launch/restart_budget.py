"""Decides whether a run that failed starts again. Restarts inside a job and requeues of a job share this rule.

Why: a run that was killed must continue by itself, and one that always fails at the same place must end.
How: the ends of a run are compared by what they reached, a generation and a step. An end is progress if it reached more
than all ends before it. Progress resets the count of restarts, so the number of failures of a long run is not limited.
`launch.slurm.requeue` counts checkpoints as progress, because the next job resumes from one. A restart inside the job
counts logged steps: it has two further limits, a number of restarts within `launch.restart_window`, and a rank that
raises the same error at the same step twice. `decide_restart` is a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_HALTED, EXIT_INTERRUPTED, StorageError
from harness.config.launch import LaunchConfig
from harness.core.rundir import RunDir

FINAL = {
    EXIT_DONE: "all steps done",
    EXIT_BAD_CONFIG: "invalid config, or another process trains this run",
    EXIT_HALTED: "halted by the sentinel",
}
"""Exit codes after which a run never starts again by itself."""

Reached = tuple[int, int]
"""Generation and step; increases with every checkpoint and step, also after a rollback."""


class RestartDecision(NamedTuple):
    """Whether the run starts again, and why."""

    again: bool
    reason: str


class RunAttempt(NamedTuple):
    """One start of a run that has ended, for the budget."""

    reached: Reached | None
    """None if there is nothing to resume from."""
    restarted: bool
    """It was followed by another start."""
    is_stall: bool = True
    """Without progress it counts against the run; False if its nodes ended it."""


class SpentBudget(NamedTuple):
    """What counts against the limits: since the last progress."""

    restarts: int
    stalls: int


def count_since_progress(attempts: Sequence[RunAttempt]) -> SpentBudget:
    """Restarts after the last attempt with progress, and stalls since then. The last attempt has just ended."""
    since = last_progress([attempt.reached for attempt in attempts])
    return SpentBudget(
        restarts=sum(attempt.restarted for attempt in attempts[max(since, 0) :]),
        stalls=sum(attempt.is_stall for attempt in attempts[since + 1 :]),
    )


def last_progress(ages: Sequence[Reached | None]) -> int:
    """Index of the last end that reached more than all before it; -1 if there is none."""
    newest, found = None, -1
    for number, age in enumerate(ages):
        if age is not None and (newest is None or age > newest):
            newest, found = age, number
    return found


def newest_checkpoint(run: RunDir, *healths: Health) -> Reached | None:
    """None if there is none, or if storage fails: that start counts as one without progress."""
    try:
        found = [item for item in catalog.list_checkpoints(run.checkpoints) if item.health in healths]
    except StorageError:
        return None
    return found[-1].age if found else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """One start that failed inside the job."""

    exit_code: int
    """The exit code that the launcher would return."""
    time_s: float
    """When the failure was noticed, by a clock that never jumps."""
    reached: Reached | None
    error: str = ""
    """Type and place of the exception that a rank raised; empty: it was killed, or hung."""
    step: int = -1
    """Updates that the rank had applied when it raised; -1: it had not begun to train."""


def decide_restart(
    failures: Sequence[FailedStart], limits: LaunchConfig, *, before: Reached | None, obstacle: str = ""
) -> RestartDecision:
    """Decide whether all ranks start again inside the job.

    `failures` are the starts of this launcher, oldest first. All but the last were restarted. `before` is what earlier
    launchers had reached. `obstacle` is a reason why no restart is possible.
    """
    last = failures[-1]
    if last.exit_code in FINAL or last.exit_code == EXIT_INTERRUPTED:
        return RestartDecision(False, FINAL.get(last.exit_code, "interrupted, resumable"))
    if obstacle:
        return RestartDecision(False, obstacle)
    if limits.max_restarts == 0:
        return RestartDecision(False, "launch.max_restarts=0 allows no restart")
    if len(failures) > 1 and last.error and (last.error, last.step) == (failures[-2].error, failures[-2].step):
        where = f"at step {last.step}" if last.step >= 0 else "before the first step"
        return RestartDecision(False, f"the same error {where} twice: {last.error}")
    attempts = [RunAttempt(before, False), *(RunAttempt(failure.reached, True) for failure in failures[:-1])]
    spent = count_since_progress([*attempts, RunAttempt(last.reached, False)])
    if spent.restarts >= limits.max_restarts:
        where = f"the last is {last.reached[1]}" if last.reached else "there is none"
        limit = f"launch.max_restarts={limits.max_restarts}"
        return RestartDecision(False, f"restarted {spent.restarts} times without a new step ({where}), {limit}")
    recent = sum(last.time_s - failure.time_s < limits.restart_window for failure in failures[:-1])
    if recent >= limits.max_restarts:
        limit = f"launch.max_restarts={limits.max_restarts} in launch.restart_window={limits.restart_window:g}"
        return RestartDecision(False, f"restarted {recent} times within {limits.restart_window:g} s, {limit}")
    return RestartDecision(True, f"restart {len(failures)}")
