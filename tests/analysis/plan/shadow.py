"""A step on fake tensors: the real model, sharded by the real FSDP2 over any number of ranks, on one CPU.

Tensors are torch's fake ones, which have shapes and no data, and the other ranks are torch's fake process group, which
answers at once. Every storage that comes and goes is counted, and every collective that is called: what is left to
believe is that a GPU keeps what a CPU keeps. Norms are the one exception that matters, and are put in their place by
`FusedNorm`, which keeps what the fused kernel of a GPU keeps. Of an operator in fp8 what goes in and comes out is seen,
not what it takes meanwhile.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.analysis.plan.resharding import will_reshard
from harness.config.schema import Config
from harness.distributed.fsdp import set_replica_all_reduce, shard
from harness.distributed.shards import local
from harness.distributed.world import World
from harness.model.transformer import Transformer
from harness.precision.fp8.layers import convert_to_fp8
from harness.precision.mixed_precision import fsdp_policy, linear
from tests.composed import load

COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """Bytes of one rank; the peaks are those of the second micro-batch, because gradients of the first exist then."""

    weights: int
    kept: int
    forward_peak: int
    backward_peak: int
    gradients: int
    calls: dict[str, int]
    """'kind bytes' -> calls in the last micro-batch; bytes are the output of a gather, the input of a reduction."""


class FusedNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one value per row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = hidden.float().square().mean(dim=-1, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(hidden, weight, scale)
        return (hidden.float() * scale).to(hidden.dtype) * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        normed = hidden.float() * scale
        inner = gradient.float() * weight.float()
        along = (inner * normed).mean(dim=-1, keepdim=True)
        of_weight = (gradient.float() * normed).flatten(0, -2).sum(dim=0)
        return ((inner - normed * along) * scale).to(hidden.dtype), of_weight.to(weight.dtype), None


@contextmanager
def fused_norms() -> Iterator[None]:
    """Makes norms save the same tensors as on a GPU."""
    plain = nn.RMSNorm.forward

    def forward(self: nn.RMSNorm, hidden: Tensor) -> Tensor:
        return FusedNorm.apply(hidden, self.weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]

    setattr(nn.RMSNorm, "forward", forward)  # noqa: B010  (a method to mypy)
    try:
        yield
    finally:
        setattr(nn.RMSNorm, "forward", plain)  # noqa: B010


class Counting(TorchDispatchMode):
    """Counts bytes of all live storages, their peak, and every collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.peak = 0
        self.calls: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        if name in COLLECTIVES:
            sizes = [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.calls[f"{COLLECTIVES[name]} {max(sizes)}"] += 1
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self.see(leaf)
        return result

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            weakref.finalize(storage, self._forget, storage._cdata)
        self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            self.total += storage.nbytes() - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, self.total)

    def _forget(self, key: int) -> None:
        self.total -= self._sizes.pop(key)

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """FSDP2 frees and allocates gathered weights by resizing their storage, which is no operator."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            self.resized(storage)
            return result

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010
        try:
            yield
        finally:
            setattr(torch.UntypedStorage, "resize_", plain)  # noqa: B010


@contextmanager
def alone_among(world_size: int, *, replicate: int) -> Iterator[World]:
    """Rank 0 of a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    shape: tuple[int, ...] = (world_size,) if replicate == 1 else (replicate, world_size // replicate)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield World(
            rank=0,
            size=world_size,
            device=torch.device("cpu"),
            mesh=mesh,
            replicate=replicate,
            host_mesh=mesh,
            background_group=group,
        )
    finally:
        dist.destroy_process_group()


def shadow(cfg: Config, *, world_size: int) -> Shadow:
    """Two micro-batches of a step of `cfg` on the first of `world_size` ranks."""
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=cfg.train.sequence_length, linear=linear)
        convert_to_fp8(model.blocks, cfg.precision)
    counting = Counting()
    micro = cfg.train.micro_batch_size or cfg.train.batch_size // world_size
    with (
        fused_norms(),
        alone_among(world_size, replicate=cfg.parallel.replicate) as world,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        parallel = replace(cfg.parallel, reshard_after_forward=will_reshard(cfg))
        watched = shard(model, model.blocks, world=world, cfg=parallel, precision=fsdp_policy(cfg.precision.kind))
        model.to_empty(device="cpu")
        with counting, counting.resizes():
            for small in (watched.square_sum, *model.buffers()):
                counting.see(small)
            besides = counting.total
            for parameter in model.parameters():
                counting.see(local(parameter.detach()))
            weights = counting.total - besides
            for is_last in (False, True):
                if cfg.parallel.replicate > 1:
                    set_replica_all_reduce(model, enabled=is_last)
                counting.calls.clear()
                before = counting.total
                tokens = torch.zeros(micro, cfg.train.sequence_length, dtype=torch.int64)
                counting.peak = 0
                output = model(tokens, tokens)
                kept, forward_peak = counting.total, counting.peak
                counting.peak = 0
                output.objective.backward()
                backward_peak = counting.peak
                del output, tokens
    return Shadow(
        weights=weights,
        kept=kept,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        gradients=before - weights - besides,
        calls=dict(counting.calls),
    )


def main() -> None:
    """One line of JSON for each `RANKS override ...` on a line of stdin."""
    for line in sys.stdin:
        ranks, *overrides = line.split()
        print(json.dumps(asdict(shadow(load(overrides), world_size=int(ranks)))), flush=True)


if __name__ == "__main__":
    main()
