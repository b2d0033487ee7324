"""Numbers with their noun, for lines that people read."""

from __future__ import annotations


def pluralize(number: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
