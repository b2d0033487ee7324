"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool

LONGEST_FIRST = (
    "test_drills",
    "test_slurm",
    "test_sentinel",
    "test_shipper",
    "test_hosts",
    "test_kill",
    "test_sweep",
    "test_drill_command",
    "test_operator",
    "test_resume",
    "test_keeper",
    "test_infrastructure",
    "test_local",
    "test_leaving",
    "test_parallel",
    "test_mlflow_sink",
    "test_data_command",
)
"""Files that take half a minute or more: begun last, one of them would leave the other workers idle."""


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
