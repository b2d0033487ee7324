"""The mechanism drill: does a burst of rare tokens hurt more where Adam's second moment forgets slowly?

Why: the harness advises beta2 0.95, clipping at 1 and weight decay 0.1 (PaLM's and Llama's choice), because a rare
batch gives a large gradient, a stale second moment does not damp the step, and the next batches pay for it. Advice
should be seen to hold, or not, where it can be looked at.
How: every combination of beta2, clip and weight decay is trained twice from the same seed on the same batches, once
with one batch of nothing but the rarest tokens. What the burst did is the difference between the two, batch by batch;
the combinations differ in nothing else. Several seeds give the spread.
Left out: that a large model would answer alike. This one is small enough to be trained 72 times in minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import NamedTuple, final

from harness.core.events import StepRecord
from harness.faults.plan import Fault, FaultKind, FaultPlan

BURST_AT = 200
"""Batch index, and the iteration before: nothing was skipped."""
NUM_AFTER = 50
"""Steps over which what the burst did is added up."""
NUM_BEFORE = 20
"""Steps that show what was usual."""


class Cell(NamedTuple):
    """One choice of what the advice is about."""

    beta2: float
    clip_norm: float | None
    weight_decay: float

    @property
    def words(self) -> list[str]:
        clip = "null" if self.clip_norm is None else f"{self.clip_norm:g}"
        return [
            f"optim.beta2={self.beta2:g}",
            f"optim.clip_norm={clip}",
            f"optim.weight_decay={self.weight_decay:g}",
        ]

    @property
    def name(self) -> str:
        return ",".join(word.removeprefix("optim.") for word in self.words)


CELLS = [Cell(*choice) for choice in product((0.95, 0.999), (None, 1.0, 0.5), (0.1, 0.01))]


def plan(seed: int) -> FaultPlan:
    """One batch of the rarest tokens there are."""
    return FaultPlan(seed=seed, faults=[Fault(kind=FaultKind.poisoned_batch, at=BURST_AT)])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What the burst did to one run, against the same run without it."""

    burst_loss: float
    grad_factor: float
    """Gradient norm before clipping in the burst, over the usual one."""
    moment_factor: float
    """Largest norm of Adam's second moment soon after, over the usual one."""
    update_factor: float
    """Largest update soon after, relative to the weights, over the usual one."""
    peak_gap: float
    """Largest loss above the twin's on one of the batches that follow, in nats."""
    damage: float
    """Loss above the twin's, summed over the steps that follow, in nats."""
    last_gap: float
    """Mean of the last of them: what is still there at the end."""


def effect(burst: Sequence[StepRecord], clean: Sequence[StepRecord]) -> Effect:
    """Compare two runs that differ in one batch; one record an iteration each."""
    assert all(a.cursor == b.cursor for a, b in zip(burst, clean, strict=True)), "nothing was skipped or undone"
    usual = clean[BURST_AT - NUM_BEFORE : BURST_AT]
    after = slice(BURST_AT + 1, BURST_AT + 1 + NUM_AFTER)
    gaps = [a.loss - b.loss for a, b in zip(burst[after], clean[after], strict=True)]
    soon = burst[BURST_AT : after.stop]
    return Effect(
        burst_loss=burst[BURST_AT].loss,
        grad_factor=burst[BURST_AT].grad_norm / mean(record.grad_norm for record in usual),
        moment_factor=max(_known(record.v_norm) for record in soon) / mean(_known(record.v_norm) for record in usual),
        update_factor=max(_known(record.update_ratio) for record in soon)
        / mean(_known(record.update_ratio) for record in usual),
        peak_gap=max(gaps),
        damage=sum(gaps),
        last_gap=mean(gaps[-NUM_BEFORE:]),
    )


def _known(value: float | None) -> float:
    assert value is not None, "every iteration is probed"
    return value


COLUMNS = {
    "grad_factor": "gradient norm",
    "moment_factor": "second moment",
    "update_factor": "update size",
    "peak_gap": "worst loss gap (nats)",
    "damage": f"damage over {NUM_AFTER} steps (nats)",
}


def table(effects: dict[Cell, list[Effect]]) -> str:
    """One row a combination, the mean over the seeds and in brackets their range; Markdown."""
    head = ["beta2", "clip", "weight decay", *COLUMNS.values()]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for cell, each in effects.items():
        clip = "off" if cell.clip_norm is None else f"{cell.clip_norm:g}"
        values = [_spread([getattr(one, column) for one in each], column) for column in COLUMNS]
        lines.append(f"| {cell.beta2:g} | {clip} | {cell.weight_decay:g} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float], column: str) -> str:
    unit = "x" if column.endswith("factor") else ""
    number = ".1f" if unit else ".2f"
    return f"{mean(values):{number}}{unit} ({min(values):{number}} to {max(values):{number}})"


class Question(NamedTuple):
    """What does one change do, all else equal?"""

    words: str
    other: Callable[[Cell], Cell | None]
    """What a combination is compared with; None where the question is not about it."""


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


def answers(effects: dict[Cell, list[Effect]]) -> list[str]:
    """Mean damage before and after each change, and in how many pairs of equal seed it grew."""
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
            f"{question.words}: mean damage {before:.2f} -> {after:.2f} nats, more in {num_more} of {len(pairs)} pairs"
        )
    return lines
