"""fp8 by Transformer Engine: its kernels that round and transpose in one pass, and cuBLASLt behind its products.

Why not its modules: `te.Linear` rounds the same activations once for each matrix that reads them, keeps weights in fp8
from forward to backward, which FSDP has to shard, and finds the largest number in a pass of its own. Here the caller
brings the scale, or a kernel of the harness rounds by a guess of it.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
import transformer_engine.pytorch  # noqa: F401  (loads the libraries that the extension needs)
import transformer_engine_torch as extension
from torch import Tensor
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

from harness.precision.fp8.formats import BLOCK, FORWARD, GRADIENT, SCALE_STEPS, Blocks, Rounded, Side

NAMES = {FORWARD: extension.DType.kFloat8E4M3, GRADIENT: extension.DType.kFloat8E5M2}


@final
class TransformerEngine:
    def round(
        self, values: Tensor, scale: Tensor, *, dtype: torch.dtype, both: bool, largest: Tensor | None
    ) -> Rounded:
        if largest is None:
            largest = torch.empty(1, dtype=torch.float32, device=values.device)  # nobody reads it
        quantizer = Float8Quantizer(scale.view(1), largest.view(1), NAMES[dtype], rowwise=True, columnwise=both)
        quantizer.internal = True
        found: Any = extension.quantize(values, quantizer)
        rows = found._data.view(dtype)
        columns = rows.new_empty(0)
        if both:
            columns = rows.T.contiguous() if found._transpose is None else found._transpose.view(dtype)
        return Rounded(rows, columns, found._scale_inv, found._scale_inv)

    def fit(self, values: Tensor, guess: Tensor, *, dtype: torch.dtype) -> Rounded:
        """By a kernel of the harness: Transformer Engine would have to be told the scale."""
        from harness.kernels.fp8_quantize import round_matrix

        made = round_matrix(values, guess, dtype=dtype, step=SCALE_STEPS[dtype])
        return Rounded(made.rows, made.columns, made.inverse, made.inverse)

    def round_blocks(self, values: Tensor, *, dtype: torch.dtype, both: bool, square: bool) -> Rounded:
        quantizer = Float8BlockQuantizer(
            NAMES[dtype], rowwise=True, columnwise=both, force_pow_2_scales=True, block_scaling_dim=2 if square else 1
        )
        quantizer.internal = True
        found: Any = extension.quantize(values, quantizer)
        rows, row_inverse = found._rowwise_data.view(dtype), found._rowwise_scale_inv
        if not both:
            return Rounded(rows, rows.new_empty(0), row_inverse, row_inverse.new_empty(0))
        return Rounded(rows, found._columnwise_data.view(dtype), row_inverse, found._columnwise_scale_inv)

    def block_scales(self, num_rows: int, num_columns: int, *, square: bool) -> tuple[int, int]:
        """Those of lines lie transposed, and both are padded to what the product reads at once."""
        wide = math.ceil(num_columns / BLOCK)
        return (math.ceil(num_rows / BLOCK), _padded(wide)) if square else (wide, _padded(num_rows))

    def multiply(self, left: Side, right: Side, *, out: Tensor | None, blocks: Blocks, exact: bool) -> Tensor:
        if blocks is Blocks.none:
            first, second = _scaled(right), _scaled(left)
        else:
            first, second = _blocked(right, is_square=blocks is Blocks.squares), _blocked(left, is_square=False)
        product, *_ = general_gemm(
            first,
            second,
            out_dtype=torch.bfloat16,
            out=out,
            accumulate=out is not None,
            use_split_accumulator=exact,
        )
        return product  # type: ignore[no-any-return]


def _padded(length: int) -> int:
    return math.ceil(length / 4) * 4


def _scaled(side: Side) -> Any:
    return Float8TensorStorage(
        data=side.numbers.view(torch.uint8),
        fp8_scale_inv=side.inverse.view(1),
        fp8_dtype=NAMES[side.numbers.dtype],
        fake_dtype=torch.bfloat16,
    )


def _blocked(side: Side, *, is_square: bool) -> Any:
    return Float8BlockwiseQTensorStorage(
        rowwise_data=side.numbers.view(torch.uint8),
        rowwise_scale_inv=side.inverse,
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=NAMES[side.numbers.dtype],
        quantizer=Float8BlockQuantizer(
            NAMES[side.numbers.dtype], rowwise=True, columnwise=False, block_scaling_dim=2 if is_square else 1
        ),
        is_2D_scaled=is_square,
        fake_dtype=torch.bfloat16,
    )
