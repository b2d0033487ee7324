"""A pytest plugin that calls every public function of harness.kernels inside `no_sync`.

Why: these functions run in each step on CUDA and must not read device data. Triton's interpreter runs them on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from types import ModuleType
from typing import Any

from harness.kernels import adamw, chunk_cat, cross_entropy, fp8_quantize, grad_norm, multi_tensor, muon, rope, swiglu
from tests.no_sync import no_sync

MODULES = (chunk_cat, cross_entropy, grad_norm, multi_tensor, rope, fp8_quantize, adamw, muon, swiglu)


def pytest_configure() -> None:
    """Guard the modules before any test imports functions by name."""
    for module in MODULES:
        guard(module)


def guard(module: ModuleType) -> None:
    """Wrap the public functions that a module defines. Triton kernels are objects, not functions, and stay."""
    for name, value in vars(module).items():
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            setattr(module, name, _guarded(value))


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any, **options: Any) -> Any:
        with no_sync():
            return function(*args, **options)

    return guarded
