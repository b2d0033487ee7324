"""What a record says of its batch; whatever does not have the right form says nothing."""

from __future__ import annotations

import math
from typing import Any

from harness.core.events import StepRecord


def entropy(record: StepRecord) -> float | None:
    value = record.batch.get("entropy_nats")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def rare_count(record: StepRecord) -> int | None:
    """How many tokens of the batch are among its rarest ones."""
    counts = [each[1] for each in rarest(record) if isinstance(each[1], int)]
    return sum(counts) if counts else None


def rarest(record: StepRecord) -> list[list[Any]]:
    """Token, how often in the batch, how often in the corpus; only what has that form."""
    listed = record.batch.get("rarest", [])
    return [each for each in listed if isinstance(each, list) and len(each) == 3] if isinstance(listed, list) else []
