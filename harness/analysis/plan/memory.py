"""Computes the peak memory of one device in a step, by part, in bytes.

Why: a job that runs out of memory fails after it has queued, and the error does not say what to change.
How: a rank holds its shard of fp32 weights and of the moments; FSDP2 gathers other weights when they are needed. The
peak can be at five points of a step, and the plan takes the largest:

    loss       all saved activations, and the logits of one chunk
    turn       all saved activations, and the gradients from the loss, twice
    backward   within a block: saved tensors are freed, gradients appear; the first and last block of each run of equal
               blocks bound all others
    reduction  the end of backward: the unsharded gradients of embedding and head, and their reduction
    update     all sharded gradients; with Muon also the matrices that this rank orthogonalizes

The buffers of FSDP2 follow its code. An all-gather needs a flat buffer beside the gathered weights. In backward the
next block is gathered while this one computes, and the fp32 gradients of the previous block live until this block's are
reduced. Replicas accumulate micro-batches before their all-reduce; replicas that shard nothing divide gradients in a
copy. With world_size 1 nothing is gathered, only cast. Shards are padded to equal rows.
Left out: a probed step in fp8, which needs more memory than other steps because it counts underflows while it
quantizes; host memory (snapshot ring and saves: `harness.analysis.plan.plan`). Memory outside torch's allocator (CUDA
context, NCCL) and fragmentation are `OUTSIDE_BYTES` and `FRAGMENTED`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import prod
from typing import final

from harness.analysis.plan.activations import (
    FP32_BYTES,
    element_bytes,
    kept_bytes,
    temporary_bytes,
    temporary_weight_bytes,
)
from harness.analysis.plan.fp8 import blocks_in_fp8, fp8_projections, workspace_bytes
from harness.analysis.plan.orthogonalization import muon_matrices, update_bytes
from harness.analysis.plan.resharding import will_reshard
from harness.config.optim import MomentDtype
from harness.config.parallel import DeviceKind
from harness.config.schema import Config, check_world, sharing
from harness.model.size import Shape, block_shapes, num_parameters, root_shapes

TOKEN_BYTES = 8
BLOCKS_ON_DEVICE = 2
"""Blocks whose activations are on the device with `parallel.activation_offload`: one computes, and those of a neighbour
are copied."""
BF16_BYTES = 2
NUM_MOMENTS = 2
"""Of AdamW. Muon has one, always in fp32."""
WORKSPACE_BYTES = 70_000_000
"""cuBLAS workspaces and small tensors; measured."""
OUTSIDE_BYTES = 1_000_000_000
"""CUDA context and NCCL's own memory."""
FRAGMENTED = 0.02
"""Memory that torch's allocator reserves beyond what is allocated, as a fraction of it."""
EAGER_LOGIT_BYTES = 17
"""Bytes for one logit within a loss that is not compiled: four tensors in fp32 and a mask."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes on one device at one point of a step."""

    weights: int
    """This rank's shard, fp32."""
    moments: int
    gradients: int
    """Reduced shards, fp32."""
    gathered: int
    """Unsharded weights in the compute type."""
    in_flight: int
    """Collective buffers, and unsharded gradients."""
    activations: int
    logits: int
    """Loss: logits of a chunk and the head's gradient."""
    other: int
    """Batch and workspaces."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a device in a step; the parts are those at the peak."""

    moment: str
    parts: MemoryParts
    state_bytes: int
    """Between steps."""
    kept_bytes: int
    """After the forward pass."""
    forward_peak_bytes: int
    backward_peak_bytes: int
    update_peak_bytes: int
    outside_bytes: int
    """Memory that torch does not count: CUDA context, NCCL, fragmentation."""

    @property
    def peak_bytes(self) -> int:
        """Peak of torch's allocated memory in a step."""
        return self.parts.total

    @property
    def needed_bytes(self) -> int:
        """Memory that must be free on the device."""
        return self.parts.total + self.outside_bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Sizes from which the memory of a step is computed, for one rank."""

    num_blocks: int
    num_shards: int
    num_micro_batches: int
    tokens: int
    """Tokens of one micro-batch."""
    element: int
    """Bytes of an element in the compute type."""
    kept: tuple[int, ...]
    """kept[n]: bytes on the device for one token, of those that the first n blocks save."""
    block: int
    """Parameters of a block, padded; a count, not bytes."""
    root: int
    head: int
    state: MemoryParts

    def shard(self, number: int) -> int:
        """Bytes of one rank's fp32 shard of this many parameters."""
        return FP32_BYTES * number // self.num_shards


def moment_bytes(cfg: Config) -> int:
    """Bytes of one of AdamW's moments of a parameter."""
    return BF16_BYTES if cfg.optim.moment_dtype is MomentDtype.bf16 else FP32_BYTES


def padded_size(shapes: list[Shape], num_shards: int) -> int:
    """Elements of all shards together, each padded to as many rows as the largest."""
    return sum(-(-shape[0] // num_shards) * num_shards * prod(shape[1:]) for shape in shapes)


def memory(cfg: Config, *, world_size: int) -> Memory:
    """Peak memory of one of `world_size` ranks, in the phase of `precision.phases` that needs the most."""
    check_world(cfg, world_size)
    kinds = dict.fromkeys([cfg.precision.kind, *(phase.kind for phase in cfg.precision.phases)])
    phases = [replace(cfg, precision=replace(cfg.precision, kind=kind, phases=[])) for kind in kinds]
    return max((_memory_of_phase(phase, world_size) for phase in phases), key=lambda held: held.needed_bytes)


def _memory_of_phase(cfg: Config, world_size: int) -> Memory:
    sizes = _sizes(cfg, world_size)
    kept = _kept(cfg, sizes)
    turn = _plus(kept, logits=_stream(cfg, sizes) + sizes.element * sizes.head)
    loss = _loss(cfg, sizes)
    blocks = _peak_candidates(cfg)
    in_blocks = [_in_block(cfg, sizes, block, is_done=is_done) for block in blocks for is_done in (False, True)]
    backward = max(in_blocks, key=_total)
    reduction, update = _reduction(cfg, sizes), _update(cfg, sizes)
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


def _total(parts: MemoryParts) -> int:
    return parts.total


def _peak_candidates(cfg: Config) -> set[int]:
    """Blocks that can be the peak of backward. Within a run of equal blocks memory changes linearly, so only its ends
    matter; the last block differs because no gradients of a later block are in flight."""
    last, low = cfg.model.num_layers - 1, blocks_in_fp8(cfg)
    ends = {0, last - 1, last} | ({low.start - 1, low.start, low.stop - 1, low.stop} if low else set())
    return {block for block in ends if 0 <= block <= last}


def _sizes(cfg: Config, world_size: int) -> StepSizes:
    model, num_shards = cfg.model, world_size // cfg.parallel.replicate
    shared = sharing(cfg, world_size)
    block, root = padded_size(block_shapes(model), num_shards), padded_size(root_shapes(model), num_shards)
    shard = FP32_BYTES * (model.num_layers * block + root) // num_shards
    matrices = FP32_BYTES * padded_size([*muon_matrices(cfg)], num_shards) // num_shards
    state = MemoryParts(
        weights=shard,
        moments=NUM_MOMENTS * (shard - matrices) * moment_bytes(cfg) // FP32_BYTES + matrices,
        gradients=0,
        gathered=0,
        in_flight=0,
        activations=0,
        logits=0,
        other=WORKSPACE_BYTES + workspace_bytes(cfg) + batch_bytes(cfg, world_size=world_size),
    )
    return StepSizes(
        num_blocks=model.num_layers,
        num_shards=num_shards,
        num_micro_batches=shared.num_micro_batches,
        tokens=shared.micro_batch_slots * cfg.train.sequence_length // cfg.parallel.context,
        element=element_bytes(cfg),
        kept=_kept_on_device(cfg),
        block=block,
        root=root,
        head=model.vocab_size * model.dim,
        state=state,
    )


def batch_bytes(cfg: Config, *, world_size: int) -> int:
    """Inputs and targets of one rank in a step, of all its micro-batches."""
    return 2 * TOKEN_BYTES * sharing(cfg, world_size).num_slots * cfg.train.sequence_length


def _kept_by_blocks(cfg: Config) -> list[int]:
    """Bytes that each block saves for one token."""
    return [kept_bytes(cfg, fp8_projections(cfg, block)) for block in range(cfg.model.num_layers)]


def _kept_on_device(cfg: Config) -> tuple[int, ...]:
    sums = list(accumulate(_kept_by_blocks(cfg), initial=0))
    if not is_offloaded(cfg):
        return tuple(sums)
    return tuple(total - sums[max(0, number - BLOCKS_ON_DEVICE)] for number, total in enumerate(sums))


def is_offloaded(cfg: Config) -> bool:
    """Whether activations leave the device; a CPU rank has no other memory."""
    return cfg.parallel.activation_offload and cfg.parallel.device is not DeviceKind.cpu


def offloaded_bytes(cfg: Config, *, world_size: int) -> int:
    """Activations of one rank in host memory: of all blocks but the last, for one micro-batch."""
    if not is_offloaded(cfg):
        return 0
    tokens = sharing(cfg, world_size).micro_batch_slots * cfg.train.sequence_length // cfg.parallel.context
    return tokens * sum(_kept_by_blocks(cfg)[:-1])


def _plus(parts: MemoryParts, **more: int) -> MemoryParts:
    values = {field.name: getattr(parts, field.name) + more.get(field.name, 0) for field in fields(MemoryParts)}
    return MemoryParts(**values)


def _accumulated(sizes: StepSizes) -> int:
    """Gradients of earlier micro-batches."""
    return sizes.shard(sizes.num_blocks * sizes.block + sizes.root) if sizes.num_micro_batches > 1 else 0


def _stream(cfg: Config, sizes: StepSizes) -> int:
    """Bytes of the residual stream of a micro-batch."""
    return sizes.tokens * cfg.model.dim * sizes.element


def _forward(cfg: Config, sizes: StepSizes) -> MemoryParts:
    """After the blocks' forward pass: weights that stay gathered, saved tensors, and the output of the last block."""
    blocks = 0 if will_reshard(cfg) else sizes.num_blocks * sizes.block
    return _plus(
        sizes.state,
        gradients=_accumulated(sizes),
        gathered=sizes.element * (sizes.root + blocks),
        activations=sizes.tokens * sizes.kept[sizes.num_blocks] + _stream(cfg, sizes),
    )


def _kept(cfg: Config, sizes: StepSizes) -> MemoryParts:
    """After the forward pass, with the gradients from the loss."""
    return _plus(_forward(cfg, sizes), logits=_stream(cfg, sizes) + sizes.element * sizes.head)


def _loss(cfg: Config, sizes: StepSizes) -> MemoryParts:
    """In the loss: either two chunks of logits, because the gradient of one lives until the next exists; or the end,
    where the head's gradient is cast. Compiled, logits are overwritten by their gradient."""
    size, stream = sizes.element, _stream(cfg, sizes)
    num_logits = min(sizes.tokens, cfg.model.loss_chunk_tokens) * cfg.model.vocab_size
    earlier = size if sizes.tokens > cfg.model.loss_chunk_tokens else 0
    of_a_logit = earlier + size + (0 if cfg.parallel.compile else EAGER_LOGIT_BYTES)
    at_end = (1 if cfg.parallel.compile else 2) * num_logits * size + size * sizes.head
    logits = stream + FP32_BYTES * sizes.head + max(num_logits * of_a_logit, at_end)
    gather = size * sizes.block if sizes.num_shards > 1 else 0
    return _plus(_forward(cfg, sizes), in_flight=gather, activations=stream, logits=logits)


def _in_block(cfg: Config, sizes: StepSizes, block: int, *, is_done: bool) -> MemoryParts:
    """The backward pass of a block, counted from the first: at its peak, with the gradient of one matrix; or at its
    end, with all its gradients."""
    size, is_sharded, num_done = sizes.element, sizes.num_shards > 1, sizes.num_blocks - 1 - block
    gathered, prefetched = (block + 1) * sizes.block, 0
    if will_reshard(cfg):
        gathered, prefetched = sizes.block, (sizes.block if is_sharded and block > 0 else 0)
    waiting = FP32_BYTES * sizes.block if num_done else 0
    projections = fp8_projections(cfg, block)
    passing = cfg.model.dim * size if is_done else temporary_bytes(cfg, projections)
    own = size * sizes.block if is_done else temporary_weight_bytes(cfg, projections)
    num_kept = block if is_done else block + 1
    return _plus(
        sizes.state,
        gradients=_accumulated(sizes) or sizes.shard(num_done * sizes.block),
        gathered=size * (sizes.root + gathered),
        in_flight=size * (sizes.head + prefetched) + own + waiting,
        activations=sizes.tokens * (sizes.kept[num_kept] + passing),
    )


def _reduction(cfg: Config, sizes: StepSizes) -> MemoryParts:
    """Embedding and head: unsharded gradients and their fp32 copy, then that copy and the reduced result; replicas that
    shard nothing need another copy for the division."""
    gradients = sizes.shard(sizes.num_blocks * sizes.block + sizes.root)
    reduced = sizes.shard(sizes.root) if sizes.num_micro_batches > 1 else 0
    divided = FP32_BYTES * sizes.root if sizes.num_shards == 1 and cfg.parallel.replicate > 1 else 0
    beside = max(sizes.element * sizes.root, reduced + divided)
    return _plus(sizes.state, gradients=gradients, in_flight=FP32_BYTES * sizes.root + beside)


def _update(cfg: Config, sizes: StepSizes) -> MemoryParts:
    """All sharded gradients, and Muon's buffers; probes are computed in pieces and need no extra memory."""
    gradients = sizes.shard(sizes.num_blocks * sizes.block + sizes.root)
    return _plus(sizes.state, gradients=gradients, in_flight=update_bytes(cfg, sizes.num_shards))


def checkpoint_bytes(cfg: Config) -> int:
    """One checkpoint on disk; replicas are saved once."""
    matrices = sum(map(prod, muon_matrices(cfg)))
    moments = NUM_MOMENTS * moment_bytes(cfg) * (num_parameters(cfg.model) - matrices)
    return FP32_BYTES * (num_parameters(cfg.model) + matrices) + moments
