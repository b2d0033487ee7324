"""fp8 that cannot be is one line that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.compose import load
from harness.config.errors import ConfigError
from harness.config.precision import Fp8Engine, Fp8Recipe, PrecisionKind
from tests.forks import Launched

SIDES = "must give GEMM dimensions that are multiples of 16 for precision=fp8, gives"


def test_the_default_recipe_has_no_memory_and_the_rehearsal_is_named() -> None:
    cfg = load(["precision=fp8"]).precision
    assert (cfg.kind, cfg.fp8.recipe, cfg.fp8.engine) == (
        PrecisionKind.fp8,
        Fp8Recipe.current,
        Fp8Engine.transformer_engine,
    )
    assert load(["precision=fp8_emulated"]).precision.fp8.engine is Fp8Engine.emulated


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.dim=24", "model.num_heads=1", "model.num_kv_heads=1"], f"model.dim: {SIDES} 24"),
        (["model.ffn_dim=360"], f"model.ffn_dim: {SIDES} 360"),
        (["model.dim=32", "model.num_heads=4", "model.num_kv_heads=1"], f"model.num_kv_heads: {SIDES} 8"),
        (
            ["train.sequence_length=40"],
            "train.sequence_length: must give micro-batches of a multiple of 16 tokens for precision=fp8, gives 40",
        ),
        (["precision.fp8.recipe=best"], "precision.fp8.recipe: must be one of current, delayed, block, got 'best'"),
        (["precision.fp8.engine=x"], "precision.fp8.engine: must be one of transformer_engine, emulated, got 'x'"),
        (["precision.fp8.keep_first_blocks=-1"], "precision.fp8.keep_first_blocks: must be 0 or more, got -1"),
        (["precision.fp8.history_steps=0"], "precision.fp8.history_steps: must be at least 1, got 0"),
        (
            ["precision.fp8.keep_first_blocks=3", "precision.fp8.keep_last_blocks=1"],
            "precision.fp8.keep_last_blocks: must leave a block of model.num_layers=4 to fp8; the first 3 and the last "
            "1 stay bf16",
        ),
        (
            ["precision.fp8.keep_first_blocks=4"],
            "precision.fp8.keep_first_blocks: must leave a block of model.num_layers=4 to fp8; the first 4 and the "
            "last 0 stay bf16",
        ),
        (
            ["precision.fp8.attention=false", "precision.fp8.mlp=false"],
            "precision.fp8.mlp: must be true if precision.fp8.attention is false, or nothing is fp8",
        ),
    ],
)
def test_what_fp8_cannot_multiply_is_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(["model=tiny", "precision=fp8", *overrides])
    assert str(refused.value) == line


def test_odd_sides_are_for_others() -> None:
    load(["model.dim=24", "model.num_heads=1", "model.num_kv_heads=1", "precision=bf16", "train.sequence_length=40"])
    load(["precision=fp8", "train.sequence_length=40", "train.micro_batch_size=2"])


def test_without_a_gpu_training_in_fp8_ends_with_one_line(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    words = ["precision=fp8", "parallel.device=cpu", "launch.nproc=1", f"run.dir={runs}", "telemetry=plain"]
    with Launched("launch.train", *words, output=tmp_path / "output") as process:
        assert process.wait(timeout=60) == 2, process.stderr
    assert process.stderr.splitlines() == [
        "harness: precision: fp8 needs a GPU of compute capability 8.9 or more; use bf16, or rehearse with "
        "precision=fp8_emulated"
    ]
    assert not runs.exists()
