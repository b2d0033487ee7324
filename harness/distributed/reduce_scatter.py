"""FSDP2's collectives with measurements: each rank's gradient norm before the reduction, and the time spent waiting.

Why: a bad gradient is attributed to its rank before the reduce-scatter; after it, all ranks have the same sum. A rank
that never waits in a collective is the one that the others wait for.
How: torch's own collectives, subclassed (`torch_private.fsdp_collectives`). Where the harness has its own kernel for
FSDP2's copy of the gradients, the copy also computes the norm (`harness.distributed.copy_sums`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from harness.distributed.bit_digests import BitDigests
from harness.distributed.copy_sums import CopySums, SumRequest, request_sums
from harness.distributed.exchange_watch import ExchangeWatch
from harness.distributed.torch_private.fsdp_collectives import DefaultAllGather, DefaultReduceScatter


@final
@dataclass(slots=True)
class CommStats:
    """This rank's gradient norm before the reduction, and its time in collectives."""

    square_sum: Tensor
    """Sum of squares of the gradients that were measured in a pass of their own, since it was last taken; on the
    device."""
    measures_gradients: bool
    """Whether gradients are measured before they are reduced: true if world_size is more than 1."""
    is_sharded: bool = True
    """Whether the shard axis is longer than 1: only then does FSDP2 call the reduce-scatter."""
    waited_s: float = 0.0
    """Host seconds in collectives since the start. Over gloo the host waits there for other ranks; on CUDA it only
    launches. The all-reduce between replicas is FSDP2's own and not counted."""
    copy_sums: CopySums = field(default_factory=CopySums)
    """Sums of squares of the gradients that were measured while they were copied."""
    digests: BitDigests | None = None
    """Digests of a micro-batch that is computed twice; None: the model is not sharded by `harness.distributed.fsdp`."""
    exchanges: ExchangeWatch = field(default_factory=ExchangeWatch)
    """What this rank sends to its context group."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the duration of the block to `waited_s`."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began_s

    def take_square_sum(self) -> Tensor:
        """Return the sum of squares of this rank's gradients before the reduction, over all micro-batches since the
        last call, and reset it.

        No extra stream sync is needed: the end of the backward pass made the current stream wait for all reductions,
        and the next reductions wait for the current stream.
        """
        copied = self.copy_sums.take()
        taken = self.square_sum.clone() if copied is None else self.square_sum + copied
        self.square_sum.zero_()
        return taken


@final
class TimedAllGather(DefaultAllGather):
    """FSDP2's all-gather, with its host time added to the stats."""

    def __init__(self, stats: CommStats) -> None:
        self._stats = stats

    def __call__(self, *inputs: Any, **options: Any) -> dist.Work | None:
        with self._stats.timed():
            return super().__call__(*inputs, **options)


@final
class MeasuredReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, with the norm of its input added to the stats.

    FSDP2 calls `allocate` twice in a reduction: for the input, and, on the reduce-scatter stream, for the output when
    the input is filled. It calls the object itself only if there are several shards. If the shard axis has size 1, the
    second `allocate` is the last place where a gradient can be measured before the all-reduce between replicas.
    The sums of the copy in between are requested at the first `allocate`.
    """

    def __init__(
        self,
        stats: CommStats,
        *,
        block: int | None = None,
        before_measuring: Sequence[Callable[[Tensor], None]] = (),
    ) -> None:
        """`block`: number of the block whose gradients are reduced; the number of blocks for all other weights; None:
        gradients are not digested. `before_measuring`: functions that modify each gradient in place; only fault
        injection passes any. The gradient is then measured after them, in a pass of its own."""
        self._stats = stats
        self._block = block
        self._before_measuring = before_measuring
        self._input: Tensor | None = None
        """The input of the reduction under way."""
        self._request: SumRequest | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        allocated = super().allocate(size, dtype=dtype, device=device)
        if self._input is None:
            self._input = allocated
            self._request = None if self._before_measuring else request_sums(allocated, self._stats.copy_sums)
        elif not self._stats.is_sharded:
            self._measure(self._input)
        return allocated

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *inputs: Any, **options: Any) -> dist.Work:
        self._measure(input_tensor)
        with self._stats.timed():
            return super().__call__(output_tensor, input_tensor, *inputs, **options)

    def _measure(self, gradient: Tensor) -> None:
        """Measure a filled input, unless the copy has done so, and digest it if this micro-batch is computed twice.

        Runs on the reduce-scatter stream, so the additions have a fixed order.
        """
        request, self._request, self._input = self._request, None, None
        for modify in self._before_measuring:
            modify(gradient)
        if self._block is not None and self._stats.digests is not None:
            self._stats.digests.add_gradient(self._block, gradient)
        if request is not None and request.is_answered:
            return
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self._stats.square_sum.addcmul_(norm, norm)


@final
class NoCopyReduceScatter(DefaultReduceScatter):
    """Skips FSDP2's copy of the gradients when world_size is 1: the output of a reduction is its input.

    FSDP2 calls `allocate` twice in a reduction: for the input, then for the output. Not for replicas: their gradients
    are read on another stream, for which the memory would have to be recorded as well.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        reduce_input, self._input = self._input, None
        if reduce_input is None:
            self._input = super().allocate(size, dtype=dtype, device=device)
            return self._input
        assert (tuple(reduce_input.shape), reduce_input.dtype) == (tuple(size), dtype), "output differs from input"
        if reduce_input.is_cuda:  # the reduce-scatter stream still reads it when micro-batches are accumulated
            reduce_input.record_stream(torch.cuda.current_stream(device))
        return reduce_input
