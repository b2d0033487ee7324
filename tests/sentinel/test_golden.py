from __future__ import annotations

import json

import pytest

from tests.sentinel.golden import GOLDEN, path_of


@pytest.mark.parametrize("name", GOLDEN)
def test_seeded_series_match_the_golden_files(name: str) -> None:
    """After a wanted change: `python -m tests.sentinel.golden`, and read the difference."""
    expected = json.loads(path_of(name).read_text(encoding="utf-8"))
    for series, lines in GOLDEN[name]().items():
        assert lines == expected.pop(series), series
    assert expected == {}
