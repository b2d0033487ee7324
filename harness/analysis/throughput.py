"""The throughput of a whole run: one number, the same in every table that compares runs.

The median over its step records, each of which is a mean over recent iterations: the last one may lie in the pause of
an evaluation or of a save. A live view shows the last one, because it answers another question: how fast is it now.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median


def median_rate(rates: Iterable[float]) -> float | None:
    """Median of the rates of all steps; None if none was measured."""
    measured = [float(rate) for rate in rates if math.isfinite(rate) and rate > 0]
    return median(measured) if measured else None
