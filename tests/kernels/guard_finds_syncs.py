"""A test of `tests.guarded_kernels`. `test_kernels.py` runs it in Triton's interpreter, with that plugin."""

from __future__ import annotations

import pytest
import torch

from harness.kernels import grad_norm, multi_tensor

READING = "lambda *given: build_table(*given) if given[0][0].sum() > 0 else None"
"""In a string, because the guard names the innermost line in a file of this repository: that of the launcher."""


def test_a_host_sync_in_a_launcher_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(5), torch.ones(7)]
    assert grad_norm.sum_squares(tensors).flatten().tolist() == [5, 7]
    monkeypatch.setattr(grad_norm, "build_table", eval(READING, {"build_table": multi_tensor.build_table}))
    with pytest.raises(
        AssertionError, match=r"would wait for the device:\s+harness/kernels/grad_norm\.py:\d+: bool\(\)"
    ):
        grad_norm.sum_squares(tensors)
