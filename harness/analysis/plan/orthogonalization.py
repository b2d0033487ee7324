"""What Muon changes in a plan: moments, buffers of the update, FLOPs of the orthogonalization, exchanged bytes.

Why: Muon keeps one moment of a matrix where AdamW keeps two, but multiplies and exchanges whole matrices in the update.
How: the assignment of matrices to ranks is the one that training uses (`harness.optim.matrix_owners`). Directions are
bf16, as on a GPU. All of it is zero or AdamW's own without Muon.
"""

from __future__ import annotations

from harness.config.optim import OptimizerKind
from harness.config.schema import Config
from harness.model.size import block_shapes
from harness.optim.matrix_owners import Matrix, MatrixBatch, assign_matrices, newton_schulz_flops

DIRECTION_BYTES = 2
"""Of a value that is exchanged and orthogonalized: bf16."""
SHARDED_COPIES, WHOLE_COPIES = 6, 2
"""Tensors as large as the matrices of a batch that exist at once: two iterates; with several ranks also what was
received for this batch and the next, and two reordered copies."""
GRAM_COPIES = 2
"""Tensors of the short side squared: the Gram matrix and its polynomial."""


def muon_matrices(cfg: Config) -> list[Matrix]:
    """Shapes of all matrices that Muon updates; none with AdamW."""
    if cfg.optim.kind is not OptimizerKind.muon:
        return []
    block = [(shape[0], shape[1]) for shape in block_shapes(cfg.model) if len(shape) == 2]
    return block * cfg.model.num_layers


def matrix_batches(cfg: Config, num_shards: int) -> list[MatrixBatch]:
    """The batches of an update; none with AdamW."""
    matrices = muon_matrices(cfg)
    return assign_matrices(matrices, num_shards) if matrices else []


def direction_bytes(cfg: Config, num_shards: int) -> int:
    """One rank's buffer of its rows of all matrices, padded; sent once to their owners, and once back."""
    batches = matrix_batches(cfg, num_shards)
    return DIRECTION_BYTES * batches[-1].end if batches else 0


def update_bytes(cfg: Config, num_shards: int) -> int:
    """Memory of one rank that only the update needs: its directions, and the largest batch while it is computed."""
    return direction_bytes(cfg, num_shards) + max(
        (_batch_bytes(batch) for batch in matrix_batches(cfg, num_shards)), default=0
    )


def _batch_bytes(batch: MatrixBatch) -> int:
    count, short = max(map(len, batch.owned)), min(batch.rows, batch.columns)
    copies = SHARDED_COPIES if batch.num_ranks > 1 else WHOLE_COPIES
    return DIRECTION_BYTES * count * (copies * batch.rows * batch.columns + GRAM_COPIES * short * short)


def orthogonalize_flops(cfg: Config, num_shards: int, *, overhead: float) -> float:
    """FLOPs of the rank with the most matrices; replicas take turns. `overhead`: the inner dimension that takes as long
    as starting and finishing a tile."""
    loads = [[0.0] * cfg.parallel.replicate for _ in range(num_shards)]
    for index, batch in enumerate(matrix_batches(cfg, num_shards)):
        short, long = sorted((batch.rows, batch.columns))
        outputs = 2 * short * short + short * long  # of the three GEMMs of an iteration
        flops = newton_schulz_flops((short, long), 1) + 2 * overhead * outputs
        for rank, numbers in enumerate(batch.owned):
            loads[rank][index % cfg.parallel.replicate] += cfg.optim.muon.iterations * flops * len(numbers)
    return max(map(max, loads))
