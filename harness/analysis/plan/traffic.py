"""Lists the collectives of a step under FSDP2, with bytes sent by one rank and their time.

Why: on many machines the links limit the step time, and a wrong mesh is cheaper to notice here than in training.
How: each collective is listed with its number of calls, size and group. Blocks are all-gathered once per micro-batch,
twice if they are resharded after forward. Gradients are reduce-scattered in fp32 at every micro-batch. Replicas
all-reduce their shards once per step. Muon sends the rows of each batch of matrices to their owners and back, in bf16,
directly from rank to rank; replicas take turns and broadcast the result. The ranks that share a sequence gather keys
and values in every layer and micro-batch, once more with checkpointing, and reduce-scatter their gradients.
Neighbouring ranks share a machine, and the shards of one replica are neighbours, so replicas are spread over machines
first. Volumes and times are those of a ring, as in NCCL's cost model: each rank sends (n - 1) / n of an all-gather, and
twice that of an all-reduce. A ring over several machines uses the ports of all its devices. Latency grows with the
number of ranks.
Left out: the small all-reduce of signals; other jobs on the same network; trees and in-network reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import final

from harness.analysis.plan.activations import FP32_BYTES, element_bytes
from harness.analysis.plan.memory import padded_size
from harness.analysis.plan.orthogonalization import direction_bytes, matrix_batches
from harness.analysis.plan.resharding import BYTES_PER_GB, will_reshard
from harness.config.parallel import ActivationCheckpointing, ClusterConfig
from harness.config.schema import Config, sharing
from harness.model.size import block_shapes, root_shapes

LINK_EFFICIENCY = 0.8
"""Share of a link's rate that a large collective reaches."""
START_S, NEAR_HOP_S, FAR_HOP_S = 8.4e-6, 3.4e-6, 14.0e-6
"""NCCL's figures for a ring (src/graph/tuning.cc, protocol Simple): base latency, and latency of each hop within a
machine and between machines."""


SEQUENCES = "sequences"
"""What context parallelism exchanges: the keys and values of a layer."""


class CollectiveKind(StrEnum):
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    all_reduce = "all_reduce"
    all_to_all = "all_to_all"
    broadcast = "broadcast"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks of a process group."""

    num_ranks: int
    num_nodes: int
    per_node: int
    """Ranks of the group on one machine."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective of a step, for the blocks, for the root module or for the matrices that Muon updates."""

    kind: CollectiveKind
    of: str
    """block, root, matrices or sequences."""
    num_calls: int
    """Calls in a step."""
    num_bytes: int
    """The whole tensor: what a gather gives, a scatter takes, an all-reduce sums, a rank has for an all-to-all
    or a broadcast."""
    group: RankGroup

    @property
    def sent_bytes(self) -> int:
        """By one rank in one call, to anybody."""
        ring = self.num_bytes * (self.group.num_ranks - 1) // self.group.num_ranks
        return 2 * ring if self.kind is CollectiveKind.all_reduce else ring

    @property
    def sent_far_bytes(self) -> int:
        """Through the port of one device to another machine, in one call."""
        if self.kind is CollectiveKind.all_to_all:
            return self.num_bytes * (self.group.num_ranks - self.group.per_node) // self.group.num_ranks
        return self.sent_bytes // self.group.per_node if self.group.num_nodes > 1 else 0


def num_per_node(cfg: Config, world_size: int) -> int:
    """Number of ranks on one machine."""
    here = cfg.launch.nproc or cfg.launch.slurm.gpus_per_node or cfg.cluster.gpus_per_node
    return min(here or world_size, world_size)


def rank_groups(cfg: Config, world_size: int) -> tuple[RankGroup, RankGroup]:
    """The group that shards one replica, and the group that holds the same shard of all replicas."""
    here, replicate = num_per_node(cfg, world_size), cfg.parallel.replicate
    num_shards = world_size // replicate
    near = min(num_shards, here)
    same = max(1, min(replicate, here // num_shards))
    return (
        RankGroup(num_ranks=num_shards, num_nodes=-(-num_shards // near), per_node=near),
        RankGroup(num_ranks=replicate, num_nodes=-(-replicate // same), per_node=same),
    )


def collectives(cfg: Config, *, world_size: int) -> list[Collective]:
    """All collectives of a step that move weights or gradients."""
    shards, replicas = rank_groups(cfg, world_size)
    num_micro_batches = sharing(cfg, world_size).num_micro_batches
    num_gathers = 2 if will_reshard(cfg) else 1
    sizes = {"block": padded_size(block_shapes(cfg.model), shards.num_ranks)}
    sizes["root"] = padded_size(root_shapes(cfg.model), shards.num_ranks)
    modules = {"block": cfg.model.num_layers, "root": 1}
    calls = {of: count * num_micro_batches for of, count in modules.items()}
    listed = []
    for of, size in sizes.items():
        often = calls[of] * (num_gathers if of == "block" else 1)
        gathered, reduced = size * element_bytes(cfg), size * FP32_BYTES
        listed += [
            Collective(kind=CollectiveKind.all_gather, of=of, num_calls=often, num_bytes=gathered, group=shards),
            Collective(kind=CollectiveKind.reduce_scatter, of=of, num_calls=calls[of], num_bytes=reduced, group=shards),
            Collective(
                kind=CollectiveKind.all_reduce,
                of=of,
                num_calls=modules[of],
                num_bytes=reduced // shards.num_ranks,
                group=replicas,
            ),
        ]
    if batches := matrix_batches(cfg, shards.num_ranks):
        mean_bytes = direction_bytes(cfg, shards.num_ranks) // len(batches)
        num_own = -(-len(batches) // replicas.num_ranks)
        for kind, num_calls, group in (
            (CollectiveKind.all_to_all, 2 * num_own, shards),
            (CollectiveKind.broadcast, len(batches), replicas),
        ):
            listed.append(Collective(kind=kind, of="matrices", num_calls=num_calls, num_bytes=mean_bytes, group=group))
    return [
        collective
        for collective in [*listed, *_sequence_collectives(cfg, world_size)]
        if collective.group.num_ranks > 1
    ]


def _sequence_collectives(cfg: Config, world_size: int) -> list[Collective]:
    """Of the keys and values of the sequences that several ranks share."""
    context, model, shares = cfg.parallel.context, cfg.model, sharing(cfg, world_size)
    near = min(context, num_per_node(cfg, world_size))
    group = RankGroup(num_ranks=context, num_nodes=-(-context // near), per_node=near)
    tokens = shares.micro_batch_slots * cfg.train.sequence_length
    num_bytes = 2 * tokens * model.num_kv_heads * model.head_dim * element_bytes(cfg)
    num_passes = model.num_layers * shares.num_micro_batches
    again = 1 if cfg.parallel.activation_checkpointing is ActivationCheckpointing.none else 2
    return [
        Collective(kind=kind, of=SEQUENCES, num_calls=num_calls, num_bytes=num_bytes, group=group)
        for kind, num_calls in (
            (CollectiveKind.all_gather, again * num_passes),
            (CollectiveKind.reduce_scatter, num_passes),
        )
    ]


def seconds(collective: Collective, cluster: ClusterConfig) -> float | None:
    """Time of one call without other traffic; None if the cluster's link rates are not set."""
    group, near, far = collective.group, cluster.intra_node_gb_s, cluster.inter_node_gb_s
    rates = [near] if group.per_node > 1 else []
    rates += [None if far is None else far * group.per_node] if group.num_nodes > 1 else []
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    if collective.kind is CollectiveKind.all_to_all:
        near_s = 0.0 if near is None else (collective.sent_bytes - collective.sent_far_bytes) / near
        far_s = 0.0 if far is None else collective.sent_far_bytes / far
        hop_s = FAR_HOP_S if group.num_nodes > 1 else NEAR_HOP_S
        return START_S + hop_s + max(near_s, far_s) / (BYTES_PER_GB * LINK_EFFICIENCY)
    rounds = 2 if collective.kind is CollectiveKind.all_reduce else 1
    num_far = group.num_nodes - 1
    hops_s = num_far * FAR_HOP_S + (group.num_ranks - 1 - num_far) * NEAR_HOP_S
    return START_S + rounds * hops_s + collective.sent_bytes / (min(known) * BYTES_PER_GB * LINK_EFFICIENCY)
