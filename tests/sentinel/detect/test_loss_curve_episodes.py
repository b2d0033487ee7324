"""Episodes of loss and gradient findings: when they end, and the effect of a restart or an accepted level."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.core.events import Finding, StepRecord
from harness.sentinel.detect.detectors import Detectors
from tests.sentinel.series import config, kinds, losses, norms, record, records

CFG = config()
SHORT = config(divergence_rows=40)


def found(detectors: Detectors, rows: list[StepRecord]) -> list[Finding]:
    return [finding for row in rows for finding in detectors.observe(row)]


def run(num: int, *, first: int = 500, loss: float = 1.0, norm: float = 1.0, seed: int = 0) -> list[StepRecord]:
    """Rows of the flat part of a run, made higher by a factor; the step is that of the run."""
    values, grad_norms = losses(first + num, seed=seed)[first:], norms(first + num, seed=seed + 1)[first:]
    return [
        record(first + place, loss * value, norm * grad_norm)
        for place, (value, grad_norm) in enumerate(zip(values, grad_norms, strict=True))
    ]


def test_after_steps_went_back_the_new_level_is_not_compared_with_the_old_one() -> None:
    detectors = Detectors(SHORT)
    assert found(detectors, [*run(200), *run(150, first=600, loss=1.1)]) == []


def test_an_accepted_level_is_not_compared_with_the_old_one() -> None:
    detectors = Detectors(SHORT)
    assert found(detectors, run(200)) == []
    detectors.accept_level(loss=3.3)
    assert found(detectors, run(150, first=700, loss=1.1)) == []


def test_a_restart_with_a_row_without_gradient_keeps_their_level() -> None:
    detectors = Detectors(CFG)
    assert found(detectors, run(200)) == []
    rows = run(30, first=600)
    rows[0].grad_norm = 0.0
    assert found(detectors, rows) == []
    assert kinds(found(detectors, run(1, first=630, norm=15.0))) == ["grad_spike"]


def test_a_shift_is_raised_again_only_after_blocks_without_one() -> None:
    """Eight of them, of five rows each; those that hold rows of both levels do not count."""
    found_at = []
    for num in (55, 60):
        detectors = Detectors(SHORT)
        rows = [*run(200), *run(100, first=700, loss=1.1, norm=1.5)]
        rows += [*run(num, first=800), *run(100, first=800 + num, loss=1.1, norm=1.5)]
        found_at.append([finding.step for finding in found(detectors, rows) if finding.kind == "level_shift"])
    assert [len(steps) for steps in found_at] == [1, 2]


def test_a_divergence_is_not_raised_again_as_a_shift() -> None:
    rows = [*run(200), *run(200, first=700, loss=1.8, norm=3.0)]
    assert kinds(found(Detectors(SHORT), rows)) == ["loss_spike", "divergence"]


def test_a_finding_names_at_most_sixteen_batches() -> None:
    rising = [*run(200), *[record(700 + place, 3.0 * math.exp(0.004 * place)) for place in range(120)]]
    slow = [each for each in found(Detectors(SHORT), rising) if each.kind != "loss_spike"]
    assert [each.cursors for each in slow] == [[*range(each.step - 15, each.step + 1)] for each in slow]
    assert slow


def test_a_spike_names_its_batches_and_the_one_before() -> None:
    rows = [*run(200), *run(3, first=700, loss=1.3, norm=2.0)]
    for row in rows:
        row.cursor = 10 * row.iteration
    (finding,) = found(Detectors(CFG), rows)
    assert (finding.onset, finding.iteration) == (700, 701)
    assert finding.cursors == [6990, 7000, 7010]


@pytest.mark.parametrize(("norm", "groups"), [(0.5, ["a", "b"]), (0.49, ["a"])])
def test_groups_with_half_of_the_largest_gradient_are_named(norm: float, groups: list[str]) -> None:
    facts: dict[str, Any] = {"group_grad_norms": {"a": 6.0, "b": 6.0 * norm}}
    row = record(700, 3.0, 6.0, **facts)
    (finding,) = found(Detectors(CFG), [*run(200), row])
    assert (finding.kind, finding.groups, finding.value) == ("grad_spike", groups, 6.0)


def test_a_spike_needs_a_gradient_rise_only_if_gradients_are_logged() -> None:
    higher = [3.4 if place >= 700 else value for place, value in enumerate(losses(706))]
    assert kinds(found(Detectors(CFG), records(higher[500:]))) == ["loss_spike"]
    assert found(Detectors(CFG), records(higher[500:], [0.3] * 206)) == []


def test_a_log_that_starts_after_step_1000_has_findings_sooner() -> None:
    def steps(first: int) -> list[int]:
        rows = [record(first + place, 3.0 if place < 10 else 4.0) for place in range(14)]
        return [finding.step - first for finding in found(Detectors(CFG), rows)]

    assert steps(1001) == [12]
    assert steps(1000) == []
