"""FSDP where a rank is alone: nothing is gathered, scattered or reduced, and nothing is copied for it.

Why: FSDP2 casts a weight in one pass and moves it in a second, and copies gradients from where they would be sent to
where they would arrive. With others both are part of the collectives; alone they are passes over all weights.
How: both are asked of objects that can be replaced. What goes in is what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState


@final
class Unscattered(DefaultReduceScatter):
    """What FSDP would copy the gradients to is what they are in.

    It asks for room twice in each reduction, first for what goes in, then for what comes out. Not for replicas: their
    gradients go on to another stream, which would have to be told of.
    """

    def __init__(self) -> None:
        self._given: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        given, self._given = self._given, None
        if given is None:
            self._given = super().allocate(size, dtype=dtype, device=device)
            return self._given
        assert (tuple(given.shape), given.dtype) == (tuple(size), dtype), "FSDP asked for something else"
        if given.is_cuda:  # the stream of reductions goes on reading it, when gradients of micro-batches are added up
            given.record_stream(torch.cuda.current_stream(device))
        return given


def gather_in_one_pass(module: FSDPModule) -> None:
    """Have the copy of each weight, which FSDP makes, cast it on the way."""
    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in () if group is None else group.fsdp_params:
        assert type(parameter) is FSDPParam, "not as FSDP made it"
        parameter.__class__ = _Ungathered


class _Ungathered(FSDPParam):
    """Gives its weights as they are, and takes them in the type that the model computes in."""

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        is_whole = self.sharded_state is ShardedState.SHARDED
        return [self._sharded_param_data] if is_whole else super().all_gather_inputs

    def init_all_gather_outputs(
        self, all_gather_input_numels: list[int], all_gather_input_dtypes: list[torch.dtype], *rest: Any, **options: Any
    ) -> None:
        dtypes = [self.param_dtype or dtype for dtype in all_gather_input_dtypes]
        super().init_all_gather_outputs(all_gather_input_numels, dtypes, *rest, **options)
