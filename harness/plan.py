"""What a run will take and what its trouble will cost, before anything is started.

Why: a job that does not fit, or that saves too rarely, should be found out at a desk, not after a night in a queue.
How: numbers are a pure function of the configuration, the text a pure function of the numbers. Weights, gradients and
both moments of AdamW are fp32 and spread evenly over the ranks of one copy of the model. Seconds are stated only where
`cluster.peak_tflops` says how fast a device is, at a share of that rate (MFU) that the reader chooses.
Left out: activations and gathered blocks, traffic, and what a step takes on a given cluster: they need measurements.
A rank's share is an average; parameters that do not divide evenly make it differ by a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from harness.checkpoint.cadence import RollbackCost, num_buffers, rewind_cost, rollback_cost
from harness.config import Config, check_world
from harness.model.size import flops_per_token, num_parameters

FP32_BYTES = 4
NUM_MOMENTS = 2
WIDTH = 18


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: str
    num_parameters: int
    flops_per_token: int
    tokens_per_step: int
    flops_per_step: int
    num_ranks: int
    replicate: int
    """Copies of the model that the ranks hold together."""
    weights_bytes: int
    """Of one rank, as gradients and moments."""
    gradients_bytes: int
    moments_bytes: int
    checkpoint_bytes: int
    """One checkpoint on disk."""
    ring_slots: int
    ring_bytes: int
    """Host memory of one machine: snapshots, and the one that is being saved."""
    ring_allowed_bytes: int | None
    """None: half of what is free when the run starts."""
    mfu: float
    step_time_s: float | None
    """At that MFU; None where the rate of a device is not known."""
    rewind: RollbackCost | None
    rollback: RollbackCost


def plan(cfg: Config, *, mfu: float) -> Plan:
    """The numbers of a run on `launch.nproc` ranks of one machine, or on one rank where that is not set."""
    num_ranks = cfg.launch.nproc or 1
    check_world(cfg, num_ranks)
    count, num_shards = num_parameters(cfg.model), num_ranks // cfg.parallel.replicate
    token_flops = flops_per_token(cfg.model, cfg.train.sequence_length)
    tokens = cfg.train.batch_size * cfg.train.sequence_length
    peak_tflops, ring = cfg.cluster.peak_tflops, cfg.checkpoint.ring
    step_time_s = None if peak_tflops is None else tokens * token_flops / (num_ranks * peak_tflops * 1e12 * mfu)
    share_bytes = FP32_BYTES * -(-count // num_shards)
    state_bytes = share_bytes * (1 + NUM_MOMENTS)
    return Plan(
        model=cfg.model.name,
        num_parameters=count,
        flops_per_token=token_flops,
        tokens_per_step=tokens,
        flops_per_step=tokens * token_flops,
        num_ranks=num_ranks,
        replicate=cfg.parallel.replicate,
        weights_bytes=share_bytes,
        gradients_bytes=share_bytes,
        moments_bytes=share_bytes * NUM_MOMENTS,
        checkpoint_bytes=FP32_BYTES * count * (1 + NUM_MOMENTS),
        ring_slots=ring.slots,
        ring_bytes=num_buffers(ring) * state_bytes * num_ranks,
        ring_allowed_bytes=None if ring.memory_gb is None else round(ring.memory_gb * 1e9),
        mfu=mfu,
        step_time_s=step_time_s,
        rewind=rewind_cost(cfg),
        rollback=rollback_cost(cfg, step_time_s=step_time_s),
    )


def render(plan: Plan) -> str:
    """The plan for people."""
    state_bytes = plan.weights_bytes + plan.gradients_bytes + plan.moments_bytes
    ranks, copies = _counted(plan.num_ranks, "rank", "ranks"), _counted(plan.replicate, "copy", "copies")
    rows = {
        f"model {plan.model}": {
            "parameters": f"{plan.num_parameters:,}",
            "a token": _si(plan.flops_per_token, "FLOP"),
            "a step": f"{plan.tokens_per_step:,} tokens, {_si(plan.flops_per_step, 'FLOP')}{_pace(plan)}",
        },
        f"memory of a rank ({ranks}, {copies} of the model)": {
            "weights": _si(plan.weights_bytes, "B"),
            "gradients": _si(plan.gradients_bytes, "B"),
            "moments": _si(plan.moments_bytes, "B"),
            "together": f"{_si(state_bytes, 'B')}, and activations",
        },
        "checkpoints": {"on disk": f"{_si(plan.checkpoint_bytes, 'B')} each", **_ring(plan)},
        "going back loses at most": {
            "rewind": "no snapshots are kept" if plan.rewind is None else _loss(plan.rewind, plan.step_time_s),
            "rollback": _loss(plan.rollback, plan.step_time_s),
        },
    }
    lines = []
    for title, section in rows.items():
        lines.append(title)
        lines += [f"  {name:<{WIDTH}}{value}" for name, value in section.items()]
    return "\n".join(lines) + "\n"


def _pace(plan: Plan) -> str:
    return "" if plan.step_time_s is None else f", {_duration(plan.step_time_s)} at {100 * plan.mfu:g} % MFU"


def _ring(plan: Plan) -> dict[str, str]:
    snapshots = _counted(plan.ring_slots, "snapshot", "snapshots")
    rows = {"in memory": f"{_si(plan.ring_bytes, 'B')} a machine: {snapshots} and the one being saved"}
    if plan.ring_allowed_bytes is not None:
        fits = plan.ring_bytes <= plan.ring_allowed_bytes
        refused = "" if fits else "; TOO LITTLE, the run will be refused"
        rows["allowed"] = f"{_si(plan.ring_allowed_bytes, 'B')} (checkpoint.ring.memory_gb){refused}"
    return rows


def _loss(cost: RollbackCost, step_time_s: float | None) -> str:
    by_clock = ""
    if cost.minutes_at_most is not None and step_time_s is None:
        by_clock = f"{cost.minutes_at_most:g} minutes and {cost.steps_besides:,} steps"
    if cost.steps_at_most is None:
        return by_clock
    text = f"{cost.steps_at_most:,} steps (on average {cost.steps_on_average:,}), {cost.tokens_at_most:,} tokens"
    if step_time_s is not None:
        text += f", {_duration(cost.steps_at_most * step_time_s)}"
    return f"{text}; or {by_clock}, whichever is less" if by_clock else text


def _counted(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _si(value: float, unit: str) -> str:
    """A quantity with the prefix that keeps it readable."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.4g} h"
