"""The update by AdamW or Muon with a skip mask on the device, clipping folded in, and the learning rate on the device.

Why: deciding on the host costs a host sync every step, and multiplying a bad gradient by zero writes NaN into the
weights.
How: the kernels themselves (`harness.optim.adamw`, `harness.optim.muon`) read the skip mask (1: parameters, moments and
step counters stay bit for bit as they are) and the divisor of the gradient: token count, loss scale and clipping in one
factor. Each group of parameters has one of the two optimizers. The number of applied updates is counted on the device
and indexes the schedule's table of learning rates. A lowered learning rate falls at once and recovers slowly.
Moments are allocated at the start, so that every snapshot has the same layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.config.optim import MomentDtype, OptimConfig, OptimizerKind
from harness.distributed.collectives import all_reduce_sum
from harness.distributed.reduce_scatter import CommStats
from harness.distributed.shards import first_element, local
from harness.distributed.world import World
from harness.optim.adamw import AdamWOptions, ParameterShard, step_fused, step_triton, sum_weights_triton
from harness.optim.muon import MatrixOptions, Muon
from harness.optim.schedule import schedule_table
from harness.optim.stochastic_rounding import RoundingNoise, make_noise
from harness.optim.weight_digest import UpdateSums, WeightDigest, sum_weights

LR_RECOVERY_RATE = 0.02
"""Fraction of the distance to its target by which a lowered learning rate rises with each applied update."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters with the same optimizer, learning-rate multiplier and weight decay."""

    parameters: Mapping[str, nn.Parameter]
    lr_multiplier: float
    weight_decay: float
    optimizer: OptimizerKind = OptimizerKind.adamw


@dataclass(slots=True)
class Update:
    """The optimizer with its schedule and counters."""

    adamw: torch.optim.AdamW
    muon: Muon | None
    """None: all parameters have AdamW."""
    groups: Sequence[Group]
    rates: Tensor
    """Learning rate of each step at multiplier 1."""
    step: Tensor
    """Number of applied updates, on the device."""
    clip_norm: float | None
    clip_value: float | None
    lr_scale: Tensor
    """Factor on every learning rate besides the schedule; moves towards `lr_target`."""
    digest: WeightDigest
    """Digest of this rank's weights after the last update."""
    replicate: int = 1
    """Replicas of each shard; all of them contribute to a sum over ranks."""
    own_kernel: bool = False
    """Whether the Triton kernel runs the update; CUDA only."""
    noise: Sequence[RoundingNoise | None] = ()
    """Of each AdamW group, for moments in bf16; None: its moments are fp32."""
    lr_target: float = 1.0
    """Target of `lr_scale`: it falls at once and rises by `LR_RECOVERY_RATE` per update."""
    fixed_lr: Tensor | None = None
    """Learning rate of the next update at multiplier 1, in a replay; None: that of the schedule times `lr_scale`."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for group in self.groups for name, parameter in group.parameters.items()}

    @property
    def lr(self) -> Tensor:
        """The learning rate of the next update at multiplier 1."""
        return self._scheduled(self.step) * self.lr_scale if self.fixed_lr is None else self.fixed_lr

    @property
    def rates_by_name(self) -> dict[str, Tensor]:
        """The learning rate of the next update, by parameter name."""
        lr = self.lr
        rates = [(group, lr * group.lr_multiplier) for group in self.groups]
        return {name: rate for group, rate in rates for name in group.parameters}

    @property
    def warming(self) -> Tensor:
        """1.0 while the schedule rises, else 0.0."""
        return (self._scheduled(self.step) > self._scheduled(self.step - 1)).to(torch.float64)

    def _scheduled(self, step: Tensor) -> Tensor:
        return torch.take(self.rates, step.clamp(0, len(self.rates) - 1))

    def apply(self, *, skip_mask: Tensor, grad_norm: Tensor, divisor: Tensor) -> Tensor:
        """Apply one update, or none if `skip_mask` is 1; return its learning rate.

        The true gradient is the stored one / `divisor`; its norm before clipping is `grad_norm`. Elements are clipped
        first, then the norm of the result.
        """
        moved = self.lr_scale + (self.lr_target - self.lr_scale) * LR_RECOVERY_RATE * (1 - skip_mask)
        self.lr_scale.copy_(moved.clamp(max=self.lr_target))
        lr = self.lr
        self.set_rates(lr)
        if self.clip_value is not None:
            grad_norm = self._clip_elements(self.clip_value * divisor) / divisor
        excess = 1.0 if self.clip_norm is None else (grad_norm / self.clip_norm).clamp(min=1.0)
        self.step_optimizer(skip_mask=skip_mask, divisor=divisor * excess)
        self.clear_gradients()
        self.step += 1 - skip_mask.to(self.step.dtype)
        return lr

    def set_rates(self, lr: Tensor) -> None:
        """Set the learning rate of each optimizer and group from the one at multiplier 1."""
        for group, options in zip(groups_with(self.groups, OptimizerKind.adamw), self.adamw.param_groups, strict=True):
            options["lr"].copy_(lr * group.lr_multiplier)
        if self.muon is not None:
            self.muon.lr.copy_(lr)

    def seed_noise(self, seed: int) -> None:
        """Set the seed of the noise that rounds moments in bf16; without effect on fp32."""
        groups = groups_with(self.groups, OptimizerKind.adamw)
        self.noise = [
            None if noise is None else group_noise(group, seed=seed, device=self.step.device)
            for group, noise in zip(groups, self.noise, strict=True)
        ]

    def clear_gradients(self) -> None:
        """Free the gradients of all parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _clip_elements(self, limit: Tensor) -> Tensor:
        """Clamp every stored gradient element to +-`limit`; returns the global norm of the result.

        Costs one more pass over the gradients and one more all-reduce a step.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.step.device)
        for parameter in self.parameters.values():
            assert parameter.grad is not None
            gradient = local(parameter.grad).clamp_(-limit, limit)
            squares += gradient.square().sum()
        return (all_reduce_sum(squares) / self.replicate).sqrt().to(limit.dtype)

    @torch.no_grad()
    def step_optimizer(self, *, skip_mask: Tensor, divisor: Tensor) -> None:
        """Run AdamW and Muon on this rank's local shards: `AdamW.step` would send every list through DTensor's
        dispatch. With Muon it is collective."""
        step = step_triton if self.own_kernel else step_fused
        sums = []
        for options, noise in zip(self.adamw.param_groups, self.noise, strict=True):
            beta1, beta2 = options["betas"]
            group_options = AdamWOptions(options["lr"], options["weight_decay"], beta1, beta2, options["eps"])
            shards = [self._shard(parameter) for parameter in options["params"]]
            sums.append(step(shards, group_options, skip_mask=skip_mask, divisor=divisor, noise=noise))
        if self.muon is not None:
            sums.append(self.muon.step(skip_mask=skip_mask, divisor=divisor))
        self.digest.on_update(UpdateSums.combine(sums))

    @torch.no_grad()
    def measure_digest(self) -> None:
        """Take the digest of weights that were not written by an update: initialized, loaded or restored."""
        measure = sum_weights_triton if self.own_kernel else sum_weights
        adamw_groups = groups_with(self.groups, OptimizerKind.adamw)
        groups = [[local(parameter) for parameter in group.parameters.values()] for group in adamw_groups]
        if self.muon is not None:  # in one launch, as in the update
            groups.append([local(parameter) for parameter in self.muon.parameters.values()])
            self.muon.on_restore()
        self.digest.on_restore(UpdateSums.combine([measure(weights) for weights in groups]))

    def _shard(self, parameter: nn.Parameter) -> ParameterShard:
        state = self.adamw.state[parameter]
        assert parameter.grad is not None
        return ParameterShard(
            parameter=local(parameter),
            gradient=local(parameter.grad),
            first=local(state["exp_avg"]),
            second=local(state["exp_avg_sq"]),
            step=state["step"],
        )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Moments and step counter of each parameter, by parameter name; with Muon only exp_avg, its momentum."""
        momenta = {} if self.muon is None else self.muon.momenta
        return {
            name: {"exp_avg": momenta[name]} if name in momenta else self.adamw.state[parameter]
            for name, parameter in self.parameters.items()
        }


def groups_with(groups: Sequence[Group], optimizer: OptimizerKind) -> list[Group]:
    """The groups that have this optimizer."""
    return [group for group in groups if group.optimizer is optimizer]


def group_noise(group: Group, *, seed: int, device: torch.device) -> RoundingNoise:
    """The noise that rounds this rank's moments of a group."""
    begins = [first_element(parameter) for parameter in group.parameters.values()]
    return make_noise(seed, list(group.parameters), begins, device)


def build_update(
    groups: Sequence[Group],
    *,
    cfg: OptimConfig,
    num_steps: int,
    device: torch.device,
    replicate: int = 1,
    own_kernel: bool = False,
    world: World | None = None,
    comm_stats: CommStats | None = None,
) -> Update:
    """AdamW and Muon over their groups, with their moments allocated. `world`: needed if matrices with Muon are
    sharded. Noise that rounds moments in bf16 has seed 0 until `seed_noise`."""
    adamw_groups, muon_groups = (groups_with(groups, kind) for kind in (OptimizerKind.adamw, OptimizerKind.muon))
    options = [
        {
            "params": list(group.parameters.values()),
            "lr": torch.zeros((), dtype=torch.float32, device=device),
            "weight_decay": group.weight_decay,
        }
        for group in adamw_groups
    ]
    adamw = torch.optim.AdamW(options, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)
    is_rounded = cfg.moment_dtype is MomentDtype.bf16
    dtype = torch.bfloat16 if is_rounded else torch.float32
    for group in adamw_groups:
        for parameter in group.parameters.values():
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
            }
    muon = None
    if muon_groups:
        muon = Muon(
            {name: parameter for group in muon_groups for name, parameter in group.parameters.items()},
            [MatrixOptions(group.lr_multiplier, group.weight_decay) for group in muon_groups for _ in group.parameters],
            cfg=cfg.muon,
            device=device,
            world=world,
            comm_stats=comm_stats,
            own_kernel=own_kernel,
        )
    rates = torch.from_numpy(schedule_table(cfg, num_steps=num_steps)) * cfg.lr
    update = Update(
        adamw=adamw,
        muon=muon,
        groups=groups,
        rates=rates.to(torch.float32).to(device),
        step=torch.zeros((), dtype=torch.int64, device=device),
        clip_norm=cfg.clip_norm,
        clip_value=cfg.clip_value,
        lr_scale=torch.ones((), dtype=torch.float32, device=device),
        digest=WeightDigest.start(device),
        replicate=replicate,
        own_kernel=own_kernel,
        noise=[group_noise(group, seed=0, device=device) if is_rounded else None for group in adamw_groups],
    )
    update.measure_digest()
    return update
