"""A recorded healthy run of the small default raises nothing, however often it was recorded, and hides no damage."""

from __future__ import annotations

import pytest

from harness.core.events import Finding, StepRecord
from harness.sentinel.detect.detectors import Detectors
from tests.sentinel.recorded import load_healthy_run
from tests.sentinel.series import config, kinds

CFG = config()


def watch(rows: list[StepRecord]) -> list[Finding]:
    detectors = Detectors(CFG)
    return [finding for row in rows for finding in detectors.observe(row)]


@pytest.mark.parametrize("every", [1, 2, 5, 10])
def test_a_healthy_run_raises_nothing(every: int) -> None:
    for first in range(min(every, 3)):
        assert watch(load_healthy_run()[first::every]) == []


def test_its_head_nearly_doubles_while_it_learns() -> None:
    """The run holds what once was a false `weight_drift`: a norm that grows much within 200 steps of its start."""
    norms = {row.step: row.group_param_norms["head"] for row in load_healthy_run() if row.group_param_norms}
    growth = max(norms[step + 200] / norm for step, norm in norms.items() if step > 100 and step + 200 in norms)
    assert 1.5 < growth < 2.5


@pytest.mark.parametrize("every", [1, 5, 10])
def test_damage_to_it_is_found(every: int) -> None:
    rows = load_healthy_run()
    for row in rows[900:960]:
        row.loss, row.grad_norm = 1.8 * row.loss, 3.0 * row.grad_norm
    for row in rows[1200:]:
        if row.group_param_norms:
            row.group_param_norms["head"] *= 3.0
    found = watch(rows[::every])
    assert kinds(found) == ["loss_spike", "weight_drift"]
    assert 900 <= found[0].step <= 901 + 2 * every
    assert found[1].groups == ["head"]
