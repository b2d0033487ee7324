"""Gradients of a block side by side, as FSDP wants them for their reduction, and their squares in the same pass.

Why: torch's kernel for it moves half of what memory could, and whoever watches the gradients of a rank reads all of
them once more. Both grow with the model and shrink with nothing: a rank joins the gradients of all blocks, whatever the
number of ranks.
How: FSDP joins by an operator, `fsdp::chunk_cat`, which is given this implementation. Whoever wants the squares names
the tensor beforehand; others' gradients are joined as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache

import torch
import torch.distributed.fsdp
from torch import Tensor
from torch.nn import functional as F

_wanted: dict[int, Tensor] = {}
"""Address of a tensor that is yet to be filled -> where the squares of what it is filled with are added."""


def want_squares(out: Tensor, squares: Tensor) -> None:
    """Have the squares of all that is joined in `out` next added to `squares`."""
    _wanted[out.data_ptr()] = squares


def are_wanted(out: Tensor) -> bool:
    """Whether they were not taken: nothing was joined there since. Asked once."""
    return _wanted.pop(out.data_ptr(), None) is not None


def join(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """Cut each tensor along its first axis into `num_chunks`, the last ones filled up with zeros, and lay the first of
    all side by side in the first row of `out`, and so on."""
    assert dim == 0, "FSDP cuts the first axis"
    squares = _wanted.pop(out.data_ptr(), None)
    pieces = list(_pieces(tensors, num_chunks, out))
    if out.is_cuda:
        from harness.kernels import join_gradients

        join_gradients(pieces, squares)
        return
    for tensor, piece in pieces:
        room = piece.numel() - tensor.numel()
        piece.copy_(F.pad(tensor.reshape(-1), (0, room)).view_as(piece))
        if squares is not None:
            norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
            squares.addcmul_(norm, norm)


def _pieces(tensors: list[Tensor], num_chunks: int, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor with its place in every row of `out`."""
    begin = 0
    for tensor in tensors:
        width = -(-tensor.shape[0] // num_chunks) * tensor[:1].numel()
        yield tensor.contiguous(), out[:, begin : begin + width]
        begin += width


@cache
def install() -> torch.library.Library:
    """Once in a process; torch says that something was there before, which is the point."""
    library = torch.library.Library("fsdp", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for key in ("CPU", "CUDA"):
            library.impl("chunk_cat", join, key, allow_override=True)  # type: ignore[no-untyped-call]
    return library
