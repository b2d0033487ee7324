"""Maps a function over the tensors of nested tuples, lists and dicts.

Private API: `torch.utils._pytree.tree_map`. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from torch.utils._pytree import tree_map

__all__ = ["tree_map"]
