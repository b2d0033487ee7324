"""What is loaded is left alone by the collector, and nothing else is."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from harness.core.fast_imports import loading


class Ring:
    """Only the collector can free one."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_loaded_stays_and_what_follows_is_collected() -> None:
    with loading():
        assert not gc.isenabled()
        loaded = ref(Ring())
    assert gc.isenabled()
    made_later = ref(Ring())
    gc.collect()
    assert loaded() is not None
    assert made_later() is None


def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()
