"""Sets how long the collectives of an existing process group wait.

Private API: `torch.distributed.distributed_c10d._set_pg_timeout`. Checked on torch 2.13 with gloo.

Why: `init_device_mesh` takes no timeout. The groups of a mesh axis that is shorter than the world have torch's own, 10
minutes over NCCL and 30 over gloo.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout


def set_timeout(group: ProcessGroup, timeout_s: float) -> None:
    """For all backends of the group. A gloo group that connects lazily keeps the old timeout for its first
    collective."""
    _set_pg_timeout(timedelta(seconds=timeout_s), group)
