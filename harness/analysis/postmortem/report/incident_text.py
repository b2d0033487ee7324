"""Formats numbers, actions and costs of an incident as text, for Markdown, HTML and the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from harness.analysis.postmortem.evidence import Cost, Evidence, IncidentNumbers, Token
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rules.causes import Panel
from harness.core.events import Action, ActionKind, Outcome, TrialMeasured

NOT_MEASURED = "not measured"
NOT_KNOWN = "not known yet"
MOST_LINES = 12
TYPES = {
    1: "1 (recoverable)",
    2: "2 (lingering)",
    3: "3 (divergent)",
    None: "none: no loss spike reached the weights, or it was cured before its type was visible",
}
KIND_TITLES = (
    ("duplicate_batch", "Duplicate batches"),
    ("replica_mismatch", "Replicas that differ"),
    ("corrupting_rank", "Rank that computes wrong numbers"),
    ("corruption", "Silent data corruption"),
    ("data_mismatch", "Ranks that read different data"),
    ("fp8_range", "fp8 range"),
    ("scale_collapse", "Collapse of the loss scale"),
    ("optimizer_reset", "Reset of the optimizer"),
    ("lr_jump", "Jump of the learning rate"),
    ("divergence", "Divergence"),
    ("loss_spike", "Loss spike"),
    ("level_shift", "Lasting rise of the loss"),
    ("grad_spike", "Gradient spike"),
    ("v_stale", "Stale second moment"),
    ("weight_drift", "Drift of the weights"),
    ("precursor", "Early sign"),
    ("rank_outlier", "Rank that differs from the others"),
    ("refusals", "Rejected updates"),
    ("refusal", "Rejected update"),
)
"""Kind of finding -> title of its report; the first that an incident has counts."""
SPIKE_SPREADS = 3.0
FILES = {panel: f"panel-{panel.value:02}-{panel.name}.png" for panel in Panel}
TITLES = {
    Panel.loss: "loss",
    Panel.rate: "learning rate",
    Panel.gradient: "gradient norm before clipping, and the gate's bound",
    Panel.activations: "activation RMS by layer",
    Panel.moments: "norm of Adam's second moment, and gradient relative to it",
    Panel.weights: "weight norm, and update norm relative to it",
    Panel.token_losses: "token losses of the incident's batch",
    Panel.tokens: "tokens of the incident's batch",
    Panel.ranks: "per rank: gradient norm before the reduction, step time",
    Panel.scale: "loss scale, or fp8 underflow and scales",
    Panel.throughput: "throughput",
}

KIND_NAMES = {"refusal": "rejected update", "refusals": "rejected updates"}
"""Kinds whose names differ from those in the log."""


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


def trial_table(evidence: Evidence) -> list[str]:
    """Lines of a table with every remedy that was tried and its numbers; empty if there was no trial."""
    tried = evidence.of(TrialMeasured)
    rows = [
        f"| {trial.iteration} | {trial.remedy} | {trial.steps} | {trial.num_refused} | "
        f"{format_number(trial.held_out_before)} -> {format_number(trial.held_out_loss)} | "
        f"{format_number(trial.grad_norm_before)} -> {format_number(trial.grad_norm)} | "
        f"{', '.join(trial.findings) or 'none'} | {format_duration(trial.seconds)} |"
        for trial in tried
    ]
    head = "| iteration | remedy tried | steps | rejected | held-out loss | gradient norm | findings | time |"
    return [head, "|---|---|---|---|---|---|---|---|", *rows] if rows else []


def _action_line(action: Action, outcome: Outcome | None) -> str:
    text = str(action.kind)
    if action.kind is ActionKind.trial and outcome is not None and outcome.succeeded:
        text += f", {outcome.remedy} won: {outcome.kept_steps} steps kept, {outcome.steps_lost} dropped"
    if len(action.exclude) == 2:
        first, last = action.exclude
        batches = f"batch {first}" if first == last else f"batches {first} to {last}"
        text += f", {batches} {'excluded' if outcome is None or outcome.has_excluded else 'not excluded'}"
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


def kind_names(kinds: Sequence[str]) -> list[str]:
    """Kinds of an incident in words; most of them are the names in the log."""
    return [KIND_NAMES.get(kind, kind) for kind in kinds]


def cost_in_steps(cost: Cost) -> str:
    """Cost in steps, and what became of them."""
    parts = [(cost.undone_steps, "undone"), (cost.refused_steps, "rejected"), (cost.raised_steps, "with a raised loss")]
    split = ", ".join(f"{count} {what}" for count, what in parts if count)
    return f"{cost.steps} step{'s' if cost.steps != 1 else ''}{f' ({split})' if split else ''}"


def cost_text(cost: Cost) -> str:
    """Cost in steps, tokens, time and money."""
    price = "no price set" if cost.money is None else f"{cost.money:,.2f} at cluster.price_per_gpu_hour"
    spent = f"{cost.tokens:,} tokens, {format_duration(cost.seconds)}, {cost.gpu_hours:.3g} GPU hours"
    return f"{cost_in_steps(cost)}, {spent}, {price}"


def token_texts(tokens: Sequence[Token]) -> list[str]:
    """Each rare token with its text and its counts."""
    return [
        f"{rare.token}{f' `{printable(rare.text)}`' if rare.text else ''} x{rare.num_in_batch}"
        + ("" if rare.num_in_corpus is None else f" of {rare.num_in_corpus} in the corpus")
        for rare in tokens
    ]


def printable(text: str) -> str:
    """Data on one line inside a Markdown code span: without control characters and backticks."""
    return "".join(letter if letter.isprintable() else " " for letter in text).replace("`", "'")


def panel_name(panel: Panel | None) -> str:
    return "configuration" if panel is None else f"panel {panel.value}"


def join_names(names: Sequence[object]) -> str:
    return ", ".join(map(str, names)) or "none found"


def title_of(evidence: Evidence, measures: Measures) -> str:
    """What happened, in a few words."""
    if "nonfinite weights" in evidence.kinds():
        return "Non-finite weights"
    for name in ("loss", "grad_norm"):
        if any(not math.isfinite(getattr(record, name)) for record in measures.during):
            return "Non-finite loss" if name == "loss" else "Non-finite gradient"
    known = evidence.kinds()
    title = next((title for kind, title in KIND_TITLES if kind in known), "Incident")
    is_spike = measures.rise is not None and measures.rise > SPIKE_SPREADS
    if is_spike and title.startswith(("Rejected", "Gradient")):
        title = "Loss spike"
    return f"{title}, rejected" if title == "Loss spike" and evidence.numbers.peak_refused else title


def loss_path(numbers: IncidentNumbers) -> str:
    """Loss before, at its peak and fifty steps later, as every report states them."""
    peak = f"{format_number(numbers.peak)}{' (rejected)' if numbers.peak_refused else ''}"
    after = "" if numbers.loss_after_50 is None else f" -> {format_number(numbers.loss_after_50)}"
    return f"{format_number(numbers.level)} -> {peak}{after}"


def recovery_text(numbers: IncidentNumbers) -> str:
    """The recovery loss, or that there was none."""
    if numbers.loss_after_50 is None:
        few = numbers.num_after_peak
        return f"{NOT_MEASURED}: only {few} step{'s' if few != 1 else ''} followed the peak"
    loss = format_number(numbers.loss_after_50)
    return f"did not recover: {loss}" if numbers.has_recovered is False else loss


def resumption_text(numbers: IncidentNumbers) -> str:
    """The step at which the loss was back on its course."""
    if numbers.level is None:
        return NOT_MEASURED
    if numbers.resumed_step is None:
        return f"not within the {numbers.num_after_peak} steps after the peak that the log has"
    after = f"{numbers.resumed_after} step{'s' if numbers.resumed_after != 1 else ''} after the peak"
    return f"at step {numbers.resumed_step}, {after}"
