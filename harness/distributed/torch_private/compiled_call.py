"""Undoes `nn.Module.compile`, for which torch has no public call.

Private API: `nn.Module._compiled_call_impl`, which `Module.__call__` calls if it is not None. Checked on torch 2.11 and
2.13.
"""

from __future__ import annotations

from torch import nn


def discard_compiled_call(module: nn.Module) -> None:
    """Run the module eagerly from now on, so that its hooks are called again."""
    module._compiled_call_impl = None
