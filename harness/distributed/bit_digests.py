"""Digests of what a rank computes for one micro-batch: each block's output, the losses, the gradients of each block.

Why: a micro-batch that is computed twice on the same weights must give the same bits. Digests compare two computations
without a second copy of any tensor, on the device, and the first stage that differs names the layer.
How: the stages are in the order of computation: embedding, blocks, loss, then the gradients of the blocks, the last
block first, and the gradients of all other weights. A gradient is digested as this rank computed it, before the
reduction. Nothing is digested unless `recording` is entered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import final

import torch
from torch import Tensor

PIECE = 2**24
"""Values that are digested at a time, to avoid large temporaries."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bytes of a value -> the integer type of its bit pattern."""
SHIFT = 2**40 + 1
"""Odd, and larger than twice any bit pattern: then no single flipped bit leaves x * (x + SHIFT) as it is."""


class Computation(IntEnum):
    """The two computations that are compared."""

    step = 0
    """The one whose gradients are used."""
    again = 1


def digest_bits(values: Tensor) -> Tensor:
    """Sum of x * (x + SHIFT) over the bit patterns x of a tensor of at most 32 bits, modulo 2**64; int64. A plain sum
    would miss errors of the last bit that cancel, a sum of squares the sign of 2.0."""
    patterns = values.detach().reshape(-1).view(INTEGERS[values.element_size()])
    if patterns.is_cuda:
        from harness.kernels.bit_digest import sum_patterns

        return sum_patterns(patterns, SHIFT)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for piece in torch.split(patterns, PIECE):
        wide = piece.to(torch.int64)
        total += (wide * (wide + SHIFT)).sum()
    return total


@final
class BitDigests:
    """The digests of two computations, on the device."""

    def __init__(self, num_blocks: int, *, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.tables = torch.zeros(len(Computation), len(stage_names(num_blocks)), dtype=torch.int64, device=device)
        """[computations, stages]."""
        self._places = torch.arange(1, self.tables.shape[1] + 1, device=device)
        self._table: Tensor | None = None

    @contextmanager
    def recording(self, computation: Computation) -> Iterator[None]:
        """Digest one micro-batch."""
        self._table = self.tables[computation].zero_()
        try:
            yield
        finally:
            self._table = None

    def add_output(self, stage: int, *tensors: Tensor) -> None:
        """Add an output of the forward pass: stage 0 is the embedding, then the blocks, then the losses."""
        if self._table is not None:
            with torch.no_grad():
                self._table[stage].copy_(combine([digest_bits(tensor) for tensor in tensors]))

    def add_gradient(self, block: int, *gradients: Tensor) -> None:
        """Add the gradient of a block before its reduction; `num_blocks`: of the weights outside the blocks. May run on
        the stream of the reduction: the backward pass ends with the current stream waiting for it."""
        if self._table is not None:
            with torch.no_grad():
                stage = gradient_stage(block, self.num_blocks)
                self._table[stage].copy_(combine([digest_bits(gradient) for gradient in gradients]))

    def first_difference(self, of_step: Tensor) -> Tensor:
        """1 + the first stage at which `of_step` and the repeated computation differ; 0 if they are equal. float32."""
        is_different = of_step != self.tables[Computation.again]
        first = torch.where(is_different, self._places, len(self._places) + 1).min()
        return torch.where(is_different.any(), first, 0).to(torch.float32)


def combine(digests: list[Tensor]) -> Tensor:
    """One digest of several; their order counts."""
    total = digests[0]
    for digest in digests[1:]:
        total = total * 3 + digest
    return total


def gradient_stage(block: int, num_blocks: int) -> int:
    """The stage of the gradient of a block; `num_blocks`: of the weights outside the blocks, which come last."""
    first = num_blocks + 2
    return first + (num_blocks if block == num_blocks else num_blocks - 1 - block)


def stage_names(num_blocks: int) -> list[tuple[str, str]]:
    """What each stage digests, and the layer group that it belongs to; empty: the weights outside the blocks."""
    blocks = [f"blocks.{block}" for block in range(num_blocks)]
    return [
        ("output of embedding", "embedding"),
        *((f"output of {name}", name) for name in blocks),
        ("losses", "head"),
        *((f"gradient of {name}", name) for name in reversed(blocks)),
        ("gradients of the weights outside the blocks", ""),
    ]
