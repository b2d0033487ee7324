"""How the model is spread over the ranks, and what is watched while its parts travel.

Why: parallelism is applied beside the model, not inside it.
How: activations are checkpointed, blocks compiled, then FSDP2 shards each block and the root over the mesh's shard
axis, so a step gathers one block at a time. Gradients are summed, never averaged: the loss is already divided by the
tokens of the global batch. FSDP2's collectives are torch's own, watched: what a rank puts into a reduction names the
guilty one, after it nobody does; and a rank that never waits is the one the others wait for.
With replicas, each micro-batch is reduce-scattered and the sum over micro-batches is all-reduced between replicas once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import harness.precision.fp8.swiglu  # noqa: F401  (defines operators)
import harness.precision.fused_qkv  # noqa: F401  (defines operators)
from harness.config.parallel import ActivationCheckpointing, ParallelConfig
from harness.distributed.torch_private import chunk_cat
from harness.distributed.torch_private.single_rank import Unscattered, gather_in_one_pass
from harness.distributed.world import World
from harness.precision.fp8.linear import Fp8Linear
from harness.precision.mixed_precision import widened


@final
@dataclass(slots=True)
class Collectives:
    """What this rank put into the collectives of a step, and how long it stood in them."""

    squares: Tensor
    """Sum of squares of what this rank gave to be reduced, since it was last taken; on the device."""
    sees_gradients: bool
    """Whether gradients pass through here before they are reduced: where there is more than one rank."""
    is_sharded: bool = True
    """Whether the shard axis is longer than 1: only then does FSDP2 call the reduce-scatter."""
    waited_s: float = 0.0
    """The host's seconds in collectives, ever. Over gloo it waits there for the others; on CUDA it only launches.
    The all-reduce between replicas is FSDP's own and not counted."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began_s

    def take(self) -> Tensor:
        """Squares of this rank's own gradients before the reduction; those of several micro-batches are added up.

        The end of the backward pass made the current stream wait for all reductions, and the next ones wait for it.
        """
        taken = self.squares.clone()
        self.squares.zero_()
        return taken


@final
class _WatchedGather(DefaultAllGather):
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(self, *inputs: Any, **options: Any) -> dist.Work | None:
        with self._collectives.waiting():
            return super().__call__(*inputs, **options)


@final
class WatchedScatter(DefaultReduceScatter):
    """Measures what this rank gives to each reduction.

    FSDP2 calls `allocate` twice in a reduction: for the input, then, once that is filled and on the stream of
    reductions, for the output. It calls the object itself only where there are several shards. Where the shard axis has
    size 1, the second `allocate` is the last place to see a gradient before the all-reduce between replicas.
    """

    def __init__(self, collectives: Collectives, *, first: Sequence[Callable[[Tensor], None]] = ()) -> None:
        """`first`: what is done to each gradient before it is measured; nothing, but for a drill."""
        self._collectives = collectives
        self._first = first
        self._filled: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        allocated = super().allocate(size, dtype=dtype, device=device)
        if not self._collectives.is_sharded:
            filled, self._filled = self._filled, allocated if self._filled is None else None
            if filled is not None:
                self._see(filled)
        return allocated

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *inputs: Any, **options: Any) -> dist.Work:
        self._see(input_tensor)
        with self._collectives.waiting():
            return super().__call__(output_tensor, input_tensor, *inputs, **options)

    def _see(self, gradient: Tensor) -> None:
        """On the stream of reductions, which runs one after the other: additions have an order."""
        for act in self._first:
            act(gradient)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self._collectives.squares.addcmul_(norm, norm)


def shard(
    model: nn.Module, blocks: Iterable[nn.Module], *, world: World, cfg: ParallelConfig, precision: MixedPrecisionPolicy
) -> Collectives:
    """Checkpoint activations, compile, then shard: each block by itself, what is left with the root."""
    if cfg.compile and world.device.type == "cuda":
        chunk_cat.install("CUDA")
    layers = list(blocks)
    assert cfg.reshard_after_forward is not None, "left to the memory of the devices, and not settled"
    for block in layers:
        wrap(block, cfg, recomputing=widened(precision.param_dtype or torch.float32, world.device))
        fully_shard(block, mesh=world.mesh, mp_policy=precision, reshard_after_forward=cfg.reshard_after_forward)
    fully_shard(model, mesh=world.mesh, mp_policy=precision, reshard_after_forward=False)
    squares = torch.zeros((), dtype=torch.float32, device=world.device)
    collectives = Collectives(squares, sees_gradients=world.size > 1, is_sharded=world.size > world.replicate)
    gather = _WatchedGather(collectives)
    scatter = WatchedScatter(collectives) if world.size > 1 else Unscattered()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if world.size > 1:  # alone, FSDP divides by whatever it is told, by 1 too: a pass over all gradients
                module.set_gradient_divide_factor(1.0)
            else:
                gather_in_one_pass(module)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    return collectives


def reduce_replicas(model: nn.Module, *, now: bool) -> None:
    """Whether the next backward pass all-reduces gradients between replicas, or adds to this replica's own sum."""
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(now)


def free_gathered_weights(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass leaves gathered.

    FSDP2 would use them again in the next forward pass, also if the shards were restored in between.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


ADVANCE = "advance"
"""The method of a block that computes; what is kept of it is kept from its arguments on."""

_KEPT_BY_SELECTIVE = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.harness.fp8_forward.default,
        torch.ops.harness.swiglu_forward.default,
        torch.ops.harness.project_rotated.default,
    }
)
"""Dear to compute, cheap to keep: matrix products and attention."""


def _keep_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)  # type: ignore[no-untyped-call]


def _with_recomputation(contexts: Callable[[], Any] | None, recomputing: AbstractContextManager[Any]) -> Any:
    """What the forward pass and the recomputation run in, with one more context for the latter."""
    forward, again = (nullcontext(), nullcontext()) if contexts is None else contexts()
    return forward, _both(again, recomputing)


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def wrap(block: nn.Module, cfg: ParallelConfig, *, recomputing: AbstractContextManager[Any] | None = None) -> None:
    """Checkpoint the block's activations and compile it, both where they are wanted.

    What is computed again is left to the compiler, which then leaves out what nobody needs. But for fp8: torch 2.11
    keeps all that an autograd function made in a compiled block, so there the compiled part is called a second time.
    `recomputing` is entered where activations are computed again, unless the block is compiled.
    """
    kind = cfg.activation_checkpointing
    in_fp8 = any(isinstance(each, Fp8Linear) for each in block.modules())
    is_called_again = cfg.compile and in_fp8 and kind is ActivationCheckpointing.full
    if is_called_again:
        setattr(block, ADVANCE, torch.compile(getattr(block, ADVANCE), fullgraph=True))
    _checkpoint_activations(block, kind, recomputing=None if cfg.compile else recomputing)
    if cfg.compile and not is_called_again:
        block.compile(fullgraph=True)


def unwrap(block: nn.Module) -> None:
    """Leave a block as it was: what is hooked into it is heard again."""
    block._compiled_call_impl = None
    vars(block).pop(ADVANCE, None)


def _checkpoint_activations(
    block: nn.Module, kind: ActivationCheckpointing, *, recomputing: AbstractContextManager[Any] | None
) -> None:
    """Wrap what the block computes in place, so that parameter names stay what they are and it still compiles.

    What it is given and what was to be added to that are one tensor by then: there is one to keep, not two.
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
