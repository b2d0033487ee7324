"""The base classes of FSDP2's all-gather and reduce-scatter, which the harness subclasses and passes to FSDP2.

Private API: `torch.distributed.fsdp._fully_shard._fsdp_collectives` (`DefaultAllGather`, `DefaultReduceScatter`).
Checked on torch 2.11 and 2.13.
`harness.distributed.reduce_scatter` relies on the order of calls in one reduction: `allocate` for the input, then
`allocate` for the output when the input is filled, then the object itself if the shard axis is longer than 1.
"""

from __future__ import annotations

from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

__all__ = ["DefaultAllGather", "DefaultReduceScatter"]
