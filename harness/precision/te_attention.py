"""Causal attention by cuDNN's kernels through Transformer Engine, as two operators.

Why: cuDNN's attention through `scaled_dot_product_attention` adds up gradients in no fixed order, and torch's own
deterministic kernel (FlashAttention-2) takes twice as long. Transformer Engine runs cuDNN's deterministic kernel. It
also takes queries that are the last ones of their keys, as context parallelism has them.
How: queries, keys and values are [B, S, heads, head_dim], with fewer key heads than query heads for grouped queries.
With context parallelism the queries are chunks of a longer sequence, and each chunk sees the keys up to its own end.
The kernel runs once for each chunk. To torch.compile all chunks are one operator, whose tensors have the same shapes on
all ranks of a group: decisions of the compiler that depend on sizes, such as what is recomputed, must not differ
between ranks that wait for each other.
The forward operator also returns the log-sum-exp of each row and the state of a random generator, which the backward
operator takes but does not use without dropout. That generator is a separate one, so torch's is not advanced. The
backward formula is registered with torch, as in `harness.precision.fused_qkv`. On a CPU both operators compute the same
in plain torch.
"""

# ruff: noqa: ARG001  (fake implementations take all arguments and need few)
from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.precision.fp8.custom_ops import LIBRARY, define_op
from harness.precision.fp8.engine import share_cudnn

MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 128, 8
MIN_CAPABILITY = (9, 0)
"""Compute capability from which cuDNN has a deterministic backward pass."""


def te_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    deterministic: bool = True,
    ends: Sequence[int] = (),
) -> Tensor:
    """Causal attention [B, S, heads, head_dim] in bf16 or fp16; only if `te_attention_obstacle` is empty.

    `deterministic`: the backward pass gives the same bits every time. `ends`: the queries are this many equal chunks of
    a longer sequence; each is the end of as many keys. Empty: the queries have the same positions as the keys.
    """
    attended, _, _ = attention_forward(query, key, value, scale, deterministic, list(ends))
    return attended


@cache
def te_attention_obstacle(head_dim: int) -> str:
    """Why this process cannot run attention by Transformer Engine, in words; empty if it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        return "the compute capability of the GPU is below 9.0"
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        return f"heads of {head_dim} are not multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}"
    try:
        with torch.device("cpu"):  # a model may be under construction on the meta device
            _kernels()
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return f"Transformer Engine fails to load: {reason[0]}"
    return ""


def te_workspace_bytes(num_rows: int, num_heads: int, num_keys: int, *, num_queries: int) -> int:
    """Estimate of the memory that the deterministic backward pass of a layer takes, with heads of 128.

    From one measurement: cuDNN asked for 513 GiB for one sequence of 131,072 tokens with 16 heads, which is the size of
    a partial gradient of the queries for every 128 keys.
    """
    return 2 * num_rows * num_heads * num_keys * num_queries


@cache
def _kernels() -> Any:
    """The module with Transformer Engine's fused attention; imported only when it is used."""
    share_cudnn()
    import transformer_engine.pytorch  # noqa: F401  (loads the libraries that the extension needs)
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    return fused_attn


@cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device)


@cache
def _sequence_ends(num_rows: int, length: int, device: torch.device) -> Tensor:
    """Cumulative sequence lengths; every sequence is full."""
    return torch.arange(0, (num_rows + 1) * length, step=length, dtype=torch.int32, device=device)


def _shared_arguments(query: Tensor, key: Tensor, scale: float) -> dict[str, Any]:
    num_rows, num_queries, num_keys = *query.shape[:2], key.shape[1]
    return {
        "max_seqlen_q": num_queries,
        "max_seqlen_kv": num_keys,
        "cu_seqlens_q": _sequence_ends(num_rows, num_queries, query.device),
        "cu_seqlens_kv": _sequence_ends(num_rows, num_keys, query.device),
        "fake_dtype": query.dtype,
        "fused_attention_backend": _kernels().FusedAttnBackend["F16_arbitrary_seqlen"],
        "attn_scale": scale,
        "dropout": 0.0,
        "qkv_layout": "bshd_bshd_bshd",
        "o_format": "bshd",
        "attn_bias_type": "no_bias",
        "attn_mask_type": "causal" if num_queries == num_keys else "causal_bottom_right",
        "window_size": (-1, 0),
    }


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, deterministic: bool = True, ends: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """The attended values [B, S, heads, head_dim], the log-sum-exp [B, heads, S, 1] in fp32, a generator's state."""
    if not ends:
        return _forward_chunk(query, key, value, scale)
    chunks = [
        _forward_chunk(part, key[:, :end], value[:, :end], scale)
        for part, end in zip(query.chunk(len(ends), dim=1), ends, strict=True)
    ]
    attended, log_sums, states = zip(*chunks, strict=True)
    return torch.cat(attended, dim=1), torch.cat(log_sums, dim=2), states[0]


def _forward_chunk(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of queries that are the last ones of their keys."""
    if not query.is_cuda:
        return _forward_in_torch(query, key, value, scale)
    attended, (log_sums, state) = _kernels().fused_attn_fwd(
        is_training=True,
        q=query.contiguous(),
        k=key.contiguous(),
        v=value.contiguous(),
        rng_gen=_generator(query.device),
        **_shared_arguments(query, key, scale),
    )
    return attended, log_sums, state


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    query: Tensor
    key: Tensor
    value: Tensor
    attended: Tensor
    log_sums: Tensor
    state: Tensor

    def chunks(self, ends: Sequence[int]) -> list[Saved]:
        """The parts of the chunks of the queries."""
        by_query = (
            self.query.chunk(len(ends), 1),
            self.attended.chunk(len(ends), 1),
            self.log_sums.chunk(len(ends), 2),
        )
        return [
            Saved(query, self.key[:, :end], self.value[:, :end], attended, log_sums, self.state)
            for query, attended, log_sums, end in zip(*by_query, ends, strict=True)
        ]


def backward(
    gradient: Tensor, saved: list[Tensor], scale: float, deterministic: bool = True, ends: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; with the same bits every time if `deterministic`."""
    whole = Saved(*saved)
    if not ends:
        return _backward_chunk(gradient, whole, scale, deterministic=deterministic)
    grad_queries, grad_key, grad_value = [], torch.zeros_like(whole.key), torch.zeros_like(whole.value)
    for own_gradient, own, end in zip(gradient.chunk(len(ends), dim=1), whole.chunks(ends), ends, strict=True):
        grad_query, of_keys, of_values = _backward_chunk(own_gradient, own, scale, deterministic=deterministic)
        grad_queries.append(grad_query)
        grad_key[:, :end] += of_keys
        grad_value[:, :end] += of_values
    return torch.cat(grad_queries, dim=1), grad_key, grad_value


def _backward_chunk(
    gradient: Tensor, saved: Saved, scale: float, *, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries that are the last ones of their keys, of these keys and of their values."""
    if not gradient.is_cuda:
        return _backward_in_torch(gradient, saved, scale)
    grad_query, grad_key, grad_value, *_ = _kernels().fused_attn_bwd(
        q=saved.query.contiguous(),
        k=saved.key.contiguous(),
        v=saved.value.contiguous(),
        o=saved.attended.contiguous(),
        d_o=gradient.contiguous(),
        aux_ctx_tensors=[saved.log_sums.contiguous(), saved.state],
        do_format="bshd",
        dqkv_layout="bshd_bshd_bshd",
        deterministic=deterministic,
        **_shared_arguments(saved.query, saved.key, scale),
    )
    return grad_query, grad_key, grad_value


def _group(heads: Tensor, key: Tensor) -> Tensor:
    """[B, S, heads, ...] -> [B, S, key heads, queries per key head, ...]."""
    return heads.view(*heads.shape[:2], key.shape[2], -1, *heads.shape[3:])


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Causal scores [B, key heads, queries per key head, queries, keys] in fp32."""
    scores = torch.einsum("bsgid,btgd->bgist", _group(query.float(), key), key.float()) * scale
    num_queries, num_keys = query.shape[1], key.shape[1]
    future = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).triu(1 + num_keys - num_queries)
    return scores.masked_fill(future, -torch.inf)


def _forward_in_torch(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(query, key, scale)
    log_sums = scores.logsumexp(dim=-1, keepdim=True)
    attended = torch.einsum("bgist,btgd->bsgid", (scores - log_sums).exp(), value.float())
    return (
        attended.flatten(2, 3).to(query.dtype).contiguous(),
        log_sums.flatten(1, 2),
        torch.zeros(2, dtype=torch.int64),
    )


def _backward_in_torch(gradient: Tensor, saved: Saved, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, attended, log_sums, _ = saved
    scores = _scores(query, key, scale)
    probabilities = (scores - log_sums.view(*scores.shape[:-1], 1)).exp()
    grads = _group(gradient.float(), key)
    grad_value = torch.einsum("bgist,bsgid->btgd", probabilities, grads)
    weighted = _group((gradient.float() * attended.float()).sum(dim=-1), key)
    grad_scores = torch.einsum("bsgid,btgd->bgist", grads, value.float()) - weighted.permute(0, 2, 3, 1)[..., None]
    grad_scores = grad_scores * probabilities * scale
    grad_query = torch.einsum("bgist,btgd->bsgid", grad_scores, key.float()).flatten(2, 3)
    grad_key = torch.einsum("bgist,bsgid->btgd", grad_scores, _group(query.float(), key))
    grad_query, grad_key, grad_value = (grad.to(query.dtype) for grad in (grad_query, grad_key, grad_value))
    return grad_query.contiguous(), grad_key.contiguous(), grad_value.contiguous()


def _forward_shapes(
    query: Tensor, key: Tensor, value: Tensor, scale: float, deterministic: bool = True, ends: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, length, num_heads, _ = query.shape
    return (
        query.new_empty(query.shape),
        query.new_empty((num_rows, num_heads, length, 1), dtype=torch.float32),
        query.new_empty((2,), dtype=torch.int64),
    )


def _backward_shapes(
    gradient: Tensor, saved: list[Tensor], scale: float, deterministic: bool = True, ends: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = saved[:3]
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, ctx.deterministic, ctx.ends = inputs
    ctx.save_for_backward(query, key, value, *output)


def _differentiate(ctx: Any, gradient: Tensor, *_unused: Tensor) -> tuple[Any, ...]:
    return (
        *attention_backward(gradient, list(ctx.saved_tensors), ctx.scale, ctx.deterministic, ctx.ends),
        None,
        None,
        None,
    )


attention_forward = define_op(
    "attention_forward(Tensor query, Tensor key, Tensor value, float scale, bool deterministic=True, int[] ends=[])"
    " -> (Tensor, Tensor, Tensor)",
    forward,
    _forward_shapes,
)
attention_backward = define_op(
    "attention_backward(Tensor gradient, Tensor[] saved, float scale, bool deterministic=True, int[] ends=[])"
    " -> (Tensor, Tensor, Tensor)",
    backward,
    _backward_shapes,
)
torch.library.register_autograd(
    "harness::attention_forward", _differentiate, setup_context=_save_for_backward, lib=LIBRARY
)
