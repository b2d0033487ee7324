"""The gate: computes on the device whether an update is rejected before it is applied.

How: the decision is computed from reduced signals only, so it is equal on every rank. It is applied by selection, not
by multiplication: fused AdamW reads the mask and leaves weights and moments untouched. The gate rejects what is not
finite, what lies far above the clean history of loss and gradient norm, and what a rank computed differently the second
time (`harness.recomputation`). The bounds come from the recursion of
`harness.sentinel.detect.baseline`, which the detectors use too, here on float64 scalars of the device. A rejected value
never enters the history. The history is part of every snapshot, so a resumed run is guarded from its first step.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from harness.config.sentinel import DetectConfig
from harness.distributed.torch_private.inductor_options import compile_options
from harness.sentinel.detect import baseline
from harness.sentinel.detect.baseline import Number, State


class TorchOps:
    """The arithmetic of the baseline on device tensors; loss and gradient norm are computed together."""

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
    """The initial history [baseline fields x (loss, gradient norm)]."""
    return torch.tensor(baseline.initial_state(), dtype=torch.float64, device=device)[:, None].repeat(1, 2)


class GateDecision(NamedTuple):
    skip_mask: Tensor
    """1.0 if the update is rejected, else 0.0. Exactly these values: the AdamW kernel compares with 1."""
    overflow: Tensor
    """1.0 if the gradient norm is not finite although the loss is, else 0.0. The loss does not depend on the fp16 loss
    scale, so the batch or the weights are to blame if it is not finite."""
    bounds: Tensor
    """The bounds of the loss and of the gradient norm [2]."""


@final
class Gate:
    def __init__(
        self, cfg: DetectConfig, *, device: torch.device, compiled: bool = False, rejects_corruption: bool = True
    ) -> None:
        """`compiled`: fuse some 250 scalar operations into a few kernels. `rejects_corruption`: reject an update if a
        micro-batch that was computed twice differs."""
        self._decide = decide_update
        if compiled:
            self._decide = torch.compile(decide_update, fullgraph=True, options=compile_options())
        self._cfg = cfg
        self._planned = torch.tensor([0.0, 1.0], dtype=torch.float64, device=device).unbind()
        self._no_corruption = torch.zeros((), dtype=torch.float32, device=device)
        self._rejects_corruption = rejects_corruption
        self.history = first_history(device)
        """Updated in place."""

    def decide(
        self,
        *,
        loss: Tensor,
        grad_norm: Tensor,
        warming: Tensor,
        planned: bool = False,
        corruption: Tensor | None = None,
    ) -> GateDecision:
        """Reject or accept the update of one step, and add an accepted one to the history. `warming`: 1.0 while the
        learning rate rises. `planned`: the batch lies within the window of a planned change. `corruption`: above 0 if
        any rank computed different bits the second time."""
        if corruption is None or not self._rejects_corruption:
            corruption = self._no_corruption
        decision, following = self._decide(
            self.history, loss, grad_norm, warming, self._planned[planned], corruption, self._cfg
        )
        self.history.copy_(following)
        return decision

    @torch.no_grad()
    def reopen(self, *, loss: float | None, grad_norm: float | None) -> None:
        """Set new levels of loss and gradient norm (None: keep), equal on all ranks. The spread stays. The bounds are
        wide for some rows but never above their caps."""
        levels = [0.0 if level is None else level for level in (loss, grad_norm)]
        values = torch.tensor(levels, dtype=torch.float64, device=self.history.device)
        accept = torch.isfinite(values) & (values > 0)
        num_seen = baseline.CAPPED_FROM_COUNT
        reopened = baseline.reopen(self.history.unbind(), values, accept, OPS, num_seen=num_seen)
        self.history.copy_(torch.stack(reopened))


def decide_update(
    history: Tensor,
    loss: Tensor,
    grad_norm: Tensor,
    warming: Tensor,
    planned: Tensor,
    corruption: Tensor,
    cfg: DetectConfig,
) -> tuple[GateDecision, Tensor]:
    """The decision on a step and the history after it; a pure function of tensors, so it can be compiled."""
    values = torch.stack([loss, grad_norm]).to(torch.float64)
    by_loss, by_gradient = history.unbind(dim=1)
    bounds = baseline.gate_bounds(by_loss.unbind(), by_gradient.unbind(), cfg, OPS, warming=warming, planned=planned)
    is_finite = torch.isfinite(values).all()
    is_clean = is_finite & ~baseline.beyond(values[0], values[1], bounds) & (corruption == 0)
    following = baseline.advance(history.unbind(), values, is_clean, cfg, OPS)
    decision = GateDecision(
        skip_mask=(~is_clean).to(torch.float32),
        overflow=(torch.isfinite(values[0]) & ~is_finite).to(torch.float32),
        bounds=torch.stack(bounds[:2]).to(torch.float32),
    )
    return decision, torch.stack(following)
