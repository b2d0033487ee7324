"""fp8 settings that cannot work give one error line that names the config key."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.errors import ConfigError
from harness.config.precision import Fp8Engine, Fp8Recipe, PrecisionKind
from tests.composed import load
from tests.forks import Launched

SIZE_ERROR = "must give GEMM dimensions that are multiples of 16 for precision=fp8, gives"


def test_the_default_recipe_is_current_and_emulation_is_explicit() -> None:
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
        (["model.dim=24", "model.num_heads=1", "model.num_kv_heads=1"], f"model.dim: {SIZE_ERROR} 24"),
        (["model.ffn_dim=360"], f"model.ffn_dim: {SIZE_ERROR} 360"),
        (["model.dim=32", "model.num_heads=4", "model.num_kv_heads=1"], f"model.num_kv_heads: {SIZE_ERROR} 8"),
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
def test_invalid_fp8_settings_are_rejected(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(["model=tiny", "precision=fp8", *overrides])
    assert str(error.value) == line


def test_other_precisions_accept_odd_sizes() -> None:
    load(["model.dim=24", "model.num_heads=1", "model.num_kv_heads=1", "precision=bf16", "train.sequence_length=40"])
    load(["precision=fp8", "train.sequence_length=40", "train.micro_batch_size=2"])


def test_fp8_without_a_gpu_ends_with_one_error_line(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    overrides = ["precision=fp8", "parallel.device=cpu", "launch.nproc=1", f"run.dir={runs}", "telemetry=plain"]
    with Launched("launch.train", *overrides, output=tmp_path / "output") as process:
        assert process.wait(timeout=200) == 2, process.stderr
    assert process.stderr.splitlines() == [
        "harness: precision: fp8 needs a GPU of compute capability 8.9 or more; use bf16, or emulate it with "
        "precision=fp8_emulated"
    ]
    assert not runs.exists()
