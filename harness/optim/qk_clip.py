"""QK-clip: scales query and key weights of an attention head whose logits exceed a threshold.

Why: without QK-norm the attention logits of a head can grow without bound while the loss still falls. The softmax then
saturates, its gradient vanishes or explodes, and the loss spikes. Scaling the weights bounds the logits without a
change of the architecture (Kimi K2, arXiv 2507.20534).
How: after an update, gamma = min(1, threshold / largest logit) of each head. The logits of a head are to shrink by its
gamma, and query and key weights share the factor. Heads that share a key head (grouped queries) may have different
gammas: the key takes the square root of the largest gamma of its query heads, and each query takes the rest. So no
weight grows, and the logits of a head below the threshold stay as they are. With one query head per key head both take
the square root of gamma. With QK-norm the scale of the weights has no effect: there the gains of both norms, which all
heads of a layer share, take the square root of the smallest gamma.
The logits are those of sampled queries of this step on all ranks; one MAX all-reduce of [layers, heads] gives every
rank the same factors, and each rank scales the rows of its shards. If the update was rejected, weights stay bit for bit
as they are, by selection. Nothing waits for the device. Moments are left as they are; nothing new is in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from harness.config.model import ModelConfig
from harness.distributed.collectives import all_reduce_max
from harness.distributed.reduce_scatter import CommStats
from harness.distributed.shards import local, local_rows
from harness.optim.weight_digest import WeightDigest, sum_weights


class _Layer(NamedTuple):
    """The shards of one attention layer that are scaled, and the head of each of their rows."""

    query: Tensor
    key: Tensor
    query_heads: Tensor
    key_heads: Tensor


@final
class QkClip:
    """Holds the largest logits of the last measured step, and clips by them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        cfg: ModelConfig,
        threshold: float | None,
        digest: WeightDigest,
        device: torch.device,
        comm_stats: CommStats,
        measure_always: bool = False,
    ) -> None:
        """`threshold`: clip after every update; None: only if `clip` is called. `measure_always`: measure logits in
        every step even without a threshold, so that compiled blocks need one graph."""
        self.threshold = threshold
        self._measure_always = measure_always
        self.logits = torch.full((cfg.num_layers, cfg.num_heads), -torch.inf, dtype=torch.float32, device=device)
        """Largest sampled logit of each layer and head on this rank, in the last step that measured them."""
        self._has_norm = cfg.qk_norm
        self._num_keys = cfg.num_kv_heads
        self._digest = digest
        self._comm_stats = comm_stats
        head_dim = cfg.head_dim
        layers = []
        for number in range(cfg.num_layers):
            names = (f"blocks.{number}.attention.{name}{'_norm' * cfg.qk_norm}.weight" for name in ("query", "key"))
            query, key = (parameters[name] for name in names)
            heads = (local_rows(each).to(device) // head_dim for each in (query, key))
            layers.append(_Layer(local(query).detach(), local(key).detach(), *heads))
        self._layers = layers

    @property
    def measures_always(self) -> bool:
        """Whether every step measures the logits, and not only a probed one."""
        return self._measure_always or self.threshold is not None

    def limit_logits(self, threshold: float) -> None:
        """Clip after every update from now on, at this threshold unless a lower one is set. On all ranks alike."""
        self.threshold = threshold if self.threshold is None else min(self.threshold, threshold)

    def start_step(self) -> None:
        """Forget the logits of earlier steps, before a step that measures them."""
        self.logits.fill_(-torch.inf)

    def add_logits(self, logits: Tensor) -> None:
        """Add the largest logits [layers, heads] of a micro-batch."""
        torch.maximum(self.logits, logits, out=self.logits)

    def after_update(self, skip_mask: Tensor) -> None:
        """Clip after an update, if `optim.qk_clip` is set; nothing changes by a bit if `skip_mask` is 1."""
        if self.threshold is not None:
            self.clip(self.threshold, skip_mask=skip_mask)

    @torch.no_grad()
    def clip(self, threshold: float, *, skip_mask: Tensor | None = None) -> None:
        """Scale the weights of all heads whose logits exceeded the threshold. Collective: all ranks must call."""
        with self._comm_stats.timed():
            largest = all_reduce_max(self.logits.clone())
        is_above = (largest > threshold) & torch.isfinite(largest)
        if skip_mask is not None:
            is_above = is_above & (skip_mask == 0)
        gammas = torch.where(is_above, threshold / largest, 1.0)
        query_factors, key_factors = self._split(gammas)
        weights = [weight for layer in self._layers for weight in (layer.query, layer.key)]
        before = sum_weights(weights)
        for layer, of_query, of_key in zip(self._layers, query_factors, key_factors, strict=True):
            _scale_rows(layer.query, of_query[layer.query_heads])
            _scale_rows(layer.key, of_key[layer.key_heads])
        self._digest.on_rescaled(before, sum_weights(weights))
        self.logits.mul_(torch.where(is_above, gammas, 1.0))

    def _split(self, gammas: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the query heads [layers, heads] and of the key heads [layers, key heads]; with QK-norm those of
        both gains [layers, 1]."""
        if self._has_norm:
            factors = gammas.amin(dim=1, keepdim=True).sqrt()
            return factors, factors
        shared = gammas.view(len(gammas), self._num_keys, -1).amax(dim=2).sqrt()
        return gammas / shared.repeat_interleave(gammas.shape[1] // self._num_keys, dim=1), shared


def _scale_rows(weight: Tensor, factors: Tensor) -> None:
    """Multiply each row by its factor; rows whose factor is 1 keep their bits."""
    factors = factors.view(-1, *[1] * (weight.ndim - 1))
    weight.copy_(torch.where(factors == 1, weight, weight * factors))
