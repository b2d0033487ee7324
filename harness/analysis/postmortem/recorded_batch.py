"""Reads batch statistics from a step record: token entropy and rarest tokens. Malformed values count as missing."""

from __future__ import annotations

import math
from typing import Any

from harness.core.events import StepRecord


def entropy(record: StepRecord) -> float | None:
    value = record.batch.get("entropy_nats")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def rare_count(record: StepRecord) -> int | None:
    """Occurrences of the batch's rarest tokens, summed; None if the record has none."""
    counts = [entry[1] for entry in rarest(record) if isinstance(entry[1], int)]
    return sum(counts) if counts else None


def rarest(record: StepRecord) -> list[list[Any]]:
    """Entries of [token, count in the batch, count in the corpus]; malformed entries are dropped."""
    entries = record.batch.get("rarest", [])
    return (
        [entry for entry in entries if isinstance(entry, list) and len(entry) == 3] if isinstance(entries, list) else []
    )
