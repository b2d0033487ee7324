"""The operators of attention, by which selective checkpointing saves their outputs.

Private API: `torch.ops.aten._scaled_dot_product_*`, checked on torch 2.11 and 2.13, and
`torch.ops.higher_order.flex_attention`, checked on torch 2.13. Selective checkpointing sees the latter in compiled
blocks only; elsewhere it runs compiled by itself and is recomputed.
"""

from __future__ import annotations

import torch
import torch.nn.attention.flex_attention

ATTENTION_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.higher_order.flex_attention,
    }
)
