"""Activation checkpointing, torch.compile and FSDP2 sharding, applied beside the model and not inside it.

How: activations are checkpointed, blocks compiled, then FSDP2 shards each block and the root over the mesh's shard
axis, so a step gathers one block at a time. Gradients are summed, never averaged: the loss is already divided by the
tokens of the global batch. The collectives are measured (`harness.distributed.reduce_scatter`).
With replicas, each micro-batch is reduce-scattered and the sum over micro-batches is all-reduced between replicas once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import harness.precision.fp8.swiglu
import harness.precision.fused_qkv
import harness.precision.te_attention  # noqa: F401  (all three define operators that are named below)
from harness.config.parallel import ActivationCheckpointing, ParallelConfig
from harness.distributed.bit_digests import BitDigests
from harness.distributed.reduce_scatter import CommStats, MeasuredReduceScatter, NoCopyReduceScatter, TimedAllGather
from harness.distributed.torch_private import chunk_cat
from harness.distributed.torch_private.attention_ops import ATTENTION_OPS
from harness.distributed.torch_private.compiled_call import discard_compiled_call
from harness.distributed.torch_private.fsdp_param import cast_on_copy
from harness.distributed.torch_private.inductor_options import compile_options
from harness.distributed.torch_private.recompile_limit import compile_limit
from harness.distributed.world import World
from harness.precision.fp8.linear import Fp8Linear
from harness.precision.mixed_precision import fp32_matmul_mode, is_emulating


def shard(
    model: nn.Module, blocks: Iterable[nn.Module], *, world: World, cfg: ParallelConfig, precision: MixedPrecisionPolicy
) -> CommStats:
    """Checkpoint activations, compile, then shard each block by itself and the rest with the root."""
    if cfg.compile and world.device.type == "cuda":
        chunk_cat.install("CUDA")
    layers = list(blocks)
    assert cfg.reshard_after_forward is not None, "reshard_after_forward must be resolved before sharding"
    for block in layers:
        wrap(block, cfg, recomputing=fp32_matmul_mode(precision.param_dtype or torch.float32, world.device))
        fully_shard(block, mesh=world.mesh, mp_policy=precision, reshard_after_forward=cfg.reshard_after_forward)
    fully_shard(model, mesh=world.mesh, mp_policy=precision, reshard_after_forward=False)
    square_sum = torch.zeros((), dtype=torch.float32, device=world.device)
    stats = CommStats(square_sum, measures_gradients=world.size > 1, is_sharded=world.size > world.replicate)
    stats.digests = BitDigests(len(layers), device=world.device)
    all_gather = TimedAllGather(stats)
    numbers = {block: number for number, block in enumerate(layers)}
    without_copy = NoCopyReduceScatter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if world.size > 1:  # with world_size 1 a divide factor, even 1.0, costs a pass over all gradients
                module.set_gradient_divide_factor(1.0)
            else:
                cast_on_copy(module)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(all_gather)
            measured = MeasuredReduceScatter(stats, block=numbers.get(module, len(layers)))
            module.set_custom_reduce_scatter(measured if world.size > 1 else without_copy)
    return stats


def gather_before_forward(model: nn.Module) -> None:
    """Gather all weights at the beginning of every forward pass; for gloo and weights that are not resharded.

    Over gloo a gather blocks the host until the other ranks reach it. The ranks then wait for each other once, and not
    in front of every block. Without resharding all weights are gathered at the end of the pass anyway. On CUDA a gather
    runs while the block before it computes, so nothing is gained there.
    """
    model.register_forward_pre_hook(_gather_weights)


def _gather_weights(model: nn.Module, _inputs: Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def set_replica_all_reduce(model: nn.Module, *, enabled: bool) -> None:
    """Set whether the next backward pass all-reduces gradients between replicas or accumulates them in this replica."""
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(enabled)


def free_gathered_weights(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass leaves gathered.

    FSDP2 would use the stale copies in the next forward pass, even if the shards were restored in between.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


ADVANCE = "advance"
"""The method of a block that is checkpointed: all that the block computes after the first residual add."""

_SAVED_BY_SELECTIVE = ATTENTION_OPS | {
    torch.ops.aten.mm.default,
    torch.ops.harness.fp8_forward.default,
    torch.ops.harness.swiglu_forward.default,
    torch.ops.harness.qkv_rope.default,
    torch.ops.harness.attention_forward.default,
}
"""Operators whose outputs are saved: matmuls and attention are expensive to recompute and small to keep."""


def _save_matmuls(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_matmuls)  # type: ignore[no-untyped-call]


def _with_recomputation(contexts: Callable[[], Any] | None, recomputing: AbstractContextManager[Any]) -> Any:
    """The contexts of the forward pass and of the recomputation; `recomputing` is added to the latter, if the forward
    pass, which calls this, emulates matmuls too: saved and recomputed tensors must have the same dtypes."""
    forward, recomputation = (nullcontext(), nullcontext()) if contexts is None else contexts()
    return forward, _enter_both(recomputation, recomputing) if is_emulating() else recomputation


@contextmanager
def _enter_both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def wrap(block: nn.Module, cfg: ParallelConfig, *, recomputing: AbstractContextManager[Any] | None = None) -> None:
    """Checkpoint the block's activations and compile it, as configured.

    The whole block is compiled with its checkpoint inside, so that the compiler removes dead recomputation. fp8 with
    full checkpointing is the exception: torch 2.11 saves every output of an autograd function in a compiled block, so
    there `advance` is compiled and the checkpoint calls it a second time.
    `recomputing` is entered during recomputation, unless the block is compiled.
    fp8 has a graph for each number of rows, which a warmup of the batch size changes.
    """
    kind = cfg.activation_checkpointing
    is_fp8 = any(isinstance(module, Fp8Linear) for module in block.modules())
    compiles_inside = cfg.compile and is_fp8 and kind is ActivationCheckpointing.full
    if compiles_inside:
        compiled = torch.compile(getattr(block, ADVANCE), fullgraph=True, options=compile_options(), **compile_limit())
        setattr(block, ADVANCE, compiled)
    _checkpoint_activations(block, kind, recomputing=None if cfg.compile else recomputing)
    if cfg.compile and not compiles_inside:
        block.compile(fullgraph=True, options=compile_options(), **compile_limit())


def unwrap(block: nn.Module) -> None:
    """Undo `wrap`, so that hooks inside the block are called."""
    discard_compiled_call(block)
    vars(block).pop(ADVANCE, None)


def run_eagerly(blocks: Iterable[nn.Module], cfg: ParallelConfig) -> None:
    """Run compiled blocks without the compiler from now on, with their activations checkpointed as before."""
    for block in blocks:
        unwrap(block)
        wrap(block, replace(cfg, compile=False))


def _checkpoint_activations(
    block: nn.Module, kind: ActivationCheckpointing, *, recomputing: AbstractContextManager[Any] | None
) -> None:
    """Replace the block's `advance` by a checkpointed one; parameter names do not change, and the block still compiles.

    `advance` takes the residual stream after the add: one tensor is saved, not two.
    """
    if kind is ActivationCheckpointing.none:
        return
    advance = getattr(block, ADVANCE)
    contexts: dict[str, Any] = {"context_fn": _selective_contexts} if kind is ActivationCheckpointing.selective else {}
    if recomputing is not None:
        contexts["context_fn"] = partial(_with_recomputation, contexts.get("context_fn"), recomputing)

    def checkpointed(*inputs: Any) -> Any:
        return checkpoint(advance, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)

    setattr(block, ADVANCE, checkpointed)
