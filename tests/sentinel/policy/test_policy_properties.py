"""The promises of the policy against a hostile cluster: whatever is found or fails, it ends in progress or halt."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.events import (
    ActionKind,
    FindingKind,
    to_json,
)
from harness.sentinel.policy.policy import Policy, replay_actions
from tests.sentinel.cluster import CFG, NUM_STEPS, Cluster, Malice, actions_of, survive
from tests.sentinel.policy_runs import finding, record

hostile = st.builds(
    Malice,
    seed=st.integers(0, 2**32),
    lag=st.integers(0, 3),
    refuse=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    find=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    late=st.sampled_from([0.0, 0.5]),
    fail=st.sampled_from([0.0, 0.3, 1.0]),
    damage=st.sampled_from([0.0, 0.5]),
    measure=st.sampled_from([0.0, 0.1]),
    restart=st.sampled_from([0.0, 0.02]),
    round_trip=st.just(0.0),
)


@given(hostile)
@settings(max_examples=150, deadline=None)
def test_it_ends_in_progress_or_halt_within_its_budgets(malice: Malice) -> None:
    """Budgets, targets and the direction of every restore are asserted by the cluster as it goes."""
    cluster = survive(malice)
    watches = Counter(action.incident for action in actions_of(cluster) if action.kind is ActionKind.watch)
    assert max(watches.values(), default=0) <= 1
    if cluster.is_halted:
        assert cluster.policy.decide(record(10**6), [finding(FindingKind.divergence, record(10**6))]) is None


@given(hostile)
@settings(max_examples=60, deadline=None)
def test_the_log_gives_its_actions_and_the_policy(malice: Malice) -> None:
    cluster = survive(malice)
    assert replay_actions(cluster.log, CFG, lag=malice.lag) == actions_of(cluster)
    assert Policy.replay(CFG, cluster.log, lag=malice.lag).state() == cluster.policy.state()


@given(hostile, st.sampled_from([0.05, 1.0]))
@settings(max_examples=60, deadline=None)
def test_state_can_be_put_away_at_any_point(malice: Malice, round_trip: float) -> None:
    interrupted, whole = survive(replace(malice, round_trip=round_trip)), survive(malice)
    assert [to_json(event) for event in interrupted.log] == [to_json(event) for event in whole.log]


@given(st.integers(0, 2**32), st.integers(1, NUM_STEPS - 1))
@settings(max_examples=40, deadline=None)
def test_a_place_that_always_fails_ends_the_run(seed: int, step: int) -> None:
    """The dice are loaded: whatever is excluded, the same step diverges."""
    calm = Malice(
        seed=seed, lag=1, refuse=0.0, find=0.0, late=0.0, fail=0.0, damage=0.0, measure=0.0, restart=0.0, round_trip=0.0
    )
    cluster = Cluster(calm, Policy.start(CFG, lag=1), random.Random(seed))
    while not cluster.is_halted:
        cluster.train()
        assert cluster.now.step <= step + 1, "it passed the place"
        assert len(cluster.log) < 50 * NUM_STEPS
        if cluster.now.step == step:
            now = record(cluster.iteration + 1, step=step + 1, cursor=cluster.now.cursor)
            cluster.iteration += 1
            cluster.now = replace(cluster.now, iteration=cluster.iteration, step=step + 1, cursor=now.cursor + 1)
            found = [finding(FindingKind.divergence, now)]
            cluster.carry_out(cluster.policy.decide(now, found), now)
    assert actions_of(cluster)[-1].kind is ActionKind.halt
