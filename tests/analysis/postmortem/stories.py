"""Hand-made incidents: a healthy event log with one fault, written as a run would write it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.gather import gather_evidence, incidents, remarks
from harness.core.event_json import to_json
from harness.core.events import (
    Action,
    ActionKind,
    ChangePlanned,
    Event,
    Finding,
    FindingKind,
    Incident,
    Intervention,
    Outcome,
    RunEnded,
    RunStarted,
    StepRecord,
)
from harness.core.rundir import RunDir
from harness.telemetry.event_log import read_non_step_events
from tests.sentinel.series import record

ONSET = 150
NUM_ROWS = 230
SETTINGS = """\
run: {seed: 7}
train: {num_steps: 400, batch_size: 8, sequence_length: 32}
optim: {lr: 0.001, beta1: 0.9, beta2: 0.95, eps: 1.0e-08, weight_decay: 0.1, decay_embeddings: false, clip_norm: 1.0,
  clip_value: null, schedule: constant, warmup_steps: 0, decay_steps: 0, min_lr_fraction: 0.1}
precision: {kind: fp32}
model: {name: tiny, vocab_size: 256, dim: 128, num_layers: 4, num_heads: 4, num_kv_heads: 2, ffn_dim: 352,
  rope_theta: 10000.0, norm_eps: 1.0e-05, tied_head: false, qk_norm: true, embedding_norm: false, attention: fused,
  z_loss: 0.0, loss_chunk_tokens: 4096, init: fixed, init_std: 0.02, depth_scaled_init: true, mup_base_width: null}
cluster: {price_per_gpu_hour: 3600.0}
"""
FP16 = SETTINGS.replace("fp32", "fp16")
FP8 = SETTINGS.replace("kind: fp32", "kind: fp8, fp8: {recipe: current}").replace("num_layers: 4", "num_layers: 8")
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
    """An update that was rejected: the step that it would have been is the next one."""
    return lambda row: replace(row, refused=True, step=row.step - 1, **facts)


def changed_config(at: int, **changes: Any) -> Intervention:
    """A resume with another configuration; keys with __ for a dot, values [old, new]."""
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return Intervention(time=1.8e9 + at, iteration=at, who="ada", reason="run.resume=changed", changes=given)


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
    spike = finding(FindingKind.loss_spike, ONSET, "loss 5.5, 16 sigma above normal")
    back = outcome(ActionKind.rollback, ONSET + 1, steps_lost=10, seconds=1.0, target="step-00000140-gen-0")
    return log_of({ONSET: change}, [spike, action(ActionKind.rollback, ONSET), back, ended(actions=["rollback"])])


def planned_phase() -> list[Event]:
    """A phase of `data.phases`: other tokens, a higher loss, and nothing broken."""

    def other(row: StepRecord) -> StepRecord:
        return replace(row, loss=row.loss + 1.2, in_planned_change=True, batch=row.batch | {"entropy_nats": 4.4})

    spike = finding(FindingKind.loss_spike, ONSET, "loss 3.7, 40 sigma above normal")
    accept = action(ActionKind.accept, ONSET + 6, level=3.7)
    plan = ChangePlanned(
        time=1.8e9 + ONSET,
        iteration=ONSET,
        step=ONSET,
        cursor=ONSET,
        until=ONSET + 50,
        reason="a phase of data.phases begins",
    )
    checked = [action(ActionKind.check, ONSET + 3, level=2.6), outcome(ActionKind.check, ONSET + 4, held_out_loss=2.6)]
    end = ended(last=ONSET + 6, kinds=["loss_spike"], verdict="accepted", actions=["check", "accept"])
    return log_of(dict.fromkeys(range(ONSET, NUM_ROWS), other), [plan, spike, *checked, accept, end])


PHASED = SETTINGS + f"data: {{phases: [{{from_batch: {ONSET}, weights: {{web: 1.0}}}}]}}\n"


def hot_start() -> list[Event]:
    """A learning rate 1000 times the usual one from step 1 on: the loss climbs, and is not finite in the end."""

    def hot(at: int) -> Change:
        growth = min(1.15**at, 1e4)
        loss = math.nan if at > 60 else 5.5 + 0.4 * growth
        norms = {"embedding": 3.0 * growth, "blocks.0": 9.0 * growth, "head": 12.0}
        norms = norms if at % 10 == 0 else {}
        return lambda row: replace(row, lr=3.0, loss=loss, grad_norm=0.8 * growth, group_param_norms=norms)

    changes = {at: hot(at) for at in range(90)}
    climb = finding(FindingKind.divergence, 40, "the loss climbs")
    drift = finding(FindingKind.weight_drift, 45, "norm of blocks.0 changed 5-fold", groups=["blocks.0"])
    halt = action(
        ActionKind.halt, 80, reason="structural, needs a human: divergence came back after every cure", onset=40
    )
    log = [each for each in log_of(changes, [climb, drift, halt]) if each.iteration < 90]
    end = ended(
        last=80, onset=40, onset_step=40, kinds=["divergence", "weight_drift"], verdict="open", is_open=True,
        spike_type=3, actions=["halt"],
    )  # fmt: skip
    return [*log, end, RunEnded(time=1.8e9 + 90, iteration=90, step=90, exit_code=3, reason="halted")]


HOT = SETTINGS.replace("lr: 0.001", "lr: 3.0")


def hot_resume() -> list[Event]:
    """A resume that raises the learning rate thirtyfold; the loss spikes shortly after."""
    changes: dict[int, Change] = {at: lambda row: replace(row, lr=0.03) for at in range(ONSET - 4, NUM_ROWS)}
    for at in range(ONSET, ONSET + 40):
        changes[at] = lambda row: replace(row, lr=0.03, loss=4.5, grad_norm=5.0)
    spike = finding(FindingKind.loss_spike, ONSET, "loss 4.5, 50 sigma above normal")
    jump = finding(FindingKind.lr_jump, ONSET - 4, "learning rate went from 0.001 to 0.03 in one row")
    end = ended(last=ONSET + 30, kinds=["loss_spike"], verdict="lingering", spike_type=2, actions=["watch"])
    return log_of(changes, [changed_config(ONSET - 5, optim__lr=[0.001, 0.03]), jump, spike, end])


RAISED = SETTINGS.replace("lr: 0.001", "lr: 0.03")


def longer_schedule() -> list[Event]:
    """A resume with more steps, whose schedule has not decayed as far: the learning rate is higher than before."""
    changes: dict[int, Change] = {at: lambda row: replace(row, lr=0.0001) for at in range(ONSET)}
    changes[ONSET] = lambda row: replace(row, lr=0.001, loss=3.4)
    jump = finding(FindingKind.lr_jump, ONSET, "learning rate went from 0.0001 to 0.001 in one row")
    events = [changed_config(ONSET - 1, train__num_steps=[160, 400]), jump, action(ActionKind.watch, ONSET)]
    return log_of(changes, [*events, ended(last=ONSET + 2, kinds=["lr_jump"], actions=["watch"])])


def broken_update() -> list[Event]:
    """An update with a NaN gradient that was applied: all later losses and weights are NaN, and the run ends so."""

    def broken(probe: dict[str, Any]) -> Change:
        return lambda row: replace(row, loss=math.nan, grad_norm=math.nan, nonfinite_ranks=[0, 1], **probe)

    changes: dict[int, Change] = {ONSET: lambda row: replace(row, grad_norm=math.nan, nonfinite_ranks=[0, 1])}
    norms = {"embedding": math.nan, "blocks.0": math.nan, "head": math.nan}
    for at in range(ONSET + 1, ONSET + 20):
        probe: dict[str, Any] = {"group_param_norms": norms} if at % 10 == 0 else {}
        changes[at] = broken(probe)
    found = finding(FindingKind.nonfinite, ONSET, "loss 2.5, gradient norm nan", ranks=[0, 1])
    halt = action(ActionKind.halt, ONSET + 15, reason="no state to restore; the weights are not finite")
    log = [each for each in log_of(changes, [found, halt]) if each.iteration < ONSET + 20]
    end = ended(
        last=ONSET + 15, kinds=["nonfinite", "nonfinite weights"], verdict="open", is_open=True, spike_type=3,
        actions=["halt"],
    )  # fmt: skip
    return [*log, end, RunEnded(time=1.8e9 + 200, iteration=ONSET + 20, step=ONSET, exit_code=3, reason="halted")]


def cascade() -> list[Event]:
    """Activations that grow from layer to layer, in bf16."""
    grown = {"blocks.0": 0.12, "blocks.1": 0.9, "blocks.2": 6.0, "blocks.3": 40.0}
    usual = {"blocks.0": 0.1, "blocks.1": 0.2, "blocks.2": 0.3, "blocks.3": 0.4}
    changes: dict[int, Change] = {at: lambda row: replace(row, activation_rms=usual) for at in range(0, ONSET, 10)}
    changes[ONSET] = lambda row: replace(row, loss=4.4, grad_norm=3.0, activation_rms=grown)
    spike = finding(FindingKind.loss_spike, ONSET, "loss 4.4, 60 sigma above normal")
    return log_of(changes, [spike, action(ActionKind.watch, ONSET), ended(kinds=["loss_spike"], actions=["watch"])])


BF16 = SETTINGS.replace("fp32", "bf16")


def bad_rank() -> list[Event]:
    """The gradient of one rank is far too large, again and again."""
    spread = {"median": 40.0, "spread": 39.0, "worst": [[1, 80.0], [0, 0.5]]}
    change = refused(loss=2.5, grad_norm=40.0, ranks={"grad_norm": spread})
    found = finding(FindingKind.grad_spike, ONSET, "gradient norm 40 against at most 18", ranks=[1])
    return log_of(
        dict.fromkeys(range(ONSET, ONSET + 3), change), [found, *skipped()[:2], ended(last=ONSET + 2, ranks=[1])]
    )


def bad_shard() -> list[Event]:
    """Several batches of one source hold tokens that are not text."""

    def noise(row: StepRecord) -> StepRecord:
        batch = row.batch | {"entropy_nats": 5.1, "rows": {"web": 8}}
        return replace(row, refused=True, step=row.step - 1, loss=6.6, grad_norm=2.5, batch=batch)

    spike = finding(FindingKind.loss_spike, ONSET, "the gate refused this batch")
    return log_of(dict.fromkeys(range(ONSET, ONSET + 4), noise), [spike, *skipped()[:2], ended(last=ONSET + 3)])


def rejected_in_a_row() -> list[Event]:
    """Four rejected updates; the policy's onset is the applied update before them."""
    change = refused(loss=6.0, grad_norm=20.0)
    rewind = action(ActionKind.rewind, ONSET + 3, onset=ONSET - 1)
    back = outcome(ActionKind.rewind, ONSET + 3, step=ONSET - 6, steps_lost=5, target="snapshot of iteration 144")
    incident = ended(last=ONSET + 3, onset=ONSET - 1, onset_step=ONSET - 1, kinds=["refusal", "refusals"])
    return log_of(dict.fromkeys(range(ONSET, ONSET + 4), change), [rewind, back, incident])


def vary(log: Iterable[Event], seed: int) -> list[Event]:
    """The same story in another run: other levels of loss and gradient norm, other noise, other batch indices."""
    random = Random(seed)
    loss, grad, first = random.uniform(0.7, 1.6), random.uniform(0.2, 5.0), random.randrange(5000)
    return [_vary_event(event, random, loss, grad, first) for event in log]


def _vary_event(event: Event, random: Random, loss: float, grad: float, first: int) -> Event:
    match event:
        case StepRecord():
            grad *= random.lognormvariate(0, 0.05)
            ranks = {name: _scale(spread, grad) for name, spread in event.ranks.items()}
            return replace(
                event,
                loss=event.loss * loss * random.lognormvariate(0, 0.004),
                grad_norm=event.grad_norm * grad,
                group_grad_norms=_scale(event.group_grad_norms, grad),
                ranks=ranks,
                cursor=event.cursor + first,
            )
        case Finding():
            return replace(event, cursors=[cursor + first for cursor in event.cursors])
        case Action():
            return replace(event, exclude=[cursor + first for cursor in event.exclude])
        case ChangePlanned():
            return replace(event, cursor=event.cursor + first, until=event.until + first)
        case _:
            return event


def _scale(value: Any, factor: float) -> Any:
    """All numbers of plain data times a factor; ranks in pairs [rank, value] stay."""
    match value:
        case dict():
            return {key: _scale(each, factor) for key, each in value.items()}
        case [int(rank), float(each)]:
            return [rank, each * factor]
        case list():
            return [_scale(each, factor) for each in value]
        case _:
            return value * factor


def duplicated() -> list[Event]:
    """Duplicate batches: no incident, because the policy does not act on them."""
    twice = finding(
        FindingKind.duplicate_batch, ONSET, "batch 150 holds the same tokens as batch 149", cursors=[149, 150]
    )
    return log_of({}, [twice])
