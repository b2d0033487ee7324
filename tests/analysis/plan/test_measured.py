"""The plan against every step measured on a GPU: time, memory, and the configurations that are covered."""

from __future__ import annotations

from functools import cache

import pytest

from harness.analysis.plan.calibration import NUM_STEPS, TOLERANCE, sizes, unmeasured
from harness.analysis.plan.memory import memory
from harness.analysis.plan.plan import plan
from harness.analysis.plan.plan_text import render, render_table
from harness.analysis.plan.work import RATES, work
from tests.analysis.plan.calibrate import FITTED, Step, fit, left_out_errors, measured_steps
from tests.analysis.plan.measured import ROWS, SHARED, Measured, Shared, config

MEMORY_TOLERANCE = 0.03
FIT_TOLERANCE = 0.02
TOKENS = 8 * 4096
ESTIMATE = "estimate without measurement: "


@cache
def steps() -> tuple[Step, ...]:
    return tuple(measured_steps())


def names(row: Measured) -> str:
    return row.name


@pytest.mark.parametrize("row", [row for row in ROWS if row.step_s is not None], ids=names)
def test_measured_step_times_are_planned_within_the_tolerance(row: Measured) -> None:
    planned = plan(row.config(), world_size=1)
    assert planned.unmeasured == []
    assert planned.step_time_s == pytest.approx(row.step_s, rel=TOLERANCE)


@pytest.mark.parametrize("row", [row for row in ROWS if row.peak_bytes is not None], ids=names)
def test_measured_peaks_are_planned_within_the_tolerance(row: Measured) -> None:
    assert memory(row.config(), world_size=1).peak_bytes == pytest.approx(row.peak_bytes, rel=MEMORY_TOLERANCE)


@pytest.mark.parametrize("row", SHARED, ids=lambda row: f"{row.tokens} tokens, {row.num_ranks} ranks")
def test_long_sequences_on_several_ranks_are_planned_within_the_tolerance(row: Shared) -> None:
    cfg = row.config()
    planned = work(cfg, world_size=row.num_ranks)
    assert planned is not None
    assert planned.total_s == pytest.approx(row.kernel_s, rel=TOLERANCE)
    if row.peak_bytes is not None:
        assert memory(cfg, world_size=row.num_ranks).peak_bytes == pytest.approx(row.peak_bytes, rel=TOLERANCE)


def test_the_time_with_documents_is_that_of_long_documents() -> None:
    """Measured with one document in each sequence, and with documents of 512 tokens on average."""
    planned = plan(config("data.document_mask=true"), world_size=1)
    assert planned.step_time_s == pytest.approx(TOKENS / 60_660, rel=TOLERANCE)
    assert planned.step_time_s is not None
    assert planned.step_time_s > TOKENS / 71_303
    (reason,) = planned.unmeasured
    assert reason == "data.document_mask, planned for one document in each sequence, shorter ones are faster"


def test_each_configuration_is_predicted_by_the_others() -> None:
    errors = dict(zip((step.row.name for step in steps()), left_out_errors(steps()), strict=True))
    assert max(map(abs, errors.values())) < TOLERANCE, errors


def test_rates_in_use_are_the_fitted_ones() -> None:
    fitted = fit(steps())
    for name in FITTED:
        assert getattr(RATES, name) == pytest.approx(getattr(fitted, name), rel=FIT_TOLERANCE), name


def test_far_fewer_rates_are_fitted_than_configurations_measured() -> None:
    assert len(steps()) == NUM_STEPS
    assert len({step.row.overrides for step in steps()}) > 4 * len(FITTED)


def test_ranges_are_those_of_the_measured_steps() -> None:
    measured = [sizes(step.cfg, world_size=1) for step in steps()]
    for each in measured[0]:
        values = [row[each] for row in measured]
        assert (each.least, each.most) == (min(values), max(values)), each.what


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["cluster=h100"], "not an H200"),
        (["cluster.memory_gb_s=3350"], "not an H200"),
        (["precision=fp16"], "precision=fp16"),
        (["precision=fp32"], "precision=fp32"),
        (["precision=fp8", "precision.fp8.recipe=block"], "precision.fp8.recipe=block"),
        (["precision=fp8", "parallel.compile=false"], "fp8 not compiled or with activation checkpointing"),
        (["precision=fp8", "parallel.activation_checkpointing=full"], "fp8 not compiled or with activation"),
        (["precision=fp8_emulated"], "precision.fp8.engine=emulated, which is slower than the bf16 step planned here"),
        (["model.attention=fp32"], "model.attention=fp32"),
        (["model.qk_norm=true"], "model.qk_norm=true"),
        (["model.norm=layer"], "model.norm=layer"),
        (["model.norm_placement=post"], "model.norm_placement=post"),
        (["data.document_mask=true", "precision=fp32"], "data.document_mask, planned for a dense mask"),
        (["model=13b"], "13,015,864,320 parameters (measured up to 5,933,109,248)"),
        (["train.sequence_length=2048"], "2,048 tokens per sequence (measured from 4,096)"),
        (
            ["train.micro_batch_size=1", "train.sequence_length=2048"],
            "2,048 tokens per micro-batch (measured from 4,096)",
        ),
        (["model.num_heads=8", "model.num_kv_heads=8"], "256 numbers per head (measured up to 128)"),
    ],
)
def test_unmeasured_time_is_reported_as_an_estimate(overrides: list[str], reason: str) -> None:
    planned = plan(config(*overrides), world_size=1)
    assert any(each.startswith(reason) for each in planned.unmeasured), planned.unmeasured
    (line,) = (line for line in render(planned).splitlines() if "  basis " in line)
    assert ESTIMATE in line
    assert reason in line


def test_several_ranks_are_an_estimate() -> None:
    plans = [plan(config(), world_size=ranks) for ranks in (1, 2)]
    assert [each.unmeasured for each in plans] == [[], ["several ranks"]]
    assert f"time: {ESTIMATE}several ranks\n" in render_table(plans)
    assert ESTIMATE not in render_table(plans[:1])


def test_given_mfu_leaves_communication_estimated() -> None:
    slow = config("precision=fp32", "cluster=h100")
    assert unmeasured(slow, world_size=1, is_mfu_given=True) == []
    assert unmeasured(slow, world_size=4, is_mfu_given=True) == ["several ranks"]
    shared = config("launch.ranks_per_gpu=2")
    assert unmeasured(shared, world_size=4, is_mfu_given=True) == ["several ranks", "ranks that share a GPU"]
    assert "  basis             --mfu\n" in render(plan(slow, world_size=1, mfu=0.03))


@pytest.mark.parametrize("more", ["model=3b", "precision=fp8", "parallel.compile=false"])
def test_muon_was_measured_in_one_configuration(more: str) -> None:
    assert any(reason.startswith("optim.kind=muon") for reason in unmeasured(config("optim=muon", more), world_size=1))
    is_moment_covered = not any(
        "moment" in each for each in unmeasured(config("optim.moment_dtype=bf16", more), world_size=1)
    )
    assert is_moment_covered is (more == "model=3b")
