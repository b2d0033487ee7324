"""How long a step takes: the devices' work, and what of the traffic they must wait for.

Why: whether a cluster of this size is worth its price shows before it is booked.
How: work is model FLOPs over the devices' rate times the share of it that one of them alone reaches. That share was
measured in bf16 (one H200, 1.26B parameters; README, `tests.bench.plan`) with each way to keep activations, compiled
and not. In fp8 what products gain is taken off, and what rounding costs is added (`harness.plan.fp8`); the share is
still one of the bf16 rate, as every MFU here.
Traffic runs beside it, block by block: while a block computes, FSDP2 gathers the next one and, in backward, scatters
the gradients of the last one. What takes longer of the two is waited for. In the open lie, of each micro-batch, the
first gathers, where blocks are gathered again those of the last block, and the reduction of the first block and of
embedding and head. Gathers and scatters share the links; the all-reduce of replicas, in the last micro-batch alone, has
its own where shards stay on one machine. Where ranks have uneven shares, all take as long as the largest: the others
compute padding.
Left out: slower or failing machines, evaluation, saves, and that kernels are slower on smaller tensors: models below 1B
and small micro-batches take 10 to 15 % longer than this says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from harness.config import ActivationCheckpointing, ClusterConfig, Config, PrecisionKind, sharing
from harness.model.size import flops_per_token
from harness.plan.fp8 import saved_s
from harness.plan.gathered import resharded
from harness.plan.traffic import Collective, CollectiveKind, collectives, seconds

COMPILED = {
    ActivationCheckpointing.none: 0.598,
    ActivationCheckpointing.selective: 0.586,
    ActivationCheckpointing.full: 0.493,
}
NOT_COMPILED = {
    ActivationCheckpointing.none: 0.497,
    ActivationCheckpointing.selective: 0.452,
    ActivationCheckpointing.full: 0.391,
}
"""Share of its bf16 rate that one H200 reached, measured."""
H200_FLOPS = 989e12
"""The bf16 rate that they are shares of; datasheet."""
DOCUMENTS_APART = 0.72
"""What keeping documents apart leaves of it, measured."""
FP32_RATE = 67 / 989
"""An H100's fp32 rate as a share of its bf16 rate; datasheet, not measured."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A step of all ranks."""

    work_s: float
    """The devices' own."""
    traffic_s: float | None
    """All collectives one after the other; None where the links' rates are not known, and nothing is waited for."""
    waiting_s: float
    """What of the traffic does not hide behind the work."""
    step_time_s: float
    tokens_per_s: float
    mfu: float


def default_mfu(cfg: Config, *, world_size: int) -> float:
    """Share of its bf16 rate that one device alone reaches at this configuration."""
    share = (COMPILED if cfg.parallel.compile else NOT_COMPILED)[cfg.parallel.activation_checkpointing]
    share *= DOCUMENTS_APART if cfg.data.document_mask else 1.0
    if cfg.precision.kind is PrecisionKind.fp32:
        return share * FP32_RATE
    tokens = sharing(cfg, world_size).micro_batch_slots * cfg.train.sequence_length
    flops = tokens * flops_per_token(cfg.model, cfg.train.sequence_length)
    bf16_s = flops / (share * H200_FLOPS)
    return share * bf16_s / (bf16_s - saved_s(cfg, tokens=tokens, bf16_flops_per_s=H200_FLOPS))


def pace(cfg: Config, *, world_size: int, mfu: float) -> Pace | None:
    """The pace at `mfu` of a device's own work; None where nobody said how fast a device is."""
    if cfg.cluster.peak_tflops is None:
        return None
    tokens = cfg.train.batch_size * cfg.train.sequence_length
    flops = tokens * flops_per_token(cfg.model, cfg.train.sequence_length)
    peak = world_size * cfg.cluster.peak_tflops * 1e12
    num_slots = world_size * sharing(cfg, world_size).num_slots
    work_s = flops / (peak * mfu) * (num_slots / cfg.train.batch_size)
    calls = collectives(cfg, world_size=world_size)
    costs = [(call, seconds(call, cfg.cluster)) for call in calls]
    known = [(call, cost) for call, cost in costs if cost is not None]
    traffic_s = sum(call.num_calls * cost for call, cost in known) if len(known) == len(costs) else None
    waiting_s = 0.0 if traffic_s is None else _waiting_s(cfg, calls, work_s=work_s, world_size=world_size)
    step_time_s = work_s + waiting_s
    return Pace(
        work_s=work_s,
        traffic_s=traffic_s,
        waiting_s=waiting_s,
        step_time_s=step_time_s,
        tokens_per_s=tokens / step_time_s,
        mfu=flops / (peak * step_time_s),
    )


def _waiting_s(cfg: Config, calls: list[Collective], *, work_s: float, world_size: int) -> float:
    """Seconds of a step in which devices wait for links."""
    num_micro_batches = sharing(cfg, world_size).num_micro_batches
    head = 6 * cfg.model.vocab_size * cfg.model.dim
    of_blocks = 1 - head / flops_per_token(cfg.model, cfg.train.sequence_length)
    block_s = work_s * of_blocks / num_micro_batches / cfg.model.num_layers
    forward_s, backward_s = block_s / 3, 2 * block_s / 3
    gather = _cost(calls, CollectiveKind.all_gather, "block", cfg.cluster)
    scatter = _cost(calls, CollectiveKind.reduce_scatter, "block", cfg.cluster)
    replicas = _cost(calls, CollectiveKind.all_reduce, "block", cfg.cluster)
    regather = gather if resharded(cfg) else 0.0
    far = [call for call in calls if call.group.num_nodes > 1]
    share_links = len({call.kind is CollectiveKind.all_reduce for call in far}) == 2
    with_replicas = regather + scatter + replicas if share_links else max(regather + scatter, replicas)
    hidden = cfg.model.num_layers - 1
    root = {kind: _cost(calls, kind, "root", cfg.cluster) for kind in CollectiveKind}

    def pass_s(behind: float, reduced: float) -> float:
        """What is waited for in one micro-batch: `behind` of a block hides in its backward pass, `reduced` does not."""
        late = hidden * (max(0.0, gather - forward_s) + max(0.0, behind - backward_s))
        return late + gather + regather + scatter + reduced

    gathers = root[CollectiveKind.all_gather] + root[CollectiveKind.reduce_scatter]
    last = pass_s(with_replicas, gathers + replicas + root[CollectiveKind.all_reduce])
    return (num_micro_batches - 1) * pass_s(regather + scatter, gathers) + last


def _cost(calls: list[Collective], kind: CollectiveKind, of: str, cluster: ClusterConfig) -> float:
    """Seconds of one such call; 0 where there is none."""
    return sum(seconds(call, cluster) or 0.0 for call in calls if call.kind is kind and call.of == of)
