"""The fp8 engine on Transformer Engine: its quantize-and-transpose kernels, and cuBLASLt GEMMs.

Why not its modules: `te.Linear` quantizes the same activations once for each projection that reads them, keeps fp8
weights from forward to backward, which FSDP would have to shard, and computes the amax in a separate pass. Here the
caller gives the scale, or a kernel of the harness quantizes by the last scale.
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

from harness.precision.fp8.formats import BLOCK, FORWARD, GRADIENT, SCALE_STEPS, BlockScaling, Operand, QuantizedMatrix

NAMES = {FORWARD: extension.DType.kFloat8E4M3, GRADIENT: extension.DType.kFloat8E5M2}


@final
class TransformerEngine:
    """The fp8 engine on Transformer Engine; methods as in `harness.precision.fp8.engine.Engine`."""

    def quantize(
        self, values: Tensor, scale: Tensor, *, dtype: torch.dtype, transpose: bool, amax: Tensor | None
    ) -> QuantizedMatrix:
        if amax is None:
            amax = torch.empty(1, dtype=torch.float32, device=values.device)  # written, never read
        quantizer = Float8Quantizer(scale.view(1), amax.view(1), NAMES[dtype], rowwise=True, columnwise=transpose)
        quantizer.internal = True
        result: Any = extension.quantize(values, quantizer)
        rows = result._data.view(dtype)
        columns = rows.new_empty(0)
        if transpose:
            columns = rows.T.contiguous() if result._transpose is None else result._transpose.view(dtype)
        return QuantizedMatrix(rows, columns, result._scale_inv, result._scale_inv)

    def quantize_to_amax(self, values: Tensor, last_scale: Tensor, *, dtype: torch.dtype) -> QuantizedMatrix:
        """Uses a kernel of the harness: Transformer Engine needs the scale in advance."""
        from harness.kernels.fp8_quantize import quantize_matrix

        tiles = quantize_matrix(values, last_scale, dtype=dtype, step=SCALE_STEPS[dtype])
        return QuantizedMatrix(tiles.rows, tiles.columns, tiles.scale_inv, tiles.scale_inv)

    def quantize_blocks(self, values: Tensor, *, dtype: torch.dtype, transpose: bool, square: bool) -> QuantizedMatrix:
        quantizer = Float8BlockQuantizer(
            NAMES[dtype],
            rowwise=True,
            columnwise=transpose,
            force_pow_2_scales=True,
            block_scaling_dim=2 if square else 1,
        )
        quantizer.internal = True
        result: Any = extension.quantize(values, quantizer)
        rows, row_scale_inv = result._rowwise_data.view(dtype), result._rowwise_scale_inv
        if not transpose:
            return QuantizedMatrix(rows, rows.new_empty(0), row_scale_inv, row_scale_inv.new_empty(0))
        return QuantizedMatrix(rows, result._columnwise_data.view(dtype), row_scale_inv, result._columnwise_scale_inv)

    def block_scale_shape(self, num_rows: int, num_columns: int, *, square: bool) -> tuple[int, int]:
        """1-D scales are stored transposed; both kinds are padded to a multiple of 4, as the GEMM requires."""
        wide = math.ceil(num_columns / BLOCK)
        return (math.ceil(num_rows / BLOCK), _pad_to_4(wide)) if square else (wide, _pad_to_4(num_rows))

    def gemm(
        self, left: Operand, right: Operand, *, out: Tensor | None, scaling: BlockScaling, split_accumulator: bool
    ) -> Tensor:
        if scaling is BlockScaling.none:
            first, second = _per_tensor(right), _per_tensor(left)
        else:
            first, second = (
                _per_block(right, is_square=scaling is BlockScaling.two_d),
                _per_block(left, is_square=False),
            )
        product, *_ = general_gemm(
            first,
            second,
            out_dtype=torch.bfloat16,
            out=out,
            accumulate=out is not None,
            use_split_accumulator=split_accumulator,
        )
        return product  # type: ignore[no-any-return]


def _pad_to_4(length: int) -> int:
    return math.ceil(length / 4) * 4


def _per_tensor(operand: Operand) -> Any:
    return Float8TensorStorage(
        data=operand.data.view(torch.uint8),
        fp8_scale_inv=operand.scale_inv.view(1),
        fp8_dtype=NAMES[operand.data.dtype],
        fake_dtype=torch.bfloat16,
    )


def _per_block(operand: Operand, *, is_square: bool) -> Any:
    return Float8BlockwiseQTensorStorage(
        rowwise_data=operand.data.view(torch.uint8),
        rowwise_scale_inv=operand.scale_inv,
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=NAMES[operand.data.dtype],
        quantizer=Float8BlockQuantizer(
            NAMES[operand.data.dtype], rowwise=True, columnwise=False, block_scaling_dim=2 if is_square else 1
        ),
        is_2D_scaled=is_square,
        fake_dtype=torch.bfloat16,
    )
