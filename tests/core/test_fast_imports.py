"""Tests of `loading`: objects created inside are frozen, objects created later are collected."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from harness.core.fast_imports import loading


class Ring:
    """A reference cycle: only garbage collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_loaded_objects_are_frozen_and_later_ones_collected() -> None:
    with loading():
        assert not gc.isenabled()
        loaded = ref(Ring())
    assert gc.isenabled()
    made_later = ref(Ring())
    gc.collect()
    assert loaded() is not None
    assert made_later() is None


def test_a_failed_import_leaves_garbage_collection_on() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()
