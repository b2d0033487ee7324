"""Planned changes in the configuration: batch-size warm-up and precision phases; their arithmetic and their errors."""

from __future__ import annotations

import pytest

from harness.analysis.plan.plan import plan
from harness.analysis.plan.plan_text import render
from harness.config.errors import ConfigError
from harness.config.precision import PrecisionKind
from harness.config.schema import check_world
from tests.composed import load

WARMUP = "train.batch_size_warmup=[{until_batch: 10, batch_size: 2}, {until_batch: 30, batch_size: 4}]"


def test_the_stages_of_a_warmup_cover_the_run() -> None:
    train = load([WARMUP, "train.batch_size=8", "train.num_steps=50", "train.sequence_length=32"]).train
    assert train.size_stages() == [(0, 2), (10, 4), (30, 8)]
    assert train.num_tokens() == 32 * (10 * 2 + 20 * 4 + 20 * 8)
    short = load([WARMUP, "train.num_steps=15", "train.sequence_length=32", "optim.warmup_steps=0"]).train
    assert short.num_tokens() == 32 * (10 * 2 + 5 * 4)
    assert load(["train.num_steps=15", "optim.warmup_steps=0"]).train.size_stages() == [(0, 8)]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["train.batch_size_warmup=[{until_batch: 0, batch_size: 2}]"],
            r"train\.batch_size_warmup\[0\]\.until_batch: must be above 0, ",
        ),
        (
            ["train.batch_size_warmup=[{until_batch: 5, batch_size: 4}, {until_batch: 5, batch_size: 6}]"],
            r"train\.batch_size_warmup\[1\]\.until_batch: must be above 5, ",
        ),
        (
            ["train.batch_size_warmup=[{until_batch: 5, batch_size: 8}]"],
            r"train\.batch_size_warmup\[0\]\.batch_size: must be above 0 and below train\.batch_size=8, got 8",
        ),
        (
            ["train.batch_size_warmup=[{until_batch: 5, batch_size: 3}]", "train.micro_batch_size=2"],
            r"train\.batch_size_warmup\[0\]\.batch_size: must be a multiple of train\.micro_batch_size=2, got 3",
        ),
        (
            [WARMUP, "train.micro_batch_size=2", "train.batch_size=9"],
            r"train\.batch_size: must be a multiple of train\.micro_batch_size=2 with a batch-size warm-up, got 9",
        ),
        ([WARMUP, "data.stratify.rare_below=2"], r"train\.batch_size_warmup: must be empty with data\.stratify"),
        (
            ["precision=bf16", "precision.phases=[{from_batch: 5, kind: bf16}]"],
            r"precision\.phases: must be empty with",
        ),
        (
            ["precision=fp8_emulated", "precision.phases=[{from_batch: 5, kind: fp8}]"],
            r"precision\.phases\[0\]\.kind: must be bf16, because the phase before is in fp8, got fp8",
        ),
        (
            ["precision=fp8_emulated", "precision.phases=[{from_batch: 5, kind: fp16}]"],
            r"precision\.phases\[0\]\.kind: must be bf16, .*, got fp16",
        ),
        (
            ["precision=fp8_emulated", "precision.phases=[{kind: bf16}]"],
            r"precision\.phases\[0\]\.from_batch: must be above 0, ",
        ),
        (
            ["precision=fp8_emulated", "precision.phases=[{from_fraction: 0.001, kind: bf16}]"],
            r"precision\.phases\[0\]\.from_fraction: must give a batch above 0, .*=200 gives 0$",
        ),
        (
            ["precision=fp8_emulated", "precision.phases=[{from_fraction: 1.5, kind: bf16}]"],
            r"precision\.phases\[0\]\.from_fraction: must be above 0 and below 1, got 1\.5",
        ),
    ],
)
def test_an_invalid_stage_is_rejected_with_one_line(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        load(overrides)
    assert "\n" not in str(caught.value)


def test_every_stage_needs_a_sequence_per_rank() -> None:
    check_world(load([WARMUP]), 2)
    with pytest.raises(
        ConfigError, match=r"^train\.batch_size_warmup\[0\]\.batch_size: must be at least .* \(4\), got 2"
    ):
        check_world(load([WARMUP]), 4)


def test_a_phase_by_fraction_begins_at_that_share_of_the_steps() -> None:
    phases = "precision.phases=[{from_fraction: 0.25, kind: bf16}, {from_batch: 190, kind: fp8}]"
    precision = load(["precision=fp8_emulated", phases]).precision
    assert [phase.from_batch for phase in precision.phases] == [50, 190]
    kinds = [precision.kind_at(batch) for batch in (0, 49, 50, 189, 190, 500)]
    fp8, bf16 = PrecisionKind.fp8, PrecisionKind.bf16
    assert kinds == [fp8, fp8, bf16, bf16, fp8, fp8]


def test_the_plan_adds_up_the_stages() -> None:
    phases = "precision.phases=[{from_fraction: 0.9, kind: bf16}]"
    warmup = "train.batch_size_warmup=[{until_batch: 50, batch_size: 4}]"
    common = ["model=1b", "precision=fp8", "cluster=h200", "train.sequence_length=4096", "train.micro_batch_size=4"]
    common += ["parallel.compile=true", "cluster.price_per_gpu_hour=2"]
    planned = plan(load([*common, phases, warmup]), world_size=1)
    fp8 = plan(load(common), world_size=1)
    bf16 = plan(load([*common, "precision=bf16"]), world_size=1)
    half = plan(load([*common, "train.batch_size=4"]), world_size=1)
    assert [(each.num_steps, each.batch_size, str(each.precision)) for each in planned.stages] == [
        (50, 4, "fp8"),
        (130, 8, "fp8"),
        (20, 8, "bf16"),
    ]
    assert fp8.step_time_s is not None
    assert bf16.step_time_s is not None
    assert half.step_time_s is not None
    expected_s = 50 * half.step_time_s + 130 * fp8.step_time_s + 20 * bf16.step_time_s
    assert planned.run_time_s == pytest.approx(expected_s)
    assert planned.price is not None
    assert planned.price.run == pytest.approx(2 * expected_s / 3600)
    assert planned.memory.needed_bytes == max(fp8.memory.needed_bytes, bf16.memory.needed_bytes)
    assert planned.num_tokens == 4096 * (50 * 4 + 150 * 8)
    text = render(planned)
    assert "50 steps of 4 sequences in fp8; 130 steps of 8 sequences in fp8; 20 steps of 8 sequences in bf16" in text
