"""Tests of campaigns: drawing is a pure function of the seed, and rounds are scored correctly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config.errors import ConfigError
from harness.core.events import ActionKind, EvalRecord, FindingKind, StepRecord
from harness.drills import campaign
from harness.drills.campaign import EARLIEST, MARGIN, MOST_FAULTS, DrawnFault
from harness.drills.drill_record import DrillEvidence
from harness.drills.scenario import Bounds, Expected, Scenario
from harness.faults.fault_plan import FaultKind
from launch.cli import campaign as command
from tests import composed
from tests.drills import logs


@cache
def known() -> dict[str, Scenario]:
    """Cached, and not read at import: every worker imports this file, and one runs it."""
    return campaign.mixable_scenarios()


def test_mixable_scenarios_need_no_special_environment() -> None:
    assert {"kill_rank", "nan_grad", "corrupted_checkpoint", "hung_rank"} <= set(known())
    special = {"full_disk", "tracking_down", "warmup_cut", "replica_mismatch", "fp16_overflow", "lost_node"}
    assert not special & set(known())
    assert composed.load(campaign.training_overrides(known())).launch.hang_after_s == 30


@given(
    seed=st.integers(0, 2**40),
    number=st.integers(0, 1000),
    num_steps=st.integers(EARLIEST + (MOST_FAULTS + 1) * MARGIN, 400),
    num_ranks=st.integers(1, 9),
)
def test_a_round_is_a_pure_function_of_its_seed(seed: int, number: int, num_steps: int, num_ranks: int) -> None:
    def draw_again() -> list[DrawnFault]:
        return campaign.draw_faults(known(), seed=seed, number=number, num_steps=num_steps, num_ranks=num_ranks)

    drawn = draw_again()
    assert drawn == draw_again()
    assert 1 <= len(drawn) <= MOST_FAULTS
    places = [draw.fault.at for draw in drawn]
    assert all(later - earlier >= MARGIN for earlier, later in pairwise(places))
    assert places[0] >= EARLIEST
    assert places[-1] <= num_steps - MARGIN
    assert all(draw.fault.rank is None or 0 <= draw.fault.rank < num_ranks for draw in drawn)
    assert campaign.make_plan(drawn, seed=seed, number=number).faults == [draw.fault for draw in drawn]


def test_rounds_and_seeds_differ_and_every_scenario_is_drawn() -> None:
    def names(seed: int) -> list[list[str]]:
        rounds = (
            campaign.draw_faults(known(), seed=seed, number=number, num_steps=campaign.NUM_STEPS, num_ranks=2)
            for number in range(60)
        )
        return [[str(drawn) for drawn in faults] for faults in rounds]

    first = names(0)
    assert first != names(1)
    assert len({tuple(faults) for faults in first}) > 50
    assert {text.split()[0] for faults in first for text in faults} == set(known())
    assert {len(faults) for faults in first} == set(range(1, MOST_FAULTS + 1))


def test_a_run_too_short_for_a_campaign_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^train.num_steps: must be at least 120 for a campaign, got 50$"):
        campaign.draw_faults(known(), seed=0, number=0, num_steps=50, num_ranks=2)


def drawn(*names: str) -> list[DrawnFault]:
    identical = logs.scenario(Expected(notices=["rank {rank} was killed"], starts=2), Bounds(identical=True))
    detected = logs.scenario(
        Expected(findings=[FindingKind.nonfinite], actions=[ActionKind.skip]), Bounds(loss_gap=0.1), at=15
    )
    return [DrawnFault(name=name, scenario=identical if name == FaultKind.kill_rank else detected) for name in names]


def test_a_survived_round() -> None:
    done = campaign.score_round(drawn("kill_rank"), logs.killed_and_resumed(), logs.clean(), number=4)
    assert (done.injected, done.detected, done.failures) == ([True], [True], [])
    assert (done.steps_lost, done.starts) == (3, 2)
    assert campaign.round_line(done) == (
        "round 4: kill_rank at 12 on rank 1: survived, 1 of 1 detected, 3 steps lost, 2 starts"
    )


def test_an_undetected_fault_is_no_loss_and_one_that_did_not_strike_is() -> None:
    victim = logs.killed_and_resumed()
    victim.faults.append(logs.strike(15, number=1))
    done = campaign.score_round(drawn("kill_rank", "nan_grad"), victim, logs.clean(), number=0)
    assert (done.injected, done.detected, done.failures) == ([True, True], [True, False], [])
    done = campaign.score_round(drawn("kill_rank", "nan_grad", "nan_grad"), victim, logs.clean(), number=0)
    assert (done.injected, done.detected) == ([True, True, False], [True, False, None])
    assert done.failures == ["nan_grad at 15 on rank 1 did not strike"]


@pytest.mark.parametrize(
    ("kind", "at", "did_pass"),
    [("nan_grad", 20, True), ("nan_grad", 21, False), ("poisoned_batch", 19, True), ("poisoned_batch", 15, False)],
)
def test_a_fault_must_strike_only_if_the_run_reached_it(kind: str, at: int, did_pass: bool) -> None:
    """Iterations 1 to 20 read batches 0 to 19, without batch 15, which is excluded."""
    twin = logs.clean()
    events = [event for event in twin.events if not (isinstance(event, StepRecord) and event.cursor == 15)]
    victim = replace(twin, events=events)
    scenario = logs.scenario(bounds=Bounds(loss_gap=0.1), kind=FaultKind(kind), at=at)
    done = campaign.score_round([DrawnFault(name=kind, scenario=scenario)], victim, twin, number=0)
    assert done.failures == did_pass * [f"{kind} at {at} on rank 1 did not strike"]


def test_a_promise_that_was_not_measured_is_a_loss() -> None:
    victim = logs.clean()
    victim.faults.append(logs.strike(15))
    unmeasured = [event for event in victim.events if not isinstance(event, EvalRecord)]
    done = campaign.score_round(drawn("nan_grad"), replace(victim, events=unmeasured), logs.clean(), number=0)
    assert done.failures == ["loss_gap: not measured, wanted at most 0.1"]
    result = campaign.Campaign(seed=0, minutes=1.0, words=[], rounds=[done])
    assert not result.survived


def test_a_campaign_without_evaluation_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^eval.every_steps: must be positive for a campaign, got 0$"):
        command.main(["eval.every_steps=0"])


def test_a_lost_round_lists_the_broken_promises() -> None:
    short = DrillEvidence(events=[logs.started(), *logs.steps(1, 9)], faults=[logs.strike(5)])
    done = campaign.score_round(drawn("kill_rank"), short, logs.clean(), number=0)
    assert done.failures == [
        "survived: no, wanted yes",
        "identical: no, wanted yes",
        "ended with exit code None at step 9 of 20",
    ]


def test_merged_bounds_hold_for_every_scenario() -> None:
    merged = campaign.merge_scenarios(drawn("kill_rank", "nan_grad"), "both")
    assert (merged.expected.starts, merged.expected.actions) == (2, [ActionKind.skip])
    assert (merged.bounds.identical, merged.bounds.loss_gap) == (False, 0.1)
    assert campaign.merge_scenarios(drawn("kill_rank"), "").bounds.identical
