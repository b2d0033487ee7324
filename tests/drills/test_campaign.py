"""What a campaign draws is a pure function of its seed, and what it counts is what happened."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import compose
from harness.config.errors import ConfigError
from harness.core.events import ActionKind, FindingKind
from harness.drills import campaign
from harness.drills.campaign import EARLIEST, MARGIN, MOST_FAULTS, Drawn
from harness.drills.drill_record import DrillEvidence
from harness.drills.scenario import Bounds, Expected
from harness.faults.plan import FaultKind
from tests.drills import logs

KNOWN = campaign.catalogue()


def test_the_catalogue_holds_what_may_be_mixed() -> None:
    assert {"kill_rank", "nan_grad", "corrupted_checkpoint", "hung_rank"} <= set(KNOWN)
    assert not {"full_disk", "tracking_down", "warmup_cut", "replica_mismatch", "fp16_overflow"} & set(KNOWN)
    assert compose.load(campaign.training(KNOWN)).launch.hang_after_s == 30


@given(
    seed=st.integers(0, 2**40),
    number=st.integers(0, 1000),
    num_steps=st.integers(EARLIEST + (MOST_FAULTS + 1) * MARGIN, 400),
    num_ranks=st.integers(1, 9),
)
def test_a_round_is_a_pure_function_of_its_seed(seed: int, number: int, num_steps: int, num_ranks: int) -> None:
    def draw() -> list[Drawn]:
        return campaign.draw(KNOWN, seed=seed, number=number, num_steps=num_steps, num_ranks=num_ranks)

    drawn = draw()
    assert drawn == draw()
    assert 1 <= len(drawn) <= MOST_FAULTS
    places = [each.fault.at for each in drawn]
    assert all(later - earlier >= MARGIN for earlier, later in pairwise(places))
    assert places[0] >= EARLIEST
    assert places[-1] <= num_steps - MARGIN
    assert all(each.fault.rank is None or 0 <= each.fault.rank < num_ranks for each in drawn)
    assert campaign.plan_of(drawn, seed=seed, number=number).faults == [each.fault for each in drawn]


def test_rounds_and_seeds_differ_and_everything_is_drawn() -> None:
    def names(seed: int) -> list[list[str]]:
        rounds = (
            campaign.draw(KNOWN, seed=seed, number=each, num_steps=campaign.NUM_STEPS, num_ranks=2)
            for each in range(60)
        )
        return [[str(drawn) for drawn in each] for each in rounds]

    first = names(0)
    assert first != names(1)
    assert len({tuple(each) for each in first}) > 50
    assert {word.split()[0] for each in first for word in each} == set(KNOWN)
    assert {len(each) for each in first} == set(range(1, MOST_FAULTS + 1))


def test_too_short_a_training_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^train.num_steps: must be at least 120 for a campaign, got 50$"):
        campaign.draw(KNOWN, seed=0, number=0, num_steps=50, num_ranks=2)


def drawn(*names: str) -> list[Drawn]:
    identical = logs.scenario(Expected(notices=["rank {rank} was killed"], starts=2), Bounds(identical=True))
    noticed = logs.scenario(
        Expected(findings=[FindingKind.nonfinite], actions=[ActionKind.skip]), Bounds(loss_gap=0.1), at=15
    )
    return [Drawn(name=name, scenario=identical if name == FaultKind.kill_rank else noticed) for name in names]


def test_a_round_that_came_through() -> None:
    done = campaign.judge_round(drawn("kill_rank"), logs.killed_and_resumed(), logs.clean(), number=4)
    assert (done.injected, done.detected, done.failures) == ([True], [True], [])
    assert (done.steps_lost, done.starts) == (3, 2)
    assert campaign.in_brief(done) == (
        "round 4: kill_rank at 12 on rank 1: survived, 1 of 1 noticed, 3 steps lost, 2 starts"
    )


def test_a_round_with_an_unnoticed_fault_and_one_that_never_came() -> None:
    victim = logs.killed_and_resumed()
    victim.faults.append(logs.strike(15, number=1))
    done = campaign.judge_round(drawn("kill_rank", "nan_grad", "nan_grad"), victim, logs.clean(), number=0)
    assert (done.injected, done.detected) == ([True, True, False], [True, False, None])
    assert not done.failures


def test_a_round_that_was_lost_says_what_was_promised() -> None:
    short = DrillEvidence(events=[logs.started(), *logs.steps(1, 9)], faults=[logs.strike(5)])
    done = campaign.judge_round(drawn("kill_rank"), short, logs.clean(), number=0)
    assert done.failures == [
        "survived: no, wanted yes",
        "identical: no, wanted yes",
        "ended with exit code None at step 9 of 20",
    ]


def test_only_what_all_promise_is_promised() -> None:
    merged = campaign.merged(drawn("kill_rank", "nan_grad"), "both")
    assert (merged.expected.starts, merged.expected.actions) == (2, [ActionKind.skip])
    assert (merged.bounds.identical, merged.bounds.loss_gap) == (False, 0.1)
    assert campaign.merged(drawn("kill_rank"), "").bounds.identical
