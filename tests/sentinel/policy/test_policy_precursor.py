"""Tests of the policy with precursors: QK-clip once for attention logits, a watch for the others."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from harness.config.sentinel import AllowedActions
from harness.core.events import Action, Event, PrecursorSignal
from harness.sentinel.policy.policy import Policy, replay_actions
from tests.sentinel.policy_runs import LAG, F, K, defaults, finding, outcome, record


def decide(policy: Policy, iteration: int, signal: PrecursorSignal | None = None) -> Action | None:
    now = record(iteration)
    findings = [] if signal is None else [replace(finding(F.precursor, now), signal=signal)]
    return policy.decide(now, findings)


def started(actions: AllowedActions = AllowedActions.all) -> Policy:
    policy = Policy.start(replace(defaults(), actions=actions), lag=LAG)
    for iteration in range(1, 100):
        assert decide(policy, iteration) is None
    return policy


def test_growing_logits_are_clipped_to_the_end_of_the_run() -> None:
    policy = started()
    action = decide(policy, 100, PrecursorSignal.attention_logit)
    assert action is not None
    assert (action.kind, action.exclude) == (K.qk_clip, [])
    assert action.reason == "precursor seen"
    assert policy.on_outcome(outcome(action, step=100)) is None
    assert policy.clips_logits
    later = [decide(policy, iteration) for iteration in range(101, 400)]
    assert later == [None] * 299
    assert policy.policy_state.open_incidents == []
    again = decide(policy, 400, PrecursorSignal.attention_logit)
    assert again is not None
    assert again.kind is K.watch, "they are clipped already"
    restored = Policy.restore(defaults(), json.loads(json.dumps(policy.state())), lag=LAG)
    assert restored.clips_logits


@pytest.mark.parametrize("signal", [PrecursorSignal.update_ratio, PrecursorSignal.fp8_underflow])
def test_other_signals_are_watched(signal: PrecursorSignal) -> None:
    policy = started()
    action = decide(policy, 100, signal)
    assert action is not None
    assert action.kind is K.watch
    assert not policy.clips_logits


def test_an_fp8_range_finding_counts_in_the_iteration_in_which_the_watch_would_end() -> None:
    policy = started()
    assert decide(policy, 100, PrecursorSignal.fp8_underflow) is not None
    last = 100 + defaults().patience_iterations
    for iteration in range(101, last):
        assert decide(policy, iteration) is None
    now = replace(record(last), in_fp8=True)
    action = policy.decide(now, [finding(F.fp8_range, now)])
    assert action is not None
    assert (action.kind, action.in_fp8) == (K.precision, False)


def test_a_preset_that_only_logs_watches_growing_logits() -> None:
    policy = started(AllowedActions.nonfinite_only)
    action = decide(policy, 100, PrecursorSignal.attention_logit)
    assert action is not None
    assert action.kind is K.watch


def test_a_checkpoint_of_an_older_version_clips_nothing() -> None:
    state = json.loads(json.dumps(started().state()))
    del state["chart"]["numbers"]["clips_logits"]
    assert not Policy.restore(defaults(), state, lag=LAG).clips_logits


def test_the_clip_is_replayed_from_the_log() -> None:
    policy, log = Policy.start(defaults(), lag=LAG), list[Event]()
    for iteration in range(1, 140):
        now = record(iteration)
        findings = [replace(finding(F.precursor, now), signal=PrecursorSignal.attention_logit)] * (iteration == 100)
        log += [now, *findings]
        if (action := policy.decide(now, findings)) is not None:
            log += [action, outcome(action, step=iteration)]
            policy.on_outcome(outcome(action, step=iteration))
    actions = [event for event in log if isinstance(event, Action)]
    assert [action.kind for action in actions] == [K.qk_clip]
    assert replay_actions(log, defaults(), lag=LAG) == actions
    assert Policy.replay(defaults(), log, lag=LAG).clips_logits
