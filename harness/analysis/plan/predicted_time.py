"""Computes the time of a step: kernel time, and communication that does not overlap with it.

Why: it shows before a cluster is booked whether its size is worth the price.
How: kernel time comes from `harness.analysis.plan.work`, or from an MFU that was measured on one device. Communication
overlaps with it, block by block: while a block computes, FSDP2 gathers the next one and, in backward, reduce-scatters
the gradients of the previous one. The longer of the two determines the time. Exposed in each micro-batch are the first
gathers, those of the last block if blocks are gathered again, and the reductions of the first block and of embedding
and head. Gathers and reduce-scatters share the links; the all-reduce between replicas, only in the last micro-batch,
has its own links if shards stay on one machine. Muon exchanges one batch of matrices while it orthogonalizes another.
Attention waits for the keys and values of the other ranks of a context group. Activations are copied to the host while
the next block computes, and back while the block after it is differentiated.
Ranks that share a GPU compute one after the other.
If the batch does not divide evenly, all ranks take as long as the largest share: the others compute padding.
Left out: slow or failing machines, evaluation, saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

from harness.analysis.plan.memory import offloaded_bytes
from harness.analysis.plan.resharding import will_reshard
from harness.analysis.plan.traffic import SEQUENCES, Collective, CollectiveKind, collectives, seconds
from harness.analysis.plan.work import Work, work
from harness.config.parallel import ClusterConfig
from harness.config.schema import Config, sharing
from harness.model.size import flops_per_token


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Time and throughput of a step."""

    work_s: float
    """Kernel time of one device."""
    parts: Work
    """Kernel time by part."""
    device_mfu: float
    """MFU without waiting; padding counts as work."""
    traffic_s: float | None
    """All collectives in sequence; None if link rates are not known, then no waiting is planned."""
    waiting_s: float
    """Communication that does not overlap with kernels."""
    copies_s: float | None
    """Activations to the host and back; None if there are some and `cluster.host_gb_s` is not set."""
    copy_waiting_s: float
    """Copies that do not overlap with kernels."""
    step_time_s: float
    tokens_per_s: float
    mfu: float


def step_time(cfg: Config, *, world_size: int, mfu: float | None = None) -> StepTime | None:
    """The time of a step, with `mfu` for the kernels of one device if given; None if the device's rate is not known."""
    kernels = work(cfg, world_size=world_size)
    if kernels is None:
        return None
    assert cfg.cluster.peak_tflops is not None
    tokens = cfg.train.batch_size * cfg.train.sequence_length
    flops = tokens * flops_per_token(cfg.model, cfg.train.sequence_length)
    ranks_per_gpu = min(cfg.launch.ranks_per_gpu, world_size)
    peak = world_size / ranks_per_gpu * cfg.cluster.peak_tflops * 1e12
    shares = sharing(cfg, world_size)
    computed_flops = flops * shares.world_size * shares.num_slots / cfg.train.batch_size
    kernels = kernels.scaled(ranks_per_gpu * kernels.total_s if mfu is None else computed_flops / (peak * mfu))
    calls = collectives(cfg, world_size=world_size)
    costs = [(call, seconds(call, cfg.cluster)) for call in calls]
    known = [(call, cost) for call, cost in costs if cost is not None]
    traffic_s = sum(call.num_calls * cost for call, cost in known) if len(known) == len(costs) else None
    waiting_s = 0.0 if traffic_s is None else _waiting_s(cfg, calls, kernels=kernels, world_size=world_size)
    copies = _copies_s(cfg, kernels=kernels, world_size=world_size)
    step_time_s = kernels.total_s + waiting_s + copies.waiting_s
    return StepTime(
        work_s=kernels.total_s,
        parts=kernels,
        device_mfu=computed_flops / (peak * kernels.total_s),
        traffic_s=traffic_s,
        waiting_s=waiting_s,
        copies_s=copies.total_s,
        copy_waiting_s=copies.waiting_s,
        step_time_s=step_time_s,
        tokens_per_s=tokens / step_time_s,
        mfu=flops / (peak * step_time_s),
    )


class _Copies(NamedTuple):
    total_s: float | None
    waiting_s: float


def _copies_s(cfg: Config, *, kernels: Work, world_size: int) -> _Copies:
    """Copies of activations in a step: to the host during the forward passes, back during the backward passes."""
    num_bytes, rate = offloaded_bytes(cfg, world_size=world_size), cfg.cluster.host_gb_s
    if not num_bytes or rate is None:
        return _Copies(None if num_bytes else 0.0, 0.0)
    one_way_s = sharing(cfg, world_size).num_micro_batches * num_bytes / (rate * 1e9)
    behind_s = kernels.blocks_s * (cfg.model.num_layers - 1) / cfg.model.num_layers
    waiting_s = max(0.0, one_way_s - behind_s / 3) + max(0.0, one_way_s - 2 * behind_s / 3)
    return _Copies(2 * one_way_s, waiting_s)


def _waiting_s(cfg: Config, calls: list[Collective], *, kernels: Work, world_size: int) -> float:
    """Seconds of a step in which devices wait for links."""
    num_micro_batches = sharing(cfg, world_size).num_micro_batches
    block_s = kernels.blocks_s / num_micro_batches / cfg.model.num_layers
    forward_s, backward_s = block_s / 3, 2 * block_s / 3
    gather = _cost(calls, CollectiveKind.all_gather, "block", cfg.cluster)
    scatter = _cost(calls, CollectiveKind.reduce_scatter, "block", cfg.cluster)
    replicas = _cost(calls, CollectiveKind.all_reduce, "block", cfg.cluster)
    regather = gather if will_reshard(cfg) else 0.0
    far = [call for call in calls if call.group.num_nodes > 1]
    share_links = len({call.kind is CollectiveKind.all_reduce for call in far}) == 2
    with_replicas = regather + scatter + replicas if share_links else max(regather + scatter, replicas)
    hidden = cfg.model.num_layers - 1
    root = {kind: _cost(calls, kind, "root", cfg.cluster) for kind in CollectiveKind}

    def pass_s(behind: float, reduced: float) -> float:
        """Waiting in one micro-batch: `behind` of a block overlaps with its backward pass, `reduced` does not."""
        late = hidden * (max(0.0, gather - forward_s) + max(0.0, behind - backward_s))
        return late + gather + regather + scatter + reduced

    gathers = root[CollectiveKind.all_gather] + root[CollectiveKind.reduce_scatter]
    last = pass_s(with_replicas, gathers + replicas + root[CollectiveKind.all_reduce])
    sequences_s = sum(call.num_calls * (seconds(call, cfg.cluster) or 0.0) for call in calls if call.of == SEQUENCES)
    return (
        (num_micro_batches - 1) * pass_s(regather + scatter, gathers)
        + last
        + _exchange_waiting_s(cfg, calls, kernels)
        + sequences_s
    )


def _exchange_waiting_s(cfg: Config, calls: list[Collective], kernels: Work) -> float:
    """Waiting in Muon's exchanges: the first gather, the last scatter, what takes longer than the GEMMs, and the
    broadcasts to other replicas."""

    def all_s(kind: CollectiveKind) -> float:
        return sum(call.num_calls * (seconds(call, cfg.cluster) or 0.0) for call in calls if call.kind is kind)

    exchanges = [call for call in calls if call.kind is CollectiveKind.all_to_all]
    ends_s = sum(2 * (seconds(call, cfg.cluster) or 0.0) for call in exchanges)
    hidden_s = max(0.0, all_s(CollectiveKind.all_to_all) - ends_s - kernels.orthogonalize_s)
    return ends_s + hidden_s + all_s(CollectiveKind.broadcast)


def _cost(calls: list[Collective], kind: CollectiveKind, of: str, cluster: ClusterConfig) -> float:
    """Seconds of one such call; 0 if there is none."""
    return sum(seconds(call, cluster) or 0.0 for call in calls if call.kind is kind and call.of == of)
