"""The tasks of the kernel comparison on a CPU, small: torch's own kernels agree with the references in fp32."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from tests.bench.gpu import kernel_peers
from tests.bench.gpu.kernel_peers import TORCH, Kernel, Started, Task, Timing, dequantized, main, render, start

SMALL = {"DEVICE": "cpu", "TOKENS": 64, "LENGTH": 32, "DIM": 48, "WIDE": 40, "VOCABULARY": 96, "HEADS": 4} | {
    "KV_HEADS": 2,
    "HEAD_DIM": 16,
    "NUM_LAYERS": 1,
}
COMPARED = {"norm": TORCH, "swiglu": TORCH, "optimizer": f"{TORCH}, fused", "chunk_cat": TORCH}
"""The tasks whose kernels of torch run uncompiled."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(kernel_peers, name, value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("name", "library"), COMPARED.items())
def test_references_agree_with_torch(name: str, library: str) -> None:
    task = kernel_peers.TASKS[name]()
    chosen = task._replace(kernels=[kernel for kernel in task.kernels if kernel.library == library])
    started = start(chosen)[library]
    assert isinstance(started, Started), started
    assert started.error < 0.01


@pytest.mark.usefixtures("small")
def test_every_task_has_a_kernel_of_the_harness_and_finite_results() -> None:
    for make_task in kernel_peers.TASKS.values():
        task = make_task()
        assert task.kernels[0].library == kernel_peers.HARNESS
        assert len(task.kernels) > 1
        assert all(bool(each.isfinite().all()) for each in task.reference())


def test_quantized_results_are_compared_after_scaling() -> None:
    values = torch.tensor([[2.0, 4.0]])

    def quantized(column_scale: float) -> Kernel:
        results = values * 8, values.T * column_scale, torch.tensor(1 / 8)
        return Kernel(f"{column_scale:g}", dequantized(lambda: lambda: results))

    kernels = [quantized(8.0), quantized(9.0)]
    started = start(Task("quantization", kernels, lambda: [values, values.T]))
    errors = {library: each.error for library, each in started.items() if isinstance(each, Started)}
    assert errors == {"8": 0.0, "9": pytest.approx(1 / 8)}


def test_a_missing_library_is_a_row_without_figures() -> None:
    def missing() -> NoReturn:
        raise ModuleNotFoundError("No module named 'liger_kernel'")

    message = start(Task("norm", [Kernel("Liger", missing)], list))["Liger"]
    assert isinstance(message, str)
    assert render("norm", {"harness": Timing(0.4071, 0.021, 3.1e-3, 1.5), "Liger": message}).splitlines() == [
        "| norm | harness | 0.407 | 2% | 3.1e-03 | 1.50 |",
        "| norm | Liger | No module named 'liger_kernel' | | | |",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_device_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "kernel_peers: torch finds no CUDA device\n"
