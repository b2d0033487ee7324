"""All reports of one run state the same numbers: post-mortem, page, index, terminal, evidence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.dashboard.index import run_row
from harness.analysis.dashboard.page_data import facts_of
from harness.analysis.dashboard.story import Story
from harness.analysis.dashboard.terminal_view import goodput_parts
from harness.analysis.postmortem import evidence as schema
from harness.analysis.postmortem.incident_numbers import incident_numbers
from harness.analysis.postmortem.report import markdown_report
from harness.core.events import ActionKind, Event, FindingKind, RunEnded
from tests.analysis.postmortem import stories
from tests.analysis.postmortem.stories import ONSET, evidence_of, log_of, write
from tests.sentinel.series import record

END = RunEnded(time=1.8e9 + 500, iteration=stories.NUM_ROWS, step=stories.NUM_ROWS, exit_code=0, reason="done")


def spiked() -> list[Event]:
    """A spike that was applied and decays within 30 steps; the run ends before the incident is closed."""

    def high(after: int) -> stories.Change:
        return lambda row: replace(row, loss=row.loss + 2.0 * math.exp(-after / 6))

    changes = {ONSET + after: high(after) for after in range(40)}
    found = stories.finding(FindingKind.loss_spike, ONSET, "loss 4.5, 50 sigma above normal")
    end = stories.ended(last=ONSET + 1, kinds=["loss_spike"], verdict="open", is_open=True, actions=["watch"])
    return log_of(changes, [found, stories.action(ActionKind.watch, ONSET), end])


@pytest.mark.parametrize("story", [spiked, stories.rejected_in_a_row, stories.poisoned, stories.overflow])
def test_all_reports_agree(tmp_path: Path, story: Callable[[], list[Event]]) -> None:
    run = write(tmp_path / "run", [*story(), END])
    evidence = evidence_of(run)
    text = markdown_report.render(evidence)
    page = Story()
    page.read_more(run)
    facts = facts_of(run, page, now_s=0.0)
    (incident,) = facts["incidents"]
    assert f"- What: loss {incident['losses']}, " in text
    assert f"- Cost: {incident['cost']}\n" in text
    assert f"- recovery loss (50 steps after the peak): {incident['recovery']}\n" in text
    assert f"- pre-spike trajectory resumed: {incident['resumed']}\n" in text
    assert f"(iteration {incident['onset']})" in text
    assert f"; {incident['verdict']}\n" in text
    assert incident["cost"].startswith(incident["cost_steps"])
    row = run_row(run, page, root=tmp_path, now_s=0.0)
    assert row.incident_steps == evidence.cost.steps
    goodput = page.accounts.total()
    assert goodput.num_refused + goodput.num_undone == evidence.cost.refused_steps + evidence.cost.undone_steps
    assert schema.to_tree(evidence)["numbers"]["onset"] == incident["onset"]
    assert not re.search(r"\bopen\b", f"{text}{facts['incidents_more']}{goodput_parts(page)}"), "the run has ended"


def numbers_of(losses: list[float]) -> Any:
    records = [record(at, loss, 1.0) for at, loss in enumerate(losses)]
    return incident_numbers(stories.ended(onset=100, last=101), records)


NOISE = [2.5 + 0.01 * ((at * 7919) % 101 - 50) / 50 for at in range(1000)]


def decaying(steps: int, scale: float) -> list[float]:
    return [base + 2.0 * math.exp(-after / scale) for after, base in enumerate(NOISE[:steps])]


def test_recovery_loss_needs_fifty_steps() -> None:
    numbers = numbers_of([*NOISE[:100], *decaying(30, 2)])
    assert (numbers.num_after_peak, numbers.loss_after_50, numbers.loss_after_500) == (29, None, None)
    assert numbers.has_recovered, "it was back at its level all the same"
    numbers = numbers_of([*NOISE[:100], *decaying(600, 4)])
    assert numbers.loss_after_50 == pytest.approx(2.5, abs=0.02)
    assert numbers.loss_after_500 == pytest.approx(2.5, abs=0.02)


def test_resumed_step_of_a_slow_recovery() -> None:
    numbers = numbers_of([*NOISE[:100], *decaying(800, 80)])
    assert numbers.has_recovered is False, "not within fifty steps"
    assert 300 < numbers.resumed_after < 600
    assert numbers.resumed_step == 100 + numbers.resumed_after


def test_spike_that_lingers_has_no_resumed_step() -> None:
    numbers = numbers_of([*NOISE[:100], *(loss + 0.5 for loss in NOISE[:600])])
    assert (numbers.has_recovered, numbers.resumed_step) == (False, None)
    assert numbers.loss_after_500 == pytest.approx(3.0, abs=0.02)


def test_level_follows_a_falling_loss() -> None:
    losses = [3 + 2.5 * math.exp(-at / 80) for at in range(100)]
    numbers = numbers_of([*losses, 9.0])
    assert numbers.level == pytest.approx(losses[-1], abs=0.03), "an average would lag"


def test_rejected_losses_enter_no_level() -> None:
    records = [record(at, loss, 1.0) for at, loss in enumerate(NOISE[:120])]
    noisy = [replace(r, refused=True, loss=50.0) if r.iteration % 5 == 0 else r for r in records]
    clean = incident_numbers(stories.ended(onset=101, last=101), records)
    numbers = incident_numbers(stories.ended(onset=101, last=101), noisy)
    assert numbers.level == pytest.approx(clean.level, abs=0.01)
