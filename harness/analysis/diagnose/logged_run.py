"""What the decision tree reads: the records of a run, its other events, and what its directory holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from harness.checkpoint.catalog import Checkpoint, Health
from harness.core.events import Action, ActionKind, EvalRecord, Event, HeldOutMeasured, RunEnded, RunStarted, StepRecord

HALF_FORMATS = ("fp16",)
"""Formats whose range ends at 65504, so that they need a loss scale."""
MIXED_FORMATS = ("fp16", "bf16", "fp8")
ACCEPTED_ABOVE = 1.1
"""A single loss may be this many times an accepted level, which is a median."""
SCALED_BY = 2.0
"""Factor by which a fix changes the learning rate or the weight decay."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    records: Sequence[StepRecord]
    settings: dict[str, Any] = field(default_factory=dict)
    """The configuration with dotted keys; empty for the log of another program."""
    events: Sequence[Event] = ()
    """The other events of the log, in order."""
    checkpoints: Sequence[Checkpoint] | None = None
    """Checkpoints on disk; None: not known, as for the log of another program."""
    replays: Sequence[dict[str, Any]] = ()
    """Results of `harness replay` in the run directory."""

    @property
    def precision(self) -> str | None:
        """Number format of the matmuls; None: not in the log."""
        kind = self.settings.get("precision.kind")
        return None if kind is None else str(kind)

    @property
    def loss_scales(self) -> list[float]:
        return [record.loss_scale for record in self.records if record.loss_scale is not None]

    @property
    def scales_loss(self) -> bool:
        """Whether overflows of the gradient are expected, because a loss scale is searched for."""
        return self.precision in HALF_FORMATS or (self.precision is None and bool(self.loss_scales))

    @property
    def has_gradients(self) -> bool:
        """Whether the log has gradient norms; those of other programs may not."""
        return any(record.grad_norm != 0 for record in self.records)

    @property
    def _last_start_or_end(self) -> RunStarted | RunEnded | None:
        return next((event for event in reversed(self.events) if isinstance(event, RunEnded | RunStarted)), None)

    @property
    def is_running(self) -> bool:
        return isinstance(self._last_start_or_end, RunStarted)

    @property
    def is_finished(self) -> bool:
        """Whether all its steps are done, so that it cannot be continued."""
        last, num_steps = self._last_start_or_end, self.setting("train.num_steps")
        return isinstance(last, RunEnded) and num_steps is not None and last.step >= num_steps

    @property
    def evaluations(self) -> list[EvalRecord | HeldOutMeasured]:
        """Losses on held-out data: of the evaluations, or else of the fixed held-out rows."""
        evals: list[EvalRecord | HeldOutMeasured] = [e for e in self.events if isinstance(e, EvalRecord)]
        return evals or [event for event in self.events if isinstance(event, HeldOutMeasured)]

    def setting(self, key: str) -> float | None:
        value = self.settings.get(key)
        return float(value) if isinstance(value, int | float) else None

    def checkpoint_before(self, step: int) -> Checkpoint | None:
        """The newest checkpoint on disk from before a step that is not known to be bad."""
        usable = [c for c in self.checkpoints or () if c.step < step and c.health in (Health.good, Health.candidate)]
        return max(usable, key=lambda checkpoint: (checkpoint.step, checkpoint.generation), default=None)

    def describe_restore(self, checkpoint: Checkpoint | None) -> str:
        """The checkpoint to restore, in words; None: `checkpoint_before` found none."""
        if checkpoint is not None:
            return f"restore {checkpoint.name} (step {checkpoint.step})"
        if self.checkpoints is None:
            return "restore a checkpoint from before it, if there is one"
        return "no checkpoint from before it is on disk: the cost is a full re-train"

    def replay_of(self, iteration: int) -> dict[str, Any] | None:
        return next((found for found in self.replays if found.get("iteration") == iteration), None)

    def replay_arguments(self, iteration: int) -> list[str]:
        """Arguments of `harness replay` for a step; its incident if the step belongs to one."""
        actions = [event for event in self.events if isinstance(event, Action) and event.incident]
        for action in actions:
            if action.onset <= iteration <= action.iteration:
                return ["--incident", str(action.incident)]
        return ["--iteration", str(iteration)]

    def acceptance_of(self, record: StepRecord, *, rows: int) -> Action | None:
        """The action with which the run accepted the loss of a step as that of other data, because the held-out loss
        had not risen: a step of its incident, or one of the `rows` iterations after it with no higher loss."""
        for event in self.events:
            if isinstance(event, Action) and event.kind is ActionKind.accept and event.onset <= record.iteration:
                is_as_high = event.level is not None and record.loss <= ACCEPTED_ABOVE * event.level
                if record.iteration <= event.iteration + (rows if is_as_high else 0):
                    return event
        return None

    def is_expected_overflow(self, record: StepRecord) -> bool:
        """Whether a rejected update belongs to the search for the loss scale."""
        has_overflow = not math.isfinite(record.grad_norm) and math.isfinite(record.loss)
        return self.scales_loss and record.loss_scale is not None and record.refused and has_overflow


def scaled_override(key: str, value: float | None, factor: float) -> list[str]:
    """The override that multiplies a setting; empty if its value is not known."""
    return [] if value is None else [f"{key}={value * factor:g}"]
