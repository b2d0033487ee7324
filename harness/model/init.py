"""First values that depend on the seed and the name of a parameter, and on nothing else.

Why: 1, 2 and 4 ranks must start bit-identical, whatever the sharding and the order in which parameters are visited.
How: each parameter has a random generator of its own, seeded by a hash of (seed, name). The full tensor is drawn in
fp32 on the parameter's device, one parameter at a time, and this rank keeps its part of it.
Left out: bits are equal across devices of one type only; CPU and CUDA generators differ.
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
    """Give every parameter and buffer of `model`, sharded or not, its first values, in place."""
    table = parameter_table(cfg, decay_embeddings=False)
    for name, parameter in model.named_parameters():
        _write_first_values(parameter, std=table[role_of(name)].init_std, seed=_seed_of(seed, name))
    model.init_buffers()


def _write_first_values(parameter: nn.Parameter, *, std: float | None, seed: int) -> None:
    full = torch.ones(parameter.shape, dtype=torch.float32, device=parameter.device)
    if std is not None:
        generator = torch.Generator(device=parameter.device).manual_seed(seed)
        full.normal_(0.0, std, generator=generator)
    write_local(parameter, full)


def _seed_of(seed: int, name: str) -> int:
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
