from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.events import Finding, FindingKind, StepRecord
from harness.sentinel.detect.baseline import FLOATS, expected_log_value
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.detect.loss_curve import next_interval, scale_rows
from tests.sentinel.series import config, kinds, losses, norms, record, records

CFG = config()


def watch(rows: list[StepRecord], detectors: Detectors | None = None) -> list[Finding]:
    detectors = Detectors(CFG) if detectors is None else detectors
    return [finding for row in rows for finding in detectors.observe(row)]


@pytest.mark.parametrize("seed", range(6))
def test_healthy_runs_raise_nothing(seed: int) -> None:
    assert watch(records(losses(3000, seed=seed), norms(3000, seed=seed + 100))) == []


def test_outliers_of_single_steps_are_not_spikes() -> None:
    random, values = Random(5), losses(4000, noise=0.02)
    for place in range(100, 4000, 37):
        values[place] *= math.exp(random.expovariate(1 / 0.08))
    assert watch(records(values)) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_spike_is_found_within_three_steps(seed: int) -> None:
    values = losses(1200, seed=seed)
    for place in range(60):
        values[900 + place] *= 1 + 0.25 * math.exp(-((place - 10) ** 2) / 300)
    (finding,) = watch(records(values))
    assert finding.kind is FindingKind.loss_spike
    assert 897 <= finding.onset <= finding.step <= 903
    assert set(finding.cursors) >= {finding.onset, finding.step}


def test_a_spike_is_raised_once_and_the_next_one_again() -> None:
    values = losses(2000)
    for place in (900, 1500):
        values[place : place + 50] = [1.3 * value for value in values[place : place + 50]]
    found = watch(records(values))
    assert kinds(found) == ["loss_spike", "loss_spike"]
    assert [finding.onset for finding in found] == [900, 1500]


def test_one_row_is_enough_if_rows_are_several_steps_apart() -> None:
    values = losses(1200)
    values[900] *= 1.3
    assert watch(records(values)) == []
    assert kinds(watch(records(values, every=10))) == ["loss_spike"]


def test_a_loss_that_doubles_is_a_spike_in_its_first_row() -> None:
    values = losses(1200)
    values[900] *= 2.5
    (finding,) = watch(records(values))
    assert (finding.kind, finding.step) == (FindingKind.loss_spike, 900)


def test_easy_data_that_comes_and_goes_raises_nothing() -> None:
    values = losses(3000)
    for first in (1500, 2200):
        values[first : first + 200] = [0.9 * value for value in values[first : first + 200]]
    assert watch(records(values)) == []


def test_a_rise_without_a_rise_of_gradients_is_a_level_shift() -> None:
    values = losses(3000)
    values[2000:] = [1.1 * value for value in values[2000:]]
    (finding,) = watch(records(values, norms(3000)))
    assert finding.kind is FindingKind.level_shift
    assert finding.onset == pytest.approx(2000, abs=30)
    assert "new data" in finding.message


def test_damage_that_stays_is_a_spike_and_then_a_shift() -> None:
    values, grad_norms = losses(3000), norms(3000)
    values[2000:] = [1.1 * value for value in values[2000:]]
    grad_norms[2000:] = [2 * norm for norm in grad_norms[2000:]]
    assert kinds(watch(records(values, grad_norms))) == ["loss_spike", "level_shift"]


@pytest.mark.parametrize("slope", [0.0005, 0.001, 0.005])
def test_a_loss_that_creeps_up_diverges(slope: float) -> None:
    values = [
        value * math.exp(slope * max(0, place - 1500)) for place, value in enumerate(losses(2600, noise=NOISE_OF_CREEP))
    ]
    found = [finding for finding in watch(records(values)) if finding.kind is FindingKind.divergence]
    assert len(found) == 1
    assert found[0].step < 1500 + (450 if slope < 0.001 else 250)
    assert found[0].onset >= 1400


NOISE_OF_CREEP = 0.012


def test_a_loss_that_jumps_and_stays_diverges() -> None:
    values = losses(2000)
    values[1500:] = [2.2 * value for value in values[1500:]]
    assert kinds(watch(records(values))) == ["loss_spike", "divergence"]


def test_nonfinite_names_rank_group_and_batch() -> None:
    rows = records(losses(100), norms(100))
    rows[60].loss, rows[60].grad_norm, rows[60].refused = math.nan, math.nan, True
    rows[60].nonfinite_ranks, rows[60].group_grad_norms = [3], {"blocks.0": 1.0, "head": math.inf}
    (finding,) = watch(rows)
    assert (finding.kind, finding.step, finding.ranks) == (FindingKind.nonfinite, 60, [3])
    assert (finding.groups, finding.cursors) == (["head"], [60])


def test_a_run_of_nan_is_found_at_once_and_once() -> None:
    assert kinds(watch(records([math.nan] * 50, [math.nan] * 50))) == ["nonfinite"]
    assert kinds(watch(records([math.nan] * 50))) == ["nonfinite"]


def test_a_rejected_row_raises_findings_and_changes_no_baseline() -> None:
    detectors = Detectors(CFG)
    watch(records(losses(300), norms(300)), detectors)
    before = detectors.state()
    refused = record(300, 30.0, 500.0, refused=True, group_grad_norms={"embed": 1.0, "head": 499.0})
    found = detectors.observe(refused)
    assert kinds(found) == ["grad_spike", "loss_spike"]
    assert found[0].groups == ["head"]
    assert detectors.state() == before


def test_a_gradient_that_bursts_leads_the_loss() -> None:
    grad_norms = norms(600)
    grad_norms[500] *= 5
    grad_norms[550] *= 20
    (finding,) = watch(records(losses(600), grad_norms))
    assert (finding.kind, finding.step, finding.cursors) == (FindingKind.grad_spike, 550, [550])


def test_steps_that_go_back_are_no_spike() -> None:
    values = losses(700)
    rows = records(values)
    again = [record(step, value) for step, value in enumerate(losses(700, seed=9))][200:]
    assert watch(rows + again) == []


def test_an_accepted_level_is_normal() -> None:
    detectors = Detectors(CFG)
    watch(records(losses(1000)), detectors)
    raised = [record(step, 1.2 * value) for step, value in enumerate(losses(1400, seed=3))]
    assert kinds(watch(raised[1000:1001], detectors)) == []
    detectors.accept_level()
    assert watch(raised[1001:], detectors) == []


def rates(num: int, peak: float = 3e-4) -> list[float]:
    """Linear warm-up, then cosine."""
    return [
        peak * (step + 1) / 100 if step < 100 else peak * 0.5 * (1 + math.cos(math.pi * (step - 100) / (num - 100)))
        for step in range(num)
    ]


@pytest.mark.parametrize("every", [1, 10, 50])
def test_a_schedule_has_no_jumps(every: int) -> None:
    rows = [record(step, 3.0, lr=rate) for step, rate in enumerate(rates(2000))]
    assert watch(rows[::every]) == []


@pytest.mark.parametrize(("expected", "found"), [(False, ["lr_jump"]), (True, [])])
def test_an_lr_jump_is_found_unless_it_was_expected(expected: bool, found: list[str]) -> None:
    detectors = Detectors(CFG)
    rows = [record(step, 3.0, lr=rate * (0.5 if step >= 700 else 1.0)) for step, rate in enumerate(rates(2000))]
    assert watch(rows[:695], detectors) == []
    if expected:
        detectors.expect_lr_change()
    assert kinds(watch(rows[695:], detectors)) == found


def test_a_group_whose_norm_doubles_drifts() -> None:
    rows = [
        record(step, 3.0, group_param_norms={"embed": 10.0, "head": 5.0 * 2 ** (max(0, step - 500) / 150)})
        for step in range(0, 800, 10)
    ]
    (finding,) = watch(rows)
    assert (finding.kind, finding.groups) == (FindingKind.weight_drift, ["head"])
    assert 640 <= finding.step <= 680


HEAD_NORMS = (
    *(3.64, 5.67, 9.33, 10.77, 11.53, 12.07, 12.93, 13.8, 14.79, 15.98, 17.22, 18.27, 19.45, 20.69, 21.91, 23.24),
    *(24.61, 25.65, 26.69, 27.79, 28.69),
)
"""Norm of the output head at steps 1, 21, ... of a run of the defaults with 8,000 steps."""


@pytest.mark.parametrize("gain", [1.0, 1.2])
def test_a_head_that_learns_does_not_drift(gain: float) -> None:
    """The head begins small and grows by about the same amount per step. In this run it nearly doubles from step 101 to
    301; with 20 % more growth per step from there on it more than doubles."""
    norms = [*HEAD_NORMS[:6], *(HEAD_NORMS[5] + gain * (norm - HEAD_NORMS[5]) for norm in HEAD_NORMS[6:])]
    rows = [record(1 + 20 * place, 3.0, group_param_norms={"head": norm}) for place, norm in enumerate(norms)]
    assert (norms[15] / norms[5] > 2) == (gain > 1)
    assert watch(rows) == []


def test_growth_faster_than_before_drifts() -> None:
    """From step 101 on the head grows three times as fast as before."""
    rows = [
        record(step, 3.0, group_param_norms={"head": 3.64 + 0.05 * (step + 2 * max(0, step - 101))})
        for step in range(1, 400, 20)
    ]
    (finding,) = watch(rows)
    assert (finding.kind, finding.groups) == (FindingKind.weight_drift, ["head"])
    assert 141 <= finding.step <= 201


def test_a_norm_that_shrinks_as_fast_as_before_drifts() -> None:
    """As with a weight decay that is too strong from the first step."""
    rows = [record(step, 3.0, group_param_norms={"head": 0.5 ** (step / 150)}) for step in range(1, 400, 20)]
    assert kinds(watch(rows)) == ["weight_drift"]


def test_a_second_moment_that_is_stale_or_gone() -> None:
    rows = [record(step, 3.0, v_norm=1.0, square_ratio=1.0) for step in range(0, 600, 10)]
    rows[30].square_ratio = 9.0
    rows[50].v_norm = 0.1
    assert [(str(finding.kind), finding.step) for finding in watch(rows)] == [
        ("v_stale", 300),
        ("optimizer_reset", 500),
    ]


@pytest.mark.parametrize("updates", range(11))
def test_a_reset_of_the_moments_between_two_probes_is_found(updates: int) -> None:
    """Ten updates under beta2 = 0.95 restore 40 % of the moment; decay would have left 60 %."""
    rows = [record(step, 3.0, v_norm=1.0, beta2=0.95) for step in range(0, 600, 10)]
    rows[50].v_norm = 1.0 - 0.95**updates
    assert kinds(watch(rows[:51])) == ["optimizer_reset"]


def test_moments_that_only_decay_raise_nothing() -> None:
    """Gradients that vanish at once leave what decay leaves, also where a probe is missed."""
    rows = [record(step, 3.0, v_norm=0.95 ** max(0, step - 200), beta2=0.95) for step in range(0, 600, 10)]
    del rows[30:34]
    assert watch(rows) == []


@pytest.mark.parametrize(("left", "found"), [(1.0, []), (0.98, ["optimizer_reset"])])
@pytest.mark.parametrize(("before", "after"), [(0.95, 0.999), (0.999, 0.95)])
def test_a_resume_with_another_beta2_is_no_reset(before: float, after: float, left: float, found: list[str]) -> None:
    """Before the first probe after the resume, some updates were made with the old beta2."""
    first = Detectors(CFG)
    assert watch([record(step, 3.0, v_norm=1.0, beta2=before) for step in range(0, 600, 10)], first) == []
    resumed = Detectors.restore(CFG, first.state())
    norm = left * 0.95**10
    assert kinds(watch([record(600, 3.0, v_norm=norm, beta2=after)], resumed)) == found
    assert kinds(watch([record(610, 3.0, v_norm=norm * after**10, beta2=after)], resumed)) == []
    assert kinds(watch([record(620, 3.0, v_norm=norm * after**20 * 0.98, beta2=after)], resumed)) == ["optimizer_reset"]


def test_broken_weights_are_found_and_their_layers_named() -> None:
    norms = {"blocks.0": 4.0, "blocks.1": math.inf}
    rows = [record(step, 3.0, group_param_norms=norms if step >= 5 else {"blocks.0": 4.0}) for step in range(8)]
    (finding,) = watch(rows)
    assert (finding.kind, finding.step, finding.groups) == (FindingKind.nonfinite, 5, ["blocks.1"])


def test_a_batch_rejected_for_its_loss_is_named() -> None:
    rows = [record(step, 3.0, cursor=step) for step in range(60)]
    (finding,) = watch([*rows, record(59, 9.0, cursor=60, refused=True)])
    assert (finding.kind, finding.cursors) == (FindingKind.loss_spike, [60])


def test_a_batch_seen_before_is_a_duplicate_and_a_replay_is_not() -> None:
    rows = [record(step, 3.0, fingerprint=f"{step % 40:016x}", cursor=step) for step in range(41)]
    (finding,) = watch(rows)
    assert (finding.kind, finding.cursors) == (FindingKind.duplicate_batch, [0, 40])
    assert watch([record(step, 3.0, fingerprint="a", cursor=7) for step in range(3)]) == []


def test_ranks_that_read_other_data_are_named_once() -> None:
    rows = [
        record(step, 3.0, other_data={"plan": [2]} if 3 <= step < 6 else {}, refused=step == 3) for step in range(9)
    ]
    (finding,) = watch(rows)
    assert (finding.kind, finding.ranks, finding.step) == (FindingKind.data_mismatch, [2], 3)
    assert finding.message == "ranks 2 have another corpus, order or ledger than the rest"


def test_a_loss_scale_that_collapses_or_sticks() -> None:
    falling = [record(step, 3.0, loss_scale=2.0 ** (8 - step)) for step in range(12)]
    assert [(str(finding.kind), finding.step) for finding in watch(falling)] == [("scale_collapse", 9)]
    stuck = [record(1, 3.0, math.inf, loss_scale=1024.0, refused=True) for _ in range(8)]
    assert kinds(watch(stuck)) == ["nonfinite", "scale_collapse"]


class TestTheRangeOfFp8:
    def probed(self, step: int, share: float = 0.01, saturated: float = 0.0, **facts: Any) -> StepRecord:
        """A probe in fp8: so much of blocks.1 became zero, so many tensors of activations were beyond the range."""
        health = {"activations": {"underflow": share, "saturated": saturated, "scale_log2": [0, 4]}}
        shares = {"blocks.0": 0.01, "blocks.1": share}
        given: dict[str, Any] = {"loss": 3.0, "in_fp8": True, "fp8": health, "fp8_underflow": shares}
        return record(step, **given | facts)

    def test_a_layer_that_becomes_zero_is_named_once_with_the_place_where_it_may_have_begun(self) -> None:
        plain = [record(step, 3.0, in_fp8=True) for step in range(22, 31)]
        (finding,) = watch([self.probed(1), self.probed(11), self.probed(21), *plain, self.probed(31, 0.6)])
        assert (finding.kind, finding.groups, finding.cursors) == (FindingKind.fp8_range, ["blocks.1"], [])
        assert (finding.iteration, finding.onset, finding.value, finding.bound) == (31, 22, 0.6, 0.25)
        assert finding.message == "60% of the values of blocks.1 underflow to zero in fp8, above 25%"

    def test_tensors_beyond_the_range_are_found_too(self) -> None:
        (finding,) = watch([self.probed(1), self.probed(11, 0.3, 0.75)])
        assert finding.message == (
            "30% of the values of blocks.1 underflow to zero in fp8, above 25%; "
            "75% of the tensors of activations saturate in fp8, above 50%"
        )
        (finding,) = watch([self.probed(1), self.probed(11, 0.1, 0.75)])
        assert (finding.groups, finding.value, finding.bound) == ([], 0.75, 0.5)

    def test_it_is_raised_again_only_after_a_clean_probe(self) -> None:
        shares = [0.3, 0.4, 0.2, 0.3, 0.1, 0.3]
        rows = [self.probed(10 * place + 1, share) for place, share in enumerate(shares)]
        assert [finding.iteration for finding in watch(rows)] == [1, 51], "0.2 is below the bound and not yet clean"

    def test_what_is_still_there_when_fp8_comes_back_is_new(self) -> None:
        away = [record(step, 3.0, in_fp8=False) for step in range(12, 31)]
        found = watch([self.probed(11, 0.3), *away, self.probed(31, 0.3)])
        assert [(finding.iteration, finding.onset) for finding in found] == [(11, 1), (31, 31)]

    def test_a_step_that_is_not_finite_says_nothing_and_a_refused_one_does(self) -> None:
        broken = self.probed(11, 1.0, loss=math.nan)
        assert kinds(watch([self.probed(1), broken])) == ["nonfinite"]
        assert kinds(watch([self.probed(1), self.probed(11, 1.0, refused=True)])) == ["fp8_range"]

    def test_a_run_that_was_saved_before_there_was_fp8_goes_on(self) -> None:
        state = Detectors(CFG).state()
        del state["ranges"]
        assert Detectors.restore(CFG, state).state() == Detectors(CFG).state()


def paced(seconds: list[float], first: int = 0, **fields: Any) -> list[StepRecord]:
    return [record(step, 3.0, median_step_s=each, **fields) for step, each in enumerate(seconds, start=first)]


def test_a_slow_stretch_names_the_straggler() -> None:
    rows = [record(step, 3.0, median_step_s=0.1) for step in range(60)]
    spread = {"median": 1.0, "spread": 0.01, "worst": [[5, 3.0], [1, 1.02]]}
    rows += [record(step, 3.0, median_step_s=0.33, ranks={"step_time_s": spread}) for step in range(60, 90)]
    (finding,) = watch(rows)
    assert (finding.kind, finding.ranks, finding.step) == (FindingKind.slow, [5], 64)
    assert finding.cursors == [], "no batch is to blame"


@pytest.mark.parametrize(
    ("busy", "late"), [([0.02, 0.52], [1]), ([0.5, 0.52], []), ([0.02, 0.03], [])], ids=["one", "both", "the link"]
)
def test_of_two_ranks_the_one_that_takes_most_of_a_slow_step_is_named(busy: list[float], late: list[int]) -> None:
    spread = {"median": sum(busy) / 2, "spread": 0.74 * (busy[1] - busy[0]), "worst": [[0, busy[0]], [1, busy[1]]]}
    (finding,) = watch([*paced([0.1] * 60), *paced([0.55] * 30, 60, ranks={"step_time_s": spread})])
    assert (finding.kind, finding.ranks) == (FindingKind.slow, late)


@pytest.mark.parametrize(
    ("worst", "late"),
    [
        ([[0, 0.01], [1, 0.02]], [1]),
        ([[0, 0.02], [1, 0.021]], []),
        ([[6, 0.03], [1, 0.0101], [2, 0.01], [3, 0.01]], [6]),
        ([[6, 0.004], [1, 0.0101], [2, 0.01], [3, 0.01]], []),
    ],
    ids=["of two", "both alike", "of many", "a fast one is not late"],
)
def test_a_slow_device_is_named_where_no_host_is_late(worst: list[list[float]], late: list[int]) -> None:
    values = [value for _, value in worst]
    device = {"median": sorted(values)[len(values) // 2] if len(values) > 2 else sum(values) / 2, "spread": 0.0001}
    hosts = {"median": 0.002, "spread": 0.0001, "worst": [[0, 0.002], [1, 0.002]]}
    slow = paced([1.0] * 30, 60, ranks={"step_time_s": hosts, "device_time_s": {**device, "worst": worst}})
    (finding,) = watch([*paced([0.5] * 60), *slow])
    assert (finding.kind, finding.ranks) == (FindingKind.slow, late)


@pytest.mark.parametrize("factor", [1.7, 2.0, 2.3, 5.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_lasting_slowdown_is_found_and_so_is_its_end(factor: float, seed: int) -> None:
    rng = Random(seed)
    seconds = [(factor if 150 <= row < 260 else 1.0) * rng.lognormvariate(0, 0.02) for row in range(400)]
    found = watch(paced(seconds))
    assert kinds(found) == ["slow", "speed_recovered"]
    assert 154 <= found[0].iteration <= 160
    assert 264 <= found[1].iteration <= 270
    assert found[0].value < found[0].bound
    assert found[1].value > found[1].bound


def test_steps_that_become_slower_bit_by_bit_are_found() -> None:
    seconds = [1.0] * 100 + [1.0 + row / 50 for row in range(50)] + [2.0] * 50
    assert kinds(watch(paced(seconds))) == ["slow"]


def test_noise_single_late_steps_and_short_hiccups_are_not_slow() -> None:
    rng = Random(0)
    noisy = [rng.lognormvariate(0, 0.2) * (20.0 if row % 50 == 49 else 1.0) for row in range(2000)]
    assert watch(paced(noisy)) == []
    hiccup = [0.02] * 100 + [0.06] * 12 + [0.02] * 100
    assert watch(paced(hiccup)) == [], "ten rows that take less than a second together"


def test_a_lasting_speed_becomes_the_usual_one() -> None:
    seconds = [1.0] * 100 + [2.0] * 1200 + [4.0] * 20
    assert kinds(watch(paced(seconds))) == ["slow", "slow"]


def test_a_speed_saved_in_another_unit_starts_again() -> None:
    state = Detectors(CFG).state() | {"speed": {"speed": math.log(1e5), "count": 500, "slow": 0}}
    detectors = Detectors.restore(CFG, state)
    assert [finding for row in paced([1.0] * 50) for finding in detectors.observe(row)] == []


def ranks(worst: list[list[float]], spread: float = 0.02) -> dict[str, Any]:
    return {"loss": {"median": 3.0, "spread": spread, "worst": worst}}


def test_an_extreme_rank_is_named_at_once() -> None:
    broken = {"grad_norm": {"median": 0.3, "spread": 0.02, "worst": [[6, 250.0], [2, 0.34]]}}
    (finding,) = watch([record(1, 3.0, ranks=broken), record(2, 3.0, ranks=broken)])
    assert (finding.kind, finding.ranks) == (FindingKind.rank_outlier, [6])


def test_a_moderately_outlying_rank_is_named_after_five_rows() -> None:
    assert watch([record(step, 3.0, ranks=ranks([[step, 4.2]])) for step in range(20)]) == []
    (finding,) = watch([record(step, 3.0, ranks=ranks([[4, 4.2]])) for step in range(20)])
    assert (finding.kind, finding.ranks, finding.step) == (FindingKind.rank_outlier, [4], 4)
    assert watch([record(step, 3.0, ranks=ranks([[4, 3.01]], spread=1e-6)) for step in range(20)]) == []


def test_replicas_that_differ_are_named_once() -> None:
    rows = [record(step, 3.0, mismatched_ranks=[1, 3] if step in (4, 5) else []) for step in range(9)]
    (finding,) = watch(rows)
    assert (finding.kind, finding.ranks, finding.step) == (FindingKind.replica_mismatch, [1, 3], 4)


def test_changed_weights_are_named_and_explain_replicas_that_differ() -> None:
    rows = [
        record(step, 3.0, changed_ranks=[3] if step == 4 else [], mismatched_ranks=[1, 3] if step in (4, 5) else [])
        for step in range(9)
    ]
    changed, mismatch = watch(rows)
    assert (changed.kind, changed.ranks, changed.step) == (FindingKind.weights_changed, [3], 4)
    assert (changed.onset, changed.cursors) == (2, []), "the update of step 3 read what step 2 had not left"
    assert (mismatch.kind, mismatch.step) == (FindingKind.replica_mismatch, 5), "still different if nothing is done"


values = st.one_of(st.floats(0.5, 20.0), st.sampled_from([3.0, 3.01, 2.99, 3.02, math.nan, math.inf]))
facts = st.fixed_dictionaries(
    {},
    optional={
        "refused": st.booleans(),
        "lr": st.floats(1e-5, 1e-3),
        "loss_scale": st.sampled_from([0.5, 1024.0]),
        "square_ratio": st.floats(0.5, 8.0),
        "v_norm": st.floats(0.01, 10.0),
        "param_norm": st.floats(1.0, 9.0),
        "median_step_s": st.sampled_from([0.1, 1.0]),
        "mismatched_ranks": st.lists(st.integers(0, 3), max_size=2),
        "fingerprint": st.sampled_from("abcdef"),
        "ranks": st.builds(lambda rank, value: ranks([[rank, value]]), st.integers(0, 3), st.floats(1.0, 90.0)),
    },
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(values, values, facts), min_size=1, max_size=80),
    cut=st.integers(0, 80),
    warm=st.sampled_from([0, 120]),
)
def test_detectors_restored_from_json_find_the_same(
    rows: list[tuple[float, float, dict[str, Any]]], cut: int, warm: int
) -> None:
    start = records(losses(warm), norms(warm))
    series = start + [record(warm + step, loss, norm, **more) for step, (loss, norm, more) in enumerate(rows)]
    whole, first = Detectors(CFG), Detectors(CFG)
    at = min(warm + cut, len(series))
    expected = watch(series, whole)
    found = watch(series[:at], first)
    second = Detectors.restore(CFG, json.loads(json.dumps(first.state())))
    found += watch(series[at:], second)
    assert repr(found) == repr(expected)
    assert json.dumps(second.state()) == json.dumps(whole.state())


def test_a_state_is_a_copy() -> None:
    detectors = Detectors(CFG)
    watch(records(losses(200)), detectors)
    state = detectors.state()
    kept = json.dumps(state)
    watch([record(step, 9.0) for step in range(200, 400)], detectors)
    restored = Detectors.restore(CFG, state)
    watch([record(step, 9.0) for step in range(200, 300)], restored)
    assert json.dumps(state) == kept


def test_a_spike_of_the_steep_start_is_found_in_a_sparse_log() -> None:
    """The level of as many rows as in a dense log lags behind, and the spike stays below it."""
    random = Random(0)
    rows = [
        record(step, (4.2 + 8.0 * math.exp(-step / 180)) * math.exp(random.gauss(0, 0.009)))
        for step in range(1, 1500, 10)
    ]
    assert watch(rows) == []
    for row in rows:
        if 600 <= row.step < 700:
            row.loss *= 1.0 + 0.2 * math.exp(-(row.step - 600) / 60)
    (finding,) = watch(rows)
    assert finding.kind is FindingKind.loss_spike
    assert 600 <= finding.step <= 611


def steep_rows(seed: int, *, every: int, height: float = 0.0) -> list[StepRecord]:
    """A loss that falls steeply until step 1,000 or so, with a rise of ten rows from row 62 on."""
    random = Random(seed)
    rows = [
        record(step, (3.4 + 8.0 * math.exp(-step / 350)) * math.exp(random.gauss(0, 0.009)))
        for step in range(1, 150 * every, every)
    ]
    for place, row in enumerate(rows):
        if 62 <= place < 72:
            row.loss *= 1.0 + height * min(1.0, (place - 61) / 3) * math.exp(-max(0, place - 64) / 5)
    return rows


@pytest.mark.parametrize("seed", range(6))
def test_a_slow_spike_of_the_steep_start_is_found_in_a_sparse_log(seed: int) -> None:
    """The baseline lags behind the falling loss there, and follows the rise, unless both are prevented."""
    assert watch(steep_rows(seed, every=10)) == []
    (finding,) = watch(steep_rows(seed, every=10, height=0.1))
    assert finding.kind is FindingKind.loss_spike
    assert 621 <= finding.step <= 671


def test_the_lag_of_a_sparse_baseline_is_measured_on_falling_rows_only() -> None:
    detectors = Detectors(CFG)
    watch(steep_rows(0, every=10)[:60], detectors)
    curves = detectors.curves
    lag, level = curves.lag, curves.loss[1]
    assert -0.05 < lag < -0.005
    expected, spread = expected_log_value(curves.loss, scale_rows(CFG, 10), FLOATS)
    high = math.exp(expected + 3 * spread)
    watch([record(601, high)], detectors)
    assert curves.sum > 0
    assert (curves.lag, curves.held) == (lag, 1), "a row of a rise does not change the lag"
    assert curves.loss[1] < level, "the baseline continues to fall"
    falling = curves.loss[1]
    watch([record(611, math.exp(expected + 2 * spread))], detectors)
    assert curves.held == 2
    assert curves.loss[1] < falling
    watch([record(621, math.exp(expected + 2 * spread))], detectors)
    assert (curves.held, curves.lag, curves.spiking) == (2, lag, False)
    assert curves.loss[-1] == pytest.approx(expected + 2 * spread), "the third row is followed"
    detectors.accept_level()
    assert (curves.lag, curves.held, curves.spiking) == (0.0, 0, False)
    assert (Detectors(CFG).curves.lag, Detectors(CFG).curves.held) == (0.0, 0)


def test_the_lag_of_one_row_is_limited() -> None:
    detectors = Detectors(CFG)
    watch(steep_rows(0, every=10)[:60], detectors)
    curves = detectors.curves
    lag = curves.lag
    _, spread = expected_log_value(curves.loss, scale_rows(CFG, 10), FLOATS)
    watch([record(601, 0.1)], detectors)
    assert curves.lag == pytest.approx(lag + (-8.0 * spread - lag) / 8)


def test_only_the_steep_start_of_a_log_with_many_steps_a_row_has_a_lag() -> None:
    for every, is_corrected in ((7, False), (8, True)):
        detectors = Detectors(CFG)
        watch(steep_rows(0, every=every)[:60], detectors)
        assert (detectors.curves.lag < 0.0) is is_corrected
    detectors = Detectors(CFG)
    rows = [record(step, loss) for step, loss in zip(range(1, 9001, 10), losses(900, seed=3)[:900], strict=True)]
    watch(rows[:400], detectors)
    lag = detectors.curves.lag
    watch(rows[400:], detectors)
    assert detectors.curves.lag == lag, "the memory is trusted"


def test_rows_of_the_baseline_scale_with_the_interval() -> None:
    scaled = {every: scale_rows(CFG, every) for every in (2, 5, 10)}
    assert [scaled[every].memory_rows for every in (2, 5, 10)] == [150, 60, 60]
    for every in (2, 5, 7):
        assert scale_rows(CFG, every) == replace(CFG, memory_rows=max(60, round(300 / every))), "only the memory"
    assert (scaled[10].level_rows, scaled[10].spread_rows, scaled[10].warmup_rows) == (12, 40, 20)
    assert (scale_rows(CFG, 8).level_rows, scale_rows(CFG, 8).memory_rows) == (12, 60)
    detectors = Detectors(CFG)
    watch([record(step, 3.0) for step in range(1, 100)], detectors)
    after_dense = detectors.sparse
    assert after_dense is None
    watch([record(step, 3.0) for step in range(100, 400, 2)], detectors)
    assert detectors.sparse == scale_rows(CFG, 2)
    watch([record(step, 3.0) for step in range(400, 1200, 8)], detectors)
    assert detectors.sparse == scale_rows(CFG, 8)
    few = replace(CFG, level_rows=6)
    assert scale_rows(few, 10).level_rows == 6, "never more rows than configured"


def test_the_first_rows_average_the_interval() -> None:
    assert next_interval(1.0, 10, num_rows=1.0) == 10.0
    assert next_interval(4.0, 10, num_rows=4.0) == 6.0
    assert next_interval(4.0, 100, num_rows=17.0) == 4.0 + 12.0 / 16.0


def test_the_interval_is_known_after_two_rows_and_ignores_a_gap() -> None:
    detectors = Detectors(CFG)
    watch([record(step, 3.0) for step in (1, 11)], detectors)
    assert detectors.curves.interval == 10.0
    watch([record(step, 3.0) for step in range(21, 400, 10)], detectors)
    watch([record(5000, 3.0)], detectors)
    assert detectors.curves.interval == pytest.approx(10.0 + 30.0 / 16.0)
