"""Ranks for tests that need CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[Pool]:
    """Processes that run distributed cases over NCCL, with `launch.ranks_per_gpu`.

    Each case has new ones: in processes that had run a case before, two cases with replicas ended without a message
    (NCCL 2.28, torch 2.11).
    """
    pool = Pool(reuses=False)
    yield pool
    pool.close()
