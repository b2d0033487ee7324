"""Tests of the MLflow metrics of each event."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from harness.core.events import CheckpointSaved, DrillScored, EvalRecord, RunStarted, StepRecord
from harness.telemetry.sinks.metrics import metrics_of

MakeStep = Callable[..., StepRecord]


def test_a_step_has_its_metrics(make_step: MakeStep) -> None:
    record = make_step(
        4,
        mfu=0.58,
        memory_bytes=3_500_000_000,
        z_loss=0.1,
        loss_scale=65536.0,
        param_norm=10.0,
        v_norm=0.2,
        group_grad_norms={"layers.0": 0.5, "head[x]": 0.25},
        activation_rms={"layers.3": 1.5},
        in_fp8=True,
        fp8={"weights": {"underflow": 0.1, "saturated": 0.25, "scale_log2": [4, 6]}},
        fp8_underflow={"layers.0": 0.125},
    )
    assert metrics_of(record) == {
        "loss": record.loss,
        "grad_norm": 1.25,
        "lr": 3e-3,
        "step": 5.0,
        "tokens": 10_240.0,
        "refused": 0.0,
        "tokens_per_s": 20_480.0,
        "step_time_s": 0.1,
        "flops_per_s": 38.2e9,
        "mfu": 0.58,
        "memory_gb": 3.5,
        "z_loss": 0.1,
        "loss_scale": 65536.0,
        "param_norm": 10.0,
        "v_norm": 0.2,
        "grad_norm/layers.0": 0.5,
        "grad_norm/head_x_": 0.25,
        "activation_rms/layers.3": 1.5,
        "in_fp8": 1.0,
        "fp8_underflow/layers.0": 0.125,
        "fp8_saturated/weights": 0.25,
    }


def test_unknown_values_are_not_sent(make_step: MakeStep) -> None:
    assert (
        not {"mfu", "memory_gb", "z_loss", "loss_scale", "param_norm", "v_norm", "in_fp8"}
        & metrics_of(make_step(0)).keys()
    )


def test_a_batch_without_a_token_to_predict_has_no_loss(make_step: MakeStep) -> None:
    facts = {"z_loss": 0.0, "group_grad_norms": {"head": 0.0}, "source_losses": {"web": 0.0, "code": 0.0}}
    metrics = metrics_of(make_step(4, loss=0.0, grad_norm=0.0, refused=True, **facts))
    assert not {name for name in metrics if re.match("(loss|grad_norm|z_loss)(/|$)", name)}
    assert (metrics["refused"], metrics["step"]) == (1.0, 5.0)


def test_nonfinite_values_become_a_flag(make_step: MakeStep) -> None:
    metrics = metrics_of(make_step(0, loss=math.nan, grad_norm=math.inf, group_grad_norms={"head": -math.inf}))
    flags = {"loss_nonfinite", "grad_norm_nonfinite", "grad_norm/head_nonfinite"}
    assert {name for name in metrics if name.endswith("_nonfinite")} == flags
    assert not {"loss", "grad_norm", "grad_norm/head"} & metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())


def test_other_events_have_their_metrics(started: RunStarted) -> None:
    evaluated = EvalRecord(time=0.0, iteration=1, step=1, loss=2.5, tokens=8)
    assert metrics_of(evaluated) == {"eval/loss": 2.5, "eval/tokens": 8.0}
    saved = CheckpointSaved(time=0.0, iteration=1, step=1, directory="d", seconds=0.5, blocked_s=0.1, bytes=2 * 10**9)
    assert metrics_of(saved) == {"checkpoint/seconds": 0.5, "checkpoint/blocked_s": 0.1, "checkpoint/gb": 2.0}
    scored = DrillScored(time=0.0, iteration=9, scenario="nan_grad", passed=True, scores={"steps_lost": 1.0})
    assert metrics_of(scored) == {"drill/passed": 1.0, "drill/steps_lost": 1.0}
    assert metrics_of(started) == {}
