"""What one rank sends in a step, and over which links, from the way FSDP2 spreads the model.

Why: on many machines the links decide how fast a step can be, and a wrong mesh is cheaper to see here than to train on.
How: every collective of a step is listed with how often it comes, how large it is and who takes part. Blocks are
gathered once a micro-batch, twice where they are resharded after forward; gradients are scattered in fp32 at every
micro-batch; copies of the model sum their shards once a step. Neighbouring ranks share a machine, and shards are
neighbours: replicas are what lies on different machines first. Volumes and times are those of a ring, as NCCL's own
cost model has it: each rank sends (n - 1) / n of a gather, twice that of an all-reduce; where a ring leaves its
machine, every device of it there lends its port. Latency grows with the number of ranks.
Left out: the one small all-reduce of signals; other jobs on the same network; trees and in-network reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import final

from harness.analysis.plan.activations import FP32_BYTES, element_bytes
from harness.analysis.plan.memory import padded
from harness.analysis.plan.resharding import BYTES_PER_GB, resharded
from harness.config.parallel import ClusterConfig
from harness.config.schema import Config, sharing
from harness.model.size import block_shapes, root_shapes

LINK_EFFICIENCY = 0.8
"""Share of a link's rate that a large collective reaches."""
START_S, NEAR_HOP_S, FAR_HOP_S = 8.4e-6, 3.4e-6, 14.0e-6
"""NCCL's own figures for a ring (src/graph/tuning.cc, protocol Simple): to begin, and for each hop within a machine and
between two."""


class CollectiveKind(StrEnum):
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    all_reduce = "all_reduce"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that talk to each other."""

    num_ranks: int
    num_nodes: int
    per_node: int
    """Of them, on one machine."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of call that a step makes."""

    kind: CollectiveKind
    of: str
    """block or root."""
    num_calls: int
    """In a step."""
    num_bytes: int
    """The whole tensor: what a gather gives, a scatter takes, an all-reduce sums."""
    group: Group

    @property
    def sent_bytes(self) -> int:
        """By one rank in one call, to anybody."""
        ring = self.num_bytes * (self.group.num_ranks - 1) // self.group.num_ranks
        return 2 * ring if self.kind is CollectiveKind.all_reduce else ring

    @property
    def sent_far_bytes(self) -> int:
        """Through the port of one device to another machine, in one call."""
        return self.sent_bytes // self.group.per_node if self.group.num_nodes > 1 else 0


def num_per_node(cfg: Config, world_size: int) -> int:
    """Ranks on one machine."""
    here = cfg.launch.nproc or cfg.launch.slurm.gpus_per_node or cfg.cluster.gpus_per_node
    return min(here or world_size, world_size)


def groups(cfg: Config, world_size: int) -> tuple[Group, Group]:
    """Who shares one copy of the model, and who holds the same shard of different copies."""
    here, replicate = num_per_node(cfg, world_size), cfg.parallel.replicate
    num_shards = world_size // replicate
    near = min(num_shards, here)
    same = max(1, min(replicate, here // num_shards))
    return (
        Group(num_ranks=num_shards, num_nodes=-(-num_shards // near), per_node=near),
        Group(num_ranks=replicate, num_nodes=-(-replicate // same), per_node=same),
    )


def collectives(cfg: Config, *, world_size: int) -> list[Collective]:
    """Every collective of a step that moves weights or gradients."""
    shards, replicas = groups(cfg, world_size)
    num_micro_batches = sharing(cfg, world_size).num_micro_batches
    num_gathers = 2 if resharded(cfg) else 1
    sizes = {"block": padded(block_shapes(cfg.model), shards.num_ranks)}
    sizes["root"] = padded(root_shapes(cfg.model), shards.num_ranks)
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
    return [each for each in listed if each.group.num_ranks > 1]


def seconds(collective: Collective, cluster: ClusterConfig) -> float | None:
    """How long one call takes with the links to itself; None where the cluster does not say how fast they are."""
    group, near, far = collective.group, cluster.intra_node_gb_s, cluster.inter_node_gb_s
    rates = [near] if group.per_node > 1 else []
    rates += [None if far is None else far * group.per_node] if group.num_nodes > 1 else []
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    rounds = 2 if collective.kind is CollectiveKind.all_reduce else 1
    num_far = group.num_nodes - 1
    hops_s = num_far * FAR_HOP_S + (group.num_ranks - 1 - num_far) * NEAR_HOP_S
    return START_S + rounds * hops_s + collective.sent_bytes / (min(known) * BYTES_PER_GB * LINK_EFFICIENCY)
