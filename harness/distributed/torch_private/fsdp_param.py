"""Casts each FSDP2 weight in the copy that FSDP2 makes anyway, for world_size 1.

Private API: `torch.distributed.fsdp._fully_shard._fsdp_param` (`FSDPParam`, `ShardedState`) and
`FSDPModule._get_fsdp_state()._fsdp_param_group`. Checked on torch 2.11 and 2.13.

Why: FSDP2 casts a weight in one pass and copies it in a second. With several ranks the copy is part of the all-gather;
with one rank it is an extra pass over all weights.
How: `all_gather_inputs` returns the fp32 shard, and the all-gather outputs are allocated in the compute dtype, so the
copy casts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState


def cast_on_copy(module: FSDPModule) -> None:
    """Make FSDP2's copy of each weight of this module cast it, too."""
    for parameter in fsdp_params(module):
        assert type(parameter) is FSDPParam, "the parameter was replaced already"
        parameter.__class__ = CastOnCopyParam


def fsdp_params(module: FSDPModule) -> list[FSDPParam]:
    """FSDP2's own objects for the parameters that this module shards."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else list(group.fsdp_params)


class CastOnCopyParam(FSDPParam):
    """Gives its shard uncast as all-gather input, and takes the output in the dtype that the model computes in."""

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        is_sharded = self.sharded_state is ShardedState.SHARDED
        return [self._sharded_param_data] if is_sharded else super().all_gather_inputs

    def init_all_gather_outputs(
        self, all_gather_input_numels: list[int], all_gather_input_dtypes: list[torch.dtype], *rest: Any, **options: Any
    ) -> None:
        dtypes = [self.param_dtype or dtype for dtype in all_gather_input_dtypes]
        super().init_all_gather_outputs(all_gather_input_numels, dtypes, *rest, **options)
