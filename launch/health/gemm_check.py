"""GEMMs with a known result: finds a device that computes wrong numbers, and one that is slower than its neighbours.

Why: a sick unit does not always report an error. It returns wrong products, and the loss of the whole run follows.
How: left = x yᵀ and right = z wᵀ hold small integers times a power of two. Every partial sum of their GEMM, in any
order, is exact in the accumulator. The result is s x wᵀ with s = y·z, exact in the output dtype, and every element is
compared bit for bit. y and z cancel up to one term, so that s is small although the partial sums are not. Each GEMM has
new operands, and is large enough for all multiprocessors of a GPU. fp8 is checked where the device has it.
Left out: errors that need hours of load, and units that no GEMM uses.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_SPEED_FRACTION = 0.8
"""Of the median of a node's devices; a slower device is reported."""
LIMIT_S = 0.5
"""For the products of one dtype, without the first, which loads kernels."""
SPEED_S = 0.3
"""For the measurement of the speed."""
GPU_SIZE, CPU_SIZE = 4096, 128
"""Rows and columns. A CPU without bf16 multiplies it in a plain loop: two seconds for a matrix of 512."""
NUM_GPU_PRODUCTS, NUM_CPU_PRODUCTS = 50, 6
GPU_BATCH, CPU_BATCH = 20, 1
"""GEMMs between two readings of the clock."""
FP8_CAPABILITY = (8, 9)

Multiply = Callable[[Tensor, Tensor], Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCase:
    """Operands of one dtype; `max_outer**2 * max_inner**2 * max_depth` is exact in its accumulator."""

    name: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    max_outer: int
    """Largest absolute value in x and w."""
    max_inner: int
    """Largest absolute value in y and z, and of s."""
    max_depth: int
    """Largest number of terms of a sum."""
    max_exponent: int
    """Each operand is scaled by two to a power up to this."""


FP32 = GemmCase(
    name="fp32",
    dtype=torch.float32,
    out_dtype=torch.float32,
    max_outer=8,
    max_inner=16,
    max_depth=1024,
    max_exponent=20,
)
BF16 = GemmCase(
    name="bf16",
    dtype=torch.bfloat16,
    out_dtype=torch.bfloat16,
    max_outer=4,
    max_inner=16,
    max_depth=4096,
    max_exponent=20,
)
FP8 = GemmCase(
    name="fp8",
    dtype=torch.float8_e4m3fn,
    out_dtype=torch.bfloat16,
    max_outer=2,
    max_inner=3,
    max_depth=128,
    max_exponent=0,
)
"""Hopper adds fp8 products in about 13 bits, so the sums are short."""


class Operands(NamedTuple):
    """Two matrices and their exact product."""

    left: Tensor
    right: Tensor
    expected: Tensor


class Difference(NamedTuple):
    """Where a product is wrong."""

    num_wrong: int
    row: int
    """Of the first wrong element."""
    column: int
    value: float
    expected: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WrongGemm:
    """All wrong products of one dtype on one device."""

    dtype: str
    num_products: int
    num_wrong_products: int
    num_wrong: int
    """Elements, in all products together."""
    num_elements: int
    """Elements of one product."""
    first_product: int
    first: Difference

    def describe(self) -> str:
        return (
            f"{self.dtype} GEMM is wrong: {self.num_wrong_products} of {self.num_products} products, {self.num_wrong} "
            f"elements of {self.num_elements} each; the first is product {self.first_product}, element "
            f"[{self.first.row}, {self.first.column}]: {self.first.value:g}, expected {self.first.expected:g}"
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GemmReport:
    """Result of the check of one device."""

    device: str
    """"GPU 3", or "CPU"."""
    tflops: float
    """bf16 GEMM, TFLOP/s."""
    num_products: int
    wrong: tuple[WrongGemm, ...]
    failure: str = ""
    """Error message, if the device could not compute at all."""

    def list_faults(self) -> list[str]:
        failed = [f"{self.device}: GEMM failed: {self.failure}"] if self.failure else []
        return failed + [f"{self.device}: {wrong.describe()}" for wrong in self.wrong]


def check_devices(devices: Sequence[torch.device]) -> list[GemmReport]:
    """Check some devices of this node at the same time. Creates a CUDA context on each GPU.

    A GPU that hangs keeps this call waiting: run it in a process that can be killed.
    """
    with (
        full_precision_sums(),
        warnings.catch_warnings(),
        ThreadPoolExecutor(max_workers=max(1, len(devices))) as threads,
    ):
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # on a CPU without bf16, which is no fault
        return list(threads.map(check_device, devices))


def check_device(device: torch.device, multiply: Multiply | None = None) -> GemmReport:
    """Multiply known matrices on one device, compare every element, and measure the speed."""
    name = "CPU" if device.type == "cpu" else f"GPU {device.index or 0}"
    is_gpu = device.type == "cuda"
    size, most = (GPU_SIZE, NUM_GPU_PRODUCTS) if is_gpu else (CPU_SIZE, NUM_CPU_PRODUCTS)
    wrong: list[WrongGemm] = []
    num_products, tflops, failure = 0, 0.0, ""
    multiply = multiply or multiply_on_device
    try:
        for case in list_cases(device):
            try:
                done, found = check_dtype(case, device, size=size, most=most, limit_s=LIMIT_S, multiply=multiply)
            except RuntimeError:
                if case is not FP8:
                    raise
                continue  # not supported here; a broken device cannot compute the bf16 GEMMs below either
            num_products += done
            wrong += [found] if found else []
        tflops = measure_tflops(device, size=size, batch=GPU_BATCH if is_gpu else CPU_BATCH)
    except RuntimeError as error:
        failure = " ".join(str(error).split())
    return GemmReport(device=name, tflops=tflops, num_products=num_products, wrong=tuple(wrong), failure=failure)


def list_cases(device: torch.device) -> list[GemmCase]:
    """The dtypes to check on a device."""
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    return [FP32, BF16, FP8] if has_fp8 and hasattr(F, "scaled_mm") else [FP32, BF16]


def check_dtype(
    case: GemmCase, device: torch.device, *, size: int, most: int, limit_s: float, multiply: Multiply
) -> tuple[int, WrongGemm | None]:
    """Compute products with different operands; returns their number, and what was wrong.

    `limit_s` begins after the first product.
    """
    generator = torch.Generator().manual_seed(size)
    differences: dict[int, Difference] = {}
    deadline_s = 0.0
    done = 0
    while done < most and (done < 2 or time.monotonic() < deadline_s):
        operands = draw_operands(case, size, generator, device)
        difference = find_difference(multiply(operands.left, operands.right), operands.expected)
        if difference is not None:
            differences[done] = difference
        if done == 0:
            deadline_s = time.monotonic() + limit_s
        done += 1
    if not differences:
        return done, None
    first = min(differences)
    return done, WrongGemm(
        dtype=case.name,
        num_products=done,
        num_wrong_products=len(differences),
        num_wrong=sum(difference.num_wrong for difference in differences.values()),
        num_elements=size * size,
        first_product=first,
        first=differences[first],
    )


def draw_operands(case: GemmCase, size: int, generator: torch.Generator, device: torch.device) -> Operands:
    """Random operands of a case and their exact product, [size, depth] and [depth, size]."""
    depth = min(size, case.max_depth)
    x, w = (draw_integers(size, case.max_outer, generator) for _ in range(2))
    half_y, half_z = (draw_integers(depth // 2, case.max_inner, generator) for _ in range(2))
    total = int(torch.randint(1, case.max_inner + 1, (), generator=generator))
    y, z = torch.cat([half_y, half_y]), torch.cat([half_z, -half_z])  # the halves cancel
    y[0], z[0], z[depth // 2] = 1, total, 0
    order = torch.randperm(depth, generator=generator)
    left_power, right_power = (
        2.0 ** int(torch.randint(-case.max_exponent, case.max_exponent + 1, (), generator=generator)) for _ in range(2)
    )
    x, w, y, z = (vector.float().to(device) for vector in (x, w, y[order], z[order]))
    return Operands(
        left=torch.outer(x * left_power, y).to(case.dtype),
        right=torch.outer(w * right_power, z).to(case.dtype).t(),
        expected=torch.outer(x * (left_power * right_power * total), w).to(case.out_dtype),
    )


def draw_integers(count: int, largest: int, generator: torch.Generator) -> Tensor:
    """Integers from -largest to largest, without 0."""
    signs = 2 * torch.randint(0, 2, (count,), generator=generator) - 1
    return torch.randint(1, largest + 1, (count,), generator=generator) * signs


def multiply_on_device(left: Tensor, right: Tensor) -> Tensor:
    """The product in the output dtype of the case."""
    if left.dtype is not torch.float8_e4m3fn:
        return left @ right
    one, tensorwise = torch.ones((), device=left.device), F.ScalingType.TensorWise
    return F.scaled_mm(left, right, one, tensorwise, one, tensorwise, output_dtype=FP8.out_dtype)


def find_difference(product: Tensor, expected: Tensor) -> Difference | None:
    """Compare bit for bit; None if all elements are equal."""
    bits = torch.int16 if expected.dtype.itemsize == 2 else torch.int32
    differs = (product.contiguous().view(bits) != expected.contiguous().view(bits)).flatten()
    num_wrong = int(differs.sum())
    if num_wrong == 0:
        return None
    place = int(differs.to(torch.uint8).argmax())
    row, column = divmod(place, expected.shape[1])
    return Difference(num_wrong, row, column, float(product[row, column]), float(expected[row, column]))


def measure_tflops(device: torch.device, *, size: int, batch: int) -> float:
    """Median TFLOP/s of bf16 GEMMs, measured for `SPEED_S` and at least three batches."""
    operands = draw_operands(BF16, size, torch.Generator().manual_seed(0), device)
    product = operands.left @ operands.right
    seconds: list[float] = []
    began_s = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - began_s < SPEED_S:
        synchronize(device)
        batch_s = time.perf_counter()
        for _ in range(batch):
            torch.mm(operands.left, operands.right, out=product)
        synchronize(device)
        seconds.append(time.perf_counter() - batch_s)
    flops = 2 * size * size * operands.left.shape[1] * batch
    return flops / statistics.median(seconds) / 1e12


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def find_slow_devices(tflops: Mapping[str, float]) -> list[str]:
    """Devices of one node that are slower than `MIN_SPEED_FRACTION` of their median, each in a few words."""
    middle = statistics.median(tflops.values()) if tflops else 0.0
    return [
        f"{device}: bf16 GEMM at {speed:.4g} TFLOP/s, {speed / middle:.0%} of the median of {len(tflops)} devices"
        for device, speed in tflops.items()
        if speed < MIN_SPEED_FRACTION * middle
    ]


@contextmanager
def full_precision_sums() -> Iterator[None]:
    """Let cuBLAS add the parts of a split sum in fp32; in bf16 they would be rounded."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def list_devices(kind: str) -> list[torch.device]:
    """All devices of this node that ranks would use: its GPUs, or its CPU (`kind` is a value of `DeviceKind`)."""
    num_gpus = 0 if kind == "cpu" else torch.cuda.device_count()
    return [torch.device("cuda", index) for index in range(num_gpus)] or [torch.device("cpu")]
