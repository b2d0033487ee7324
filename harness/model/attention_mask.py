"""Masks of attention: dense, and block-sparse for `flex_attention`.

Why: a dense mask [B, 1, S, S] computes every score. Documents of a packed sequence are short: most blocks of
`MASK_BLOCK` queries and keys lie between two documents, and a block-sparse kernel skips them.
How: documents are contiguous. So a block of queries and an earlier block of keys share a document if the first query
and the last key do, and all of their pairs are allowed if the last query and the first key do. The lists of blocks are
computed by a few operations on [B, S / MASK_BLOCK, S / MASK_BLOCK], on the device, without a host sync. torch's
`create_block_mask` looks at every pair instead, which takes longer than the attention.
Context parallelism: a rank's queries are a part of the sequence, its keys are all of it. A mask then has the rows of
this rank's queries only, and it is complete: a dense one includes causality.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from harness.distributed.context import ContextSplit
from harness.model.flex_limits import MASK_BLOCK


def document_mask(documents: Tensor) -> Tensor:
    """Attention mask [B, 1, S, S] within documents; `documents` [B, S] numbers each token's document."""
    return documents[:, None, :, None] == documents[:, None, None, :]


def context_document_mask(documents: Tensor, context: ContextSplit) -> Tensor:
    """Causal mask [B, 1, S / N, S] within documents [B, S], for the queries of this rank."""
    own = context.take(documents, 1)
    is_same = own[:, None, :, None] == documents[:, None, None, :]
    return is_same & context_causal_mask(documents.shape[1], documents.device, context)


@cache
def context_causal_mask(length: int, device: torch.device, context: ContextSplit) -> Tensor:
    """Causal mask [S / N, S] for the queries of this rank."""
    return context.positions(length, device)[:, None] >= torch.arange(length, device=device)


class BlockLists(NamedTuple):
    """For each row of blocks, which ones to compute: [B, 1, rows] and [B, 1, rows, columns], int32.

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
    query_positions: Tensor | None = None
    """[S / N], the positions of this rank's queries in the sequence, int32; None: all of them."""
    query_documents: Tensor | None = None
    """[B, S / N], their documents; None without documents, or if the queries are all of the sequence."""

    def dense(self) -> Tensor | None:
        """The same mask for the dense kernels. Causality is added there, unless the queries are a part of the
        sequence."""
        if self.query_positions is not None:
            num_keys = MASK_BLOCK * self.partial_queries.counts.shape[-1]
            is_earlier = self.query_positions[:, None] >= torch.arange(num_keys, device=self.query_positions.device)
            if self.documents is None or self.query_documents is None:
                return is_earlier
            return is_earlier & (self.query_documents[:, None, :, None] == self.documents[:, None, None, :])
        return None if self.documents is None else document_mask(self.documents)


def build_block_mask(documents: Tensor, context: ContextSplit | None = None) -> BlockSparseMask:
    """The block-sparse mask of `documents` [B, S]: the tokens of a document are contiguous."""
    first, last = documents[:, ::MASK_BLOCK], documents[:, MASK_BLOCK - 1 :: MASK_BLOCK]
    lists = _list_blocks(first, last, context)
    if context is None:
        return BlockSparseMask(documents, *lists)
    positions = context.positions(documents.shape[1], documents.device)
    return BlockSparseMask(documents, *lists, positions, context.take(documents, 1))


@cache
def causal_block_mask(length: int, device: torch.device, context: ContextSplit | None = None) -> BlockSparseMask:
    """The block-sparse mask of one sequence without documents; it holds for every row of a batch."""
    block_documents = torch.zeros(1, length // MASK_BLOCK, dtype=torch.int32, device=device)
    lists = _list_blocks(block_documents, block_documents, context)
    positions = None if context is None else context.positions(length, device)
    return BlockSparseMask(None, *lists, positions)


def _list_blocks(
    first: Tensor, last: Tensor, context: ContextSplit | None
) -> tuple[BlockLists, BlockLists, BlockLists, BlockLists]:
    """Partial and full key blocks, then the same transposed; from the documents of each block's ends [B, blocks].

    The rows are the query blocks of this rank.
    """
    num_blocks = first.shape[1]
    is_earlier = torch.ones(num_blocks, num_blocks, dtype=torch.bool, device=first.device).tril(-1)
    shares = (first[:, :, None] == last[:, None, :]) & is_earlier
    is_full = (last[:, :, None] == first[:, None, :]) & is_earlier
    is_partial = (shares & ~is_full) | torch.eye(num_blocks, dtype=torch.bool, device=first.device)
    chosen = torch.stack([is_partial, is_full]).to(torch.int8)[:, :, None]
    if context is not None:
        chosen = context.take(chosen, 3)
    partial_keys, full_keys = _list_chosen(chosen)
    partial_queries, full_queries = _list_chosen(chosen.mT)
    return partial_keys, full_keys, partial_queries, full_queries


def _list_chosen(chosen: Tensor) -> list[BlockLists]:
    """The lists of the chosen blocks, of each kind. The kernels of `flex_attention` ignore the stride of a row's
    indices: they must be contiguous."""
    chosen = chosen.contiguous()  # argsort keeps the strides of its input
    counts = chosen.sum(dim=-1, dtype=torch.int32)
    indices = chosen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return [BlockLists(*pair) for pair in zip(counts.unbind(), indices.unbind(), strict=True)]
