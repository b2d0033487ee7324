"""The device on which the Triton kernels are tested: a GPU, or the CPU in Triton's interpreter if TRITON_INTERPRET=1
(`tests/kernels/test_kernels.py` sets it)."""

from __future__ import annotations

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs a CUDA device"),
]
