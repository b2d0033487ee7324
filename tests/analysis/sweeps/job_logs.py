"""Jobs of a sweep on disk, as their trainers would leave them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.analysis.sweeps.job_result import JobResult
from harness.analysis.sweeps.sweep_record import Job
from harness.core.event_json import to_json
from harness.core.events import Action, ActionKind, EvalRecord, Event, Outcome, RunEnded, RunStarted, StepRecord


def job(**overrides: str) -> Job:
    """A job that sweeps over keys of `optim`."""
    swept = {f"optim.{key}": value for key, value in overrides.items()}
    return Job(name=",".join(f"{key}={value}" for key, value in swept.items()), overrides=swept)


def finished(each: Job, evaluations: Sequence[float], *, losses: Sequence[float] = (3.0, 2.0)) -> JobResult:
    """A job that did all its steps."""
    return JobResult(
        job=each,
        exit_code=0,
        step=len(losses),
        num_steps=len(losses),
        iterations=array("q", range(len(losses))),
        losses=array("d", losses),
        evaluated_at=list(range(len(evaluations))),
        evaluations=list(evaluations),
        tokens_per_s=1234.0,
    )


def step(iteration: int, loss: float, *, refused: bool = False) -> StepRecord:
    return StepRecord(
        time=float(iteration),
        iteration=iteration,
        step=iteration + 1,
        cursor=iteration,
        tokens=8 * (iteration + 1),
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        tokens_per_s=100.0 * (iteration + 1),
        refused=refused,
        stop_requested=False,
        step_time_s=0.1,
        flops_per_s=1.0,
    )


def started(num_steps: int, *, at: int = 0) -> RunStarted:
    return RunStarted(time=0.0, iteration=at, world_size=1, num_steps=num_steps, step=at)


def evaluated(iteration: int, loss: float) -> EvalRecord:
    return EvalRecord(time=0.0, iteration=iteration, step=iteration, loss=loss, tokens=8)


def ended(at: int, exit_code: int = 0) -> RunEnded:
    return RunEnded(time=0.0, iteration=at, step=at, exit_code=exit_code, reason="")


def acted(kind: ActionKind, incident: int, *, succeeded: bool = True) -> list[Event]:
    """A decision and what came of it."""
    return [
        Action(time=0.0, iteration=1, kind=kind, step=1, incident=incident, reason="", onset=1),
        Outcome(time=0.0, iteration=1, kind=kind, incident=incident, succeeded=succeeded, step=1),
    ]


def write_log(directory: Path, events: Iterable[Event]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "events.jsonl").write_text("".join(f"{to_json(event)}\n" for event in events))
