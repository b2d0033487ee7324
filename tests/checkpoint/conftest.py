"""Fixtures that several tests of checkpoints use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.compose import load
from harness.config import ParallelConfig
from harness.parallel import World, connect, disconnect


@pytest.fixture(scope="session")
def on_cpu() -> ParallelConfig:
    return load(["parallel.device=cpu"]).parallel


@pytest.fixture
def world(on_cpu: ParallelConfig) -> Iterator[World]:
    """World size 1, in this process."""
    yield connect(on_cpu)
    disconnect()
