"""The interface of an fp8 engine (quantize, GEMM), and the choice between Transformer Engine and emulation.

Why: Transformer Engine multiplies in fp8 on a GPU. Everything around it (scales, range statistics, drills) must run and
be tested on a CPU.
How: a few operations on plain tensors. `quantize` gives an fp8 matrix by rows and, if requested, transposed: a GEMM on
Hopper reads both operands along the axis it sums over. `quantize_to_amax` does so by the scale that fits the amax.
`gemm` multiplies two such matrices. Scales are tensors on the device; there is no host sync. The emulation gives the
same quantized bits as Transformer Engine, slowly.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from harness.config.errors import ConfigError
from harness.config.precision import Fp8Engine, Fp8Recipe, PrecisionConfig, PrecisionKind
from harness.precision.fp8.formats import BlockScaling, Operand, QuantizedMatrix

INSTALL = "pip install wheel; pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20,<2.21'"
INSTEAD = "or emulate it with precision=fp8_emulated"


class Engine(Protocol):
    """Quantizes matrices to fp8 and multiplies them."""

    def quantize(
        self, values: Tensor, scale: Tensor, *, dtype: torch.dtype, transpose: bool, amax: Tensor | None
    ) -> QuantizedMatrix:
        """Quantize by one given scale. Values beyond the range saturate, NaN stays NaN. `amax` is raised to the largest
        absolute value."""

    def quantize_to_amax(self, values: Tensor, last_scale: Tensor, *, dtype: torch.dtype) -> QuantizedMatrix:
        """Quantize, with transpose, by the scale that fits the amax, and write it into `last_scale`; fastest if that
        scale was right already."""

    def quantize_blocks(self, values: Tensor, *, dtype: torch.dtype, transpose: bool, square: bool) -> QuantizedMatrix:
        """Quantize with one scale per block: 1 x `BLOCK`, or `BLOCK` x `BLOCK` if `square`."""

    def block_scale_shape(self, num_rows: int, num_columns: int, *, square: bool) -> tuple[int, int]:
        """Shape of the scales of a matrix that `quantize_blocks` gives by rows."""

    def gemm(
        self, left: Operand, right: Operand, *, out: Tensor | None, scaling: BlockScaling, split_accumulator: bool
    ) -> Tensor:
        """[M, K] and [N, K] -> [M, N] in bf16, added to `out` if given; `split_accumulator`: accumulate in fp32."""


@cache
def get_engine(kind: str) -> Engine:
    """The engine of this name. Transformer Engine is imported here, only when it is used."""
    if kind == Fp8Engine.emulated:
        from harness.precision.fp8.emulation import EmulatedEngine

        return EmulatedEngine()
    share_cudnn()
    from harness.precision.fp8.te_backend import TransformerEngine

    return TransformerEngine()


def share_cudnn() -> None:
    """Make Transformer Engine load torch's cuDNN: by default it loads the system's, and two versions conflict."""
    libraries = sorted(Path(torch.__file__).parents[1].glob("nvidia/**/libcudnn*.so.*"))
    if libraries:
        os.environ.setdefault("CUDNN_HOME", str(libraries[0].parent))
    for library in libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def require_engine(cfg: PrecisionConfig, device: torch.device) -> None:
    """Raise a ConfigError that names what is missing if fp8 cannot run on this device."""
    if not needs_transformer_engine(cfg):
        return
    require_engine_installed(cfg, has_gpu=device.type == "cuda")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        found = ".".join(map(str, capability))
        raise ConfigError("precision", f"fp8 needs compute capability 8.9 or more, this GPU has {found}; use bf16")
    if cfg.fp8.recipe is Fp8Recipe.block and capability < (9, 0):
        raise ConfigError("precision.fp8.recipe", "block needs compute capability 9.0 or more; use current")
    try:
        get_engine(cfg.fp8.engine)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError("precision", f"fp8 needs Transformer Engine, which fails to load: {reason[0]}") from error


def require_engine_installed(cfg: PrecisionConfig, *, has_gpu: bool) -> None:
    """The part of `require_engine` that needs no access to the GPU."""
    if not needs_transformer_engine(cfg):
        return
    if not has_gpu:
        raise ConfigError("precision", f"fp8 needs a GPU of compute capability 8.9 or more; use bf16, {INSTEAD}")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError("precision", f"fp8 needs Transformer Engine: {INSTALL}; {INSTEAD}")


def needs_transformer_engine(cfg: PrecisionConfig) -> bool:
    return cfg.kind is PrecisionKind.fp8 and cfg.fp8.engine is Fp8Engine.transformer_engine
