"""What one job of a sweep came to, read from its event log."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from harness.analysis.sweeps.spike_score import SpikeScore, spike_score
from harness.analysis.sweeps.sweep_record import Job
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE
from harness.core.events import (
    Action,
    ActionKind,
    EvalRecord,
    Event,
    Outcome,
    RunEnded,
    RunStarted,
    StepRecord,
    parse,
)
from harness.core.rundir import RunDir
from harness.telemetry.log_index import PLAIN, TOKENS_PER_S, whole_lines

ANSWERS = (ActionKind.skip, ActionKind.rewind, ActionKind.rollback)
STEPS_OF_A_RATE = 10_000


@dataclass(slots=True, kw_only=True)
class Result:
    job: Job
    exit_code: int | None = None
    """None: it was not started, or it has not said its last word."""
    step: int = 0
    """Updates applied."""
    num_steps: int = 0
    """Updates asked for; 0: not started."""
    iterations: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    """Training loss of each iteration."""
    evaluated_at: list[int] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    """Held-out loss, and at which iteration."""
    spikes: SpikeScore = field(default_factory=lambda: SpikeScore(num_spikes=0, num_judged=0))
    incidents: set[int] = field(default_factory=set)
    num_refused: int = 0
    done: Counter[ActionKind] = field(default_factory=Counter)
    """Skips, rewinds and rollbacks that succeeded."""
    tokens_per_s: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.exit_code == EXIT_DONE and self.step >= self.num_steps > 0

    @property
    def incidents_per_10k(self) -> float | None:
        """Incidents in 10,000 steps of a run as this one; None: it made no step."""
        return len(self.incidents) * STEPS_OF_A_RATE / len(self.losses) if self.losses else None


def result_of(sweep: Path, job: Job) -> Result:
    """Read a job's log; one that was refused, or has not begun, has an empty result."""
    result = Result(job=job, exit_code=EXIT_BAD_CONFIG if job.problem else None)
    events = RunDir(sweep / job.name).events
    rates = array("d")
    if events.is_file():
        with events.open("rb") as file:
            for line in whole_lines(file, 0):
                _add_line(result, rates, line)
    result.spikes = spike_score(result.losses)
    result.tokens_per_s = statistics.median(rates) if rates else None
    return result


def _add_line(result: Result, rates: array[float], line: bytes) -> None:
    plain, rate = PLAIN.match(line), TOKENS_PER_S.search(line)
    if plain and rate:  # ten times quicker than to parse all of it
        result.iterations.append(int(plain[1]))
        result.step = int(plain[2])
        result.losses.append(float(plain[3]))
        rates.append(float(rate[1]))
        return
    for event in parse(line.decode(errors="replace")):
        if isinstance(event, StepRecord):
            result.iterations.append(event.iteration)
            result.losses.append(event.loss)
            result.num_refused += event.refused
            result.step = event.step
            rates.append(event.tokens_per_s)
        else:
            _add(result, event)


def _add(result: Result, event: Event) -> None:
    """Anything but a step."""
    match event:
        case EvalRecord():
            result.evaluated_at.append(event.iteration)
            result.evaluations.append(event.loss)
        case RunStarted():
            result.exit_code, result.num_steps, result.step = None, event.num_steps, event.step
        case RunEnded():
            result.exit_code, result.step = event.exit_code, event.step
        case Action(incident=number) if number > 0:
            result.incidents.add(number)
        case Outcome(succeeded=True, kind=kind) if kind in ANSWERS:
            result.done[kind] += 1
        case _:
            pass
