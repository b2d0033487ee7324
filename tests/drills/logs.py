"""Synthetic event logs of runs, as input of the score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.core.batch_sizes import BatchSize, BatchSizes, TokenSchedule
from harness.core.events import (
    Action,
    ActionKind,
    EvalRecord,
    Event,
    FaultInjected,
    Finding,
    FindingKind,
    RunEnded,
    RunRestarted,
    RunStarted,
    StepRecord,
)
from harness.drills.drill_record import DrillEvidence, Start
from harness.drills.scenario import Bounds, Expected, Scenario
from harness.faults.fault_plan import Fault, FaultKind

NUM_STEPS = 20
SECONDS_PER_STEP = 2.0


def schedule(*sizes: tuple[int, int], sequence_length: int = 1) -> TokenSchedule:
    """Tokens of each batch; `sizes`: first batch and sequences of a batch from there on."""
    return TokenSchedule(sizes=BatchSizes([BatchSize(*size) for size in sizes]), sequence_length=sequence_length)


HUNDRED = schedule((0, 100))


def started(iteration: int = 0, step: int = 0, time: float = 0.0) -> RunStarted:
    name = f"step-{step:08d}-gen-0" if step else None
    return RunStarted(time=time, iteration=iteration, world_size=2, num_steps=NUM_STEPS, step=step, resumed_from=name)


def step(iteration: int, number: int | None = None, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "time": SECONDS_PER_STEP * iteration,
        "iteration": iteration,
        "step": iteration if number is None else number,
        "cursor": iteration - 1,
        "tokens": 0,
        "loss": 5.0 - iteration / 100,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_s": 1.0,
        "refused": False,
        "stop_requested": False,
        "step_time_s": 1.0,
        "flops_per_s": 1.0,
    }
    return StepRecord(**(values | changes))


def steps(first: int, last: int, *, behind: int = 0) -> list[Event]:
    """Records of iterations; `behind`: iterations minus steps."""
    return [step(iteration, iteration - behind) for iteration in range(first, last + 1)]


def held_out(loss: float, iteration: int = NUM_STEPS) -> EvalRecord:
    return EvalRecord(time=SECONDS_PER_STEP * iteration, iteration=iteration, step=NUM_STEPS, loss=loss, tokens=10)


def ended(iteration: int = NUM_STEPS, number: int = NUM_STEPS, exit_code: int = 0) -> RunEnded:
    time = SECONDS_PER_STEP * iteration
    return RunEnded(time=time, iteration=iteration, step=number, exit_code=exit_code, reason="done")


def finding(iteration: int, kind: FindingKind = FindingKind.nonfinite, **changes: Any) -> Finding:
    values: dict[str, Any] = {"step": iteration, "onset": iteration, "value": 1.0, "bound": 0.0, "message": "odd"}
    return Finding(time=0.0, iteration=iteration, kind=kind, **(values | changes))


def action(iteration: int, kind: ActionKind) -> Action:
    return Action(time=0.0, iteration=iteration, kind=kind, step=iteration, incident=1, reason="so", onset=iteration)


def strike(iteration: int, *, rank: int = 1, number: int = 0) -> FaultInjected:
    return FaultInjected(time=0.0, iteration=iteration, number=number, kind="nan_grad", rank=rank, message="now")


def clean() -> DrillEvidence:
    """A run without faults."""
    return DrillEvidence(events=[started(), *steps(1, NUM_STEPS), held_out(4.0), ended()], schedule=HUNDRED)


def killed_and_resumed() -> DrillEvidence:
    """Rank 1 is killed in iteration 12, half a second after the last step; the launcher restarts it from step 8."""
    killed = RunRestarted(time=22.75, iteration=11, step=11, number=1, reason="rank 1 on a was killed by SIGKILL")
    events = [started(), *steps(1, 11), killed, started(11, 8, time=23.5), *steps(12, 23, behind=3)]
    last = events[-1]
    assert isinstance(last, StepRecord)
    last.loss, last.cursor = step(NUM_STEPS).loss, NUM_STEPS - 1
    said = ["harness: rank 1 was killed by SIGKILL; its log: x"]
    return DrillEvidence(
        events=[*events, held_out(4.0, 23), ended(23)],
        faults=[replace(strike(12), time=22.5)],
        starts=[Start(exit_code=0, said=said, seconds=18.0)],
        schedule=HUNDRED,
    )


def scenario(expected: Expected | None = None, bounds: Bounds | None = None, **fault: Any) -> Scenario:
    values: dict[str, Any] = {"kind": FaultKind.nan_grad, "at": 12, "rank": 1}
    return Scenario(
        summary="one thing breaks",
        fault=Fault(**(values | fault)),
        expected=expected or Expected(),
        bounds=bounds or Bounds(),
        train=[],
    )
