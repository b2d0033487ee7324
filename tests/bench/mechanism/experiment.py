"""The study: does a burst of rare tokens do more damage if Adam's second moment adapts slowly?

Why: the harness recommends beta2 0.95, clipping at 1 and weight decay 0.1, as in PaLM and Llama: a batch of rare tokens
gives a large gradient, a stale second moment does not scale the update down, and the loss of the next batches rises.
This experiment tests the recommendation.
How: every combination of beta2, clip and weight decay is trained twice from the same seed on the same batches, once
with one batch made of the rarest tokens. The effect of the burst is the difference between the two runs, batch by
batch. Several seeds give the spread.
Left out: large models. This one is small enough to be trained 72 times in minutes, and may not transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import NamedTuple, final

from harness.core.events import StepRecord
from harness.faults.fault_plan import Fault, FaultKind, FaultPlan

BURST_AT = 200
"""Batch index of the burst; also the number of iterations before it, because no batch is skipped."""
NUM_AFTER = 50
"""Steps after the burst over which the damage is summed."""
NUM_BEFORE = 20
"""Steps before the burst that give the usual values."""


class Cell(NamedTuple):
    """One combination of the three settings."""

    beta2: float
    clip_norm: float | None
    weight_decay: float

    @property
    def overrides(self) -> list[str]:
        clip = "null" if self.clip_norm is None else f"{self.clip_norm:g}"
        return [
            f"optim.beta2={self.beta2:g}",
            f"optim.clip_norm={clip}",
            f"optim.weight_decay={self.weight_decay:g}",
        ]

    @property
    def name(self) -> str:
        return ",".join(override.removeprefix("optim.") for override in self.overrides)


CELLS = [Cell(*choice) for choice in product((0.95, 0.999), (None, 1.0, 0.5), (0.1, 0.01))]


def burst_plan(seed: int, *, at: int = BURST_AT) -> FaultPlan:
    """The fault plan: one batch made of the rarest tokens."""
    return FaultPlan(seed=seed, faults=[Fault(kind=FaultKind.poisoned_batch, at=at)])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Effect of the burst on one run, compared with the same run without it."""

    burst_loss: float
    grad_factor: float
    """Gradient norm of the burst before clipping, over the usual one."""
    moment_factor: float
    """Largest norm of Adam's second moment within `NUM_AFTER` steps, over the usual one."""
    update_factor: float
    """Largest update norm relative to the weight norm within `NUM_AFTER` steps, over the usual one."""
    peak_gap: float
    """Largest difference to the clean run's loss on a batch after the burst, in nats."""
    damage: float
    """Sum of the differences over `NUM_AFTER` steps, in nats."""
    last_gap: float
    """Mean of the last `NUM_BEFORE` differences."""


def measure_effect(burst: Sequence[StepRecord], clean: Sequence[StepRecord], *, at: int = BURST_AT) -> Effect:
    """Compare two runs that differ in one batch; each has one record per iteration."""
    assert all(a.cursor == b.cursor for a, b in zip(burst, clean, strict=True)), "no batch was skipped or undone"
    usual = clean[at - NUM_BEFORE : at]
    after = slice(at + 1, at + 1 + NUM_AFTER)
    gaps = [a.loss - b.loss for a, b in zip(burst[after], clean[after], strict=True)]
    soon = burst[at : after.stop]
    return Effect(
        burst_loss=burst[at].loss,
        grad_factor=burst[at].grad_norm / mean(record.grad_norm for record in usual),
        moment_factor=max(_probed(record.v_norm) for record in soon) / mean(_probed(record.v_norm) for record in usual),
        update_factor=max(_probed(record.update_ratio) for record in soon)
        / mean(_probed(record.update_ratio) for record in usual),
        peak_gap=max(gaps),
        damage=sum(gaps),
        last_gap=mean(gaps[-NUM_BEFORE:]),
    )


def _probed(value: float | None) -> float:
    assert value is not None, "every iteration is probed"
    return value


COLUMNS = {
    "grad_factor": "gradient norm",
    "moment_factor": "second moment",
    "update_factor": "update size",
    "peak_gap": "worst loss gap (nats)",
    "damage": f"damage over {NUM_AFTER} steps (nats)",
}


def effects_table(effects: dict[Cell, list[Effect]]) -> str:
    """Markdown table: one row for each combination, mean over the seeds with their range in brackets."""
    head = ["beta2", "clip", "weight decay", *COLUMNS.values()]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for cell, of_seeds in effects.items():
        clip = "off" if cell.clip_norm is None else f"{cell.clip_norm:g}"
        values = [_spread([getattr(effect, column) for effect in of_seeds], column) for column in COLUMNS]
        lines.append(f"| {cell.beta2:g} | {clip} | {cell.weight_decay:g} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float], column: str) -> str:
    unit = "x" if column.endswith("factor") else ""
    number = ".1f" if unit else ".2f"
    return f"{mean(values):{number}}{unit} ({min(values):{number}} to {max(values):{number}})"


class Question(NamedTuple):
    """The effect of changing one setting, all else equal."""

    text: str
    other: Callable[[Cell], Cell | None]
    """The combination to compare with; None: the question does not apply."""


QUESTIONS = (
    Question(
        "beta2 0.999 instead of 0.95, not clipped",
        lambda cell: cell._replace(beta2=0.95) if cell.beta2 == 0.999 and cell.clip_norm is None else None,
    ),
    Question(
        "beta2 0.999 instead of 0.95, clipped",
        lambda cell: cell._replace(beta2=0.95) if cell.beta2 == 0.999 and cell.clip_norm is not None else None,
    ),
    Question("clip at 1 instead of none", lambda cell: cell._replace(clip_norm=None) if cell.clip_norm == 1 else None),
    Question("clip at 0.5 instead of 1", lambda cell: cell._replace(clip_norm=1.0) if cell.clip_norm == 0.5 else None),
    Question(
        "weight decay 0.01 instead of 0.1",
        lambda cell: cell._replace(weight_decay=0.1) if cell.weight_decay == 0.01 else None,
    ),
)


def answer_questions(effects: dict[Cell, list[Effect]]) -> list[str]:
    """Mean damage before and after each change, and in how many pairs with equal seeds it grew."""
    lines = []
    for question in QUESTIONS:
        pairs = [
            (then.damage, now.damage)
            for cell in effects
            if (other := question.other(cell)) is not None
            for then, now in zip(effects[other], effects[cell], strict=True)
        ]
        num_more = sum(now > then for then, now in pairs)
        before, after = mean(then for then, _ in pairs), mean(now for _, now in pairs)
        lines.append(
            f"{question.text}: mean damage {before:.2f} -> {after:.2f} nats, more in {num_more} of {len(pairs)} pairs"
        )
    return lines
