"""Config section `model`: the shape of the transformer and its initialization."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from harness.config.errors import require, require_positive_fp32

MOST_LAYERS = 10_000
"""Building and planning a model take a time in proportion to its blocks."""


class AttentionKind(StrEnum):
    """Numerics of the attention kernel."""

    fused = "fused"
    fp32 = "fp32"


class NormKind(StrEnum):
    """Norm of the residual stream."""

    rms = "rms"
    layer = "layer"


class NormPlacement(StrEnum):
    """Place of a block's norms."""

    pre = "pre"
    post = "post"


class InitKind(StrEnum):
    """Standard deviation of the initial weights."""

    fixed = "fixed"
    hidden = "hidden"


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """Shape, numerics and initialization of the transformer."""

    name: str
    """Name of the size, for run names and reports."""
    vocab_size: int
    """Number of token ids; at least one above the highest id in the data."""
    dim: int
    """Width of the residual stream."""
    num_layers: int
    """Number of transformer blocks."""
    num_heads: int
    """Query heads; each is dim / num_heads wide."""
    num_kv_heads: int
    """Key and value heads (grouped-query attention); divides num_heads."""
    ffn_dim: int
    """Width of the SwiGLU hidden layer."""
    rope_theta: float
    """Base of the rotary frequencies; larger for longer sequences."""
    norm_eps: float
    """Epsilon of every norm."""
    norm: NormKind = NormKind.rms
    """Norm of the residual stream. rms: RMSNorm; layer: LayerNorm without bias, for comparison only. QK-norm is always
    RMSNorm."""
    norm_placement: NormPlacement = NormPlacement.pre
    """pre: a block normalizes the input of attention and of the MLP (pre-LN). post: it normalizes the residual stream
    after each sum (post-LN), for comparison only."""
    tied_head: bool
    """Share the weights of embedding and output head."""
    qk_norm: bool
    """RMSNorm on queries and keys of each head."""
    embedding_norm: bool
    """RMSNorm right after the embedding (BLOOM)."""
    attention: AttentionKind
    """fused: the fastest kernel, with an fp32 softmax; fp32: queries, keys and values are cast to fp32 too."""
    z_loss: float
    """Coefficient of the squared log-partition; 0: off."""
    loss_chunk_tokens: int
    """Tokens per chunk of the loss; only one chunk of logits is in memory."""
    init: InitKind
    """fixed: std is init_std; hidden: std is sqrt(1 / (3 dim))."""
    init_std: float
    """Standard deviation of the initial weights, for init=fixed."""
    depth_scaled_init: bool
    """Divide the std of matrices that write into the residual stream by sqrt(2 num_layers)."""
    mup_base_width: int | None
    """muP: the width at which lr and init_std were tuned; null: standard parametrization."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "loss_chunk_tokens"):
            require(getattr(self, name) >= 1, f"model.{name}", f"must be at least 1, got {getattr(self, name)}")
        message = f"must be at most {MOST_LAYERS:,}, got {self.num_layers:,}"
        require(self.num_layers <= MOST_LAYERS, "model.num_layers", message)
        require(
            self.dim % self.num_heads == 0, "model.num_heads", f"must divide model.dim={self.dim}, got {self.num_heads}"
        )
        message = f"must give an even model.dim / model.num_heads for rotary embedding, gives {self.head_dim}"
        require(self.head_dim % 2 == 0, "model.dim", message)
        message = f"must divide model.num_heads={self.num_heads}, got {self.num_kv_heads}"
        require(self.num_heads % self.num_kv_heads == 0, "model.num_kv_heads", message)
        for name in ("rope_theta", "norm_eps", "init_std"):
            require_positive_fp32(getattr(self, name), f"model.{name}")
        require(self.z_loss >= 0, "model.z_loss", f"must be 0 (off) or more, got {self.z_loss}")
        if self.mup_base_width is not None:
            require(
                self.mup_base_width >= 1,
                "model.mup_base_width",
                f"must be at least 1 or null, got {self.mup_base_width}",
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads
