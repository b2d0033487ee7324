"""Ranks for tests that need CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> None:
    """A test that compares times of kernels, or memory of the whole GPU, needs a GPU on which no other test runs."""
    if request.node.get_closest_marker("alone") and int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("needs the GPU to itself: run it with -m alone and one worker")


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[Pool]:
    """Processes that run distributed cases over NCCL, with `launch.ranks_per_gpu`.

    Each case has new ones: in processes that had run a case before, two cases with replicas ended without a message
    (NCCL 2.28, torch 2.11).
    """
    pool = Pool(reuses=False)
    yield pool
    pool.close()
