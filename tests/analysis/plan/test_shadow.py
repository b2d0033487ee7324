"""The plan against FSDP2 itself: shards, collectives and memory of a step on fake tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from harness.analysis.plan.memory import WORKSPACE_BYTES, memory
from harness.analysis.plan.traffic import CollectiveKind, collectives
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from tests.composed import load

pytestmark = pytest.mark.full

FEW_TOKENS = ["parallel.compile=false", "train.micro_batch_size=1", "train.sequence_length=64", "precision=bf16"]
IN_FP8 = ["parallel.compile=false", "train.micro_batch_size=2", "train.sequence_length=2048", "precision=fp8_emulated"]
CASES: dict[str, tuple[int, list[str]]] = {
    "70b on 1,024 ranks": (1024, ["model=70b", "model.num_layers=2", *FEW_TOKENS]),
    "two copies, uneven shards, gathered once": (
        6,
        [
            *["model=1b", "model.num_layers=3", "model.vocab_size=32003", *FEW_TOKENS],
            *["parallel.replicate=2", "parallel.reshard_after_forward=false"],
            "parallel.activation_checkpointing=full",
        ],
    ),
    "fp8, but for the last block": (2, ["model=1b", "model.num_layers=3", *IN_FP8, "precision.fp8.keep_last_blocks=1"]),
    "fp8, products kept": (
        2,
        ["model=1b", "model.num_layers=2", *IN_FP8, "parallel.activation_checkpointing=selective"],
    ),
    "fp8, inputs kept": (2, ["model=1b", "model.num_layers=3", *IN_FP8, "parallel.activation_checkpointing=full"]),
}
NUM_MICRO_BATCHES = 2


def overrides_of_case(case: str) -> list[str]:
    ranks, overrides = CASES[case]
    rows = next(
        int(override.partition("=")[2]) for override in overrides if override.startswith("train.micro_batch_size=")
    )
    return [*overrides, f"train.batch_size={NUM_MICRO_BATCHES * rows * ranks}"]


@pytest.fixture(scope="module")
def shadows() -> dict[str, dict[str, Any]]:
    """All steps, in a separate process, because a fake process group must not remain in this one."""
    lines = "".join(f"{CASES[case][0]} {' '.join(overrides_of_case(case))}\n" for case in CASES)
    command = [sys.executable, "-m", "tests.analysis.plan.shadow"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, shadows: dict[str, dict[str, Any]]) -> tuple[Config, int, dict[str, Any]]:
    return load(overrides_of_case(request.param)), CASES[request.param][0], shadows[request.param]


def test_shard_sizes_match_the_plan(case: tuple[Config, int, dict[str, Any]]) -> None:
    cfg, ranks, seen = case
    assert memory(cfg, world_size=ranks).parts.weights == seen["weights"] == seen["gradients"]


def test_collectives_match_the_plan(case: tuple[Config, int, dict[str, Any]]) -> None:
    cfg, ranks, seen = case
    planned = collectives(cfg, world_size=ranks)
    calls = {f"{call.kind} {call.num_bytes}": call.num_calls for call in planned}
    once = {call for call in seen["calls"] if call.startswith(CollectiveKind.all_reduce)}
    assert calls == {
        call: often if call in once else NUM_MICRO_BATCHES * often for call, often in seen["calls"].items()
    }, "replicas are summed in the last micro-batch only"


def test_memory_matches_the_plan(case: tuple[Config, int, dict[str, Any]]) -> None:
    """The fake step has no moments and no workspaces; temporary bytes of a block were measured on a GPU."""
    cfg, ranks, seen = case
    planned = memory(cfg, world_size=ranks)
    besides = planned.parts.moments + WORKSPACE_BYTES
    assert planned.kept_bytes - besides == pytest.approx(seen["kept"], rel=0.001)
    assert planned.forward_peak_bytes - besides == pytest.approx(seen["forward_peak"], rel=0.01)
    share = (planned.backward_peak_bytes - besides) / seen["backward_peak"]
    if cfg.precision.kind is PrecisionKind.fp8:
        assert 0.999 < share < 1.06, "the shadow does not see what an operator holds within itself"
    else:
        assert share == pytest.approx(1.0, rel=0.03)
