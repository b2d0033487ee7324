"""The language model: pre-LN, RMSNorm, SwiGLU, RoPE, grouped-query attention, no biases.

LayerNorm and post-LN blocks can be chosen for comparison (`model.norm`, `model.norm_placement`).

Sharding, compilation and activation checkpointing are applied beside this module (`harness.distributed.fsdp`), and
FSDP2 casts its weights. Attention and its kernels are in `harness.model.attention_layer`. Projections of attention and
`swiglu` (MLP) choose fused or fp8 GEMMs by the type of the layers they get. Statistics of norms, RoPE and the loss are
fp32 in every precision.
How: `forward` takes tokens and targets and returns the objective to differentiate with the sums that are logged, so
logits exist only in chunks inside the loss. Blocks are equal and get all inputs as arguments, so that each can be
compiled, checkpointed and sharded by itself. No control flow depends on tensor values: there is no host sync, and NaN
propagates to the gate.
Context parallelism: `forward` takes whole sequences on all ranks of a context group and computes this rank's part of
them (`harness.distributed.context`). Its sums are those of this rank's tokens, and add up over the ranks.
RoPE pairs the first half of a head with the second, as in Hugging Face's Llama, so that weights can be exchanged.
Left out: dropout, positions that restart in each document of a packed sequence, KV caches for generation.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.config.model import ModelConfig, NormKind, NormPlacement
from harness.distributed.activation_offload import ActivationOffload
from harness.distributed.bit_digests import BitDigests
from harness.distributed.context import ContextSplit
from harness.model.attention_layer import (
    Attention,
    AttentionMask,
    LinearFactory,
    mask_context,
    mask_documents,
    needs_causal_blocks,
)
from harness.model.attention_mask import causal_block_mask
from harness.model.loss import IGNORED, LossOptions, chunked_cross_entropy, count_losses, sample_entropy
from harness.model.mup import output_multiplier
from harness.precision.fp8.swiglu import swiglu

MAX_SAMPLED_LAYERS = 8
"""Layers whose activations are probed, at most."""


class Output(NamedTuple):
    """What a forward pass returns. Only `objective` has a gradient; the others are detached fp32."""

    objective: Tensor
    """seed * (sum of row_losses + z_sum); differentiate this one."""
    token_losses: Tensor
    """Cross-entropy of each token [B, S] in nats, zero where the target is ignored; of this rank's tokens [B, S / N]
    with context parallelism, like all sums below."""
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
    attention_logits: Tensor | None = None
    """Largest sampled attention logit of each layer and head [layers, heads], if measured."""
    entropy: Tensor | None = None
    """Summed entropy in nats of the output distribution at sampled positions, and their number [2], if probed."""


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


def build_norm(cfg: ModelConfig) -> nn.RMSNorm | nn.LayerNorm:
    """A norm of the residual stream."""
    match cfg.norm:
        case NormKind.rms:
            return nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        case NormKind.layer:
            return nn.LayerNorm(cfg.dim, eps=cfg.norm_eps, bias=False)


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

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        linear: LinearFactory,
        deterministic: bool = False,
        context: ContextSplit | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = build_norm(cfg)
        self.attention = Attention(cfg, linear=linear, deterministic=deterministic, context=context)
        self.mlp_norm = build_norm(cfg)
        self.mlp = SwiGLU(cfg, linear=linear)

    def forward(
        self,
        hidden: Tensor,
        change: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: AttentionMask = None,
        measure_logits: bool = False,
    ) -> tuple[Tensor, ...]:
        """Take and return the residual stream [B, S, D] and a change that is yet to be added to it.

        The sum is computed where it is read: by the next norm, in the same kernel. `mask` is combined with the causal
        mask. With `measure_logits` the largest sampled attention logits [heads] follow.
        """
        return self.advance(hidden + change, cos, sin, mask, measure_logits)

    def advance(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask, measure_logits: bool = False
    ) -> tuple[Tensor, ...]:
        """The block after the first residual add; the part that is checkpointed (`harness.distributed.fsdp`)."""
        attended, *logits = self._attend(self.attention_norm(hidden), cos, sin, mask, measure_logits)
        hidden = hidden + attended
        return hidden, self.mlp(self.mlp_norm(hidden)), *logits

    def _attend(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask, measure_logits: bool
    ) -> tuple[Tensor, ...]:
        """The output of attention, followed by the largest logits if they are measured."""
        if not measure_logits:
            return (self.attention(hidden, cos, sin, mask),)
        attended, largest = self.attention(hidden, cos, sin, mask, measure_logits=True)
        return attended, largest


class PostNormBlock(Block):
    """A post-LN transformer block, for comparison: the norms are on the residual stream, after each sum.

    The last sum is normalized inside the block, so the change that is yet to be added is zero.
    """

    def advance(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask, measure_logits: bool = False
    ) -> tuple[Tensor, ...]:
        attended, *logits = self._attend(hidden, cos, sin, mask, measure_logits)
        hidden = self.attention_norm(hidden + attended)
        hidden = self.mlp_norm(hidden + self.mlp(hidden))
        return hidden, torch.zeros_like(hidden), *logits


def build_block(
    cfg: ModelConfig, *, linear: LinearFactory, deterministic: bool = False, context: ContextSplit | None = None
) -> Block:
    """A block with its norms where `model.norm_placement` says."""
    match cfg.norm_placement:
        case NormPlacement.pre:
            return Block(cfg, linear=linear, deterministic=deterministic, context=context)
        case NormPlacement.post:
            return PostNormBlock(cfg, linear=linear, deterministic=deterministic, context=context)


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
        context: ContextSplit | None = None,
    ) -> None:
        """deterministic: attention on a GPU gives the same bits every time (`harness.model.attention_layer`). context:
        this rank's part of each sequence; None: all of it."""
        super().__init__()
        self.cfg = cfg
        self.context = context
        self.sequence_length = sequence_length
        self.deterministic = deterministic
        self.loss_options = LossOptions(
            z_loss=cfg.z_loss,
            output_multiplier=output_multiplier(cfg),
            chunk_tokens=cfg.loss_chunk_tokens,
            own_kernels=own_kernels,
        )
        self.sampled_layers = sampled_layers(cfg.num_layers)
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.embedding_norm = build_norm(cfg) if cfg.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            build_block(cfg, linear=linear, deterministic=deterministic, context=context) for _ in range(cfg.num_layers)
        )
        self.norm = build_norm(cfg)
        self.head = None if cfg.tied_head else nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        table_shape = (sequence_length // (1 if context is None else context.size), cfg.head_dim // 2)
        self.register_buffer("cos", torch.empty(table_shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(table_shape, dtype=torch.float32), persistent=False)
        self.init_buffers()
        self.offload: ActivationOffload | None = None
        """Keeps saved activations of the blocks in host memory; None: on the device."""

    def init_buffers(self) -> None:
        """Fill the rotary tables; call it again after `to_empty`, which leaves them uninitialized."""
        for table, values in zip((self.cos, self.sin), rotary_tables(self.cfg, self.sequence_length), strict=True):
            table.copy_(values if self.context is None else self.context.take(values, 0))

    def mask_documents(self, documents: Tensor | None) -> AttentionMask:
        """The mask that keeps the documents [B, S] of a sequence apart; None if documents attend to each other."""
        return None if documents is None else mask_documents(self.cfg, documents, self.context)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        seed: Tensor | float = 1.0,
        probe: bool = False,
        mask: AttentionMask = None,
        digests: BitDigests | None = None,
        measure_logits: bool = False,
    ) -> Output:
        """The objective and the sums for `tokens` [B, S] and `targets` [B, S], where -100 is ignored.

        `seed` multiplies the summed loss before it is differentiated: loss scale / expected tokens. `mask` is from
        `mask_documents`, or dense. `digests` get the bits of every block's output and of the losses. `measure_logits`:
        also return the largest attention logits.
        """
        probed = (targets != IGNORED).any(dim=1) if probe else None
        if self.context is not None:
            assert tokens.shape[1] == self.sequence_length, "the rotary tables hold the positions of this rank"
            if mask is None:
                mask = mask_context(self.cfg, tokens, self.context, deterministic=self.deterministic)
            tokens, targets = self.context.take(tokens, 1), self.context.take(targets, 1)
        hidden, square_sums, logits = self._hidden(
            tokens, mask=mask, probed=probed, digests=digests, measure_logits=measure_logits
        )
        if not isinstance(seed, Tensor):
            seed = torch.full((), seed, dtype=torch.float32, device=hidden.device)
        sums = chunked_cross_entropy(
            hidden.flatten(0, 1), self._head_weight(), targets.flatten(), seed, options=self.loss_options
        )
        token_losses = sums.losses.view_as(targets)
        if digests is not None:
            digests.add_output(len(self.blocks) + 1, token_losses, sums.objective)
        return Output(
            objective=sums.objective,
            token_losses=token_losses,
            row_losses=token_losses.sum(dim=1),
            row_tokens=(targets != IGNORED).sum(dim=1, dtype=torch.float32),
            z_sum=sums.z_sum,
            activation_square_sums=torch.stack(square_sums) if probe else None,
            token_loss_counts=count_losses(sums.losses, targets.flatten()) if probe else None,
            attention_logits=torch.stack(logits) if measure_logits else None,
            entropy=self._sample_entropy(hidden, targets) if probe else None,
        )

    @torch.no_grad()
    def _sample_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return sample_entropy(
            hidden, self._head_weight(), targets, output_multiplier=self.loss_options.output_multiplier
        )

    def logits(self, tokens: Tensor, mask: AttentionMask = None) -> Tensor:
        """All logits [B, S, V] in fp32, for tests and export; the model must not be sharded."""
        assert self.context is None, "this rank would compute a part of each sequence"
        hidden, _, _ = self._hidden(tokens, mask=mask, probed=None, digests=None)
        return F.linear(hidden, self._head_weight()).float() * self.loss_options.output_multiplier

    def _hidden(
        self,
        tokens: Tensor,
        *,
        mask: AttentionMask,
        probed: Tensor | None,
        digests: BitDigests | None,
        measure_logits: bool = False,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The input of the head, the square sums of the sampled layers over the `probed` sequences [B], and the largest
        attention logits of each layer."""
        is_whole = mask is None and self.context is None
        if is_whole and self.deterministic and tokens.is_cuda and needs_causal_blocks(self.cfg, *tokens.shape):
            mask = causal_block_mask(tokens.shape[1], tokens.device)
        hidden: Tensor = self.embedding_norm(self.embedding(tokens))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        change: Tensor = _DifferentiableZeros.apply(hidden)  # type: ignore[no-untyped-call]
        square_sums, logits = [], list[Tensor]()
        if digests is not None:
            digests.add_output(0, hidden)
        for index, block in enumerate(self.blocks):
            with nullcontext() if self.offload is None else self.offload.saving(index, block, (cos, sin)):
                if measure_logits:
                    hidden, change, largest = block(hidden, change, cos, sin, mask, measure_logits=True)
                    logits.append(largest)
                else:
                    hidden, change = block(hidden, change, cos, sin, mask)
            if digests is not None:
                digests.add_output(index + 1, hidden, change)
            if probed is not None and index in self.sampled_layers:
                stream = hidden.detach() + change.detach()
                squares = torch.linalg.vector_norm(stream, dim=(1, 2), dtype=torch.float32).square()
                square_sums.append(torch.where(probed, squares, 0.0).sum())
        return self.norm(hidden + change), square_sums, logits

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight
