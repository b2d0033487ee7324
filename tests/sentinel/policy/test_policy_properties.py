"""Properties of the policy under random findings and failures: every run finishes or halts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.event_json import to_json
from harness.core.events import ActionKind, FindingKind
from harness.sentinel.policy.policy import Policy, replay_actions
from tests.sentinel.cluster import CFG, NUM_STEPS, Cluster, Hostility, actions_of, run_cluster
from tests.sentinel.policy_runs import finding, record

hostile = st.builds(
    Hostility,
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
    trials=st.sampled_from([0, 4]),
)


@given(hostile)
@settings(max_examples=150, deadline=None)
def test_every_run_finishes_or_halts_within_its_budgets(hostility: Hostility) -> None:
    """The cluster itself asserts budgets, restore targets and the direction of every restore."""
    cluster = run_cluster(hostility)
    watches = Counter(action.incident for action in actions_of(cluster) if action.kind is ActionKind.watch)
    assert max(watches.values(), default=0) <= 1
    if cluster.is_halted:
        assert cluster.policy.decide(record(10**6), [finding(FindingKind.divergence, record(10**6))]) is None


@given(hostile)
@settings(max_examples=60, deadline=None)
def test_replaying_the_log_gives_the_same_actions_and_state(hostility: Hostility) -> None:
    cluster = run_cluster(hostility)
    assert replay_actions(cluster.log, hostility.cfg, lag=hostility.lag) == actions_of(cluster)
    assert Policy.replay(hostility.cfg, cluster.log, lag=hostility.lag).state() == cluster.policy.state()


@given(hostile, st.sampled_from([0.05, 1.0]))
@settings(max_examples=60, deadline=None)
def test_the_state_survives_json_at_any_point(hostility: Hostility, round_trip: float) -> None:
    interrupted, whole = run_cluster(replace(hostility, round_trip=round_trip)), run_cluster(hostility)
    assert [to_json(event) for event in interrupted.log] == [to_json(event) for event in whole.log]


@given(hostile.filter(lambda hostility: hostility.lag > 0))
@settings(max_examples=50, deadline=None)
def test_no_batch_is_lost(hostility: Hostility) -> None:
    """Every batch behind the run was trained on, or the ledger holds it, also if its update was rejected in flight."""
    hostility = replace(hostility, in_flight=True, fail=0.0, restart=0.0)
    cluster = Cluster(hostility, Policy.start(hostility.cfg, lag=hostility.lag), random.Random(hostility.seed))
    while cluster.now.step < NUM_STEPS:
        cluster.train()
        if cluster.is_halted:
            break
        lost = set(range(cluster.now.cursor)) - cluster.now.trained - cluster.excluded - cluster.given_back
        assert not lost
    assert Policy.replay(hostility.cfg, cluster.log, lag=hostility.lag).state() == cluster.policy.state()


@given(st.integers(0, 2**32), st.integers(1, NUM_STEPS - 1))
@settings(max_examples=40, deadline=None)
def test_a_step_that_always_diverges_halts_the_run(seed: int, step: int) -> None:
    """The same step diverges, whatever is excluded."""
    quiet = Hostility(
        seed=seed, lag=1, refuse=0.0, find=0.0, late=0.0, fail=0.0, damage=0.0, measure=0.0, restart=0.0, round_trip=0.0
    )
    cluster = Cluster(quiet, Policy.start(CFG, lag=1), random.Random(seed))
    while not cluster.is_halted:
        cluster.train()
        assert cluster.now.step <= step + 1, "it went past the diverging step"
        assert len(cluster.log) < 50 * NUM_STEPS
        if cluster.now.step == step:
            now = record(cluster.iteration + 1, step=step + 1, cursor=cluster.now.cursor)
            cluster.iteration += 1
            cluster.now = replace(cluster.now, iteration=cluster.iteration, step=step + 1, cursor=now.cursor + 1)
            found = [finding(FindingKind.divergence, now)]
            cluster.carry_out(cluster.policy.decide(now, found))
    assert actions_of(cluster)[-1].kind is ActionKind.halt
