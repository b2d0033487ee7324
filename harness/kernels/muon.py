"""The elementwise parts of Muon, all matrices in one launch: momentum before, weights after the orthogonalization.

Why: in plain torch they are ten passes over the shards, one launch each for every matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.multi_tensor import (
    BLOCK,
    PIECE,
    empty_update_sums,
    find_piece,
    load_entry,
    make_table,
    offsets_from,
    store_update_sums,
)


def blend_momentum(
    gradients: Sequence[Tensor], momenta: Sequence[Tensor], buffer: Tensor, places: Sequence[int], terms: Tensor
) -> None:
    """Add gradients to momenta in place, and write the directions to orthogonalize into a flat buffer of any dtype.

    `places`: where each direction starts in the buffer. `terms`: 1 to leave the momenta as they are, the divisor of the
    gradient, the weight of the gradient in the momentum, the weight of the momentum in the direction. Gradients and
    momenta are contiguous and in fp32.
    """
    counts, base = tuple(tensor.numel() for tensor in gradients), gradients[0]
    rows = counts, offsets_from(gradients, base), offsets_from(momenta, base), tuple(places)
    table = make_table(rows, counts, base, buffer)
    _blend_momentum[(table.num_programs,)](base, buffer, terms, *table.arguments, BLOCK)


def apply_directions(
    weights: Sequence[Tensor], buffer: Tensor, places: Sequence[int], terms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract directions in a flat buffer from weights, which are contiguous and in fp32. Returns the sums of the
    weights' bit patterns before and after (int64, modulo 2**32), and the sum of their squares after.

    `terms`, one row per weight: 1 to leave it as it is, the factor on the weight, the factor on the direction.
    """
    counts, base = tuple(tensor.numel() for tensor in weights), weights[0]
    table = make_table((counts, offsets_from(weights, base), tuple(places)), counts, base, buffer)
    sums = empty_update_sums(table)
    _apply_directions[(table.num_programs,)](base, buffer, terms, sums.bits, sums.squares, *table.arguments, BLOCK)
    return sums.add_up()


@triton.jit
def _blend_momentum(
    base, buffer, terms, table, num_tensors, max_tensors: tl.constexpr, unit: tl.constexpr, block: tl.constexpr
):
    number, begin = find_piece(table, num_tensors, max_tensors)
    count = load_entry(table, 1, number, num_tensors, unit)
    gradient = base + load_entry(table, 2, number, num_tensors, unit)
    momentum = base + load_entry(table, 3, number, num_tensors, unit)
    direction = buffer + load_entry(table, 4, number, num_tensors, unit)
    skip = tl.load(terms) != 0
    divisor, gradient_weight, momentum_weight = tl.load(terms + 1), tl.load(terms + 2), tl.load(terms + 3)
    for start in range(begin, tl.minimum(begin + PIECE, count), block):
        at = start + tl.arange(0, block)
        inside = at < count
        grad = tl.load(gradient + at, mask=inside, other=0.0) / divisor
        blended = tl.load(momentum + at, mask=inside, other=0.0)
        blended += (grad - blended) * gradient_weight
        tl.store(direction + at, grad + (blended - grad) * momentum_weight, mask=inside)
        if not skip:
            tl.store(momentum + at, blended, mask=inside)


@triton.jit
def _apply_directions(
    base,
    buffer,
    terms,
    bits,
    squares,
    table,
    num_tensors,
    max_tensors: tl.constexpr,
    unit: tl.constexpr,
    block: tl.constexpr,
):
    number, begin = find_piece(table, num_tensors, max_tensors)
    count = load_entry(table, 1, number, num_tensors, unit)
    weight = base + load_entry(table, 2, number, num_tensors, unit)
    direction = buffer + load_entry(table, 3, number, num_tensors, unit)
    row = terms + number * 3
    skip = tl.load(row) != 0
    keep, step = tl.load(row + 1), tl.load(row + 2)
    before, square = tl.zeros((block,), tl.int32), tl.zeros((block,), tl.float32)
    after = before
    for start in range(begin, tl.minimum(begin + PIECE, count), block):
        at = start + tl.arange(0, block)
        inside = at < count
        updated = tl.load(weight + at, mask=inside, other=0.0)
        before += updated.to(tl.int32, bitcast=True)  # wraps around
        if not skip:
            updated = updated * keep
            updated -= tl.load(direction + at, mask=inside, other=0.0).to(tl.float32) * step
            tl.store(weight + at, updated, mask=inside)
        after += tl.where(inside, updated.to(tl.int32, bitcast=True), 0)
        square += tl.where(inside, updated * updated, 0.0)
    store_update_sums(bits, squares, before, after, square)
