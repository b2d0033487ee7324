"""Config section `sentinel`: detector thresholds, policy limits and budgets."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.config.errors import require


@dataclass(slots=True, kw_only=True)
class DetectConfig:
    """What is normal and what is not; the gate and the detectors read the same numbers."""

    level_rows: int
    """Rows that the level of loss and gradient norm is the mean of."""
    memory_rows: int
    """Rows over which the slow level forgets: the loss may come back to where it was in them."""
    spread_rows: int
    """Rows that the spread of the noise is learnt from."""
    warmup_rows: int
    """Rows until the bounds are as narrow as they get."""
    warmup_widening: float
    """What bounds are widened by while the learning rate rises; at least 1."""
    gate_sigmas: float
    """Spreads above the level from which the gate refuses; heavy noise counts in its own measure."""
    gate_loss_factor: float
    """The gate refuses no loss below this many times the level."""
    gate_grad_factor: float
    """The gate refuses no gradient norm alone below this many times the level."""
    gate_loss_cap: float
    """The gate refuses a loss of this many times the level, whatever the noise."""
    gate_grad_cap: float
    """The gate refuses a gradient norm of this many times the level, whatever the noise."""
    joint_sigmas: float
    """Spreads from which the gate refuses where loss and gradient norm are both beyond."""
    joint_grad_factor: float
    """Together with the loss, the gate refuses a gradient norm of this many times the level."""
    spike_sigmas: float
    """Spreads, summed over neighbouring rows beyond `slack_sigmas` each, that make a loss spike."""
    slack_sigmas: float
    """Spreads above the level that one row has free before it counts towards a spike."""
    row_sigmas: float
    """Spreads that one row can count at most towards a spike: less than `spike_sigmas` + `slack_sigmas` takes two."""
    lone_sigmas: float
    """Spreads from which one row is a spike by itself where rows are logged several steps apart."""
    spike_forgetting: float
    """Share of the sum that is forgotten with each row."""
    grad_spike_factor: float
    """Times the level from which a gradient norm is a spike."""
    recovered_rows: int
    """Rows back to normal after which an episode is over and its detector armed again; steps where rows are sparser."""
    lingering_rows: int
    """Rows, twice over, after which an incident whose loss has not come back is closed."""
    divergence_rows: int
    """Rows over which a rising trend is a divergence."""
    planned_widening: float = 2.0
    """The gate's bounds on loss and gradient norm are this many times as high within the window of a planned change;
    at least 1. The caps stay."""
    fp8_underflow: float
    """Share of the numbers of a layer group that fp8 makes zero from which its range does not do."""
    fp8_saturated: float
    """Share of the tensors with numbers at twice the range of fp8 or beyond from which it does not do."""

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
        for name in ("gate_sigmas", "joint_sigmas", "spike_sigmas", "row_sigmas", "lone_sigmas"):
            require(getattr(self, name) > 0, f"sentinel.detect.{name}", f"must be positive, got {getattr(self, name)}")
        valid = 0 <= self.spike_forgetting < 1
        require(valid, "sentinel.detect.spike_forgetting", f"must be in 0 .. 1, got {self.spike_forgetting}")
        for name in ("fp8_underflow", "fp8_saturated"):
            share = getattr(self, name)
            require(0 < share <= 1, f"sentinel.detect.{name}", f"must be above 0 and at most 1, got {share}")


@dataclass(slots=True, kw_only=True)
class BudgetConfig:
    per_window: int
    """Within sentinel.policy.window_steps of net progress."""
    per_run: int

    def __post_init__(self) -> None:
        for name in ("per_window", "per_run"):
            value = getattr(self, name)
            require(value >= 0, f"sentinel.policy.budgets.*.{name}", f"must be 0 (never) or more, got {value}")


@dataclass(slots=True, kw_only=True)
class BudgetsConfig:
    skip: BudgetConfig
    rewind: BudgetConfig
    rollback: BudgetConfig
    cool: BudgetConfig
    swap: BudgetConfig
    precision: BudgetConfig
    check: BudgetConfig = field(default_factory=lambda: BudgetConfig(per_window=20, per_run=1000))


@dataclass(slots=True, kw_only=True)
class PolicyConfig:
    watch_iterations: int
    """How long a loss spike may take to recover by itself; it is prolonged while the spike keeps halving."""
    patience_iterations: int
    """How long a loss spike may take to turn, and how long after a sign of trouble the trouble may follow."""
    accept_rise_nats: float
    """Largest lasting step of the loss that is taken for other data, where it never overshot and has no known cause."""
    held_out_tolerance: float = 0.05
    """Share of the expected held-out loss. At an incident a held-out loss up to this far above it means that the state
    is healthy and the data changed; above that the state is damaged."""
    refused_in_row: int
    """Rejected updates in a row, of as many batches, that show that the state is broken and not a batch. So many in one
    incident, in a row or not, also lead to a check of the held-out loss."""
    neighbours: int
    """Batches on either side of the guilty ones that are excluded too where their exclusion alone did not help."""
    rollback_margin_steps: int
    """How long before the onset a checkpoint should be; any before it will do where there is none so old."""
    rollback_window_batches: int
    """Batches around the onset that a rollback excludes."""
    region_steps: int
    """Trouble this near to a place of trouble is the same incident."""
    clean_steps: int
    """Steps past a place of trouble after which its incident is closed and the ladder begins anew."""
    window_steps: int
    """Stretch of net progress that budgets count in; steps that are trained again are no progress."""
    recur_after: int
    """Rewinds and rollbacks in one window after which a cure follows: another source, another precision, a lower lr."""
    swap_after: int
    """Guilty batches in a row that must share a source before it is turned off."""
    cool_factor: float
    """What the learning rate is multiplied with each time."""
    min_lr_scale: float
    """The learning rate is never scaled below this."""
    cool_steps: int
    """Clean steps of net progress after which one cooling is taken back."""
    fall_back_precision: bool
    """Whether a run in fp8 computes in bf16 for a while where the range of fp8 does not do."""
    precision_iterations: int
    """For how long it then does; twice as long each time it must again."""
    budgets: BudgetsConfig

    def __post_init__(self) -> None:
        positive = ("watch_iterations", "patience_iterations", "refused_in_row", "region_steps", "clean_steps")
        for name in (*positive, "window_steps", "recur_after", "swap_after", "cool_steps", "precision_iterations"):
            value = getattr(self, name)
            require(value >= 1, f"sentinel.policy.{name}", f"must be at least 1, got {value}")
        not_negative = ("neighbours", "rollback_margin_steps", "rollback_window_batches", "accept_rise_nats")
        for name in (*not_negative, "held_out_tolerance"):
            value = getattr(self, name)
            require(value >= 0, f"sentinel.policy.{name}", f"must be 0 or more, got {value}")
        factor, least = self.cool_factor, self.min_lr_scale
        require(0 < factor < 1, "sentinel.policy.cool_factor", f"must be between 0 and 1, got {factor}")
        require(0 < least <= 1, "sentinel.policy.min_lr_scale", f"must be above 0 and at most 1, got {least}")


@dataclass(slots=True, kw_only=True)
class SentinelConfig:
    lag: int
    """Steps after which the host reads what the device wrote; 0 waits for every step."""
    probe_every: int
    """Steps between the costlier signals: norms of weights, moments and activations."""
    halt_after_refused: int
    """Updates refused in a row after which the run halts (exit code 3): what is broken will not mend itself."""
    held_out_rows: int = 16
    """Held-out sequences that the check at an incident measures the loss of, always the same ones; rounded up to whole
    micro-batches on every rank. 0: no check, an incident goes straight to the restore."""
    planned_batches: int = 50
    """Batches (steps, for the schedule) after a planned change within which the gate's bounds are wider and the first
    rejected update leads to a check; 0: planned changes are treated like any other."""
    policy: PolicyConfig
    detect: DetectConfig

    def __post_init__(self) -> None:
        require(self.lag >= 0, "sentinel.lag", f"must be 0 or more, got {self.lag}")
        for name in ("held_out_rows", "planned_batches"):
            require(getattr(self, name) >= 0, f"sentinel.{name}", f"must be 0 or more, got {getattr(self, name)}")
        for name in ("probe_every", "halt_after_refused"):
            require(getattr(self, name) >= 1, f"sentinel.{name}", f"must be at least 1, got {getattr(self, name)}")
