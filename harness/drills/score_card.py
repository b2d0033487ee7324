"""Renders score cards for a terminal, as Markdown and as JSON. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence

from harness.drills.score import Bound, BoundStatus, Card, format_value

MARKS = {
    BoundStatus.held: "ok",
    BoundStatus.broken: "BROKEN",
    BoundStatus.unmeasured: "NOT MEASURED",
    BoundStatus.free: "",
}
LABELS = {
    "struck": "fault struck",
    "survived": "survived",
    "exit_code": "exit code",
    "starts": "starts",
    "detected": "detected",
    "latency_steps": "latency, iterations",
    "right_rank": "right rank",
    "right_layer": "right layer",
    "right_action": "right action",
    "steps_lost": "steps lost",
    "tokens_lost": "tokens lost",
    "seconds": "seconds to recover",
    "loss_gap": "loss gap to the twin, nats",
    "identical": "identical to the twin",
    "false_alarms": "false alarms in the twin",
    "excluded": "batches excluded",
    "notice_s": "seconds to notice",
    "restart_s": "seconds from notice to resume",
    "first_update_s": "seconds from fault to first update",
}


def as_text(card: Card) -> str:
    """One drill, for a terminal."""
    rows = [_row(bound) for bound in card.bounds]
    lines = [f"drill {card.scenario}: {card.summary}", *(f"  {line}" for line in align_columns(rows))]
    lines += [f"  remark: {remark}" for remark in card.score.remarks]
    lines.append(f"  {'passed' if card.passed else 'FAILED'}")
    return "\n".join(lines) + "\n"


def as_markdown(card: Card) -> str:
    """One drill as Markdown, stored in its run directory."""
    lines = [
        f"# Drill {card.scenario}: {'passed' if card.passed else 'FAILED'}",
        "",
        f"{card.summary[:1].upper()}{card.summary[1:]}.",
        "",
    ]
    lines += markdown_table(("", "measured", "wanted", "verdict"), [_row(bound) for bound in card.bounds])
    if card.score.remarks:
        lines += ["", "Remarks", "", *(f"- {remark}" for remark in card.score.remarks)]
    return "\n".join(lines) + "\n"


def as_json(card: Card) -> str:
    return json.dumps(card.as_dict(), indent=2) + "\n"


def summary_of_drills(cards: Sequence[Card], skipped: Sequence[tuple[str, str]] = ()) -> str:
    """Several drills, one line each, for a terminal."""
    rows: list[tuple[str, ...]] = [("drill", "", "detected", "latency", "steps lost", "seconds", "broken")]
    for card in cards:
        broken = [
            LABELS[bound.name] for bound in card.bounds if bound.verdict in (BoundStatus.broken, BoundStatus.unmeasured)
        ]
        score = card.score
        numbers = (score.detected, score.latency_steps, score.steps_lost, score.seconds)
        result = "passed" if card.passed else "FAILED"
        rows.append((card.scenario, result, *(format_value(number) for number in numbers), ", ".join(broken)))
    lines = align_columns(rows)
    lines += [f"{name} was skipped: {reason}" for name, reason in skipped]
    num_passed = sum(card.passed for card in cards)
    lines.append(f"{num_passed} of {len(cards)} passed")
    return "\n".join(lines) + "\n"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_cells(head), _cells(["---"] * len(head)), *(_cells(row) for row in rows)]


def _cells(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _row(bound: Bound) -> tuple[str, str, str, str]:
    return LABELS[bound.name], format_value(bound.measured), bound.wanted, MARKS[bound.verdict]
