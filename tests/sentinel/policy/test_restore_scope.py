"""What a restore excludes where batches that were given back are consumed between others."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from harness.core.events import Action
from harness.sentinel.policy.lineage import Lineage
from harness.sentinel.policy.open_incident import OpenIncident, Rung
from harness.sentinel.policy.policy import Policy
from harness.sentinel.policy.restore_scope import excluded_batches, restore_bound
from tests.sentinel.cluster import CFG
from tests.sentinel.policy_runs import LAG, F, K, defaults, finding, record

GIVEN_BACK = range(1000, 1004)
ORDER = [*range(48900, 50000), *GIVEN_BACK, *range(50000, 50010)]
"""The batches of iterations 1, 2, ...: an operator gave four of them back when the run was at batch 50,000."""
RUNGS = (Rung.rewind, Rung.wide, Rung.rollback)


def follow(order: Sequence[int], *, memory: int = 1024) -> Lineage:
    lineage = Lineage(deque(maxlen=memory))
    for iteration, batch in enumerate(order, start=1):
        lineage.add(record(iteration, cursor=batch))
    return lineage


def scope(order: Sequence[int], onset: int, rung: Rung = Rung.rewind, **facts: Any) -> list[int]:
    """The batches that are excluded for an incident at this iteration, with 2 neighbours and a window of 12."""
    incident = OpenIncident(number=1, onset=onset, onset_step=onset, end_step=onset, kinds=["loss_spike"], **facts)
    return excluded_batches(incident, rung, lineage=follow(order), cfg=CFG)


def action_for(bad: int) -> Action:
    """The response of a policy to a divergence that begins with this batch."""
    policy = Policy.start(defaults(), lag=LAG)
    for iteration, batch in enumerate(ORDER, start=1):
        now = record(iteration, cursor=batch)
        action = policy.decide(now, [finding(F.divergence, now, cursors=[batch])] if batch == bad else [])
        if action is not None:
            return action
    raise AssertionError("the policy does nothing")


@pytest.mark.parametrize("bad", [*GIVEN_BACK, 50000])
def test_a_rollback_excludes_the_bad_batch_and_its_window_only(bad: int) -> None:
    action = action_for(bad)
    assert action.kind is K.rollback
    first, last = action.exclude
    assert first <= bad <= last
    window = defaults().rollback_window_batches // 2
    allowed = GIVEN_BACK if bad in GIVEN_BACK else range(bad - window, bad + window + 1)
    assert set(range(first, last + 1)) <= set(allowed)
    consumed = [iteration for iteration, batch in enumerate(ORDER, start=1) if first <= batch <= last]
    assert action.onset <= min(consumed)
    assert action.onset >= ORDER.index(bad) + 1 - defaults().rollback_margin_steps - window, "no more is undone"


def test_the_batch_before_a_jump_is_blamed_if_the_incident_recurs() -> None:
    order = [*range(200, 260), *range(100, 104), *range(260, 270)]
    assert scope(order, 61) == [100, 100]
    assert scope(order, 61, target_step=50) == [259, 259]
    assert scope(order, 62) == [100, 101]
    assert scope(order, 65) == [260, 260]
    assert scope(order, 65, target_step=50) == [103, 103]
    assert scope(order, 66) == [260, 261]


def test_the_window_of_a_batch_that_was_given_back_holds_those_given_back_with_it() -> None:
    order = [*range(200, 260), 97, *range(100, 104), 107, *range(260, 270)]
    assert scope(order, 63, Rung.wide) == [100, 103]
    assert scope(order, 63, Rung.rollback) == [100, 103]
    assert scope([*range(99), *range(105, 160), 99, 100, 101, 160], 156, Rung.rollback) == [99, 101]


def test_a_batch_given_back_to_its_neighbours_is_treated_like_them() -> None:
    """A corrupted computation consumes batch 48 again, after one that was in flight."""
    order = [*range(50), 48, *range(50, 60)]
    assert scope(order, 51) == [48, 49]
    assert scope(order, 51, Rung.rollback) == [42, 55]


def test_batches_that_are_excluded_already_may_lie_between_the_blamed_ones() -> None:
    assert scope([*range(50), *range(85, 99)], 51) == [49, 85]
    assert scope([*range(50), *range(86, 99)], 51) == [86, 86], "three windows are 36 batches"


def test_no_batch_before_the_stored_records_is_excluded() -> None:
    order = [*range(100), *range(200, 300), 150, 151, *range(300, 310)]
    lineage = follow(order, memory=60)
    assert lineage.seen[0].cursor == 252
    incident = OpenIncident(number=1, onset=155, onset_step=155, end_step=155, kinds=["loss_spike"])
    assert excluded_batches(incident, Rung.rollback, lineage=lineage, cfg=CFG) == [252, 260]
    again = Lineage.restore(json.loads(json.dumps(lineage.state())))
    assert again.newest_forgotten == 251
    old = {name: value for name, value in lineage.state().items() if name != "forgotten"}
    assert Lineage.restore(old).newest_forgotten == 251
    again.restart_at(300, 10)
    assert again.newest_forgotten == -1, "the run is before all of them"


def test_a_batch_rejected_behind_the_restored_state_is_not_the_one_before_the_onset() -> None:
    """Batches 50 to 52 were rejected in a row; the restored state is from before them, and consumes 50 first."""
    lineage = follow(range(50))
    for iteration in (51, 52, 53):
        lineage.add(record(iteration, step=50, cursor=iteration - 1, refused=True))
    lineage.restart_at(54, 50)
    assert [seen.iteration for seen in lineage.seen] == [*range(1, 51)]
    lineage.add(record(55, step=51, cursor=50))
    incident = OpenIncident(number=1, onset=55, onset_step=51, end_step=51, kinds=["loss_spike"])
    assert excluded_batches(incident, Rung.rewind, lineage=lineage, cfg=CFG) == [49, 50]


def random_order(random: Random) -> list[int]:
    """Batches in the order in which they are consumed: ranges are skipped, and given back later."""
    order: list[int] = [0]
    skipped: list[range] = []
    batch = 1
    while batch < 120:
        num = random.randint(1, 30)
        match random.choice(["consume", "consume", "skip", "give back"]):
            case "consume":
                order += range(batch, batch + num)
                batch += num
            case "skip":
                skipped.append(range(batch, batch + num // 4 + 1))
                batch = skipped[-1].stop
            case "give back" if skipped:
                order += skipped.pop(random.randrange(len(skipped)))
    return order


@pytest.mark.parametrize("seed", range(5))
def test_a_restored_state_never_trained_on_a_batch_that_it_excludes(seed: int) -> None:
    """Whatever the order of the batches; 40 records are stored."""
    random = Random(seed)
    for _ in range(120):
        order = random_order(random)
        lineage = follow(order, memory=40)
        onset = random.choice(lineage.seen).iteration
        rung, target_step = random.choice(RUNGS), random.choice([None, len(order)])
        incident = OpenIncident(
            number=1, onset=onset, onset_step=onset, end_step=onset, kinds=["loss_spike"], target_step=target_step
        )
        first, last = exclude = excluded_batches(incident, rung, lineage=lineage, cfg=CFG)
        assert 0 <= first <= last
        bound = restore_bound(incident, rung, exclude, lineage=lineage, cfg=CFG)
        assert all(iteration >= bound for iteration, batch in enumerate(order, start=1) if first <= batch <= last)
