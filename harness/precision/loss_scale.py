"""Dynamic loss scaling for fp16, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.precision import PrecisionConfig, PrecisionKind


@dataclass(slots=True)
class LossScale:
    """Keeps small fp16 gradients from underflow; constant 1 for every other precision."""

    value: Tensor
    """What the loss is multiplied by before backward; on the device."""
    clean_steps: Tensor
    """Steps since the last overflow or doubling."""
    initial: float
    """The scale at the start of a run."""
    growth_interval: int | None
    """None: the scale is constant."""

    def update(self, *, overflow: Tensor, refused: Tensor) -> None:
        """Halve at an overflow, double after `growth_interval` clean steps; no host sync.

        An update that was rejected for its size, or for a loss that is not finite, changes nothing.
        """
        if self.growth_interval is None:
            return
        overflowed = overflow > 0
        clean_steps = torch.where(overflowed, 0, self.clean_steps + (refused == 0))
        grown = clean_steps >= self.growth_interval
        factor = torch.where(overflowed, 0.5, torch.where(grown, 2.0, 1.0))
        self.value.mul_(factor)
        self.clean_steps.copy_(torch.where(grown, 0, clean_steps))

    def adapt(self) -> None:
        """After a restore, on the device: the scale of a state that another precision saved is the initial one.

        In such a state the scale is 1 and no step is counted. A constant scale stays what it is.
        """
        if self.growth_interval is None:
            self.value.fill_(self.initial)
            self.clean_steps.zero_()
            return
        is_foreign = (self.value == 1.0) & (self.clean_steps == 0)
        self.value.copy_(torch.where(is_foreign, self.initial, self.value))


def build_loss_scale(cfg: PrecisionConfig, device: torch.device) -> LossScale:
    """The loss scale at the start of a run."""
    dynamic = cfg.kind is PrecisionKind.fp16
    initial = cfg.initial_loss_scale if dynamic else 1.0
    return LossScale(
        value=torch.tensor(initial, dtype=torch.float32, device=device),
        clean_steps=torch.zeros((), dtype=torch.int64, device=device),
        initial=initial,
        growth_interval=cfg.loss_scale_growth_interval if dynamic else None,
    )
