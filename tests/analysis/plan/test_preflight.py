"""Settings that are known to be unstable are named before a run starts."""

from __future__ import annotations

import pytest

from harness.analysis.plan.preflight import check_preflight, preflight, usual_lr
from harness.config.errors import ConfigError
from tests import composed

LONG = "train.num_steps=1000"
SIZES = ("tiny", "50m", "125m", "1b", "3b", "7b", "13b", "70b")


@pytest.mark.parametrize("overrides", [[], *([f"model={size}"] for size in SIZES), ["+experiment=50m_one_day"]])
def test_shipped_defaults_have_no_warning(overrides: list[str]) -> None:
    assert preflight(composed.load([*overrides, "train.num_steps=20000"])) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optim.weight_decay=0.009", "optim.weight_decay: is 0.009; below 0.01 weights drift"),
        ("optim.weight_decay=0.9", "optim.weight_decay: is 0.9; above 0.5 the model cannot fit the data"),
        ("optim.beta2=0.9999", "optim.beta2: is 0.9999; the second moment needs 10,000 steps"),
        ("optim.clip_norm=null", "optim.clip_norm: is null; one bad batch"),
        ("optim.lr=5", "optim.lr: is 5, above the usual range of 0.0003 to 0.007 for 804k parameters"),
        ("optim.lr=1e-5", "optim.lr: is 1e-05, below the usual range"),
        ("optim.warmup_steps=0", "optim.warmup_steps: is 0; the first updates have the full learning rate"),
        ("checkpoint.every_steps=0", "checkpoint.every_steps: is 0, and checkpoint.every_minutes is null; a rollback"),
        ("checkpoint.every_steps=981", "checkpoint.every_steps: is 981; the first good checkpoint is at step 1,001"),
        (
            "launch.hang_after_s=600",
            "launch.hang_after_s: is 600; collectives fail after parallel.timeout_s=600, before",
        ),
        (
            "parallel.timeout_s=180",
            "launch.hang_after_s: is 180; collectives fail after parallel.timeout_s=180, before",
        ),
        ("checkpoint.retry_s=1800", "checkpoint.retry_s: is 1800; a start that waits for storage counts as hung after"),
        ("checkpoint.every_steps=49", "checkpoint.keep: is 2; checkpoints 49 steps apart reach back 98 steps"),
    ],
)
def test_each_unstable_setting_is_one_line(override: str, line: str) -> None:
    (problem,) = preflight(composed.load([LONG, override]))
    assert problem.startswith(line)


@pytest.mark.parametrize(
    "override",
    [
        "optim.weight_decay=0.01",
        "optim.weight_decay=0.5",
        "optim.beta2=0.99",
        "optim.warmup_steps=1",
        "checkpoint.every_steps=980",
        "checkpoint.every_steps=50",
    ],
)
def test_the_bounds_themselves_are_accepted(override: str) -> None:
    assert preflight(composed.load([LONG, override])) == []


def test_data_in_an_object_store_must_not_be_waited_for_longer_than_for_a_hung_rank() -> None:
    waiting = ["data=files", "data.remote.retry_s=180"]
    assert preflight(composed.load([*waiting, "data.sources.main.paths=[data/web]"])) == []
    (problem,) = preflight(composed.load([*waiting, "data.sources.main.paths=[s3://bucket/web.bin]"]))
    assert (
        problem == "data.remote.retry_s: is 180; ranks that wait for data count as hung after launch.hang_after_s=180"
    )


def test_a_short_run_needs_no_checkpoints() -> None:
    assert preflight(composed.load(["train.num_steps=999", "checkpoint.every_steps=0"])) == []


def test_fp16_without_loss_scaling() -> None:
    overrides = ["precision=fp16", "precision.initial_loss_scale=1"]
    (problem,) = preflight(composed.load(overrides))
    assert problem.startswith("precision.initial_loss_scale: is 1 and does not grow in this run; fp16 without")
    assert preflight(composed.load([*overrides, "train.num_steps=1001"])) == []
    assert preflight(composed.load(["precision=fp16"])) == []


def test_kept_checkpoints_and_checkpoints_by_time_reach_the_margin() -> None:
    assert preflight(composed.load([LONG, "checkpoint.every_steps=20", "checkpoint.keep_behind_steps=100"])) == []
    assert preflight(composed.load([LONG, "checkpoint.every_steps=20", "checkpoint.keep_every_steps=100"])) == []
    assert preflight(composed.load([LONG, "checkpoint.every_steps=0", "checkpoint.every_minutes=30"])) == []


def test_the_learning_rate_is_compared_with_the_size() -> None:
    (problem,) = preflight(composed.load(["model=70b", "optim.lr=3e-3", "train.num_steps=20000"]))
    assert problem.startswith("optim.lr: is 0.003, above the usual range of 3e-05 to 0.0008 for 70.6B parameters")
    assert preflight(composed.load(["model=70b", "optim.lr=3e-3", "model.mup_base_width=256"])) == []


@pytest.mark.parametrize(
    ("size", "published"), [(125e6, 6e-4), (1.3e9, 2e-4), (6.7e9, 3e-4), (65e9, 1.5e-4), (70e9, 1.5e-4), (175e9, 6e-5)]
)
def test_published_rates_are_usual(size: float, published: float) -> None:
    """Of GPT-3, OPT, Llama and Llama 3."""
    assert 1 / 6 < published / usual_lr(int(size)) < 4


def test_strict_rejects_the_start_and_names_the_first_key() -> None:
    cfg = composed.load(["optim.beta2=0.999", "optim.clip_norm=null", "run.preflight=strict"])
    with pytest.raises(ConfigError) as error:
        check_preflight(cfg)
    assert str(error.value).startswith("optim.beta2: is 0.999; ")
    assert "(1 more; `harness plan` lists them); run.preflight=warn starts the run all the same" in str(error.value)
    assert check_preflight(composed.load(["run.preflight=strict"])) == []
