"""The history of CUDA allocations, and its snapshot for https://pytorch.org/memory_viz.

Private API: `torch.cuda.memory._record_memory_history` and `_snapshot`, which the documentation of torch names.
"""

from __future__ import annotations

from typing import Any

import torch

MOST_ENTRIES = 200_000


def record_allocations() -> None:
    """Start to record allocations and frees, with their Python stacks."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="python")


def stop_recording() -> dict[str, Any]:
    """Stop; returns what is allocated now, and the recorded history. The viewer reads its pickle."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    return snapshot
