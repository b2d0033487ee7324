"""Config section `sentinel`: detector thresholds, policy limits and budgets."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from harness.config.errors import require

MOST_LAG = 10_000
"""Every step of the lag has a buffer of its own in host memory."""
MOST_HELD_OUT_ROWS = 100_000
"""Their places in the held-out data are computed at once."""


@dataclass(slots=True, kw_only=True)
class DetectConfig:
    """Thresholds of the gate and the detectors, which share one baseline. A row is one logged record: one step during
    training. A spread is one robust standard deviation of the noise."""

    level_rows: int
    """Rows averaged in the level of loss and gradient norm."""
    memory_rows: int
    """Time constant of the slow level, in rows: a loss that returns to where it was within them is no spike."""
    spread_rows: int
    """Rows averaged in the spread (standard deviation of the noise)."""
    warmup_rows: int
    """Rows until the bounds reach their final width; wider before."""
    warmup_widening: float
    """Factor on the width of the bounds while the learning rate rises; at least 1."""
    gate_sigmas: float
    """The gate rejects a loss or gradient norm only if it is this many spreads above its level. Heavy-tailed noise
    widens the spread."""
    gate_loss_factor: float
    """The gate rejects no loss below this multiple of its level."""
    gate_grad_factor: float
    """The gate rejects no gradient norm by itself below this multiple of its level."""
    gate_loss_cap: float
    """The gate rejects every loss above this multiple of its level, whatever the noise."""
    gate_grad_cap: float
    """The gate rejects every gradient norm above this multiple of its level, whatever the noise."""
    joint_sigmas: float
    """Spreads from which the gate rejects if loss and gradient norm are both that far above their levels."""
    joint_grad_factor: float
    """Smallest multiple of its level at which a gradient norm counts for the joint rule of `joint_sigmas`."""
    spike_sigmas: float
    """Spreads, summed over neighbouring rows above `slack_sigmas` each, that make a loss spike."""
    slack_sigmas: float
    """Spreads above the level that are free in each row; only the rest counts for a spike."""
    row_sigmas: float
    """Spreads that one row counts at most for a spike. Below `spike_sigmas` + `slack_sigmas` a spike takes two rows."""
    lone_sigmas: float
    """Spreads from which one row is a spike by itself, if rows are logged several steps apart."""
    spike_forgetting: float
    """Share of the sum that decays with each row."""
    grad_spike_factor: float
    """Multiple of its level from which a gradient norm is a spike."""
    recovered_rows: int
    """Normal rows that end a spike and re-arm its detector; in steps if rows are sparser."""
    lingering_rows: int
    """Half the number of rows after which `harness judge` closes an incident whose loss stays high and no longer
    falls."""
    divergence_rows: int
    """Rows over which a rising loss is a divergence."""
    planned_widening: float = 2.0
    """Factor on the bounds of the gate within the window of a planned change; at least 1. The caps stay."""
    fp8_underflow: float
    """Share of the values of a layer group that underflow to zero in fp8, from which fp8_range is raised."""
    fp8_saturated: float
    """Share of the tensors with values at twice the range of fp8 or beyond, from which fp8_range is raised."""
    logit_bound: float = 100.0
    """Attention logit whose approach raises a precursor; also the threshold of the QK-clip that answers it."""

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "level_rows": 2,
            "memory_rows": 2,
            "spread_rows": 2,
            "warmup_rows": 1,
            "warmup_widening": 1.0,
            "planned_widening": 1.0,
            "gate_loss_factor": 1.0,
            "gate_grad_factor": 1.0,
            "joint_grad_factor": 1.0,
            "gate_loss_cap": self.gate_loss_factor,
            "gate_grad_cap": self.gate_grad_factor,
            "grad_spike_factor": 1.0,
            "recovered_rows": 1,
            "lingering_rows": 1,
            "divergence_rows": 10,
            "slack_sigmas": 0.0,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            require(value >= minimum, f"sentinel.detect.{name}", f"must be at least {minimum:g}, got {value}")
        for name in ("gate_sigmas", "joint_sigmas", "spike_sigmas", "row_sigmas", "lone_sigmas", "logit_bound"):
            require(getattr(self, name) > 0, f"sentinel.detect.{name}", f"must be positive, got {getattr(self, name)}")
        valid = 0 <= self.spike_forgetting < 1
        require(valid, "sentinel.detect.spike_forgetting", f"must be in 0 .. 1, got {self.spike_forgetting}")
        for name in ("fp8_underflow", "fp8_saturated"):
            share = getattr(self, name)
            require(0 < share <= 1, f"sentinel.detect.{name}", f"must be above 0 and at most 1, got {share}")


@dataclass(slots=True, kw_only=True)
class BudgetConfig:
    per_window: int
    """Actions allowed within sentinel.policy.window_steps of net progress."""
    per_run: int
    """Actions allowed in the whole run."""


@dataclass(slots=True, kw_only=True)
class BudgetsConfig:
    """Limits per kind of action. Without budget for a skip or a rewind the policy rolls back; without budget for a
    rollback it halts; a check, trial, cool or swap without budget is left out; precision without budget lasts to the
    end of the run."""

    skip: BudgetConfig
    rewind: BudgetConfig
    rollback: BudgetConfig
    cool: BudgetConfig
    swap: BudgetConfig
    precision: BudgetConfig
    check: BudgetConfig = field(default_factory=lambda: BudgetConfig(per_window=20, per_run=1000))
    trial: BudgetConfig = field(default_factory=lambda: BudgetConfig(per_window=4, per_run=40))

    def __post_init__(self) -> None:
        for kind in fields(self):
            for name in ("per_window", "per_run"):
                value = getattr(getattr(self, kind.name), name)
                key = f"sentinel.policy.budgets.{kind.name}.{name}"
                require(value >= 0, key, f"must be 0 (never) or more, got {value}")


class AllowedActions(StrEnum):
    all = "all"
    nonfinite_only = "nonfinite_only"


@dataclass(slots=True, kw_only=True)
class PolicyConfig:
    actions: AllowedActions = AllowedActions.all
    """all: every action within its budget. nonfinite_only: skip the batch of a non-finite update, and only watch
    everything else; findings and incidents are logged as usual. The gate has bounds of its own (`sentinel.detect`)."""
    watch_iterations: int
    """Iterations until a loss spike must have recovered by itself. Prolonged each time that it lost half of its height
    since the last time, or a quarter of its peak and still falls."""
    patience_iterations: int
    """Iterations that a loss spike may take to begin to fall, from its peak on, and to fall further each time; also how
    long a warning sign is watched."""
    accept_rise_nats: float
    """Largest lasting rise of the loss that is accepted as new data, if it never overshot and has no known cause."""
    held_out_tolerance: float = 0.05
    """Share of the expected held-out loss. At an incident a held-out loss up to this far above it means that the state
    is healthy and the data changed; above that the state is damaged."""
    refused_in_row: int
    """Rejected updates in a row, of as many batches, that show that the state is damaged and not a batch. As many in
    one incident, in a row or not, also lead to a check of the held-out loss."""
    neighbours: int
    """Batches on either side of the blamed ones that the second rewind of an incident excludes too."""
    rollback_margin_steps: int
    """Steps that a checkpoint should precede the onset by; if there is none so old, any before the onset is used."""
    rollback_window_batches: int
    """Batches around the onset that a rollback excludes."""
    region_steps: int
    """Findings within this many steps of an incident belong to it."""
    clean_steps: int
    """Steps without a finding after which an incident is closed; the next one starts at the first rung."""
    window_steps: int
    """Length of the budget window in steps of net progress; retrained steps are no progress."""
    recur_after: int
    """Rewinds and rollbacks in one window after which a cure follows: swap, precision or cool."""
    swap_after: int
    """Bad batches in a row that must share a source before it is switched off."""
    cool_factor: float
    """Factor on the learning rate for each cooling."""
    min_lr_scale: float
    """The learning rate is never scaled below this share."""
    cool_steps: int
    """Clean steps of net progress after which one cooling is undone."""
    fall_back_precision: bool
    """Whether an fp8 run computes in bf16 for a while if fp8 underflows or saturates."""
    precision_iterations: int
    """Iterations of the first bf16 window; each further window is twice as long."""
    trials: int = 0
    """Remedies that are tried at most where an incident began, after a restore: each trains on the same batches from
    the same state, and the held-out loss decides. The first is to continue as the ladder chose; the others follow only
    if it fails. 0: the ladder's choice is not tried."""
    trial_steps: int = 10
    """Steps that each remedy of a trial trains."""
    budgets: BudgetsConfig

    def __post_init__(self) -> None:
        positive = ("watch_iterations", "patience_iterations", "refused_in_row", "region_steps", "clean_steps")
        for name in (
            *positive,
            "window_steps",
            "recur_after",
            "swap_after",
            "cool_steps",
            "precision_iterations",
            "trial_steps",
        ):
            value = getattr(self, name)
            require(value >= 1, f"sentinel.policy.{name}", f"must be at least 1, got {value}")
        not_negative = ("neighbours", "rollback_margin_steps", "rollback_window_batches", "accept_rise_nats")
        for name in (*not_negative, "held_out_tolerance", "trials"):
            value = getattr(self, name)
            require(value >= 0, f"sentinel.policy.{name}", f"must be 0 or more, got {value}")
        message = f"must be 0 (off) or at least 2 (the ladder's choice and another remedy), got {self.trials}"
        require(self.trials != 1, "sentinel.policy.trials", message)
        factor, least = self.cool_factor, self.min_lr_scale
        require(0 < factor < 1, "sentinel.policy.cool_factor", f"must be between 0 and 1, got {factor}")
        require(0 < least <= 1, "sentinel.policy.min_lr_scale", f"must be above 0 and at most 1, got {least}")


@dataclass(slots=True, kw_only=True)
class SdcConfig:
    """Silent data corruption: a micro-batch is computed twice and compared bit by bit."""

    every: int = 128
    """Steps between two checks; 0: never. A check costs the forward and backward pass of one micro-batch. On a GPU it
    needs run.deterministic=true; otherwise there is no check, and the start says so."""
    across_ranks: bool = True
    """Whether every second check compares a rank with another one, which finds errors that a rank repeats. Set it to
    false if the ranks have different hardware, which may round differently."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "sentinel.sdc.every", f"must be 0 (never) or more, got {self.every}")


@dataclass(slots=True, kw_only=True)
class SentinelConfig:
    lag: int
    """Steps between an iteration and the reading of its report by the host; 0 waits for every step."""
    probe_every: int
    """Steps between probes of the costlier signals: norms of weights, moments and activations."""
    halt_after_refused: int
    """Rejected updates in a row after which the run halts (exit code 3), whatever the policy does."""
    held_out_rows: int = 16
    """Held-out sequences on which a check measures the loss, always the same ones; rounded up to whole micro-batches on
    every rank. 0: no check, an incident goes straight to the restore."""
    planned_batches: int = 50
    """Batches (steps, for the schedule) after a planned change within which the bounds of the gate are wider and the
    first rejected update leads to a check; 0: planned changes are treated like any other."""
    sdc: SdcConfig = field(default_factory=SdcConfig)
    policy: PolicyConfig
    detect: DetectConfig

    def __post_init__(self) -> None:
        require(0 <= self.lag <= MOST_LAG, "sentinel.lag", f"must be from 0 to {MOST_LAG:,}, got {self.lag:,}")
        message = f"must be from 0 to {MOST_HELD_OUT_ROWS:,}, got {self.held_out_rows:,}"
        require(0 <= self.held_out_rows <= MOST_HELD_OUT_ROWS, "sentinel.held_out_rows", message)
        valid = self.planned_batches >= 0
        require(valid, "sentinel.planned_batches", f"must be 0 or more, got {self.planned_batches}")
        for name in ("probe_every", "halt_after_refused"):
            require(getattr(self, name) >= 1, f"sentinel.{name}", f"must be at least 1, got {getattr(self, name)}")
