"""Context parallelism: the ranks of a context group share each sequence, so its activations fit on them together.

Why: FSDP shards weights, gradients and moments. The activations of one long sequence stay on one device, and from some
length on they do not fit.
How: a sequence is cut into 2 N chunks, and context rank i of N takes the chunks i and 2 N - 1 - i. A late token attends
to more keys than an early one; with one early and one late chunk all ranks compute equally many scores. All operators
but attention work on single tokens and need nothing else. Attention needs the keys and values of the whole sequence:
one all-gather per layer brings them, in their natural order, and its backward pass is a reduce-scatter.
All-gather instead of a ring: with grouped queries keys and values are a small part of the activations, any kernel and
any mask works on them, and the softmax of a query is computed in one piece, as without context parallelism.
Both collectives are custom operators, so that blocks compile as a whole; activation checkpointing repeats the gather,
on all ranks alike. NCCL sums the gradients in the compute type; gloo sums them in fp32.
Left out: overlap of the gather with the projections; second derivatives.
"""

# ruff: noqa: ARG001  (fake implementations take all arguments and need few)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from harness.distributed.collectives import all_gather_stack, reduce_scatter_stack
from harness.distributed.reduce_scatter import CommStats
from harness.distributed.world import ContextGroup, World
from harness.precision.fp8.custom_ops import LIBRARY, define_op


@final
@dataclass(frozen=True)
class ContextSplit:
    """Which part of each sequence this rank computes."""

    size: int
    """Number of ranks that share a sequence."""
    rank: int
    """Index of this rank among them."""
    group_name: str = ""
    """Name of their process group; empty if nothing is gathered."""
    te_obstacle: str = ""
    """Why attention is not computed by Transformer Engine; equal on all ranks, so that they compile the same graph."""

    def take(self, values: Tensor, dim: int) -> Tensor:
        """This rank's two chunks of a dimension that runs over a whole sequence; a new tensor."""
        length, rest = divmod(values.shape[dim], 2 * self.size)
        assert not rest, "the sequence length is a multiple of 2 x parallel.context"
        late = 2 * self.size - 1 - self.rank
        chunks = [values.narrow(dim, number * length, length) for number in (self.rank, late)]
        return torch.cat(chunks, dim=dim)

    def chunk_ends(self, length: int) -> tuple[int, int]:
        """Where this rank's two chunks of a sequence of `length` tokens end: how many keys they see."""
        chunk = length // (2 * self.size)
        return (self.rank + 1) * chunk, (2 * self.size - self.rank) * chunk

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Positions of this rank's tokens in a sequence of `length` tokens; int32."""
        return self.take(torch.arange(length, dtype=torch.int32, device=device), 0)


class _Membership(NamedTuple):
    """The context group of this process, and what measures its exchanges."""

    group: ContextGroup
    stats: CommStats


_MEMBERSHIPS: dict[str, _Membership] = {}
"""Group name -> membership. Operators take names, not groups. A process is in one context group at a time."""


def split_of(world: World, *, te_obstacle: str = "") -> ContextSplit | None:
    """This rank's part of each sequence; None: whole sequences."""
    if world.context_group is None:
        return None
    return ContextSplit(world.context, world.context_rank, world.context_group.group_name, te_obstacle)


def join_context(world: World, stats: CommStats) -> None:
    """Let the operators find the group of this rank; `stats` get the time of every exchange and what is sent in it."""
    _MEMBERSHIPS.clear()
    if world.context_group is not None:
        _MEMBERSHIPS[world.context_group.group_name] = _Membership(world.context_group, stats)


def gather_keys_and_values(key: Tensor, value: Tensor, split: ContextSplit) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence [B, S, heads, head_dim] in natural order, from those of this rank's tokens
    [B, S / N, heads, head_dim]. Collective over the context group, in the backward pass too."""
    gathered_key, gathered_value = context_gather(torch.stack([key, value]), split.size, split.group_name)
    return gathered_key, gathered_value


def join_chunks(by_rank: Tensor) -> Tensor:
    """[N, pair, B, S / N, ...] in the order of the ranks -> [pair, B, S, ...] in the order of the tokens."""
    num_ranks, pair, rows, length, *rest = by_rank.shape
    chunks = by_rank.view(num_ranks, pair, rows, 2, length // 2, *rest).movedim(0, 2)
    early, late = chunks.unbind(3)
    return torch.cat([early, late.flip(2)], dim=2).view(pair, rows, num_ranks * length, *rest)


def part_chunks(joined: Tensor, num_ranks: int) -> Tensor:
    """The inverse of `join_chunks`."""
    pair, rows, length, *rest = joined.shape
    early, late = joined.view(pair, rows, 2, num_ranks, length // (2 * num_ranks), *rest).unbind(2)
    by_rank = torch.stack([early, late.flip(2)], dim=3).movedim(2, 0)
    return by_rank.reshape(num_ranks, pair, rows, length // num_ranks, *rest)


def gather_chunks(local: Tensor, size: int, group_name: str) -> Tensor:
    """[pair, B, S / N, ...] of each rank -> [pair, B, S, ...]."""
    group, stats = _MEMBERSHIPS[group_name]
    stats.exchanges.observe(local)
    with stats.timed():
        by_rank = all_gather_stack(local, size, group)
    return join_chunks(by_rank)


def scatter_chunks(joined: Tensor, size: int, group_name: str) -> Tensor:
    """[pair, B, S, ...], summed over the ranks -> [pair, B, S / N, ...] of this rank."""
    group, stats = _MEMBERSHIPS[group_name]
    stats.exchanges.observe(joined)
    by_rank = part_chunks(joined.contiguous(), size)
    if not by_rank.is_cuda:
        by_rank = by_rank.float()
    with stats.timed():
        local = reduce_scatter_stack(by_rank, group)
    return local.to(joined.dtype)


def _gathered_shape(local: Tensor, size: int, group_name: str) -> Tensor:
    pair, rows, length, *rest = local.shape
    return local.new_empty((pair, rows, size * length, *rest))


def _scattered_shape(joined: Tensor, size: int, group_name: str) -> Tensor:
    pair, rows, length, *rest = joined.shape
    return joined.new_empty((pair, rows, length // size, *rest))


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.size, ctx.group_name = inputs


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return context_scatter(gradient, ctx.size, ctx.group_name), None, None


context_gather = define_op(
    "context_gather(Tensor local, int size, str group_name) -> Tensor", gather_chunks, _gathered_shape
)
context_scatter = define_op(
    "context_scatter(Tensor joined, int size, str group_name) -> Tensor", scatter_chunks, _scattered_shape
)
torch.library.register_autograd("harness::context_gather", _differentiate, setup_context=_keep_arguments, lib=LIBRARY)
