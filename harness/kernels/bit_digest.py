"""Digest of the bit patterns of a tensor in one pass.

Why: torch's operators write every value to memory as int64 several times.
Sums modulo 2**64 do not depend on the order, so the result is bit-identical to that of torch's operators.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DIGEST_BLOCK, MAX_DIGEST_PROGRAMS = 4096, 1024
"""Values of one iteration, and programs of a launch: each writes one sum."""


def sum_patterns(patterns: Tensor, shift: int) -> Tensor:
    """Sum of x * (x + shift) over a contiguous tensor of integers, modulo 2**64."""
    count = patterns.numel()
    num_programs = min(triton.cdiv(count, DIGEST_BLOCK), MAX_DIGEST_PROGRAMS)
    digests = torch.zeros(num_programs, dtype=torch.int64, device=patterns.device)
    if count:
        _sum_patterns[(num_programs,)](patterns, digests, count, num_programs, shift, DIGEST_BLOCK)
    return digests.sum()


@triton.jit
def _sum_patterns(patterns, digests, count, num_programs, shift: tl.constexpr, block: tl.constexpr):
    total = tl.zeros((block,), tl.int64)
    first = tl.program_id(0).to(tl.int64) * block
    while first < count:
        at = first + tl.arange(0, block)
        value = tl.load(patterns + at, mask=at < count, other=0).to(tl.int64)
        total += value * (value + shift)
        first += num_programs * block
    tl.store(digests + tl.program_id(0), tl.sum(total))
