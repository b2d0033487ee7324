"""The place of a tensor in a file, as `torch.distributed.checkpoint` reads it from a checkpoint's metadata.

Private API: `torch.distributed.checkpoint.filesystem._StorageInfo`. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo"]
