"""Initial values depend only on (seed, name, shape)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.config.model import ModelConfig
from harness.distributed.shards import local
from harness.model.init import initialize
from harness.model.mup import ParameterRole, parameter_table, role_of
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import linear

MakeConfig = Callable[..., ModelConfig]
WORLD_SIZE = 4


def build(cfg: ModelConfig, *, seed: int = 0) -> Transformer:
    model = Transformer(cfg, sequence_length=4, linear=linear)
    initialize(model, cfg, seed=seed)
    return model


def test_the_same_seed_gives_the_same_bits_for_any_global_rng_state(make_config: MakeConfig) -> None:
    first = build(make_config()).state_dict()
    torch.rand(5)
    second = build(make_config()).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_values_depend_on_the_name_and_not_on_other_parameters(make_config: MakeConfig) -> None:
    """Two more layers and a norm do not change the values of the parameters that both models have."""
    small = build(make_config(depth_scaled_init=False)).state_dict()
    large = build(make_config(depth_scaled_init=False, num_layers=4, qk_norm=True)).state_dict()
    assert all(torch.equal(small[name], large[name]) for name in small)
    assert not torch.equal(small["blocks.0.mlp.gate.weight"], small["blocks.1.mlp.gate.weight"])
    assert not torch.equal(small["blocks.0.mlp.gate.weight"], small["blocks.0.mlp.up.weight"])


def test_another_seed_gives_other_values(make_config: MakeConfig) -> None:
    first, second = build(make_config(), seed=0).state_dict(), build(make_config(), seed=1).state_dict()
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_init_std_is_that_of_the_table(make_config: MakeConfig) -> None:
    cfg = make_config(dim=128, ffn_dim=192, mup_base_width=32, qk_norm=True, embedding_norm=True)
    table = parameter_table(cfg, decay_embeddings=False)
    for name, parameter in build(cfg).named_parameters():
        std = table[role_of(name)].init_std
        if std is None:
            assert role_of(name) is ParameterRole.norm
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.05 * std, name


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of a fake process group of four: sharding is real, communication is not."""
    rank: int = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    yield rank
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(WORLD_SIZE), indirect=True)
def test_shards_are_chunks_of_the_full_tensor(make_config: MakeConfig, rank: int) -> None:
    """61 is not divisible by 4: the last rank's shard is smaller."""
    cfg = make_config(qk_norm=True)
    whole = build(cfg)
    with torch.device("meta"):
        model = Transformer(cfg, sequence_length=4, linear=linear)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    initialize(model, cfg, seed=0)
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        part = local(parameter)
        assert part.shape != expected[name].shape, name
        assert torch.equal(part, expected[name].chunk(WORLD_SIZE)[rank]), name
    assert torch.equal(model.cos, whole.cos)
