"""GEMMs with a known result on the CPU: a healthy device passes, one flipped bit anywhere is found and described."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from launch.health import gemm_check
from launch.health.gemm_check import BF16, FP8, FP32, GemmCase, check_device, check_dtype, draw_operands

CPU = torch.device("cpu")
EXACT = {"fp32": 2**24, "bf16": 2**24, "fp8": 2**13}
"""Integers up to this are exact in the accumulator."""


@pytest.mark.parametrize("case", [FP32, BF16, FP8], ids=lambda case: case.name)
def test_the_expected_product_is_the_exact_one(case: GemmCase) -> None:
    """In int64, for the operands as they are stored."""
    assert case.max_outer**2 * case.max_inner**2 * case.max_depth <= EXACT[case.name]
    generator = torch.Generator().manual_seed(1)
    before = None
    for _ in range(3):
        operands = draw_operands(case, 64, generator, CPU)
        left, right, expected = (matrix.double() for matrix in operands)
        assert torch.equal(left @ right, expected), "float64 holds these sums exactly"
        assert bool((expected != 0).all())
        assert before is None or not torch.equal(left, before), "each product has new operands"
        before = left


@pytest.mark.parametrize("case", [FP32, BF16, FP8], ids=lambda case: case.name)
def test_this_cpu_computes_exactly(case: GemmCase) -> None:
    done, wrong = check_dtype(case, CPU, size=128, most=3, limit_s=60.0, multiply=gemm_check.multiply_on_device)
    assert (done, wrong) == (3, None)


class FlippedBit:
    """A device that flips one bit of an operand's element in some of its GEMMs."""

    def __init__(self, *products: int, bit: int) -> None:
        self.products, self.bit, self.count = products, bit, 0

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        if self.count in self.products:
            left = left.clone()
            left.view(torch.int16)[5, 7] ^= 1 << self.bit
        self.count += 1
        return left @ right


@pytest.mark.parametrize("bit", [0, 9, 14])
def test_a_flipped_bit_of_an_operand_is_found(bit: int) -> None:
    """Element [5, 7] of the left operand is a factor of all elements of row 5 unless its counterpart is 0."""
    done, wrong = check_dtype(BF16, CPU, size=64, most=4, limit_s=60.0, multiply=FlippedBit(1, 3, bit=bit))
    assert done == 4
    assert wrong is not None
    assert (wrong.num_wrong_products, wrong.num_wrong, wrong.first_product) == (2, 128, 1)
    assert (wrong.first.row, wrong.first.column) == (5, 0)
    assert wrong.describe().startswith(
        "bf16 GEMM is wrong: 2 of 4 products, 128 elements of 4096 each; the first is product 1, element [5, 0]: "
    )


def test_one_wrong_bit_of_a_product_is_found() -> None:
    expected = torch.full((4, 8), 2.0)
    product = expected.clone()
    assert gemm_check.find_difference(product, expected) is None
    product.view(torch.int32)[2, 3] ^= 1
    product[3, 1] = torch.nan
    difference = gemm_check.find_difference(product, expected)
    assert difference is not None
    assert difference[:3] == (2, 2, 3)
    assert difference.value > difference.expected == 2.0
    minus_zero = gemm_check.find_difference(torch.tensor([[-0.0]]), torch.tensor([[0.0]]))
    assert minus_zero is not None, "the comparison is of bits"


def test_a_device_that_cannot_compute_is_a_fault() -> None:
    def fail(*_: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")

    report = check_device(CPU, fail)
    assert report.list_faults() == ["CPU: GEMM failed: CUDA error: an illegal memory access was encountered"]


def test_devices_are_compared_with_the_median_of_their_node() -> None:
    assert gemm_check.find_slow_devices({"GPU 0": 700.0, "GPU 1": 690.0, "GPU 2": 561.0}) == []
    assert gemm_check.find_slow_devices({"GPU 0": 700.0, "GPU 1": 690.0, "GPU 2": 551.0}) == [
        "GPU 2: bf16 GEMM at 551 TFLOP/s, 80% of the median of 3 devices"
    ]
    assert gemm_check.find_slow_devices({"CPU": 0.1}) == gemm_check.find_slow_devices({}) == []
