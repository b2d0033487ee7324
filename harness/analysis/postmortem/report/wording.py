"""How the numbers of an incident are put into words, alike in Markdown, HTML and on the terminal."""

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
    None: "none: refused or cured before one could show, or the loss was not touched",
}
FILES = {panel: f"panel-{panel.value:02}-{panel.name}.png" for panel in Panel}
TITLES = {
    Panel.loss: "loss",
    Panel.rate: "learning rate",
    Panel.gradient: "gradient norm before clipping, and the gate's bound",
    Panel.activations: "activations by layer",
    Panel.moments: "Adam's second moment, and gradient against it",
    Panel.weights: "norm of the weights, and of updates against it",
    Panel.token_losses: "losses of the tokens of the guilty batch",
    Panel.tokens: "tokens of the guilty batch",
    Panel.ranks: "each rank: gradient norm before the reduction, step time",
    Panel.scale: "loss scale, or how the numbers fit into fp8",
    Panel.throughput: "throughput",
}


def number(value: float | None, digits: int = 4) -> str:
    """A number as people read it."""
    if value is None:
        return NOT_MEASURED
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value).replace("nan", "NaN").replace("inf", "Inf")


def when(time_s: float) -> str:
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return NOT_MEASURED


def in_time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def action_words(evidence: Evidence) -> list[str]:
    """What was decided, and what came of it, one line each; alike ones in a row are counted."""
    lines: list[str] = []
    outcomes = list(evidence.outcomes)
    for action in evidence.actions:
        outcome = next(
            (each for each in outcomes if each.kind is action.kind and each.iteration >= action.iteration), None
        )
        if outcome is not None:
            outcomes.remove(outcome)
        lines.append(_action(action, outcome))
    if len(lines) > MOST_LINES:
        kept = MOST_LINES // 2
        lines = [*lines[:kept], f"{len(lines) - 2 * kept} more, all in evidence.json", *lines[-kept:]]
    return lines


def action_counts(evidence: Evidence) -> str:
    """What was done, in brief."""
    counts = Counter(str(action.kind) for action in evidence.actions if not action.in_fp8)
    return ", ".join(f"{kind} ({count} times)" if count > 1 else kind for kind, count in counts.items())


def _action(action: Action, outcome: Outcome | None) -> str:
    words = str(action.kind)
    if len(action.exclude) == 2:
        first, last = action.exclude
        words += f", batch {first} excluded" if first == last else f", batches {first} to {last} excluded"
    if action.lr_scale is not None:
        words += f", learning rate times {action.lr_scale:g}"
    if action.source is not None:
        words += f", source {action.source} off"
    if action.in_fp8 is not None:
        until = "" if action.until is None else f" until iteration {action.until}"
        words += ", fp8 again" if action.in_fp8 else f", bf16{until or ' to the end'}"
    if action.give_back:
        ranges = [f"{first}" if first == last else f"{first} to {last}" for first, last in action.give_back]
        words += f", batches {', '.join(ranges)} given back"
    if outcome is not None and outcome.held_out_loss is not None:
        words += f", held-out loss {number(outcome.held_out_loss)}; a healthy state has {number(action.level)}"
    if outcome is not None and not outcome.succeeded:
        words += ", failed"
    elif outcome is not None and outcome.target:
        words += f", back to {outcome.target}: {outcome.steps_lost} steps undone in {in_time(outcome.seconds)}"
    return f"{words} (iteration {action.iteration})"


def cost_words(evidence: Evidence) -> str:
    """Steps, tokens, time and money."""
    cost = evidence.cost
    parts = [(cost.undone_steps, "undone"), (cost.refused_steps, "refused"), (cost.raised_steps, "with a raised loss")]
    split = ", ".join(f"{count} {what}" for count, what in parts if count)
    price = "no price set" if cost.money is None else f"{cost.money:,.2f} at cluster.price_per_gpu_hour"
    steps = f"{cost.steps} step{'s' if cost.steps != 1 else ''}{f' ({split})' if split else ''}"
    return f"{steps}, {cost.tokens:,} tokens, {in_time(cost.seconds)}, {cost.gpu_hours:.3g} GPU hours, {price}"


def token_words(batch: GuiltyBatch) -> list[str]:
    """Each rare token with its text and its counts."""
    return [
        f"{rare.token}{f' `{printable(rare.text)}`' if rare.text else ''} x{rare.num_in_batch}"
        + ("" if rare.num_in_corpus is None else f" of {rare.num_in_corpus} in the corpus")
        for rare in batch.rarest
    ]


def printable(text: str) -> str:
    """Data on one line: no control character, no end of the code it stands in."""
    return "".join(letter if letter.isprintable() else " " for letter in text).replace("`", "'")


def panel_words(panel: Panel) -> str:
    return f"panel {panel.value}"


def listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names)) or "none named"
