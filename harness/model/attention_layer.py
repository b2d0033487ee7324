"""Causal grouped-query attention with RoPE, and the choice of its kernel.

| kernel | when |
|---|---|
| `scaled_dot_product_attention`: cuDNN on Hopper, then FlashAttention | default |
| Transformer Engine's cuDNN kernels (`harness.precision.te_attention`) | deterministic, on a GPU |
| `flex_attention` with a block-sparse mask | documents on a GPU; deterministic without Transformer Engine or if long |

With context parallelism the queries of a rank are two chunks of the sequence, and each sees the keys up to its own end.
Without documents a GPU runs the second kernel once for each chunk, on as many keys as it sees; with documents, and
without Transformer Engine, the third one; elsewhere the first one gets a dense mask. cuDNN takes queries that are the
last ones of their keys through Transformer Engine only. FlashAttention-2 takes them too, but is slower than the third
kernel.

Determinism: the second and third kernel give the same bits every time by themselves. `scaled_dot_product_attention` is
deterministic on a CPU, and on a GPU under `torch.use_deterministic_algorithms(True)`, which excludes cuDNN: then it
runs FlashAttention-2 in bf16 and fp16, and the memory-efficient kernel in fp32 or with a dense mask.
`flex_attention` and Transformer Engine compute in bf16 and fp16 only here: fp32 (`precision=fp32`,
`model.attention=fp32`) always runs `scaled_dot_product_attention`, with a dense mask for documents. So do a CPU, and
sequences that are not a multiple of `MASK_BLOCK`.

Largest logits: no kernel returns them. For `sample_logits` the scores of few queries of few rows with all earlier keys
are computed once more; on a GPU inside the compiled block, so that it has the same graph in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from harness.config.errors import require
from harness.config.model import AttentionKind, ModelConfig
from harness.config.schema import Config
from harness.distributed.collectives import gather_results
from harness.distributed.context import ContextSplit, gather_keys_and_values
from harness.distributed.torch_private.inductor_options import compile_options
from harness.model.attention_mask import (
    BlockSparseMask,
    build_block_mask,
    causal_block_mask,
    context_causal_mask,
    context_document_mask,
    document_mask,
)
from harness.model.flex_limits import MASK_BLOCK, flex_obstacle
from harness.model.mup import attention_scale
from harness.precision.fp8.linear import project
from harness.precision.fused_qkv import apply_rope, can_fuse_qkv, project_qkv_rope
from harness.precision.mixed_precision import DTYPES
from harness.precision.te_attention import te_attention, te_attention_obstacle, te_workspace_bytes

LinearFactory = Callable[[int, int], nn.Module]
"""(in_features, out_features) -> a linear layer without bias."""

AttentionMask = Tensor | BlockSparseMask | None
"""Dense (bool, broadcastable to [B, H, S, S]) or block-sparse; None: only causal. With context parallelism the queries
are those of this rank, and a dense mask includes causality."""

HALF = (torch.bfloat16, torch.float16)
MAX_WORKSPACE_BYTES = 8 * 2**30
"""Most memory that Transformer Engine may take beside the activations; `flex_attention` takes none."""
SAMPLED_ROWS, SAMPLED_QUERIES = 2, 32
"""Sequences of a micro-batch, and positions of each, whose attention logits are measured, at most."""


class Attention(nn.Module):
    """Causal grouped-query attention with RoPE."""

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        linear: LinearFactory,
        deterministic: bool = False,
        context: ContextSplit | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.head_dim = cfg.head_dim
        self.scale = attention_scale(cfg)
        self.kind = cfg.attention
        self.group_size = cfg.num_heads // cfg.num_kv_heads
        self.deterministic = deterministic
        if context is not None:
            self.uses_te = not context.te_obstacle
        else:
            self.uses_te = deterministic and not te_attention_obstacle(cfg.head_dim)
        self.on_reference_path = False
        """Run `scaled_dot_product_attention` whatever the mask; see `reference_attention`."""
        self.query = linear(cfg.dim, cfg.dim)
        self.key = linear(cfg.dim, cfg.num_kv_heads * cfg.head_dim)
        self.value = linear(cfg.dim, cfg.num_kv_heads * cfg.head_dim)
        self.output = linear(cfg.dim, cfg.dim)
        self.query_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask, measure_logits: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The output [B, S, D]; with `measure_logits` also the largest sampled logit of each query head [heads]."""
        query, key, value = self._project(hidden, cos, sin)
        if self.context is not None:
            key, value = gather_keys_and_values(key, value, self.context)
        largest = None
        if measure_logits:
            largest = sample_logits(query.detach(), key.detach(), self.scale, context=self.context)
        attended = self._attend(query, key, value, mask)
        mixed: Tensor = self.output(attended.to(hidden.dtype).flatten(2))
        return mixed if largest is None else (mixed, largest)

    def _project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, S, heads, head_dim], with RoPE applied to the first two."""
        layers = (self.query, self.key, self.value)
        if isinstance(self.query_norm, nn.Identity) and can_fuse_qkv(hidden, layers, cos):
            query, key, value = map(self._split_heads, project_qkv_rope(hidden, layers, cos, sin))
            return query, key, value
        query, key, value = map(self._split_heads, project(hidden, *layers))
        return apply_rope(self.query_norm(query), cos, sin), apply_rope(self.key_norm(key), cos, sin), value

    def _split_heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        """Causal attention [B, S, heads, head_dim]; a fully masked position gets zeros and no gradient."""
        is_fast = self.kind is AttentionKind.fused and query.dtype in HALF and not self.on_reference_path
        if is_fast and mask is None and self.uses_te and query.is_cuda:
            return self._attend_by_te(query, key, value)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if isinstance(mask, BlockSparseMask):
            if is_fast:
                attend = attend_blocks if torch.compiler.is_compiling() else _compiled_attend_blocks()
                return attend(query, key, value, mask, self.scale).transpose(1, 2)
            mask = mask.dense()
        return self._attend_by_sdpa(query, key, value, mask).transpose(1, 2)

    def _attend_by_te(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention [B, S, heads, head_dim] by Transformer Engine."""
        if self.context is None:
            return te_attention(query, key, value, self.scale)
        ends = self.context.chunk_ends(key.shape[1])
        return te_attention(query, key, value, self.scale, deterministic=self.deterministic, ends=ends)

    def _attend_by_sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention [B, heads, S, head_dim] by `scaled_dot_product_attention`."""
        enable_gqa = self.group_size > 1
        if self.kind is AttentionKind.fp32:
            # The memory-efficient fp32 kernel has no grouped queries; the kernel that has them stores S x S scores.
            query, key, value = (
                query.float(),
                key.float().repeat_interleave(self.group_size, dim=1),
                value.float().repeat_interleave(self.group_size, dim=1),
            )
            enable_gqa = False
        if self.context is not None:  # the mask includes causality, and every query sees at least itself
            if mask is None:
                places = torch.arange(key.shape[-2], device=key.device)
                mask = self.context.positions(len(places), key.device)[:, None] >= places
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=enable_gqa
            )
        if mask is None:
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scale, enable_gqa=enable_gqa
            )
        length = query.shape[-2]
        allowed = mask & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        has_key = allowed.any(dim=-1, keepdim=True)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed | ~has_key, scale=self.scale, enable_gqa=enable_gqa
        )
        return torch.where(has_key, attended, 0.0)


def sample_logits(query: Tensor, key: Tensor, scale: float, *, context: ContextSplit | None = None) -> Tensor:
    """The largest attention logit of each query head [heads] in fp32, over evenly spread queries of the first rows.

    `query` [B, S, heads, head_dim] and `key` [B, S, key heads, head_dim], with RoPE applied. Masks of documents are not
    applied: keys of other documents count too. With `context` the queries are those of this rank: the ranks of a group
    sample the queries together that one rank would sample, if its stretches are whole parts of a chunk.
    """
    length, num_heads, head_dim = query.shape[1:]
    num_all = key.shape[1]
    stride = -(-num_all // SAMPLED_QUERIES)
    places = torch.arange(stride - 1, length, stride, device=query.device)  # the last of each stretch: many keys
    if context is not None:
        stride = min(stride, length // 2)  # at least one query of each chunk
        places = context.positions(num_all, query.device)[stride - 1 :: stride]
    query, key = query[:SAMPLED_ROWS, stride - 1 :: stride], key[:SAMPLED_ROWS]
    num_rows, num_queries, num_keys = len(query), query.shape[1], key.shape[2]
    grouped = query.view(num_rows, num_queries, num_keys, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = grouped.flatten(2, 3) @ key.permute(0, 2, 3, 1)
    is_earlier = torch.arange(num_all, device=query.device) <= places[:, None]
    scores = scores.view(num_rows, num_heads, num_queries, num_all)
    largest = torch.where(is_earlier, scores, -torch.inf).amax(dim=(0, 2, 3))
    return largest.float() * scale


def attend_blocks(query: Tensor, key: Tensor, value: Tensor, mask: BlockSparseMask, scale: float) -> Tensor:
    """Attention [B, heads, S, head_dim] by `flex_attention`; fast only if compiled."""
    documents, positions = mask.documents, mask.query_positions
    query_documents = documents if mask.query_documents is None else mask.query_documents

    def is_visible(row: Tensor, _head: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:
        is_earlier = (query_at if positions is None else positions[query_at]) >= key_at
        if documents is None or query_documents is None:
            return is_earlier
        return is_earlier & (query_documents[row, query_at] == documents[row, key_at])

    block_mask = BlockMask(
        seq_lengths=(query.shape[-2], key.shape[-2]),
        kv_num_blocks=mask.partial_keys.counts,
        kv_indices=mask.partial_keys.indices,
        full_kv_num_blocks=mask.full_keys.counts,
        full_kv_indices=mask.full_keys.indices,
        q_num_blocks=mask.partial_queries.counts,
        q_indices=mask.partial_queries.indices,
        full_q_num_blocks=mask.full_queries.counts,
        full_q_indices=mask.full_queries.indices,
        BLOCK_SIZE=(MASK_BLOCK, MASK_BLOCK),
        mask_mod=is_visible,
    )
    enable_gqa = query.shape[1] != key.shape[1]
    attended = flex_attention(query, key, value, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa)
    assert isinstance(attended, Tensor)
    return attended


@cache
def _compiled_attend_blocks() -> Callable[..., Any]:
    """For blocks that are not compiled: without the compiler, `flex_attention` would store all scores."""
    return torch.compile(attend_blocks, fullgraph=True, options=compile_options())


@contextmanager
def reference_attention(model: nn.Module) -> Iterator[None]:
    """Compute all attention by `scaled_dot_product_attention`, whose backend `sdpa_kernel` chooses."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    try:
        for layer in layers:
            layer.on_reference_path = True
        yield
    finally:
        for layer in layers:
            layer.on_reference_path = False


def mask_documents(
    cfg: ModelConfig, documents: Tensor, context: ContextSplit | None = None
) -> Tensor | BlockSparseMask:
    """The mask that keeps the documents [B, S] of a sequence apart, for the queries of this rank."""
    num_ranks = 1 if context is None else context.size
    if documents.is_cuda and not flex_obstacle(cfg, documents.shape[1], context=num_ranks):
        return build_block_mask(documents, context)
    return document_mask(documents) if context is None else context_document_mask(documents, context)


def mask_context(cfg: ModelConfig, tokens: Tensor, context: ContextSplit, *, deterministic: bool) -> AttentionMask:
    """The mask of whole sequences `tokens` [B, S] without documents, for the queries of this rank; None: Transformer
    Engine needs none."""
    num_rows, length = tokens.shape
    if not tokens.is_cuda or flex_obstacle(cfg, length, context=context.size):
        return context_causal_mask(length, tokens.device, context)
    obstacle = context.te_obstacle or te_memory_obstacle(
        cfg, num_rows, length, num_queries=length // (2 * context.size), deterministic=deterministic
    )
    if not obstacle:
        return None
    return causal_block_mask(length, tokens.device, context)


def check_chunks(cfg: Config, device: torch.device) -> None:
    """Check that the chunks of a shared sequence consist of whole blocks of the mask, where the kernel needs that."""
    context, length = cfg.parallel.context, cfg.train.sequence_length
    is_fast = DTYPES[cfg.precision.kind] in HALF and not flex_obstacle(cfg.model, MASK_BLOCK)
    multiple = 2 * context * MASK_BLOCK
    message = f"must be a multiple of 2 x parallel.context x {MASK_BLOCK} ({multiple}) on a GPU, got {length}"
    must_fit = context > 1 and device.type == "cuda" and is_fast
    require(not must_fit or length % multiple == 0, "train.sequence_length", message)


def needs_causal_blocks(cfg: ModelConfig, num_rows: int, sequence_length: int) -> bool:
    """Whether deterministic attention without documents needs the block-sparse kernel on a GPU."""
    return bool(te_obstacle(cfg, num_rows, sequence_length)) and not flex_obstacle(cfg, sequence_length)


def te_obstacle(cfg: ModelConfig, num_rows: int, sequence_length: int) -> str:
    """Why deterministic attention is not left to Transformer Engine, in words; empty if it is."""
    obstacle = te_attention_obstacle(cfg.head_dim)
    return obstacle or te_memory_obstacle(cfg, num_rows, sequence_length, num_queries=sequence_length)


def te_memory_obstacle(
    cfg: ModelConfig, num_rows: int, num_keys: int, *, num_queries: int, deterministic: bool = True
) -> str:
    """Why Transformer Engine takes too much memory for attention, in words; empty if it does not."""
    workspace_bytes = te_workspace_bytes(num_rows, cfg.num_heads, num_keys, num_queries=num_queries)
    if deterministic and workspace_bytes > MAX_WORKSPACE_BYTES:
        return f"Transformer Engine would need {workspace_bytes / 2**30:.0f} GiB for the backward pass of a layer"
    return ""


def find_te_obstacle(cfg: ModelConfig) -> str:
    """Why some rank cannot run Transformer Engine's attention; the same on all ranks. Collective: all ranks must call.

    Ranks that exchange keys and values must compile the same graph.
    """
    return next(filter(None, gather_results(lambda: te_attention_obstacle(cfg.head_dim))), "")


def attention_backend(cfg: Config, device: torch.device, *, num_rows: int, deterministic: bool) -> str:
    """The kernel that computes attention in this run, with the reason if it is not the first choice.

    `num_rows`: sequences of a micro-batch.
    """
    documents, model, context = cfg.data.document_mask, cfg.model, cfg.parallel.context
    sdpa = "scaled_dot_product_attention" + (" with a dense mask" if documents or context > 1 else "")
    if device.type != "cuda" or not (documents or context > 1 or deterministic):
        return sdpa
    if DTYPES[cfg.precision.kind] not in HALF:
        return f"{sdpa}: precision is {cfg.precision.kind}"
    if model.attention is AttentionKind.fp32:
        return f"{sdpa}: model.attention is fp32"
    length = cfg.train.sequence_length
    no_te, no_flex = te_obstacle(model, num_rows, length), flex_obstacle(model, length, context=context)
    if context > 1:
        no_te = te_attention_obstacle(model.head_dim) or te_memory_obstacle(
            model, num_rows, length, num_queries=length // (2 * context), deterministic=deterministic
        )
        if not (documents or no_te or no_flex):
            return "Transformer Engine, cuDNN on each chunk" + ", deterministic" * deterministic
    elif not documents and (not no_te or (no_flex and not te_attention_obstacle(model.head_dim))):
        return "Transformer Engine, cuDNN's deterministic backward pass"
    reasons = ([] if documents else [no_te]) + ([no_flex] if no_flex else [])
    reasons = [reason for reason in reasons if reason]
    return ": ".join([sdpa if no_flex else "flex_attention, block-sparse", *(["; ".join(reasons)] if reasons else [])])
