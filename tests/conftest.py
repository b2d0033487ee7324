"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Real processes that run distributed cases."""
    pool = Pool()
    yield pool
    pool.close()
