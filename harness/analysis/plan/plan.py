"""Computes the plan of a run from its configuration: memory, traffic, step time, cost of a restore, price.

Why: a job that does not fit, waits for its links or saves too rarely should be noticed before it is submitted.
How: memory, traffic and step time have a file each; this one combines them with the cost of a restore and the price.
Times need `cluster.peak_tflops`, prices need `cluster.price_per_gpu_hour`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from harness.analysis.plan.calibration import unmeasured
from harness.analysis.plan.fp8 import blocks_in_fp8, flops_share
from harness.analysis.plan.memory import Memory, checkpoint_bytes, memory, offloaded_bytes
from harness.analysis.plan.predicted_time import StepTime, step_time
from harness.analysis.plan.resharding import rank_memory_bytes
from harness.analysis.plan.traffic import Collective, collectives, num_per_node
from harness.analysis.plan.work import FP8_SPEEDUP
from harness.checkpoint.ring_cost import RollbackCost, num_buffers, num_replica_buffers, rewind_cost, rollback_cost
from harness.config.launch import LaunchKind
from harness.config.optim import MomentDtype, OptimizerKind
from harness.config.precision import PrecisionKind
from harness.config.schema import Config, check_world, sharing
from harness.model.size import flops_per_token, num_parameters

HOUR_S = 3600


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Data that one rank sends in a step."""

    sent_bytes: int
    """To all other ranks."""
    sent_far_bytes: int
    """Part of it that goes through its port to other machines."""
    calls: list[Collective]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """In the currency of cluster.price_per_gpu_hour."""

    run: float
    thousand_steps: float
    rewind_at_most: float | None
    rollback_at_most: float | None
    """None: the number of lost steps is not known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """The part of the model that runs in fp8."""

    recipe: str
    engine: str
    num_blocks: int
    flops_share: float
    """Of the model's FLOPs."""
    peak_tflops: float | None
    """fp8 rate of a device; None if the bf16 rate is not known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunStage:
    """A part of the run with one batch size (`train.batch_size_warmup`) and precision (`precision.phases`)."""

    batch_size: int
    precision: PrecisionKind
    num_steps: int
    step_time_s: float | None
    """None if the rate of a device is not known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: str
    num_parameters: int
    flops_per_token: int
    tokens_per_step: int
    flops_per_step: int
    num_steps: int
    num_tokens: int
    """Of the whole run."""
    stages: list[RunStage]
    """In order; one if neither batch size nor precision changes."""
    num_ranks: int
    num_per_node: int
    num_sequences: int
    """Sequences that all ranks compute in a step, including padding."""
    num_padding: int
    """Sequences repeated so that all ranks have equally many; they do not count."""
    replicate: int
    """Replicas of the model over all ranks."""
    context: int
    """Ranks that share each sequence."""
    weights_bytes: int
    """Of one rank, like gradients and moments."""
    gradients_bytes: int
    moments_bytes: int
    optimizer: OptimizerKind
    """Of the matrices in the blocks."""
    moment_dtype: MomentDtype
    """Of AdamW's moments."""
    fp8: Fp8 | None
    """None: no projection runs in fp8."""
    memory: Memory
    memory_allowed_bytes: int | None
    """None: `cluster.memory_gb` is not set."""
    traffic: Traffic
    mfu: float | None
    """Share of its bf16 rate that a device reaches while it computes; None if that rate is not known."""
    is_mfu_given: bool
    """Whether `mfu` comes from the user."""
    pace: StepTime | None
    """None if the rate of a device is not known."""
    unmeasured: list[str]
    """Why the time of a step is an estimate without measurement; empty if it is not."""
    price: Price | None
    checkpoint_bytes: int
    """One checkpoint on disk."""
    ring_slots: int
    ring_bytes: int
    """Host memory of one machine: snapshots, the one being saved, and those of partners."""
    ring_replicas: int
    """Buffers of each rank for the snapshots of a partner on another machine."""
    offload_bytes: int
    """Host memory of one machine for activations (`parallel.activation_offload`)."""
    ring_allowed_bytes: int | None
    """None: half of the free memory when the run starts."""
    rewind: RollbackCost | None
    rollback: RollbackCost

    @property
    def step_time_s(self) -> float | None:
        return None if self.pace is None else self.pace.step_time_s

    @property
    def run_time_s(self) -> float | None:
        """None if the rate of a device is not known."""
        return None if self.pace is None else _run_time_s(self.stages)


def planned_ranks(cfg: Config) -> int:
    """Number of ranks in the configuration; 1 if it leaves that to the machine."""
    nproc = cfg.launch.nproc
    if nproc is None and (cfg.launch.kind is not LaunchKind.local or cfg.launch.nodes > 1):
        nproc = cfg.launch.slurm.gpus_per_node or cfg.cluster.gpus_per_node
    return cfg.launch.nodes * (nproc or 1)


def plan(cfg: Config, *, world_size: int, mfu: float | None = None) -> Plan:
    """The plan of a run on `world_size` ranks; `mfu` replaces the planned kernel time of a device."""
    check_world(cfg, world_size)
    token_flops = flops_per_token(cfg.model, cfg.train.sequence_length)
    tokens = cfg.train.batch_size * cfg.train.sequence_length
    held, moving = memory(cfg, world_size=world_size), step_time(cfg, world_size=world_size, mfu=mfu)
    calls = collectives(cfg, world_size=world_size)
    here, ring = num_per_node(cfg, world_size), cfg.checkpoint.ring
    rewind = rewind_cost(cfg)
    rollback = rollback_cost(cfg, step_time_s=None if moving is None else moving.step_time_s)
    weights = held.parts.weights
    replicas = num_replica_buffers(ring, num_nodes=-(-world_size // here), replicate=cfg.parallel.replicate)
    stages = _stages(cfg, world_size=world_size, mfu=mfu)
    shares = sharing(cfg, world_size)
    num_sequences = shares.world_size * shares.num_slots
    return Plan(
        model=cfg.model.name,
        num_parameters=num_parameters(cfg.model),
        flops_per_token=token_flops,
        tokens_per_step=tokens,
        flops_per_step=tokens * token_flops,
        num_steps=cfg.train.num_steps,
        num_tokens=cfg.train.num_tokens(),
        stages=stages,
        num_ranks=world_size,
        num_per_node=here,
        num_sequences=num_sequences,
        num_padding=num_sequences - cfg.train.batch_size,
        replicate=cfg.parallel.replicate,
        context=cfg.parallel.context,
        weights_bytes=weights,
        gradients_bytes=weights,
        moments_bytes=held.parts.moments,
        optimizer=cfg.optim.kind,
        moment_dtype=cfg.optim.moment_dtype,
        fp8=_fp8(cfg),
        memory=held,
        memory_allowed_bytes=None if (allowed := rank_memory_bytes(cfg)) is None else round(allowed),
        traffic=Traffic(
            sent_bytes=sum(call.num_calls * call.sent_bytes for call in calls),
            sent_far_bytes=sum(call.num_calls * call.sent_far_bytes for call in calls),
            calls=calls,
        ),
        mfu=None if moving is None else moving.device_mfu,
        is_mfu_given=mfu is not None,
        pace=moving,
        unmeasured=unmeasured(cfg, world_size=world_size, is_mfu_given=mfu is not None),
        price=None if moving is None else _price(cfg, moving, stages, rewind, rollback, world_size),
        checkpoint_bytes=checkpoint_bytes(cfg),
        ring_slots=ring.slots,
        ring_bytes=(num_buffers(ring) + replicas) * (weights + held.parts.moments) * here,
        ring_replicas=replicas,
        offload_bytes=here * offloaded_bytes(cfg, world_size=world_size),
        ring_allowed_bytes=None if ring.memory_gb is None else round(ring.memory_gb * 1e9),
        rewind=rewind,
        rollback=rollback,
    )


def _stages(cfg: Config, *, world_size: int, mfu: float | None) -> list[RunStage]:
    """The parts of the run, as if no batch were skipped and no update rejected."""
    sizes, num_steps = cfg.train.size_stages(), cfg.train.num_steps
    starts = {start for start, _ in sizes} | {phase.from_batch for phase in cfg.precision.phases}
    found = []
    for start, end in pairwise([*sorted(start for start in starts if start < num_steps), num_steps]):
        size, kind = next(size for first, size in reversed(sizes) if first <= start), cfg.precision.kind_at(start)
        train = replace(cfg.train, batch_size=size, batch_tokens=None, batch_size_warmup=[])
        stage_cfg = replace(cfg, train=train, precision=replace(cfg.precision, kind=kind, phases=[]))
        time = step_time(stage_cfg, world_size=world_size, mfu=mfu)
        time_s = None if time is None else time.step_time_s
        found.append(RunStage(batch_size=size, precision=kind, num_steps=end - start, step_time_s=time_s))
    return found


def _run_time_s(stages: list[RunStage]) -> float:
    return sum(stage.num_steps * (stage.step_time_s or 0.0) for stage in stages)


def _fp8(cfg: Config) -> Fp8 | None:
    blocks, peak_tflops = blocks_in_fp8(cfg), cfg.cluster.peak_tflops
    if not blocks:
        return None
    return Fp8(
        recipe=cfg.precision.fp8.recipe,
        engine=cfg.precision.fp8.engine,
        num_blocks=len(blocks),
        flops_share=flops_share(cfg),
        peak_tflops=None if peak_tflops is None else FP8_SPEEDUP * peak_tflops,
    )


def num_priced_gpus(cfg: Config, world_size: int) -> int:
    """GPUs of the ranks, which may share them, and of the spare machines."""
    return -(-world_size // cfg.launch.ranks_per_gpu) + cfg.launch.spares * num_per_node(cfg, world_size)


def _price(
    cfg: Config,
    moving: StepTime,
    stages: list[RunStage],
    rewind: RollbackCost | None,
    rollback: RollbackCost,
    world_size: int,
) -> Price | None:
    if cfg.cluster.price_per_gpu_hour is None:
        return None
    step = cfg.cluster.price_per_gpu_hour * num_priced_gpus(cfg, world_size) * moving.step_time_s / HOUR_S

    def lost(cost: RollbackCost | None) -> float | None:
        return None if cost is None or cost.steps_at_most is None else cost.steps_at_most * step

    return Price(
        run=_run_time_s(stages) / moving.step_time_s * step,
        thousand_steps=1000 * step,
        rewind_at_most=lost(rewind),
        rollback_at_most=lost(rollback),
    )
