"""Memory of one device at every moment of a step that could be the fullest, by part, in bytes.

Why: a job that runs out of memory does so after it has queued, and says nothing of what to change.
How: a rank holds its shard of fp32 weights and of both moments; FSDP2 gathers the rest when it is needed. Five points
of a step can be the fullest, and the plan takes the worst of them:

    loss       everything kept, and the logits of a chunk
    turn       everything kept, and the gradients that the loss has left behind, once more
    backward   within a block: kept tensors go, gradients come; the ends of each run of like blocks bound all others
    reduction  the end of backward: the gradients of embedding and head, whole, on their way to their shards
    update     every gradient

What FSDP2 has in flight is read from its code. A gather needs a flat buffer beside the weights it becomes; in backward
the next block's is under way while this one computes, and the last block's gradients, in fp32, wait until this one's
are done. Replicas add up micro-batches before they sum among each other; those that shard nothing divide gradients in
a copy. One rank gathers nothing, but casts. Shards are padded to equal rows. In fp8, a step that is probed counts
numbers where they are rounded, which takes more than other steps do: that is told by itself.
Left out: host memory (ring and saves: `harness.analysis.plan.plan`). What torch's allocator does not know (context,
NCCL) and what it cannot use again is `OUTSIDE_BYTES` and `FRAGMENTED`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate
from math import prod
from typing import final

from harness.analysis.plan.activations import (
    FP32_BYTES,
    element_bytes,
    kept_bytes,
    passing_bytes,
    passing_weight_bytes,
)
from harness.analysis.plan.fp8 import blocks_in_fp8, maps_of, workspace_bytes
from harness.analysis.plan.resharding import resharded
from harness.config.schema import Config, check_world, sharing
from harness.model.size import Shape, block_shapes, num_parameters, root_shapes

TOKEN_BYTES = 8
NUM_MOMENTS = 2
WORKSPACE_BYTES = 70_000_000
"""cuBLAS's workspaces and small things; measured."""
OUTSIDE_BYTES = 1_000_000_000
"""CUDA's context and what NCCL allocates for itself."""
FRAGMENTED = 0.02
"""Share of what torch handed out that its allocator holds besides."""
EAGER_LOGIT_BYTES = 17
"""Of one logit within the loss where that is not compiled: four tensors in fp32 and a mask."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes of one device at one moment."""

    weights: int
    """This rank's shard, fp32."""
    moments: int
    gradients: int
    """Shards that are finished."""
    gathered: int
    """Whole weights in the precision of the products."""
    in_flight: int
    """Buffers of collectives, and whole gradients on their way."""
    activations: int
    logits: int
    """The loss: logits of a chunk and the head's gradient."""
    other: int
    """The batch, workspaces."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the device must hold; the parts are those of the fullest moment."""

    moment: str
    parts: Parts
    state_bytes: int
    """Between steps."""
    kept_bytes: int
    """After the forward pass."""
    forward_peak_bytes: int
    backward_peak_bytes: int
    update_peak_bytes: int
    outside_bytes: int
    """What torch does not count: context, NCCL, fragments."""

    @property
    def peak_bytes(self) -> int:
        """The most that torch's allocator hands out in a step."""
        return self.parts.total

    @property
    def needed_bytes(self) -> int:
        """What must be free on the device."""
        return self.parts.total + self.outside_bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the moments are made of, each of one rank."""

    num_blocks: int
    num_shards: int
    num_micro_batches: int
    tokens: int
    """Of one micro-batch."""
    element: int
    kept: tuple[int, ...]
    """Bytes of one token that none of the blocks keep, the first, the first two, and so on."""
    block: int
    """Whole parameters of a block, padded; a number, not bytes."""
    root: int
    head: int
    state: Parts

    def shard(self, number: int) -> int:
        """Bytes of a rank's fp32 share."""
        return FP32_BYTES * number // self.num_shards


def padded(shapes: list[Shape], num_shards: int) -> int:
    """Numbers in all shards together, each padded to as many rows as the largest."""
    return sum(-(-shape[0] // num_shards) * num_shards * prod(shape[1:]) for shape in shapes)


def memory(cfg: Config, *, world_size: int) -> Memory:
    """What one of `world_size` ranks holds when it holds the most."""
    check_world(cfg, world_size)
    sizes = _sizes(cfg, world_size)
    kept = _kept(cfg, sizes)
    turn = _plus(kept, logits=_stream(cfg, sizes) + sizes.element * sizes.head)
    loss = _loss(cfg, sizes)
    blocks = _of_interest(cfg)
    in_blocks = [_in_block(cfg, sizes, block, is_done=is_done) for block in blocks for is_done in (False, True)]
    backward = max(in_blocks, key=_total)
    reduction, update = _reduction(cfg, sizes), _update(sizes)
    moments = {"loss": loss, "turn": turn, "backward": backward, "reduction": reduction, "update": update}
    fullest = max(moments, key=lambda name: moments[name].total)
    return Memory(
        moment=fullest,
        parts=moments[fullest],
        state_bytes=sizes.state.total,
        kept_bytes=kept.total,
        forward_peak_bytes=loss.total,
        backward_peak_bytes=max(turn.total, backward.total, reduction.total),
        update_peak_bytes=update.total,
        outside_bytes=OUTSIDE_BYTES + round(FRAGMENTED * moments[fullest].total),
    )


def _total(parts: Parts) -> int:
    return parts.total


def _of_interest(cfg: Config) -> set[int]:
    """Blocks of which one is the fullest in backward: from one to the next of its kind everything changes evenly, but
    for the last, behind which no gradients wait."""
    last, low = cfg.model.num_layers - 1, blocks_in_fp8(cfg)
    ends = {0, last - 1, last} | ({low.start - 1, low.start, low.stop - 1, low.stop} if low else set())
    return {block for block in ends if 0 <= block <= last}


def _sizes(cfg: Config, world_size: int) -> Sizes:
    model, num_shards = cfg.model, world_size // cfg.parallel.replicate
    shared = sharing(cfg, world_size)
    block, root = padded(block_shapes(model), num_shards), padded(root_shapes(model), num_shards)
    shard = FP32_BYTES * (model.num_layers * block + root) // num_shards
    state = Parts(
        weights=shard,
        moments=NUM_MOMENTS * shard,
        gradients=0,
        gathered=0,
        in_flight=0,
        activations=0,
        logits=0,
        other=WORKSPACE_BYTES + workspace_bytes(cfg) + 2 * TOKEN_BYTES * shared.num_slots * cfg.train.sequence_length,
    )
    return Sizes(
        num_blocks=model.num_layers,
        num_shards=num_shards,
        num_micro_batches=shared.num_micro_batches,
        tokens=shared.micro_batch_slots * cfg.train.sequence_length,
        element=element_bytes(cfg),
        kept=tuple(accumulate((kept_bytes(cfg, maps_of(cfg, block)) for block in range(model.num_layers)), initial=0)),
        block=block,
        root=root,
        head=model.vocab_size * model.dim,
        state=state,
    )


def _plus(parts: Parts, **more: int) -> Parts:
    values = {field.name: getattr(parts, field.name) + more.get(field.name, 0) for field in fields(Parts)}
    return Parts(**values)


def _accumulated(sizes: Sizes) -> int:
    """Gradients of earlier micro-batches."""
    return sizes.shard(sizes.num_blocks * sizes.block + sizes.root) if sizes.num_micro_batches > 1 else 0


def _stream(cfg: Config, sizes: Sizes) -> int:
    """The residual stream of a micro-batch at one place."""
    return sizes.tokens * cfg.model.dim * sizes.element


def _forward(cfg: Config, sizes: Sizes) -> Parts:
    """What the blocks leave behind: weights that stay gathered, tensors kept, and the output of the last."""
    blocks = 0 if resharded(cfg) else sizes.num_blocks * sizes.block
    return _plus(
        sizes.state,
        gradients=_accumulated(sizes),
        gathered=sizes.element * (sizes.root + blocks),
        activations=sizes.tokens * sizes.kept[sizes.num_blocks] + _stream(cfg, sizes),
    )


def _kept(cfg: Config, sizes: Sizes) -> Parts:
    """After the forward pass; the loss leaves its gradients."""
    return _plus(_forward(cfg, sizes), logits=_stream(cfg, sizes) + sizes.element * sizes.head)


def _loss(cfg: Config, sizes: Sizes) -> Parts:
    """Two chunks overlap, as the gradient of one lives until the next is there; or all is done and the head's gradient
    rounded. Compiled, logits become their gradient where they are."""
    size, stream = sizes.element, _stream(cfg, sizes)
    num_logits = min(sizes.tokens, cfg.model.loss_chunk_tokens) * cfg.model.vocab_size
    earlier = size if sizes.tokens > cfg.model.loss_chunk_tokens else 0
    of_a_logit = earlier + size + (0 if cfg.parallel.compile else EAGER_LOGIT_BYTES)
    at_end = (1 if cfg.parallel.compile else 2) * num_logits * size + size * sizes.head
    logits = stream + FP32_BYTES * sizes.head + max(num_logits * of_a_logit, at_end)
    gather = size * sizes.block if sizes.num_shards > 1 else 0
    return _plus(_forward(cfg, sizes), in_flight=gather, activations=stream, logits=logits)


def _in_block(cfg: Config, sizes: Sizes, block: int, *, is_done: bool) -> Parts:
    """The backward pass of a block, counted from the first: at its fullest, with the gradient of one matrix; or done,
    with those of all."""
    size, is_sharded, num_done = sizes.element, sizes.num_shards > 1, sizes.num_blocks - 1 - block
    gathered, prefetched = (block + 1) * sizes.block, 0
    if resharded(cfg):
        gathered, prefetched = sizes.block, (sizes.block if is_sharded and block > 0 else 0)
    waiting = FP32_BYTES * sizes.block if num_done else 0
    maps = maps_of(cfg, block)
    passing = cfg.model.dim * size if is_done else passing_bytes(cfg, maps)
    own = size * sizes.block if is_done else passing_weight_bytes(cfg, maps)
    num_kept = block if is_done else block + 1
    return _plus(
        sizes.state,
        gradients=_accumulated(sizes) or sizes.shard(num_done * sizes.block),
        gathered=size * (sizes.root + gathered),
        in_flight=size * (sizes.head + prefetched) + own + waiting,
        activations=sizes.tokens * (sizes.kept[num_kept] + passing),
    )


def _reduction(cfg: Config, sizes: Sizes) -> Parts:
    """Embedding and head: whole gradients and their copy in fp32 that is reduced, then that copy and what comes of it;
    where copies shard nothing, another one to divide."""
    gradients = sizes.shard(sizes.num_blocks * sizes.block + sizes.root)
    reduced = sizes.shard(sizes.root) if sizes.num_micro_batches > 1 else 0
    divided = FP32_BYTES * sizes.root if sizes.num_shards == 1 and cfg.parallel.replicate > 1 else 0
    beside = max(sizes.element * sizes.root, reduced + divided)
    return _plus(sizes.state, gradients=gradients, in_flight=FP32_BYTES * sizes.root + beside)


def _update(sizes: Sizes) -> Parts:
    """Every gradient; what is watched is computed a piece at a time."""
    return _plus(sizes.state, gradients=sizes.shard(sizes.num_blocks * sizes.block + sizes.root))


def checkpoint_bytes(cfg: Config) -> int:
    """One checkpoint on disk; copies are saved once."""
    return FP32_BYTES * num_parameters(cfg.model) * (1 + NUM_MOMENTS)
