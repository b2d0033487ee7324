"""Gradients of a block side by side, as FSDP wants them for their reduction.

Why: torch's kernel for it moves half of what memory could, and a rank joins the gradients of all blocks in every
micro-batch, whatever the number of ranks.
How: FSDP joins by an operator, `fsdp::chunk_cat`, which is given this implementation on CUDA.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
import torch.distributed.fsdp
from torch import Tensor


def join(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """Cut each tensor along its first axis into `num_chunks`, the last ones filled up with zeros, and lay the first of
    all side by side in the first row of `out`, and so on."""
    from harness.kernels.chunk_cat import join_gradients

    assert dim == 0, "FSDP cuts the first axis"
    widths = [-(-tensor.shape[0] // num_chunks) * tensor[:1].numel() for tensor in tensors]
    join_gradients([tensor.contiguous() for tensor in tensors], widths, out)


@cache
def install(key: str) -> torch.library.Library:
    """Once in a process, for a dispatch key; torch says that something was there before, which is the point."""
    library = torch.library.Library("fsdp", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        library.impl("chunk_cat", join, key, allow_override=True)  # type: ignore[no-untyped-call]
    return library
