"""What an engine of fp8 does, and which one does it.

Why: Transformer Engine multiplies in fp8 on a GPU; all around it (scales, health, a drill) must run and be
tested where there is none.
How: a few operations on plain tensors. `round` makes numbers of fp8, by rows and, where wanted, transposed: a product
on Hopper reads both of its sides along the axis it sums over; `fit` does so by the scale that it finds. `multiply`
takes two such matrices. Scales are tensors on the device; nothing here waits for it. The engine of plain torch makes
the same numbers as Transformer Engine, slowly.
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
from harness.precision.fp8.formats import Blocks, Rounded, Side

INSTALL = "pip install wheel; pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20,<2.21'"
INSTEAD = "or rehearse with precision=fp8_emulated"


class Engine(Protocol):
    def round(
        self, values: Tensor, scale: Tensor, *, dtype: torch.dtype, both: bool, largest: Tensor | None
    ) -> Rounded:
        """By one scale; what is beyond the range becomes the largest number, NaN stays NaN. `largest` is raised to the
        largest absolute value."""

    def fit(self, values: Tensor, guess: Tensor, *, dtype: torch.dtype) -> Rounded:
        """Both ways, by the scale that fits the largest number, which `guess` becomes; better if it was near."""

    def round_blocks(self, values: Tensor, *, dtype: torch.dtype, both: bool, square: bool) -> Rounded:
        """By a scale for each block: of a row, or `square`."""

    def block_scales(self, num_rows: int, num_columns: int, *, square: bool) -> tuple[int, int]:
        """Shape of the scales of a matrix that is rounded so and read by rows."""

    def multiply(self, left: Side, right: Side, *, out: Tensor | None, blocks: Blocks, exact: bool) -> Tensor:
        """[M, K] and [N, K] -> [M, N] in bf16, added to `out` where there is one; `exact`: in fp32 throughout."""


@cache
def engine_of(kind: str) -> Engine:
    """The engine itself; Transformer Engine is imported here, and only when it is wanted."""
    if kind == Fp8Engine.emulated:
        from harness.precision.fp8.emulation import Emulated

        return Emulated()
    _share_cudnn()
    from harness.precision.fp8.te_backend import TransformerEngine

    return TransformerEngine()


def _share_cudnn() -> None:
    """Lead Transformer Engine to torch's cuDNN: it takes the system's first, and two of them do not get along."""
    libraries = sorted(Path(torch.__file__).parents[1].glob("nvidia/**/libcudnn*.so.*"))
    if libraries:
        os.environ.setdefault("CUDNN_HOME", str(libraries[0].parent))
    for library in libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def require_engine(cfg: PrecisionConfig, device: torch.device) -> None:
    """Refuse fp8 where it cannot be had, with what is missing."""
    if not needs_transformer_engine(cfg):
        return
    require_parts(cfg, has_gpu=device.type == "cuda")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        found = ".".join(map(str, capability))
        raise ConfigError("precision", f"fp8 needs compute capability 8.9 or more, this GPU has {found}; use bf16")
    if cfg.fp8.recipe is Fp8Recipe.block and capability < (9, 0):
        raise ConfigError("precision.fp8.recipe", "block needs compute capability 9.0 or more; use current")
    try:
        engine_of(cfg.fp8.engine)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError("precision", f"fp8 needs Transformer Engine, which does not load: {reason[0]}") from error


def require_parts(cfg: PrecisionConfig, *, has_gpu: bool) -> None:
    """The same as far as it shows without a look at the GPU."""
    if not needs_transformer_engine(cfg):
        return
    if not has_gpu:
        raise ConfigError("precision", f"fp8 needs a GPU of compute capability 8.9 or more; use bf16, {INSTEAD}")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError("precision", f"fp8 needs Transformer Engine: {INSTALL}; {INSTEAD}")


def needs_transformer_engine(cfg: PrecisionConfig) -> bool:
    return cfg.kind is PrecisionKind.fp8 and cfg.fp8.engine is Fp8Engine.transformer_engine
