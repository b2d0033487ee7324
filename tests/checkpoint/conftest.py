"""Fixtures shared by the checkpoint tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.config.parallel import ParallelConfig
from harness.distributed.world import World, connect, disconnect
from tests.composed import load


@pytest.fixture(scope="session")
def on_cpu() -> ParallelConfig:
    return load(["parallel.device=cpu"]).parallel


@pytest.fixture
def world(on_cpu: ParallelConfig) -> Iterator[World]:
    """World size 1, in this process."""
    yield connect(on_cpu)
    disconnect()
