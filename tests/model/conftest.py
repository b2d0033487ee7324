"""Small model configs for these tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.config.model import ModelConfig
from tests.composed import load

MakeConfig = Callable[..., ModelConfig]


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """A model configuration of a few thousand parameters, with the given fields changed."""
    base = load().model
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "dim": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 48,
        "loss_chunk_tokens": 7,
    }

    def make(**changes: Any) -> ModelConfig:
        return replace(base, **(shape | changes))

    return make
