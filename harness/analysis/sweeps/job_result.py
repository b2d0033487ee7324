"""Reads the result of one job of a sweep from its event log."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from harness.analysis.sweeps.spike_score import SpikeScore, spike_score
from harness.analysis.sweeps.sweep_record import Job
from harness.analysis.throughput import median_rate
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE
from harness.core.event_json import parse
from harness.core.events import Action, ActionKind, EvalRecord, Event, Outcome, RunEnded, RunStarted, StepRecord
from harness.core.rundir import RunDir
from harness.telemetry.log_index import PLAIN, TOKENS_PER_S, whole_lines

RECOVERIES = (ActionKind.skip, ActionKind.rewind, ActionKind.rollback)
STEPS_OF_A_RATE = 10_000


@dataclass(slots=True, kw_only=True)
class JobResult:
    job: Job
    exit_code: int | None = None
    """None: the job was not started, or has not ended."""
    step: int = 0
    """Updates applied."""
    num_steps: int = 0
    """Updates configured; 0: not started."""
    iterations: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    """Training loss of each iteration whose batch had a token to predict."""
    evaluated_at: list[int] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    """Held-out losses, at the iterations `evaluated_at`."""
    spikes: SpikeScore = field(default_factory=lambda: SpikeScore(num_spikes=0, num_judged=0))
    incidents: set[int] = field(default_factory=set)
    num_refused: int = 0
    done: Counter[ActionKind] = field(default_factory=Counter)
    """Skips, rewinds and rollbacks that succeeded."""
    tokens_per_s: float | None = None
    """Median over its steps; None: it made none."""

    @property
    def is_finished(self) -> bool:
        return self.exit_code == EXIT_DONE and self.step >= self.num_steps > 0

    @property
    def incidents_per_10k(self) -> float | None:
        """Incidents per 10,000 steps; None: the job made no step."""
        return len(self.incidents) * STEPS_OF_A_RATE / len(self.losses) if self.losses else None


def read_job_result(sweep: Path, job: Job) -> JobResult:
    """Read a job's event log; a job that was rejected or not started has an empty result."""
    result = JobResult(job=job, exit_code=EXIT_BAD_CONFIG if job.problem else None)
    events = RunDir(sweep / job.name).events
    rates = array("d")
    if events.is_file():
        with events.open("rb") as file:
            for line in whole_lines(file, 0):
                _add_line(result, rates, line)
    result.spikes = spike_score(result.losses)
    result.tokens_per_s = median_rate(rates)
    return result


def _add_line(result: JobResult, rates: array[float], line: bytes) -> None:
    plain, rate = PLAIN.match(line), TOKENS_PER_S.search(line)
    if plain and rate:  # ten times faster than parsing the whole line
        result.iterations.append(int(plain[1]))
        result.step = int(plain[2])
        result.losses.append(float(plain[3]))
        rates.append(float(rate[1]))
        return
    for event in parse(line.decode(errors="replace")):
        if isinstance(event, StepRecord):
            if not event.is_empty:
                result.iterations.append(event.iteration)
                result.losses.append(event.loss)
            result.num_refused += event.refused
            result.step = event.step
            rates.append(event.tokens_per_s)
        else:
            _add(result, event)


def _add(result: JobResult, event: Event) -> None:
    """Add any event except a step record."""
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
        case Outcome(succeeded=True, kind=kind) if kind in RECOVERIES:
            result.done[kind] += 1
        case _:
            pass
