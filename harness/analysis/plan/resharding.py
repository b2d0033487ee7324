"""Whether a run frees its gathered weights between forward and backward."""

from __future__ import annotations

from harness.analysis.plan.activations import element_bytes
from harness.config.schema import Config
from harness.model.size import needs_resharding

BYTES_PER_GB = 1e9


def resharded(cfg: Config) -> bool:
    """As was asked for, or as the memory of the cluster's devices decides; where that is not known, they are."""
    if cfg.parallel.reshard_after_forward is not None:
        return cfg.parallel.reshard_after_forward
    memory_gb = cfg.cluster.memory_gb
    return needs_resharding(
        cfg.model,
        weight_bytes=element_bytes(cfg),
        memory_bytes=None if memory_gb is None else memory_gb * BYTES_PER_GB,
    )
