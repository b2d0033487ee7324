"""Parameter initialization that depends only on the seed and the parameter's name.

Why: 1, 2 and 4 ranks must start bit-identical, whatever the sharding and the order in which parameters are visited.
How: each parameter has its own random generator, seeded by a hash of (seed, name). The full tensor is drawn in fp32 on
the parameter's device, one parameter at a time, and each rank keeps its shard.
Left out: bits are equal only across devices of one type; CPU and CUDA generators differ.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import nn

from harness.config.model import ModelConfig
from harness.distributed.shards import write_local
from harness.model.mup import parameter_table, role_of
from harness.model.transformer import Transformer


def initialize(model: Transformer, cfg: ModelConfig, *, seed: int) -> None:
    """Initialize every parameter and buffer of `model`, sharded or not, in place."""
    table = parameter_table(cfg, decay_embeddings=False)
    for name, parameter in model.named_parameters():
        _init_parameter(parameter, std=table[role_of(name)].init_std, seed=_seed_of(seed, name))
    model.init_buffers()


def _init_parameter(parameter: nn.Parameter, *, std: float | None, seed: int) -> None:
    full = torch.ones(parameter.shape, dtype=torch.float32, device=parameter.device)
    if std is not None:
        generator = torch.Generator(device=parameter.device).manual_seed(seed)
        full.normal_(0.0, std, generator=generator)
    write_local(parameter, full)


def _seed_of(seed: int, name: str) -> int:
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
