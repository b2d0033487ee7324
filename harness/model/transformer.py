"""The language model: pre-LN, RMSNorm, SwiGLU, RoPE, grouped-query attention, no biases.

LayerNorm and post-LN blocks can be chosen for comparison (`model.norm`, `model.norm_placement`).

Sharding, compilation and activation checkpointing are applied beside this module (`harness.distributed.fsdp`), and
FSDP2 casts its weights. The module depends on precision in three calls: `project_qkv_rope` and `project` (QKV) and
`swiglu` (MLP) choose fused or fp8 GEMMs by the type of the layers they get. Statistics of norms, RoPE and the loss are
fp32 in every precision.
How: `forward` takes tokens and targets and returns the objective to differentiate with the sums that are logged, so
logits exist only in chunks inside the loss. Blocks are equal and get all inputs as arguments, so that each can be
compiled, checkpointed and sharded by itself. No control flow depends on tensor values: there is no host sync, and NaN
propagates to the gate.
RoPE pairs the first half of a head with the second, as in Hugging Face's Llama, so that weights can be exchanged.
Left out: dropout, positions that restart in each document of a packed sequence, KV caches for generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.config.model import AttentionKind, ModelConfig, NormKind, NormPlacement
from harness.model.loss import IGNORED, LossOptions, chunked_cross_entropy, count_losses
from harness.model.mup import attention_scale, output_multiplier
from harness.precision.fp8.linear import project
from harness.precision.fp8.swiglu import swiglu
from harness.precision.fused_qkv import apply_rope, can_fuse_qkv, project_qkv_rope

LinearFactory = Callable[[int, int], nn.Module]
"""(in_features, out_features) -> a linear layer without bias."""

MAX_SAMPLED_LAYERS = 8
"""Layers whose activations are probed, at most."""


class Output(NamedTuple):
    """What a forward pass returns. Only `objective` has a gradient; the others are detached fp32."""

    objective: Tensor
    """seed * (sum of row_losses + z_sum); differentiate this one."""
    token_losses: Tensor
    """Cross-entropy of each token [B, S] in nats, zero where the target is ignored."""
    row_losses: Tensor
    """Cross-entropy in nats, summed over the counted tokens of each sequence [B]."""
    row_tokens: Tensor
    """Number of targets of each sequence [B] that are not ignored."""
    z_sum: Tensor
    """Sum of the squared log-partition times its coefficient (z-loss)."""
    activation_square_sums: Tensor | None
    """Sum of squares of the residual stream after each of `sampled_layers`, if probed; sequences without any target are
    padding and left out."""
    token_loss_counts: Tensor | None
    """Histogram of the token losses over `TOKEN_LOSS_EDGES`, if probed."""


def sampled_layers(num_layers: int) -> tuple[int, ...]:
    """Indices of the layers whose activations are probed: few, evenly spread, with the first and the last."""
    count = min(num_layers, MAX_SAMPLED_LAYERS)
    return tuple(index * (num_layers - 1) // max(count - 1, 1) for index in range(count))


def rotary_tables(cfg: ModelConfig, sequence_length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [sequence_length, head_dim / 2] of each position's angle at each frequency.

    Computed on the CPU in fp64: far positions keep precise angles, and every device gets the same bits.
    """
    exponents = torch.arange(0, cfg.head_dim, 2, dtype=torch.float64, device="cpu") / cfg.head_dim
    positions = torch.arange(sequence_length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, cfg.rope_theta**-exponents)
    return angles.cos(), angles.sin()


def document_mask(documents: Tensor) -> Tensor:
    """Attention mask [B, 1, S, S] within documents; `documents` [B, S] numbers each token's document."""
    return documents[:, None, :, None] == documents[:, None, None, :]


def build_norm(cfg: ModelConfig) -> nn.RMSNorm | nn.LayerNorm:
    """A norm of the residual stream."""
    match cfg.norm:
        case NormKind.rms:
            return nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        case NormKind.layer:
            return nn.LayerNorm(cfg.dim, eps=cfg.norm_eps, bias=False)


class Attention(nn.Module):
    """Causal grouped-query attention with RoPE."""

    def __init__(self, cfg: ModelConfig, *, linear: LinearFactory) -> None:
        super().__init__()
        self.head_dim = cfg.head_dim
        self.scale = attention_scale(cfg)
        self.kind = cfg.attention
        self.group_size = cfg.num_heads // cfg.num_kv_heads
        self.query = linear(cfg.dim, cfg.dim)
        self.key = linear(cfg.dim, cfg.num_kv_heads * cfg.head_dim)
        self.value = linear(cfg.dim, cfg.num_kv_heads * cfg.head_dim)
        self.output = linear(cfg.dim, cfg.dim)
        self.query_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self._project(hidden, cos, sin)
        attended = self._attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
        mixed: Tensor = self.output(attended.to(hidden.dtype).transpose(1, 2).flatten(2))
        return mixed

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

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Causal attention [B, H, S, head_dim]; a fully masked position gets zeros and no gradient."""
        enable_gqa = self.group_size > 1
        if self.kind is AttentionKind.fp32:
            # The memory-efficient fp32 kernel has no grouped queries; the kernel that has them stores S x S scores.
            query, key, value = (
                query.float(),
                key.float().repeat_interleave(self.group_size, dim=1),
                value.float().repeat_interleave(self.group_size, dim=1),
            )
            enable_gqa = False
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


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: ModelConfig, *, linear: LinearFactory) -> None:
        super().__init__()
        self.gate = linear(cfg.dim, cfg.ffn_dim)
        self.up = linear(cfg.dim, cfg.ffn_dim)
        self.down = linear(cfg.ffn_dim, cfg.dim)

    def forward(self, hidden: Tensor) -> Tensor:
        return swiglu(hidden, self.gate, self.up, self.down)


class Block(nn.Module):
    """A pre-LN transformer block."""

    def __init__(self, cfg: ModelConfig, *, linear: LinearFactory) -> None:
        super().__init__()
        self.attention_norm = build_norm(cfg)
        self.attention = Attention(cfg, linear=linear)
        self.mlp_norm = build_norm(cfg)
        self.mlp = SwiGLU(cfg, linear=linear)

    def forward(
        self, hidden: Tensor, change: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take and return the residual stream [B, S, D] and a change that is yet to be added to it.

        The sum is computed where it is read: by the next norm, in the same kernel. `mask` (bool, broadcastable to
        [B, H, S, S]) is combined with the causal mask.
        """
        return self.advance(hidden + change, cos, sin, mask)

    def advance(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The block after the first residual add; the part that is checkpointed (`harness.distributed.fsdp`)."""
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin, mask)
        return hidden, self.mlp(self.mlp_norm(hidden))


class PostNormBlock(Block):
    """A post-LN transformer block, for comparison: the norms are on the residual stream, after each sum.

    The last sum is normalized inside the block, so the change that is yet to be added is zero.
    """

    def advance(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = self.attention_norm(hidden + self.attention(hidden, cos, sin, mask))
        hidden = self.mlp_norm(hidden + self.mlp(hidden))
        return hidden, torch.zeros_like(hidden)


def build_block(cfg: ModelConfig, *, linear: LinearFactory) -> Block:
    """A block with its norms where `model.norm_placement` says."""
    match cfg.norm_placement:
        case NormPlacement.pre:
            return Block(cfg, linear=linear)
        case NormPlacement.post:
            return PostNormBlock(cfg, linear=linear)


class _DifferentiableZeros(torch.autograd.Function):
    """Zeros that require grad: with them the first block has the same compiled graph as the others."""

    @staticmethod
    def forward(_ctx: Any, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    @staticmethod
    def backward(_ctx: Any, _gradient: Tensor) -> None:
        return None


class Transformer(nn.Module):
    """The language model with its loss."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        sequence_length: int,
        linear: LinearFactory,
        own_kernels: bool = False,
        deterministic: bool = False,
    ) -> None:
        """`deterministic`: forward and backward must give the same bits every time."""
        super().__init__()
        self.deterministic = deterministic
        self.cfg = cfg
        self.sequence_length = sequence_length
        self.loss_options = LossOptions(
            z_loss=cfg.z_loss,
            output_multiplier=output_multiplier(cfg),
            chunk_tokens=cfg.loss_chunk_tokens,
            own_kernels=own_kernels,
        )
        self.sampled_layers = sampled_layers(cfg.num_layers)
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.embedding_norm = build_norm(cfg) if cfg.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(build_block(cfg, linear=linear) for _ in range(cfg.num_layers))
        self.norm = build_norm(cfg)
        self.head = None if cfg.tied_head else nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        table_shape = (sequence_length, cfg.head_dim // 2)
        self.register_buffer("cos", torch.empty(table_shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(table_shape, dtype=torch.float32), persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Fill the rotary tables; call it again after `to_empty`, which leaves them uninitialized."""
        cos, sin = rotary_tables(self.cfg, self.sequence_length)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        seed: Tensor | float = 1.0,
        probe: bool = False,
        mask: Tensor | None = None,
    ) -> Output:
        """The objective and the sums for `tokens` [B, S] and `targets` [B, S], where -100 is ignored.

        `seed` multiplies the summed loss before it is differentiated: loss scale / expected tokens.
        """
        hidden, square_sums = self._hidden(tokens, mask=mask, probed=(targets != IGNORED).any(dim=1) if probe else None)
        if not isinstance(seed, Tensor):
            seed = torch.full((), seed, dtype=torch.float32, device=hidden.device)
        sums = chunked_cross_entropy(
            hidden.flatten(0, 1), self._head_weight(), targets.flatten(), seed, options=self.loss_options
        )
        token_losses = sums.losses.view_as(targets)
        return Output(
            objective=sums.objective,
            token_losses=token_losses,
            row_losses=token_losses.sum(dim=1),
            row_tokens=(targets != IGNORED).sum(dim=1, dtype=torch.float32),
            z_sum=sums.z_sum,
            activation_square_sums=torch.stack(square_sums) if probe else None,
            token_loss_counts=count_losses(sums.losses, targets.flatten()) if probe else None,
        )

    def logits(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """All logits [B, S, V] in fp32, for tests and export; the model must not be sharded."""
        hidden, _ = self._hidden(tokens, mask=mask, probed=None)
        return F.linear(hidden, self._head_weight()).float() * self.loss_options.output_multiplier

    def _hidden(self, tokens: Tensor, *, mask: Tensor | None, probed: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The input of the head, and the square sums of the sampled layers over the `probed` sequences [B]."""
        hidden: Tensor = self.embedding_norm(self.embedding(tokens))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        change: Tensor = _DifferentiableZeros.apply(hidden)  # type: ignore[no-untyped-call]
        square_sums = []
        for index, block in enumerate(self.blocks):
            hidden, change = block(hidden, change, cos, sin, mask)
            if probed is not None and index in self.sampled_layers:
                stream = hidden.detach() + change.detach()
                squares = torch.linalg.vector_norm(stream, dim=(1, 2), dtype=torch.float32).square()
                square_sums.append(torch.where(probed, squares, 0.0).sum())
        return self.norm(hidden + change), square_sums

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight
