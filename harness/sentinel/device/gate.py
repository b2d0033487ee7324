"""The gate: one device bit, equal on every rank, that refuses an update before it is applied.

Why: after a bad update the weights are bad; before it, nothing has happened yet.
How: it is computed from reduced signals only, so ranks cannot disagree, and it selects rather than multiplies: fused
AdamW reads the bit and leaves weights and moments untouched. It refuses what is not finite, and what lies far beyond
the clean history of loss and gradient norm: the recursion of `harness.sentinel.detect.baseline`, which the detectors
use too, on float64 scalars of the device. A refused value never enters the history; the history is part of every
snapshot, so a run that comes back is guarded from its first step.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from harness.config.sentinel import DetectConfig
from harness.sentinel.detect import baseline
from harness.sentinel.detect.baseline import Number, State


class TorchOps:
    """Arithmetic of the baseline on the device; loss and gradient norm side by side."""

    log, absolute, exp = staticmethod(torch.log), staticmethod(torch.abs), staticmethod(torch.exp)

    @staticmethod
    def where(condition: Any, chosen: Number, otherwise: Number) -> Number:
        return torch.where(condition, chosen, otherwise)

    @staticmethod
    def choose(condition: Any, chosen: State, otherwise: State) -> State:
        return torch.where(condition, torch.stack(chosen), torch.stack(otherwise)).unbind()

    @staticmethod
    def minimum(number: Number, other: Number) -> Number:
        return torch.clamp(number, max=other)

    @staticmethod
    def maximum(number: Number, other: Number) -> Number:
        return torch.clamp(number, min=other)


OPS = TorchOps()


def first_history(device: torch.device) -> Tensor:
    """Numbers of the baseline x (loss, gradient norm), before the first step."""
    return torch.tensor(baseline.initial_state(), dtype=torch.float64, device=device)[:, None].repeat(1, 2)


class GateDecision(NamedTuple):
    skip_mask: Tensor
    """1.0 where the update must not happen, else 0.0; exactly these two, because the kernel tests for 1."""
    overflow: Tensor
    """1.0 where loss or gradient norm is not finite, else 0.0."""
    bounds: Tensor
    """What the loss and the gradient norm were held against."""


@final
class Gate:
    def __init__(self, cfg: DetectConfig, *, device: torch.device, compiled: bool = False) -> None:
        """`compiled`: as a few kernels, where there would be one for each of some 250 operations on single numbers."""
        self._decide = torch.compile(decide_update, fullgraph=True) if compiled else decide_update
        self._cfg = cfg
        self._planned = torch.tensor([0.0, 1.0], dtype=torch.float64, device=device).unbind()
        self.history = first_history(device)
        """Changed in place."""

    def decide(self, *, loss: Tensor, grad_norm: Tensor, warming: Tensor, planned: bool = False) -> GateDecision:
        """Refuse or accept one step, and learn from what is accepted. `warming`: 1.0 while the learning rate rises.
        `planned`: the batch lies within the window of a planned change."""
        decision, following = self._decide(self.history, loss, grad_norm, warming, self._planned[planned], self._cfg)
        self.history.copy_(following)
        return decision

    @torch.no_grad()
    def reopen(self, *, loss: float | None, grad_norm: float | None) -> None:
        """Take these as the new levels, where there are any, alike on all ranks. The noise stays known; the bounds are
        wide for some rows and never beyond their caps."""
        known = [0.0 if level is None else level for level in (loss, grad_norm)]
        values = torch.tensor(known, dtype=torch.float64, device=self.history.device)
        accept = torch.isfinite(values) & (values > 0)
        num_seen = baseline.CAPPED_FROM_COUNT
        reopened = baseline.reopen(self.history.unbind(), values, accept, OPS, num_seen=num_seen)
        self.history.copy_(torch.stack(reopened))


def decide_update(
    history: Tensor, loss: Tensor, grad_norm: Tensor, warming: Tensor, planned: Tensor, cfg: DetectConfig
) -> tuple[GateDecision, Tensor]:
    """What is to be done with a step, and the history after it; from numbers alone, so that it can be compiled."""
    values = torch.stack([loss, grad_norm]).to(torch.float64)
    by_loss, by_gradient = history.unbind(dim=1)
    bounds = baseline.gate_bounds(by_loss.unbind(), by_gradient.unbind(), cfg, OPS, warming=warming, planned=planned)
    is_finite = torch.isfinite(values).all()
    is_clean = is_finite & ~baseline.beyond(values[0], values[1], bounds)
    following = baseline.advance(history.unbind(), values, is_clean, cfg, OPS)
    decision = GateDecision(
        skip_mask=(~is_clean).to(torch.float32),
        overflow=(~is_finite).to(torch.float32),
        bounds=torch.stack(bounds[:2]).to(torch.float32),
    )
    return decision, torch.stack(following)
