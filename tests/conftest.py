"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool

LONGEST_FIRST = (
    "test_drills",
    "test_slurm",
    "test_sentinel",
    "test_drill_command",
    "test_shipper",
    "test_leaving",
    "test_hosts",
    "test_resume",
    "test_local",
    "test_kill",
    "test_sweep",
    "test_operator",
    "test_infrastructure",
)
"""Files that take a minute or so: begun last, one of them would leave the other workers idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order within a file stays."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Real processes that run distributed cases."""
    pool = Pool()
    yield pool
    pool.close()
