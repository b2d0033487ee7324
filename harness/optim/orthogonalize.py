"""Orthogonalizes matrices by Newton-Schulz iteration: all singular values become about 1.

How: the quintic iteration and the coefficients of Muon (https://kellerjordan.github.io/posts/muon/), as in torch's own
`torch.optim.Muon`, for a batch of matrices of one shape. It consists of GEMMs alone. The coefficients are chosen for a
steep slope at zero, so singular values end between about 0.7 and 1.2 and not at 1.
The dtype is that of the input: bf16 on CUDA, as everywhere with Muon; fp32 on CPU, where bf16 is slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
"""Smallest norm that a matrix is divided by."""


def orthogonalize(matrices: Tensor, *, num_iterations: int) -> Tensor:
    """The orthogonalized matrices [B, rows, columns]. A matrix of zeros stays zero; a NaN makes its matrix NaN."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    found = matrices.mT if is_tall else matrices
    norms = torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True)
    found = found / norms.clamp(min=EPS)
    first, third, fifth = COEFFICIENTS
    for _ in range(num_iterations):
        gram = found @ found.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        found = torch.baddbmm(found, polynomial, found, beta=first)
    return found.mT if is_tall else found
