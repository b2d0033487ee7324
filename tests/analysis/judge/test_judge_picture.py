"""The picture of a judged log."""

from __future__ import annotations

import io
import math
from itertools import pairwise

import numpy as np
import pytest

from harness.analysis.judge.judge_picture import Trace, judged_figure


@pytest.mark.parametrize(("first", "is_whole"), [(5.0, True), (60.0, False)])
def test_first_losses_are_in_the_picture_or_it_says_that_they_are_not(first: float, is_whole: bool) -> None:
    trace = Trace()
    for step in range(100):
        trace.add(step, first if step < 5 else 3.0 - step / 100)
    (axes,) = judged_figure(trace, [], title="log").axes
    assert bool(axes.get_ylim()[1] > first) is is_whole
    assert axes.get_xlabel() == ("step" if is_whole else "step (the first losses, up to 60, are above the picture)")
    assert axes.get_ylim()[0] < 2.01, "the lowest loss is in the picture"


def test_the_name_of_a_log_is_no_formula() -> None:
    judged_figure(Trace(), [], title="cost$5_$10.csv").savefig(io.BytesIO())


def test_no_line_leads_back_after_a_rollback() -> None:
    trace = Trace()
    for step in (*range(100), *range(60, 150)):
        trace.add(step, 3.0)
    (axes,) = judged_figure(trace, [], title="log").axes
    lines = [np.asarray(line.get_xydata(), dtype=float).tolist() for line in axes.lines]
    points = max(lines, key=len)
    assert len(points) > 100
    assert all(
        step <= later or math.isnan(loss) or math.isnan(later_loss)
        for (step, loss), (later, later_loss) in pairwise(points)
    )
