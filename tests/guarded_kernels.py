"""A plugin of pytest: every function of harness.kernels that launches a kernel is called inside `no_sync`.

Why: these functions run in each step on CUDA. Interpreted they can be called on a CPU, and must read nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from types import ModuleType
from typing import Any

from harness.kernels import adamw, chunk_cat, cross_entropy, fp8_quantize, grad_norm, multi_tensor, rope, swiglu
from tests.no_sync import no_sync

MODULES = (chunk_cat, cross_entropy, grad_norm, multi_tensor, rope, fp8_quantize, adamw, swiglu)


def pytest_configure() -> None:
    """Before any test imports them by name."""
    for module in MODULES:
        guard(module)


def guard(module: ModuleType) -> None:
    """Wrap the public functions that a module defines. Triton's own are objects, not functions."""
    for name, value in vars(module).items():
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            setattr(module, name, _guarded(value))


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any, **options: Any) -> Any:
        with no_sync():
            return function(*args, **options)

    return guarded
