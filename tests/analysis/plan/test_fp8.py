"""fp8 in the plan: savings of memory and time, term by term, the blocks in fp8, and the text."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest

from harness.analysis.plan.fp8 import BLOCK, WORKSPACE_BYTES, blocks_in_fp8, flops_share, fp8_projections
from harness.analysis.plan.memory import memory
from harness.analysis.plan.plan import Plan, plan
from harness.analysis.plan.plan_text import plan_as_dict, render
from harness.config.parallel import ActivationCheckpointing
from harness.config.precision import Fp8Engine, Fp8Recipe, PrecisionKind
from harness.config.schema import Config
from tests.composed import load

TOKENS, DIM, WIDE, NUM_BLOCKS = 8 * 4096, 2048, 5632, 24
"""Of the experiment 1b_bf16."""
SELECTIVE, FULL = ({"activation_checkpointing": ActivationCheckpointing[kind]} for kind in ("selective", "full"))
BF16 = {"kind": PrecisionKind.bf16}
DEVICE = """\
  activations          40.2 GB  kept for backward, and temporary
  logits               0.00 GB  one chunk of the loss, and the head's gradient
  other                0.10 GB  batch and workspaces
  outside              2.16 GB  CUDA context, NCCL, fragmentation
  total                60.4 GB  of 150.1 GB (cluster.memory_gb)
compute per device and step
  GEMM in blocks     0.208 s  53.0 %
  attention            93 ms  23.7 %
  elementwise        40.1 ms  10.2 %
  fp8 quantization   16.8 ms   4.3 %
  head and loss      21.7 ms   5.5 %
  casts of weights   3.64 ms   0.9 %
  optimizer          9.72 ms   2.5 %
time
  compute           0.393 s, 80.9 % of the device's bf16 rate
  step              0.393 s, 83,361 tokens/s, 80.9 % MFU
"""
ASSUMED = """\
  compute           GEMM at 70.4 % and attention at 53.9 % of the bf16 rate at most, 86.7 % of the memory's bandwidth
  fp8               70.8 % of the FLOPs, at most at 60.8 % of 1,979 TFLOP/s; MFU is a share of the bf16 rate
"""


@cache
def base() -> Config:
    return load(["+experiment=1b_bf16", "cluster=h200", "precision=fp8"])


def config(**values: Any) -> Config:
    """The fp8 job with some values replaced, each in the config section that has its name."""
    cfg = base()
    changed: dict[str, Any] = {}
    for name in ("parallel", "train"):
        section = getattr(cfg, name)
        changed[name] = replace(section, **_own(section, values))
    fp8 = replace(cfg.precision.fp8, **_own(cfg.precision.fp8, values))
    return replace(cfg, precision=replace(cfg.precision, fp8=fp8, **_own(cfg.precision, values)), **changed)


def _own(section: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(section) if field.name in values}


def planned(**values: Any) -> Plan:
    return plan(config(**values), world_size=1)


def kept(**values: Any) -> int:
    return planned(**values).memory.kept_bytes - WORKSPACE_BYTES


def step_s(**values: Any) -> float:
    seconds = planned(**values).step_time_s
    assert seconds is not None
    return seconds


def test_inputs_of_fp8_gemms_are_saved_in_one_byte() -> None:
    in_bf16 = planned(**BF16).memory.kept_bytes
    saved = NUM_BLOCKS * TOKENS * (DIM + 2 * WIDE)
    assert kept() == kept(recipe=Fp8Recipe.delayed) == in_bf16 - saved, "the SwiGLU product is computed again"
    product = NUM_BLOCKS * TOKENS * WIDE
    scales = NUM_BLOCKS * TOKENS * (3 * DIM + WIDE) * 4 // BLOCK
    assert kept(recipe=Fp8Recipe.block) == in_bf16 - saved + product + scales
    assert kept(attention=False) == in_bf16 - saved, "attention saves its own inputs in bf16"
    assert kept(mlp=False) == in_bf16


def test_selective_checkpointing_helps_only_bf16() -> None:
    statistics = NUM_BLOCKS * TOKENS * 2 * 4
    assert kept(**SELECTIVE) == kept() - statistics
    assert planned(**SELECTIVE, **BF16).memory.peak_bytes < 0.8 * planned(**BF16).memory.peak_bytes
    assert planned(**FULL).memory.peak_bytes < planned(**FULL, **BF16).memory.peak_bytes


def test_blocks_kept_in_bf16() -> None:
    some = {"keep_first_blocks": 2, "keep_last_blocks": 3}
    cfg = config(**some)
    assert blocks_in_fp8(cfg) == range(2, 21)
    assert [fp8_projections(cfg, block).mlp for block in (0, 1, 2, 20, 21)] == [False, False, True, True, False]
    assert kept(**some) == planned(**BF16).memory.kept_bytes - 19 * TOKENS * (DIM + 2 * WIDE)
    assert flops_share(cfg) == pytest.approx(19 / 24 * flops_share(config()))
    assert step_s() < step_s(**some) < step_s(**BF16)
    assert not blocks_in_fp8(config(**BF16))


def test_peak_block_is_among_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak over all blocks equals the peak over the candidates."""
    for some in ({"keep_first_blocks": 5}, {"keep_last_blocks": 7, "batch_size": 1}):
        for more in (FULL, {"reshard_after_forward": True}, {"micro_batch_size": 1}):
            cfg = config(**some, **more)
            few = memory(cfg, world_size=1)
            with monkeypatch.context() as patch:
                patch.setattr(
                    "harness.analysis.plan.memory._peak_candidates", lambda cfg: set(range(cfg.model.num_layers))
                )
                assert memory(cfg, world_size=1) == few


def test_fp8_step_is_faster() -> None:
    assert step_s(recipe=Fp8Recipe.delayed) < step_s() < step_s(**BF16), "the weights have no amax pass"
    assert step_s(recipe=Fp8Recipe.block) > step_s(), "the SwiGLU product is written in bf16 first"
    assert step_s(compile=False) > step_s(), "an amax pass costs more"
    assert step_s(micro_batch_size=1) > step_s(), "weights are quantized for every micro-batch"
    assert step_s(**FULL, **BF16) - step_s(**FULL) > step_s(**BF16) - step_s(), "what runs twice gains twice"
    slow = planned(engine=Fp8Engine.emulated)
    assert slow.step_time_s == step_s(**BF16)
    assert "the emulated engine is slower than bf16" in render(slow)


def test_text_names_the_assumed_rate() -> None:
    text = render(planned())
    assert DEVICE in text
    assert ASSUMED in text
    assert "fp8" not in render(planned(**BF16))
    assert plan_as_dict(planned(**BF16))["fp8"] is None
    numbers = plan_as_dict(planned())["fp8"]
    assert (numbers["recipe"], numbers["num_blocks"]) == ("current", NUM_BLOCKS)
