"""Assigns each matrix to the rank that orthogonalizes it, and groups matrices of one shape into batches. Pure.

Why: orthogonalization needs a whole matrix, and FSDP2 leaves each rank some of its rows. If every rank gathered every
matrix, all of them would do the same work; with one owner for each matrix, they share it.
How: matrices in the order of decreasing work, each to the rank with the least work so far, so that every rank computes
the same assignment from shapes alone. A batch has matrices of one shape, and at most `MAX_BATCH_VALUES` values for each
owner: batched GEMMs are faster for small matrices, and large ones are exchanged one at a time while others compute.
Each rank sends a part of equal size of each matrix: rows are padded as FSDP2 pads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

MAX_BATCH_VALUES = 2**25
"""Values of the matrices of a batch that one rank owns, at most, unless one matrix has more: 64 MiB in bf16."""

Matrix = tuple[int, int]
"""Rows and columns."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixBatch:
    """Matrices of one shape that are exchanged and orthogonalized together."""

    rows: int
    columns: int
    owned: tuple[tuple[int, ...], ...]
    """For each rank, the numbers of the matrices that it owns."""
    start: int
    """Place of the batch in the flat buffer of a rank, which has the rank's rows of all matrices."""

    @property
    def num_ranks(self) -> int:
        return len(self.owned)

    @property
    def part_rows(self) -> int:
        """Rows of each matrix on one rank, with padding."""
        return -(-self.rows // self.num_ranks)

    @property
    def part_size(self) -> int:
        """Values of one rank's part of one matrix."""
        return self.part_rows * self.columns

    @property
    def sizes(self) -> list[int]:
        """For each owner, the values that one rank sends to it."""
        return [len(numbers) * self.part_size for numbers in self.owned]

    @property
    def end(self) -> int:
        return self.start + sum(self.sizes)

    @property
    def places(self) -> dict[int, int]:
        """Number of each matrix -> place of a rank's part of it in the flat buffer; matrices of an owner are joined."""
        numbers = [number for owned in self.owned for number in owned]
        return {number: self.start + order * self.part_size for order, number in enumerate(numbers)}


def newton_schulz_flops(matrix: Matrix, num_iterations: int) -> int:
    """FLOPs of one orthogonalization: two GEMMs of the short side squared times the long one, and one of its cube."""
    short, long = sorted(matrix)
    return num_iterations * (4 * short * short * long + 2 * short**3)


def assign_matrices(shapes: Sequence[Matrix], num_ranks: int) -> list[MatrixBatch]:
    """Batches of all matrices, in the order in which they are computed; the most expensive shapes first."""
    loads = [0] * num_ranks
    owners: dict[Matrix, list[list[int]]] = {}
    by_work = sorted(range(len(shapes)), key=lambda number: (-newton_schulz_flops(shapes[number], 1), shapes[number]))
    for number in by_work:
        rank = loads.index(min(loads))
        loads[rank] += newton_schulz_flops(shapes[number], 1)
        owners.setdefault(shapes[number], [[] for _ in range(num_ranks)])[rank].append(number)
    batches: list[MatrixBatch] = []
    for (rows, columns), owned in owners.items():
        longest, most = max(map(len, owned)), max(1, MAX_BATCH_VALUES // (rows * columns))
        size = -(-longest // -(-longest // most))  # batches of about equal size
        for first in range(0, longest, size):
            taken = tuple(tuple(numbers[first : first + size]) for numbers in owned)
            start = batches[-1].end if batches else 0
            batches.append(MatrixBatch(rows=rows, columns=columns, owned=taken, start=start))
    return batches


def largest_load(shapes: Sequence[Matrix], num_ranks: int, num_iterations: int) -> int:
    """FLOPs of the rank with the most work."""
    loads = [0] * num_ranks
    for batch in assign_matrices(shapes, num_ranks):
        flops = newton_schulz_flops((batch.rows, batch.columns), num_iterations)
        for rank, numbers in enumerate(batch.owned):
            loads[rank] += flops * len(numbers)
    return max(loads)
