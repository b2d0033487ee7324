"""Computed sizes against the real module, for every model config."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.config.conf_files import conf_dir
from harness.config.model import ModelConfig
from harness.model.size import (
    block_shapes,
    flops_per_token,
    needs_resharding,
    num_matmul_parameters,
    num_parameters,
    root_shapes,
)
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import linear
from tests.composed import load

MakeConfig = Callable[..., ModelConfig]
SIZES = sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml") if path.stem != "base")


def count(cfg: ModelConfig) -> int:
    with torch.device("meta"):
        model = Transformer(cfg, sequence_length=16, linear=linear)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", SIZES)
def test_num_parameters_of_every_size(size: str) -> None:
    cfg = load([f"model={size}"]).model
    assert num_parameters(cfg) == count(cfg)


@pytest.mark.parametrize("option", ["tied_head", "qk_norm", "embedding_norm"])
def test_num_parameters_of_every_option(make_config: MakeConfig, option: str) -> None:
    cfg = make_config(**{option: True})
    assert num_parameters(cfg) == count(cfg) != count(make_config())


def test_shapes_of_a_block_and_of_the_rest(make_config: MakeConfig) -> None:
    cfg = make_config(qk_norm=True, embedding_norm=True)
    with torch.device("meta"):
        model = Transformer(cfg, sequence_length=16, linear=linear)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    of_first = [shape for name, shape in shapes.items() if name.startswith("blocks.0.")]
    assert sorted(block_shapes(cfg)) == sorted(of_first)
    assert sorted(root_shapes(cfg)) == sorted(shape for name, shape in shapes.items() if not name.startswith("blocks."))


def test_num_matmul_parameters_counts_matrices_and_head(make_config: MakeConfig) -> None:
    cfg = make_config(qk_norm=True)
    with torch.device("meta"):
        model = Transformer(cfg, sequence_length=16, linear=linear)
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name != "embedding.weight"}
    assert num_matmul_parameters(cfg) == sum(matrices.values())
    assert num_matmul_parameters(make_config(tied_head=True)) == num_matmul_parameters(cfg)


def test_1b() -> None:
    cfg = load(["model=1b"]).model
    assert num_parameters(cfg) == pytest.approx(1.26e9, rel=0.01)
    attention = 12 * 24 * 16 * 128 * 4096
    assert flops_per_token(cfg, 4096) == 6 * num_matmul_parameters(cfg) + attention
    assert flops_per_token(cfg, 4096) == pytest.approx(9.6e9, rel=0.02)


def test_weights_stay_gathered_if_they_are_a_small_part_of_the_memory() -> None:
    model = load(["model=1b"]).model
    assert num_parameters(model) == 1_263_634_432
    assert not needs_resharding(model, weight_bytes=2, memory_bytes=80e9)
    assert needs_resharding(model, weight_bytes=4, memory_bytes=40e9)
    assert needs_resharding(model, weight_bytes=2, memory_bytes=None), "unknown memory"
