"""A real CUDA out-of-memory error is recognised with its numbers, and the free memory of a GPU is measured."""

from __future__ import annotations

import pytest
import torch

from launch.local.out_of_memory import describe_shortage
from launch.local.this_machine import measure_gpu_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_real_cuda_error_has_its_numbers() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    shortage = describe_shortage(caught.value)
    assert shortage["kind"] == "GPU memory"
    assert shortage["asked_bytes"] == pytest.approx(2 * total, rel=0.01)
    assert 0 < shortage["free_bytes"] <= shortage["total_bytes"]
    assert shortage["total_bytes"] == pytest.approx(total, rel=0.05)


def test_free_memory_falls_with_an_allocation() -> None:
    before, total = measure_gpu_bytes(1)
    block = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    assert before - measure_gpu_bytes(1)[0] >= block.numel() // 2
    assert before <= total == measure_gpu_bytes(1)[1]
