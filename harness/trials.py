"""Trials: trains a few steps with each of several remedies, from the same state on the same batches, in memory.

Why and which remedies: `harness.sentinel.policy.trial_choice`. Here they are carried out, on all ranks alike.
How: the state is a snapshot in the ring that is held until the trial ends. Each candidate sets its remedy, trains with
the step of the training loop, and measures the held-out loss; then the snapshot is restored. The event log gets one
`trial` event for each candidate and no step records, and the ledger, the catalog of checkpoints and the sentinel do not
change: a run that is killed during a trial resumes as if there had been none. The end state of the best candidate so
far is a second snapshot, so the winner's steps need not be trained again. They are kept if the sentinel would not have
interrupted them: then the run continues from their end, bit for bit as if it had trained them after the trial, and
their reports are logged and processed like those of any other step (`harness.recovery.keep_steps`).
Left out: snapshots, checkpoints and evaluations within a trial; keeping steps whose fp8 scales come from an amax
history, unless they are the last ones trained, because the history is in no snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import NamedTuple, Protocol, final

from torch import Tensor

from harness.checkpoint.slot import Slot
from harness.core.events import Action, ActionKind, Outcome, StepRecord, TrialMeasured
from harness.core.state import RunState
from harness.run import Run
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.device.step_report import HostFacts
from harness.sentinel.policy.trial_choice import DAMAGE, TrialCandidate, TrialKind, choose_candidate, is_decided
from harness.step import held_out_mean
from harness.telemetry.heartbeat import Phase

NUM_NORMS = 5
"""Steps at the start and at the end of a trial whose median gradient norm is measured."""
SLOTS_FOR_TWO = 3
"""Buffers of a ring that can hold the starting state and an end state besides its newest target."""


class TrainStep(Protocol):
    """Issues one training step."""

    def __call__(self, run: Run, *, is_trial: bool = False) -> None: ...


class TrialStart(NamedTuple):
    """The state that all candidates start from."""

    slot: Slot
    state: RunState
    held_out_loss: float


@final
@dataclass(slots=True, kw_only=True)
class TrialSteps:
    """The steps that one candidate trained."""

    start: TrialStart
    end: RunState
    begun_s: float
    """By `time.perf_counter`."""
    reports: list[tuple[HostFacts, Tensor]] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """Findings that show damage."""
    slot: Slot | None = None
    """Snapshot of the state after the steps; None: the model has that state, or it is lost."""
    seconds: float = 0.0

    @property
    def num_refused(self) -> int:
        return sum(record.refused for record in self.records)

    @property
    def must_stop(self) -> bool:
        """The run has to end or ranks disagree: the loop deals with it."""
        return any(record.stop_requested or record.digests for record in self.records)


def run_trial(run: Run, action: Action, train_step: TrainStep) -> tuple[Outcome, TrialSteps | None]:
    """Log a trial, carry it out, and log its outcome; returns the steps that the run is to continue with, if any.

    Reports of steps issued before it are processed first. If one of them calls for a response, there is no trial.
    """
    run.reporter.emit_event(action)
    begun_s = time.monotonic()
    for facts, values in run.parts.mailbox.read(everything=True):  # these steps stay
        run.process_report(facts, values)
    assert action.num_steps is not None
    num_steps = min(action.num_steps, run.cfg.train.num_steps - run.state.step - 1)
    problem = trial_obstacle(run, num_steps)
    results: list[TrialMeasured] = []
    kept: TrialSteps | None = None
    if not problem:
        start = begin_trial(run)
        best = try_candidates(run, action, start, results, num_steps=num_steps, train_step=train_step)
        problem = "a stop was requested" if best is None else ""
        kept = choose_kept(run, action, best, results)
        if kept is None:
            end_trial(run, start)
    num_kept = 0 if kept is None else len(kept.records)
    outcome = make_outcome(run, action, problem, results, num_kept=num_kept)
    outcome.seconds = time.monotonic() - begun_s - (0.0 if kept is None else kept.seconds)
    run.reporter.emit_after_pause(outcome)
    return outcome, kept


def trial_obstacle(run: Run, num_steps: int) -> str:
    """Why there can be no trial; empty if there can."""
    policy_state = run.parts.sentinel.policy.policy_state
    if policy_state.due:
        return "a step before it calls for another action"
    if not run.parts.check.rows:
        return "sentinel.held_out_rows is 0: there is no held-out loss to compare"
    return "" if num_steps > 0 else "the run is about to end"


def begin_trial(run: Run) -> TrialStart:
    """Snapshot the state, with every save finished, so that all ranks have the same free slots."""
    parts, state = run.parts, run.state
    with run.heartbeat.during(Phase.save):
        parts.checkpoints.finish_saves()
    slot = parts.ring.hold_snapshot(state, sentinel=parts.sentinel.memory())
    loss = held_out_mean(parts)
    assert loss is not None, "trial_obstacle comes first"
    return TrialStart(slot, replace(state), loss)


def try_candidates(
    run: Run,
    action: Action,
    start: TrialStart,
    results: list[TrialMeasured],
    *,
    num_steps: int,
    train_step: TrainStep,
) -> TrialSteps | None:
    """Train the candidates one after the other, until the choice is certain; returns the steps of the best one.

    Adds the result of each to `results`. Returns None if the run has to stop.
    """
    parts = run.parts
    best: TrialSteps | None = None
    for number, logged in enumerate(action.candidates, start=1):
        candidate = TrialCandidate.parse(logged)
        if number > 1:
            return_to_start(run, start)
        steps = train_candidate(run, candidate, start, num_steps=num_steps, train_step=train_step)
        if steps.must_stop:
            return None
        result = measure_candidate(run, action, candidate, steps)
        results.append(result)
        parts.sentinel.on_trial_measured(result)
        run.reporter.emit_event(result)
        if choose_candidate(results) == number - 1:
            parts.ring.discard_from(start.state.iteration + 1)
            best = steps
        if is_decided(results):
            break
        if best is steps and number < len(action.candidates) and parts.ring.num_slots >= SLOTS_FOR_TWO:
            best.slot = parts.ring.take_snapshot(steps.end)
            best.slot.complete(step=steps.end.step, refused_in_row=steps.end.refused_in_row)
    return best


def train_candidate(
    run: Run, candidate: TrialCandidate, start: TrialStart, *, num_steps: int, train_step: TrainStep
) -> TrialSteps:
    """Train some steps with the remedy of a candidate, and run a copy of the detectors on them."""
    parts, state = run.parts, run.state
    detectors = Detectors.restore(run.cfg.sentinel.detect, parts.sentinel.detectors.state())
    if candidate.lr_scale is not None:
        detectors.expect_lr_change()
    steps = TrialSteps(start=start, end=state, begun_s=time.perf_counter())

    def read_reports(*, everything: bool = False) -> None:
        for facts, values in parts.mailbox.read(everything=everything):
            record = run.read_record(facts, values)
            state.correct_step(refused=record.refused)
            found = detectors.observe(record)
            steps.reports.append((facts, values.clone()))
            steps.records.append(record)
            steps.findings += [str(each.kind) for each in found if each.kind in DAMAGE and not record.refused]

    with remedy_in_force(run, candidate):
        for _ in range(num_steps):
            run.heartbeat.beat(state, Phase.trial)
            train_step(run, is_trial=True)
            read_reports()
            if steps.must_stop:
                break
        read_reports(everything=True)
    if any(record.save_requested for record in steps.records):
        parts.checkpoints.request_save()
    steps.end, steps.seconds = replace(state), time.perf_counter() - steps.begun_s
    return steps


@contextmanager
def remedy_in_force(run: Run, candidate: TrialCandidate) -> Iterator[None]:
    """Set a remedy for the steps inside the context, exactly as its action will set it for good."""
    parts = run.parts
    fallback, lr_target = parts.sentinel.policy.policy_state.fallback, parts.update.lr_target
    was_on = fallback.is_on
    match candidate.remedy:
        case TrialKind.wider:
            first, last = candidate.exclude
            with parts.ledger.trying_exclusion(first, last):
                yield
            return
        case TrialKind.lower_lr:
            assert candidate.lr_scale is not None
            parts.update.lr_target = candidate.lr_scale * run.state.lr_factor
        case TrialKind.bf16:
            fallback.is_on = True
        case TrialKind.unchanged:
            pass
    yield
    fallback.is_on, parts.update.lr_target = was_on, lr_target


def measure_candidate(run: Run, action: Action, candidate: TrialCandidate, steps: TrialSteps) -> TrialMeasured:
    """Measure the state after the steps of a candidate; collective."""
    norms = [record.grad_norm for record in steps.records if not record.refused]
    loss = held_out_mean(run.parts)
    assert loss is not None, "there are held-out rows"
    return TrialMeasured(
        time=time.time(),
        iteration=steps.start.state.iteration,
        incident=action.incident,
        remedy=str(candidate.remedy),
        steps=len(steps.records),
        num_refused=steps.num_refused,
        findings=list(dict.fromkeys(steps.findings)),
        held_out_before=steps.start.held_out_loss,
        held_out_loss=loss,
        grad_norm_before=median(norms[:NUM_NORMS]) if norms else 0.0,
        grad_norm=median(norms[-NUM_NORMS:]) if norms else 0.0,
        seconds=time.perf_counter() - steps.begun_s,
        tokens=steps.end.tokens - steps.start.state.tokens,
    )


def choose_kept(
    run: Run, action: Action, best: TrialSteps | None, results: Sequence[TrialMeasured]
) -> TrialSteps | None:
    """The steps of the winner, if the run can continue from their end as if it had trained them after the trial."""
    if best is None:
        return None
    is_last = choose_candidate(results) == len(results) - 1
    needs_history = run.parts.fp8_layers.is_delayed and bool(run.parts.fp8_layers.in_fp8)
    if not is_last and (best.slot is None or needs_history):
        return None
    set_counters(run.state, best.start.state)
    outcome = make_outcome(run, action, "", results, num_kept=len(best.records))
    return None if is_interrupted(run, outcome, best.records) else best


def is_interrupted(run: Run, outcome: Outcome, records: Sequence[StepRecord]) -> bool:
    """Whether the sentinel would have changed the course of the run before or within these steps.

    The steps were trained with the remedy of the winner and nothing else. A watch changes nothing, and the skip of a
    batch whose update was rejected only makes sure that it does not return; so neither interrupts them by itself.
    """
    sentinel = run.parts.sentinel.copy()

    def leads_on(action: Action) -> bool:
        done = replace(outcome, kind=action.kind, incident=action.incident)
        return sentinel.on_outcome(done) is not None

    remedy = sentinel.on_outcome(outcome)
    if remedy is not None and leads_on(remedy):
        return True
    for record in records:
        action = sentinel.process_record(record).action
        if action is None:
            continue
        if action.kind not in (ActionKind.watch, ActionKind.skip) or action.give_back or leads_on(action):
            return True
    return False


def make_outcome(run: Run, action: Action, problem: str, results: Sequence[TrialMeasured], *, num_kept: int) -> Outcome:
    winner = results[choose_candidate(results)].remedy if results and not problem else ""
    undone = [result for result in results if not num_kept or result.remedy != winner]
    return Outcome(
        time=time.time(),
        iteration=run.state.iteration,
        kind=action.kind,
        incident=action.incident,
        succeeded=not problem,
        step=run.state.step,
        steps_lost=sum(result.steps for result in undone),
        tokens_lost=sum(result.tokens for result in undone),
        reason=problem,
        remedy=winner,
        kept_steps=num_kept,
    )


def return_to_start(run: Run, start: TrialStart) -> None:
    """Restore the state that all candidates start from."""
    parts = run.parts
    parts.ring.restore(start.slot)
    set_counters(run.state, start.state)
    parts.update.measure_digest()
    parts.fp8_layers.reset_scale_history()


def end_trial(run: Run, start: TrialStart) -> None:
    """Restore the starting state, and drop the snapshots of end states."""
    return_to_start(run, start)
    run.parts.ring.discard_from(start.state.iteration + 1)
    run.parts.ring.release(start.slot)


def drop_steps(run: Run, kept: TrialSteps) -> None:
    """Continue from the start of the trial after all, because an action that the steps need has failed."""
    end_trial(run, kept.start)


def restore_steps(run: Run, kept: TrialSteps) -> None:
    """Restore the state after the steps of the winner, unless the model has it, and drop what the trial held."""
    parts = run.parts
    if kept.slot is not None:
        parts.ring.restore(kept.slot)
        parts.update.measure_digest()
    parts.ring.discard_from(kept.start.state.iteration + 1)
    parts.ring.release(kept.start.slot)


def adopt_counters(state: RunState, kept: TrialSteps) -> None:
    """Count the steps of the winner as issued; their reports are processed next, and correct the step count."""
    before = replace(state)
    set_counters(state, kept.end)
    state.step += kept.num_refused
    state.refused_in_row = before.refused_in_row


def set_counters(state: RunState, other: RunState) -> None:
    """Copy all fields of a run state in place."""
    for each in fields(RunState):
        setattr(state, each.name, getattr(other, each.name))
