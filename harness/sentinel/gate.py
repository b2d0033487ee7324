"""The gate: one device bit, equal on every rank, that refuses an update before it is applied.

It is computed from reduced signals only, so ranks cannot disagree, and it selects rather than multiplies: fused AdamW
reads the bit and leaves weights and moments untouched. Today it refuses what is not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor


def refuse_nonfinite(*, loss: Tensor, grad_norm: Tensor) -> Tensor:
    """1.0 where the update must not happen, else 0.0; exactly these two, because the kernel tests for 1."""
    return (~(torch.isfinite(loss) & torch.isfinite(grad_norm))).to(torch.float32)
