"""Fixtures of the Hugging Face tests: the small models of `tests.model`."""

from __future__ import annotations

from tests.model.conftest import make_config

__all__ = ["make_config"]
