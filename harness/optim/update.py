"""The update: AdamW that a device bit can refuse, with clipping folded in and the learning rate on the device.

Why: deciding on the host costs a sync every step, and multiplying a bad gradient by zero writes NaN into the weights.
How: the kernel itself (`harness.optim.adamw`) reads whether to refuse (1: leave parameters, moments and step counters
bit for bit as they are) and what to divide the gradient by: token count, loss scale and clipping in one factor. The
number of applied updates is counted on the device, where it picks the learning rate from the schedule's table. A
learning rate that is lowered on purpose falls at once and rises slowly.
Moments exist from the start, so that every snapshot has the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.config.optim import OptimConfig
from harness.distributed.shards import local
from harness.optim.adamw import Part, Rule, step_fused, step_in_one_pass
from harness.optim.schedule import table

RE_WARMING = 0.02
"""Share of the way back to its target that a lowered learning rate goes with each update."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are treated alike."""

    parameters: Mapping[str, nn.Parameter]
    lr_multiplier: float
    weight_decay: float


@dataclass(slots=True)
class Update:
    adamw: torch.optim.AdamW
    groups: Sequence[Group]
    rates: Tensor
    """Learning rate of each step at multiplier 1."""
    step: Tensor
    """Updates applied, counted on the device."""
    clip_norm: float | None
    clip_value: float | None
    lr_scale: Tensor
    """What every rate is multiplied with, besides the schedule; on its way to `lr_target`."""
    own_kernel: bool = False
    """Whether the harness's own kernel makes the update; CUDA only."""
    lr_target: float = 1.0
    """Where `lr_scale` goes: down at once, up by and by."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for group in self.groups for name, parameter in group.parameters.items()}

    @property
    def lr(self) -> Tensor:
        """The rate the next update takes at multiplier 1."""
        return self._scheduled(self.step) * self.lr_scale

    @property
    def rates_by_name(self) -> dict[str, Tensor]:
        """The rate the next update takes, of each parameter."""
        lr = self.lr
        rates = [(group, lr * group.lr_multiplier) for group in self.groups]
        return {name: rate for group, rate in rates for name in group.parameters}

    @property
    def warming(self) -> Tensor:
        """1.0 while the schedule rises, else 0.0."""
        return (self._scheduled(self.step) > self._scheduled(self.step - 1)).to(torch.float64)

    def _scheduled(self, step: Tensor) -> Tensor:
        return torch.take(self.rates, step.clamp(0, len(self.rates) - 1))

    def apply(self, *, refuse: Tensor, grad_norm: Tensor, divisor: Tensor) -> Tensor:
        """One update, or none where `refuse` is 1; returns the learning rate it was made for.

        `divisor` turns the stored gradient into the true one, whose norm before clipping is `grad_norm`.
        """
        towards = self.lr_scale + (self.lr_target - self.lr_scale) * RE_WARMING * (1 - refuse)
        self.lr_scale.copy_(towards.clamp(max=self.lr_target))
        lr = self.lr
        for group, options in zip(self.groups, self.adamw.param_groups, strict=True):
            options["lr"].copy_(lr * group.lr_multiplier)
        excess = 1.0 if self.clip_norm is None else (grad_norm / self.clip_norm).clamp(min=1.0)
        if self.clip_value is not None:
            limit = divisor * excess * self.clip_value
            for parameter in self.parameters.values():
                assert parameter.grad is not None
                local(parameter.grad).clamp_(-limit, limit)
        self.descend(refuse=refuse, divisor=divisor * excess)
        self.adamw.zero_grad(set_to_none=True)
        self.step += 1 - refuse.to(self.step.dtype)
        return lr

    @torch.no_grad()
    def descend(self, *, refuse: Tensor, divisor: Tensor) -> None:
        """On this rank's own parts: `AdamW.step` would take every list through DTensor's dispatch."""
        step = step_in_one_pass if self.own_kernel else step_fused
        for options in self.adamw.param_groups:
            beta1, beta2 = options["betas"]
            rule = Rule(options["lr"], options["weight_decay"], beta1, beta2, options["eps"])
            parts = [self._part(parameter) for parameter in options["params"]]
            step(parts, rule, refuse=refuse, divisor=divisor)

    def _part(self, parameter: nn.Parameter) -> Part:
        state = self.adamw.state[parameter]
        assert parameter.grad is not None
        return Part(
            parameter=local(parameter),
            gradient=local(parameter.grad),
            first=local(state["exp_avg"]),
            second=local(state["exp_avg_sq"]),
            step=state["step"],
        )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Moments and step counter of each parameter, by name."""
        return {name: self.adamw.state[parameter] for name, parameter in self.parameters.items()}


def build_update(
    groups: Sequence[Group], *, cfg: OptimConfig, num_steps: int, device: torch.device, own_kernel: bool = False
) -> Update:
    """AdamW over the groups, its moments allocated."""
    options = [
        {
            "params": list(group.parameters.values()),
            "lr": torch.zeros((), dtype=torch.float32, device=device),
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]
    adamw = torch.optim.AdamW(options, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)
    for group in groups:
        for parameter in group.parameters.values():
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
    rates = torch.tensor(table(cfg, num_steps=num_steps), dtype=torch.float64) * cfg.lr
    return Update(
        adamw=adamw,
        groups=groups,
        rates=rates.to(torch.float32).to(device),
        step=torch.zeros((), dtype=torch.int64, device=device),
        clip_norm=cfg.clip_norm,
        clip_value=cfg.clip_value,
        lr_scale=torch.ones((), dtype=torch.float32, device=device),
        own_kernel=own_kernel,
    )
