"""Collectives outside FSDP2: sums, minima, shifts, broadcasts, and work whose result or failure reaches every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.errors import ConfigError, StorageError

T = TypeVar("T")


def all_reduce_sum(vector: Tensor) -> Tensor:
    """Sum over all ranks, in place."""
    dist.all_reduce(vector, op=dist.ReduceOp.SUM)
    return vector


def all_reduce_max(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Maximum over all ranks of a group, in place; None: over all ranks."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def all_reduce_min(value: int, group: dist.ProcessGroup | None = None) -> int:
    """Minimum over all ranks of a group, by gloo on the host."""
    box = torch.tensor(value)
    dist.all_reduce(box, op=dist.ReduceOp.MIN, group=group)
    return int(box)  # sync: it lies in host memory


def any_rank(value: bool) -> bool:
    """Whether the value is true on any rank, by gloo on the host."""
    return bool(all_reduce_max(torch.tensor(value, dtype=torch.int32)))  # sync: it lies in host memory


def start_all_to_all(
    sent: Tensor, received: Tensor, *, sent_sizes: list[int], received_sizes: list[int], group: dist.ProcessGroup
) -> dist.Work:
    """Send consecutive parts of a flat tensor to the ranks of a group, and receive a part from each.

    Both tensors must stay unchanged until `wait` of the result. On CUDA `wait` does not wait on the host.
    """
    work: dist.Work | None = dist.all_to_all_single(
        received, sent, received_sizes, sent_sizes, group=group, async_op=True
    )
    assert work is not None, "this rank belongs to the group"
    return work


def start_broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    """Send a tensor from rank `source` of a group to all others, in place.

    It must stay unchanged until `wait` of the result. On CUDA `wait` does not wait on the host.
    """
    work: dist.Work | None = dist.broadcast(tensor, group=group, group_src=source, async_op=True)
    assert work is not None, "this rank belongs to the group"
    return work


_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 has new names for both and warns about the old ones."""


def all_gather_stack(block: Tensor, num_ranks: int, group: dist.ProcessGroup) -> Tensor:
    """The blocks of all ranks of a group, stacked in the order of the ranks. On a GPU only the stream waits."""
    stacked = block.new_empty((num_ranks, *block.shape))
    _ALL_GATHER(stacked.view(-1), block.contiguous().view(-1), group=group)
    return stacked


def reduce_scatter_stack(stacked: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's block of a stack that is summed over all ranks of a group. On a GPU only the stream waits."""
    block = stacked.new_empty(stacked.shape[1:])
    _REDUCE_SCATTER(block.view(-1), stacked.contiguous().view(-1), group=group)
    return block


def receive_from_distance(block: Tensor, distance: int) -> Tensor:
    """The block of the rank `distance` places after this one, in a ring of all ranks. Collective: all ranks send blocks
    of the same size. On a GPU only the stream waits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert distance % size, "a rank does not send to itself"
    outgoing, incoming = block.contiguous(), torch.empty_like(block, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, outgoing, (rank - distance) % size),
        dist.P2POp(dist.irecv, incoming, (rank + distance) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return incoming


def call_unmatched_barrier() -> None:
    """A barrier that the other ranks do not call: all ranks hang. For drills."""
    dist.barrier()


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]  # type: ignore[no-any-return]


def gather_results(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `work` on every rank of a group; return all results in rank order.

    If any rank fails, the failure of the lowest such rank is raised on every rank.
    """
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _capture_outcome(work), group=group)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise _shared(outcome)
    return outcomes


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's own result; if any rank fails, raise on every rank."""
    results: list[T] = []
    gather_results(lambda: results.append(work()))
    return results[0]


def run_on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank 0; return its result, or raise its failure, on every rank."""
    outcome = broadcast(_capture_outcome(work) if dist.get_rank() == 0 else None)
    if isinstance(outcome, Exception):
        raise _shared(outcome)
    return outcome  # type: ignore[return-value]


@contextmanager
def enter_on_all_ranks(manager: AbstractContextManager[T]) -> Iterator[T]:
    """Enter a context on every rank; if any rank fails to enter, raise on every rank."""
    with ExitStack() as stack:
        yield run_on_all_ranks(lambda: stack.enter_context(manager))


def _shared(error: Exception) -> Exception:
    """An error that is about to be raised on all ranks; rank 0 prints it."""
    if isinstance(error, ConfigError | StorageError):
        error.is_shared, error.is_of_one_rank = True, False
    return error


def _capture_outcome(work: Callable[[], T]) -> T | Exception:
    """The result, or the exception; one that cannot be pickled becomes a RuntimeError with its text."""
    try:
        return work()
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error
