"""How a run recovered from each strike of a fault: time to notice, to restart and to the first update, steps lost.

Why: the time that a failure costs has several owners: who notices it, who stops and starts the processes, and who
restores the state.
How: from the log, the strikes and the ends of the launchers. What happens from one strike to the next belongs to the
first. A fault that strikes several iterations in one start is one strike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from harness.analysis.dashboard.loss_causes import loss_cause
from harness.config.errors import EXIT_DONE
from harness.core.events import (
    CheckpointFailed,
    CheckpointJudged,
    Event,
    FaultInjected,
    RunEnded,
    RunRestarted,
    RunStarted,
    StepRecord,
)
from harness.drills.drill_record import DrillEvidence


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecovery:
    """How a run recovered from one strike."""

    number: int
    """Index of the fault in the plan."""
    kind: str
    rank: int
    iteration: int
    time: float
    """When it struck, in seconds since 1970."""
    notice_s: float | None
    """From the strike until the launcher, the runner or the checkpoint writer noticed it; None: nobody had to."""
    restart_s: float | None
    """From the notice until all ranks had resumed; None: there was no restart, or nobody noticed it before."""
    first_update_s: float | None
    """From the strike until the next step was logged, by another start if there was one; None: there was none."""
    steps_lost: int
    """Logged steps that were trained again."""
    starts: int
    """Starts that followed it."""
    cause: str
    """Cause of the failure as the log names it; empty: no start ended."""
    recovered: bool
    """A step that the run had not reached before followed, or the run was done."""


def list_recoveries(victim: DrillEvidence) -> list[FaultRecovery]:
    """One entry for each strike, in order of time."""
    strikes = first_strikes(victim)
    ends = [*(strike.time for strike in strikes[1:]), math.inf][: len(strikes)]
    return [measure_recovery(victim, strike, until=end) for strike, end in zip(strikes, ends, strict=True)]


def first_strikes(victim: DrillEvidence) -> list[FaultInjected]:
    """The strikes in order of time; of a fault that struck several iterations in a row in one start, the first."""
    strikes = sorted(victim.faults, key=lambda strike: strike.time)
    starts = [event.time for event in victim.of(RunStarted)]

    def continues(earlier: FaultInjected, later: FaultInjected) -> bool:
        return earlier.number == later.number and not any(earlier.time < start <= later.time for start in starts)

    return strikes[:1] + [later for earlier, later in pairwise(strikes) if not continues(earlier, later)]


def measure_recovery(victim: DrillEvidence, strike: FaultInjected, *, until: float) -> FaultRecovery:
    """Measure one strike; what happened at `until` or later belongs to the next one."""
    place = next((at for at, event in enumerate(victim.events) if event.time >= strike.time), len(victim.events))
    while place and isinstance(victim.events[place - 1], RunEnded):  # after a crash it has the time of the last step
        place -= 1
    before, after = victim.events[:place], victim.events[place:]
    window = [event for event in after if event.time < until]
    starts = [at for at, event in enumerate(window) if isinstance(event, RunStarted)]
    resumed = window[starts[0]] if starts else None
    noticed = notice_time(window, victim, strike, resumed)
    reached = max((event.step for event in before if isinstance(event, StepRecord)), default=0)
    later = [event for event in after if isinstance(event, StepRecord)]
    updates = [event for event in window[starts[-1] if starts else 0 :] if isinstance(event, StepRecord)]
    if not starts:
        updates = [event for event in updates if event.iteration >= strike.iteration]
    return FaultRecovery(
        number=strike.number,
        kind=strike.kind,
        rank=strike.rank,
        iteration=strike.iteration,
        time=strike.time,
        notice_s=None if noticed is None else round(noticed - strike.time, 3),
        restart_s=None if noticed is None or resumed is None else round(resumed.time - noticed, 3),
        first_update_s=round(updates[0].time - strike.time, 3) if updates else None,
        steps_lost=count_undone(before, window),
        starts=len(starts),
        cause=find_cause(window),
        recovered=any(event.step > reached for event in later) or victim.exit_code == EXIT_DONE,
    )


def notice_time(
    window: Sequence[Event], victim: DrillEvidence, strike: FaultInjected, resumed: Event | None
) -> float | None:
    """When the failure was noticed: by the launcher, by the runner whose launcher ended, or by a failed save."""
    for event in window:
        if event is resumed:
            break
        if isinstance(event, RunRestarted | CheckpointFailed):
            return event.time
    ends = [start.ended for start in victim.starts if resumed and strike.time <= start.ended <= resumed.time]
    return min(ends, default=None)


def count_undone(before: Sequence[Event], window: Sequence[Event]) -> int:
    """Logged steps that the starts in the window trained again."""
    reached, lost = 0, 0
    for place, event in enumerate([*before, *window]):
        if isinstance(event, RunStarted) and place >= len(before):
            lost += max(0, reached - event.step)
        if isinstance(event, RunStarted | StepRecord):
            reached = event.step
    return lost


def find_cause(window: Sequence[Event]) -> str:
    """The cause of the first failure, and what else was found."""
    starts = [at for at, event in enumerate(window) if isinstance(event, RunStarted)]
    unsaved = ["checkpoint not saved"] * any(isinstance(event, CheckpointFailed) for event in window)
    if not starts:
        return ", ".join(unsaved)
    failure = next((event for event in window[: starts[0]] if isinstance(event, RunRestarted | RunEnded)), None)
    judged = [event.health for event in window[: starts[0]] if isinstance(event, CheckpointJudged)]
    return ", ".join([loss_cause(failure), *unsaved, *["damaged checkpoint"] * ("damaged" in judged)])
