"""Add, copy and norm over lists of tensors in few kernel launches.

Private API: `torch._foreach_add_`, `torch._foreach_copy_` and `torch._foreach_norm`. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from torch import _foreach_add_ as foreach_add_
from torch import _foreach_copy_ as foreach_copy_
from torch import _foreach_norm as foreach_norm

__all__ = ["foreach_add_", "foreach_copy_", "foreach_norm"]
