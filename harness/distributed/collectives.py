"""Collectives of the loop and its recovery: sums, broadcasts, and work whose outcome every rank learns."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def all_reduce_sum(vector: Tensor) -> Tensor:
    """Sum over all ranks, in place."""
    dist.all_reduce(vector, op=dist.ReduceOp.SUM)
    return vector


def minimum(value: int) -> int:
    """The least over all ranks, by way of the hosts."""
    box = torch.tensor(value)
    dist.all_reduce(box, op=dist.ReduceOp.MIN)
    return int(box)  # sync: it lies in host memory


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]  # type: ignore[no-any-return]


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Do something on every rank of a group; the results in rank order, or on every rank the first failure of any."""
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _outcome_of(work), group=group)
    for each in outcomes:
        if isinstance(each, Exception):
            raise each
    return outcomes


def jointly(work: Callable[[], T]) -> T:
    """Do something on every rank and return this rank's own result; raises on every rank the first failure of any."""
    done: list[T] = []
    together(lambda: done.append(work()))
    return done[0]


def from_first(work: Callable[[], T]) -> T:
    """Do something on rank 0; its result, or its failure, on every rank."""
    outcome = broadcast(_outcome_of(work) if dist.get_rank() == 0 else None)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome  # type: ignore[return-value]


@contextmanager
def entered(manager: AbstractContextManager[T]) -> Iterator[T]:
    """Enter a context on all ranks, or raise on all of them."""
    with ExitStack() as stack:
        yield jointly(lambda: stack.enter_context(manager))


def _outcome_of(work: Callable[[], T]) -> T | Exception:
    """The result, or the exception in a form that another process can read."""
    try:
        return work()
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error
