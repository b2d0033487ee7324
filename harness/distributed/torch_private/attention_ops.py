"""The ATen operators behind `scaled_dot_product_attention`, by which selective checkpointing saves their outputs.

Private API: `torch.ops.aten._scaled_dot_product_*`. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import torch

ATTENTION_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
