"""Masks of attention: dense, and block-sparse for `flex_attention`.

Why: a dense mask [B, 1, S, S] computes every score. Documents of a packed sequence are short: most blocks of
`MASK_BLOCK` queries and keys lie between two documents, and a block-sparse kernel skips them.
How: documents are contiguous. So a block of queries and an earlier block of keys share a document if the first query
and the last key do, and all of their pairs are allowed if the last query and the first key do. The lists of blocks are
computed by a few operations on [B, S / MASK_BLOCK, S / MASK_BLOCK], on the device, without a host sync. torch's
`create_block_mask` looks at every pair instead, which takes longer than the attention.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from harness.model.flex_limits import MASK_BLOCK


def document_mask(documents: Tensor) -> Tensor:
    """Attention mask [B, 1, S, S] within documents; `documents` [B, S] numbers each token's document."""
    return documents[:, None, :, None] == documents[:, None, None, :]


class BlockLists(NamedTuple):
    """For each row of blocks, which ones to compute: [B, 1, blocks] and [B, 1, blocks, blocks], int32.

    Only the first `counts` indices of a row count.
    """

    counts: Tensor
    indices: Tensor


class BlockSparseMask(NamedTuple):
    """A causal mask, within documents if there are any, as lists of blocks. Plain tensors: it passes through FSDP,
    activation checkpoints and torch.compile."""

    documents: Tensor | None
    """[B, S], the document of each token; None: every earlier token is visible."""
    partial_keys: BlockLists
    """Key blocks of each query block in which the mask decides about every pair."""
    full_keys: BlockLists
    """Key blocks of each query block in which every pair is allowed."""
    partial_queries: BlockLists
    """The transposed lists, for the backward pass."""
    full_queries: BlockLists

    def dense(self) -> Tensor | None:
        """The same mask for the dense kernels, to which causality is added there."""
        return None if self.documents is None else document_mask(self.documents)


def build_block_mask(documents: Tensor) -> BlockSparseMask:
    """The block-sparse mask of `documents` [B, S]: the tokens of a document are contiguous."""
    first, last = documents[:, ::MASK_BLOCK], documents[:, MASK_BLOCK - 1 :: MASK_BLOCK]
    return BlockSparseMask(documents, *_list_blocks(first, last))


@cache
def causal_block_mask(length: int, device: torch.device) -> BlockSparseMask:
    """The block-sparse mask of one sequence without documents; it holds for every row of a batch."""
    block_documents = torch.zeros(1, length // MASK_BLOCK, dtype=torch.int32, device=device)
    return BlockSparseMask(None, *_list_blocks(block_documents, block_documents))


def _list_blocks(first: Tensor, last: Tensor) -> list[BlockLists]:
    """Partial and full key blocks, then the same transposed; from the documents of each block's ends [B, blocks]."""
    num_blocks = first.shape[1]
    is_earlier = torch.ones(num_blocks, num_blocks, dtype=torch.bool, device=first.device).tril(-1)
    shares = (first[:, :, None] == last[:, None, :]) & is_earlier
    is_full = (last[:, :, None] == first[:, None, :]) & is_earlier
    is_partial = (shares & ~is_full) | torch.eye(num_blocks, dtype=torch.bool, device=first.device)
    chosen = torch.stack([is_partial, is_full, is_partial.mT, is_full.mT]).to(torch.int8)[:, :, None]
    counts = chosen.sum(dim=-1, dtype=torch.int32)
    indices = chosen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return [BlockLists(*pair) for pair in zip(counts.unbind(), indices.unbind(), strict=True)]
