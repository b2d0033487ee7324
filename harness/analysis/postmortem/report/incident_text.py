"""Formats numbers, actions and costs of an incident as text, for Markdown, HTML and the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from harness.analysis.postmortem.evidence import Evidence, GuiltyBatch
from harness.analysis.postmortem.rules.causes import Panel
from harness.core.events import Action, Outcome

NOT_MEASURED = "not measured"
NOT_KNOWN = "not known yet"
MOST_LINES = 12
TYPES = {
    1: "1 (recoverable)",
    2: "2 (lingering)",
    3: "3 (divergent)",
    None: "none: the update was refused, the incident was cured before a type could be determined, or the loss did "
    "not change",
}
FILES = {panel: f"panel-{panel.value:02}-{panel.name}.png" for panel in Panel}
TITLES = {
    Panel.loss: "loss",
    Panel.rate: "learning rate",
    Panel.gradient: "gradient norm before clipping, and the gate's bound",
    Panel.activations: "activation RMS by layer",
    Panel.moments: "norm of Adam's second moment, and gradient relative to it",
    Panel.weights: "weight norm, and update norm relative to it",
    Panel.token_losses: "token losses of the guilty batch",
    Panel.tokens: "tokens of the guilty batch",
    Panel.ranks: "per rank: gradient norm before the reduction, step time",
    Panel.scale: "loss scale, or fp8 underflow and scales",
    Panel.throughput: "throughput",
}


def format_number(value: float | None, digits: int = 4) -> str:
    """A number with `digits` significant digits; NaN and Inf by name."""
    if value is None:
        return NOT_MEASURED
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value).replace("nan", "NaN").replace("inf", "Inf")


def format_time(time_s: float) -> str:
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return NOT_MEASURED


def format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def action_lines(evidence: Evidence) -> list[str]:
    """One line for each action with its outcome; at most about `MOST_LINES`."""
    lines: list[str] = []
    outcomes = list(evidence.outcomes)
    for action in evidence.actions:
        outcome = next(
            (later for later in outcomes if later.kind is action.kind and later.iteration >= action.iteration), None
        )
        if outcome is not None:
            outcomes.remove(outcome)
        lines.append(_action_line(action, outcome))
    if len(lines) > MOST_LINES:
        kept = MOST_LINES // 2
        lines = [*lines[:kept], f"{len(lines) - 2 * kept} more in evidence.json", *lines[-kept:]]
    return lines


def action_counts(evidence: Evidence) -> str:
    """Kinds of actions and how often each was taken."""
    counts = Counter(str(action.kind) for action in evidence.actions if not action.in_fp8)
    return ", ".join(f"{kind} ({count} times)" if count > 1 else kind for kind, count in counts.items())


def _action_line(action: Action, outcome: Outcome | None) -> str:
    text = str(action.kind)
    if len(action.exclude) == 2:
        first, last = action.exclude
        text += f", batch {first} excluded" if first == last else f", batches {first} to {last} excluded"
    if action.lr_scale is not None:
        text += f", learning rate times {action.lr_scale:g}"
    if action.source is not None:
        text += f", source {action.source} off"
    if action.in_fp8 is not None:
        until = "" if action.until is None else f" until iteration {action.until}"
        text += ", fp8 again" if action.in_fp8 else f", bf16{until or ' to the end'}"
    if action.give_back:
        ranges = [f"{first}" if first == last else f"{first} to {last}" for first, last in action.give_back]
        text += f", batches {', '.join(ranges)} no longer excluded"
    if outcome is not None and outcome.held_out_loss is not None:
        text += f", held-out loss {format_number(outcome.held_out_loss)} (expected {format_number(action.level)})"
    if outcome is not None and not outcome.succeeded:
        text += ", failed"
    elif outcome is not None and outcome.target:
        took = format_duration(outcome.seconds)
        text += f", restored {outcome.target}: {outcome.steps_lost} steps undone in {took}"
    return f"{text} (iteration {action.iteration})"


def cost_text(evidence: Evidence) -> str:
    """Cost in steps, tokens, time and money."""
    cost = evidence.cost
    parts = [(cost.undone_steps, "undone"), (cost.refused_steps, "refused"), (cost.raised_steps, "with a raised loss")]
    split = ", ".join(f"{count} {what}" for count, what in parts if count)
    price = "no price set" if cost.money is None else f"{cost.money:,.2f} at cluster.price_per_gpu_hour"
    steps = f"{cost.steps} step{'s' if cost.steps != 1 else ''}{f' ({split})' if split else ''}"
    return f"{steps}, {cost.tokens:,} tokens, {format_duration(cost.seconds)}, {cost.gpu_hours:.3g} GPU hours, {price}"


def token_texts(batch: GuiltyBatch) -> list[str]:
    """Each rare token with its text and its counts."""
    return [
        f"{rare.token}{f' `{printable(rare.text)}`' if rare.text else ''} x{rare.num_in_batch}"
        + ("" if rare.num_in_corpus is None else f" of {rare.num_in_corpus} in the corpus")
        for rare in batch.rarest
    ]


def printable(text: str) -> str:
    """Data on one line inside a Markdown code span: without control characters and backticks."""
    return "".join(letter if letter.isprintable() else " " for letter in text).replace("`", "'")


def panel_name(panel: Panel) -> str:
    return f"panel {panel.value}"


def join_names(names: Sequence[object]) -> str:
    return ", ".join(map(str, names)) or "none found"
