"""Hand-made incidents: a healthy event log with one fault, written as a run would write it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.gather import gather_evidence, incidents, read_non_step_events, remarks
from harness.core.events import (
    Action,
    ActionKind,
    Event,
    Finding,
    FindingKind,
    Incident,
    Outcome,
    RunStarted,
    StepRecord,
    to_json,
)
from harness.core.rundir import RunDir
from tests.sentinel.series import record

ONSET = 150
NUM_ROWS = 230
SETTINGS = """\
run: {seed: 7}
train: {num_steps: 400, batch_size: 8, sequence_length: 32}
optim: {lr: 0.001, beta1: 0.9, beta2: 0.95, eps: 1.0e-08, weight_decay: 0.1, decay_embeddings: false, clip_norm: 1.0,
  clip_value: null, schedule: constant, warmup_steps: 0, decay_steps: 0, min_lr_fraction: 0.1}
precision: {kind: fp32}
model: {qk_norm: true, z_loss: 0.0}
cluster: {price_per_gpu_hour: 3600.0}
"""
FP16 = SETTINGS.replace("fp32", "fp16")
FP8 = SETTINGS.replace("kind: fp32", "kind: fp8, fp8: {recipe: current}").replace("model: {", "model: {num_layers: 8, ")
Change = Callable[[StepRecord], StepRecord]


def healthy(at: int) -> StepRecord:
    """One step record of a healthy run, with deterministic noise."""
    noise = ((at * 7919) % 101 - 50) / 50
    probe: dict[str, Any] = {}
    if at % 10 == 0:
        probe = {
            "param_norm": 20.0,
            "group_param_norms": {"embedding": 3.0, "blocks.0": 9.0, "head": 12.0},
            "v_norm": 0.03,
            "update_ratio": 0.003,
            "square_ratio": 1.1 + 0.1 * noise,
            "activation_rms": {"blocks.0": 0.1, "blocks.1": 0.2},
            "token_loss_counts": [5, 10, 20, 40, 60, 80, 30, 9, 2],
        }
    return record(
        at,
        2.5 + 0.02 * noise,
        0.8 + 0.05 * noise,
        time=1.8e9 + at,
        lr=0.001,
        tokens=at * 256,
        tokens_per_s=1000.0,
        step_time_s=0.25,
        bounds={"loss": 4.0, "grad_norm": 30.0},
        group_grad_norms={"embedding": 0.3, "blocks.0": 0.7, "head": 0.2},
        ranks={"grad_norm": {"median": 0.5, "spread": 0.02, "worst": [[0, 0.51], [1, 0.49]]}},
        batch={
            "fingerprint": f"{at:016x}",
            "entropy_nats": 3.1 + 0.05 * noise,
            "rarest": [[200 + at % 7, 1, 12], [190, 2, 30]],
            "rows": {"main": 8},
        },
        **probe,
    )


def finding(kind: FindingKind, at: int, message: str, **facts: Any) -> Finding:
    given: dict[str, Any] = {
        "kind": kind,
        "step": at,
        "onset": at,
        "value": 1.0,
        "bound": 0.5,
        "message": message,
        "cursors": [at],
    }
    return Finding(time=1.8e9 + at, iteration=at, **(given | facts))


def action(kind: ActionKind, at: int, **facts: Any) -> Action:
    given: dict[str, Any] = {"kind": kind, "step": at, "incident": 1, "reason": "a reason", "onset": ONSET}
    return Action(time=1.8e9 + at, iteration=at, **(given | facts))


def outcome(kind: ActionKind, at: int, **facts: Any) -> Outcome:
    given: dict[str, Any] = {"kind": kind, "incident": 1, "succeeded": True, "step": at}
    return Outcome(time=1.8e9 + at, iteration=at, **(given | facts))


def ended(*, last: int = ONSET, **facts: Any) -> Incident:
    given: dict[str, Any] = {
        "number": 1,
        "kinds": ["refusal"],
        "onset": ONSET,
        "onset_step": ONSET,
        "last": last,
        "last_step": last,
        "verdict": "cured",
        "actions": ["skip"],
    }
    return Incident(time=1.8e9 + last + 40, iteration=last + 40, **(given | facts))


def as_it_is(row: StepRecord) -> StepRecord:
    return row


def log_of(changes: dict[int, Change], others: Iterable[Event] = ()) -> list[Event]:
    """A healthy log with some records changed and other events added."""
    rows: list[Event] = [changes.get(at, as_it_is)(healthy(at)) for at in range(NUM_ROWS)]
    start = RunStarted(time=1.8e9, iteration=0, world_size=2, num_steps=400, step=0)
    return sorted([start, *rows, *others], key=lambda event: event.iteration)


def write(directory: Path, log: Iterable[Event], settings: str = SETTINGS) -> RunDir:
    run = RunDir(directory)
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_text(settings)
    run.events.write_text("".join(to_json(event) + "\n" for event in log))
    return run


def evidence_of(run: RunDir) -> Evidence:
    """Evidence of the only incident, or else of the only remark."""
    log = read_non_step_events(run.events)
    (incident,) = incidents(log) or remarks(log)
    return gather_evidence(run, incident)


def refused(**facts: Any) -> Change:
    return lambda row: replace(row, refused=True, **facts)


def skipped() -> list[Event]:
    return [
        action(ActionKind.skip, ONSET, exclude=[ONSET, ONSET]),
        outcome(ActionKind.skip, ONSET + 1, seconds=0.5),
        ended(),
    ]


def poisoned() -> list[Event]:
    """One batch of rare tokens, refused."""
    batch = healthy(ONSET).batch | {"rarest": [[255, 40, 0], [254, 35, 3]], "entropy_nats": 3.0}
    groups = {"embedding": 28.0, "blocks.0": 6.0, "head": 5.0}
    counts = [0, 0, 0, 0, 0, 0, 0, 1, 5, 200, 50]
    change = refused(loss=7.1, grad_norm=30.0, batch=batch, group_grad_norms=groups, token_loss_counts=counts)
    spike = finding(FindingKind.grad_spike, ONSET, "gradient norm 30 against at most 18", groups=["embedding"])
    return log_of({ONSET: change}, [spike, *skipped()])


def scrambled() -> list[Event]:
    batch = healthy(ONSET).batch | {"entropy_nats": 5.0}
    change = refused(loss=6.7, grad_norm=3.0, batch=batch)
    return log_of({ONSET: change}, [finding(FindingKind.loss_spike, ONSET, "the gate refused this batch"), *skipped()])


def one_rank() -> list[Event]:
    """NaN in the gradient of rank 1 only."""
    change = refused(grad_norm=math.nan, nonfinite_ranks=[1])
    found = finding(FindingKind.nonfinite, ONSET, "loss 2.5, gradient norm nan", ranks=[1], groups=["blocks.0"])
    incident = ended(kinds=["refusal", "nonfinite"], ranks=[1], groups=["blocks.0"])
    return log_of({ONSET: change}, [found, *skipped()[:2], incident])


def rate_jump() -> list[Event]:
    change: Change = lambda row: replace(row, lr=0.05)  # noqa: E731
    jump = finding(FindingKind.lr_jump, ONSET, "learning rate went from 0.001 to 0.05 in one row")
    watch = action(ActionKind.watch, ONSET)
    return log_of(
        dict.fromkeys(range(ONSET, ONSET + 3), change), [jump, watch, ended(last=ONSET + 2, actions=["watch"])]
    )


def lost_moments() -> list[Event]:
    reset = finding(
        FindingKind.optimizer_reset, ONSET, "Adam's second moment fell from 0.03 to 0.001 between two probes"
    )
    stale = finding(FindingKind.v_stale, ONSET, "squared gradients far above Adam's second moment")
    change: Change = lambda row: replace(row, v_norm=0.001, square_ratio=7.0)  # noqa: E731
    back = outcome(ActionKind.rollback, ONSET + 1, steps_lost=12, seconds=2.0, target="step-00000140-gen-0")
    events = [reset, stale, action(ActionKind.rollback, ONSET, exclude=[]), back, ended(actions=["rollback"])]
    return log_of({ONSET: change}, events)


def stale_moment() -> list[Event]:
    stale = finding(FindingKind.v_stale, ONSET, "squared gradients far above Adam's second moment")
    change: Change = lambda row: replace(row, square_ratio=9.0, grad_norm=6.0, loss=3.4)  # noqa: E731
    return log_of({ONSET: change}, [stale, action(ActionKind.watch, ONSET), ended(actions=["watch"])])


def overflow() -> list[Event]:
    broken = refused(loss=math.nan, grad_norm=math.nan, nonfinite_ranks=[0, 1], loss_scale=32768.0)
    changes: dict[int, Change] = {at: lambda row: replace(row, loss_scale=32768.0) for at in range(NUM_ROWS)}
    changes[ONSET] = broken
    changes[ONSET + 1] = refused(loss=math.nan, grad_norm=math.nan, nonfinite_ranks=[0, 1], loss_scale=16384.0)
    found = finding(FindingKind.nonfinite, ONSET, "loss nan, gradient norm nan", ranks=[0, 1])
    return log_of(changes, [found, *skipped()[:2], ended(last=ONSET + 1)])


def unfit() -> list[Event]:
    """One layer group that underflows in fp8 twice, and the actions taken."""

    def probed(share: float) -> Change:
        health = {
            role: {"underflow": share, "saturated": 0.0, "scale_log2": [4, 14]} for role in ("activations", "weights")
        }
        return lambda row: replace(row, in_fp8=True, fp8=health, fp8_underflow={"blocks.0": 0.001, "blocks.1": share})

    changes: dict[int, Change] = {at: lambda row: replace(row, in_fp8=True) for at in range(NUM_ROWS)}
    changes |= {at: probed(0.002) for at in range(0, NUM_ROWS, 10)}
    changes |= {at: probed(0.49) for at in (ONSET, ONSET + 30)}
    away = [*range(ONSET + 2, ONSET + 22), *range(ONSET + 32, ONSET + 72)]
    changes |= {at: lambda row: replace(row, in_fp8=False) for at in away}
    message = "49% of the numbers of blocks.1 became zero in fp8, above 25%"
    events: list[Event] = []
    for at, until in ((ONSET, ONSET + 21), (ONSET + 30, ONSET + 71)):
        left = action(ActionKind.precision, at, in_fp8=False, until=until)
        back = action(ActionKind.precision, until - 1, in_fp8=True)
        events += [finding(FindingKind.fp8_range, at, message, onset=at - 9, groups=["blocks.1"], cursors=[])]
        events += [left, outcome(ActionKind.precision, at + 1), back, outcome(ActionKind.precision, until)]
    incident = ended(last=ONSET + 30, kinds=["fp8_range"], groups=["blocks.1"], actions=["precision"])
    return log_of(changes, [*events, incident])


def growing() -> list[Event]:
    def grown(at: int) -> Change:
        norms = {"embedding": 3.0, "blocks.0": 9.0 * 1.5 ** ((at - 110) // 10), "head": 12.0}
        return lambda row: replace(row, group_param_norms=norms)

    changes = {at: grown(at) for at in range(120, NUM_ROWS, 10)}
    drift = finding(
        FindingKind.weight_drift, ONSET, "norm of blocks.0 changed 5-fold within 200 steps", groups=["blocks.0"]
    )
    return log_of(changes, [drift, action(ActionKind.watch, ONSET), ended(actions=["watch"])])


def torn() -> list[Event]:
    """Weights that become non-finite after an ordinary gradient."""
    change: Change = lambda row: replace(row, loss=5.5, group_param_norms={"blocks.0": math.inf}, param_norm=math.inf)  # noqa: E731
    spike = finding(FindingKind.loss_spike, ONSET, "loss 5.5, 16 spreads above its level")
    back = outcome(ActionKind.rollback, ONSET + 1, steps_lost=10, seconds=1.0, target="step-00000140-gen-0")
    return log_of({ONSET: change}, [spike, action(ActionKind.rollback, ONSET), back, ended(actions=["rollback"])])


def duplicated() -> list[Event]:
    """Duplicate batches: no incident, because the policy does not act on them."""
    twice = finding(
        FindingKind.duplicate_batch, ONSET, "batch 150 holds the same tokens as batch 149", cursors=[149, 150]
    )
    return log_of({}, [twice])
