"""Decides whether a planned run reshards gathered weights after forward."""

from __future__ import annotations

from harness.analysis.plan.activations import element_bytes
from harness.config.schema import Config
from harness.model.size import needs_resharding

BYTES_PER_GB = 1e9


def rank_memory_bytes(cfg: Config) -> float | None:
    """What a rank may use of its device; None: `cluster.memory_gb` is not set."""
    memory_gb = cfg.cluster.memory_gb
    return None if memory_gb is None else memory_gb * BYTES_PER_GB / cfg.launch.ranks_per_gpu


def will_reshard(cfg: Config) -> bool:
    """`parallel.reshard_after_forward` if set, else what `harness.model.size.reshards` decides for `cluster.memory_gb`.

    Training decides with the same rule from the memory of its devices.
    """
    if cfg.parallel.reshard_after_forward is not None:
        return cfg.parallel.reshard_after_forward
    return needs_resharding(cfg.model, weight_bytes=element_bytes(cfg), memory_bytes=rank_memory_bytes(cfg))
