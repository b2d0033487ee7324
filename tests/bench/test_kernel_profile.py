"""The kernel profile: kinds of kernels, means over steps, and the rendered table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.bench.gpu.kernels import REST, Kernel, StepKernels, collect_kernels, kind_of, main, render_table


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", "attention"),
        ("_count_swiglu_grad_underflow", "quantization and transposition, including SwiGLU's"),
        ("_quantize_swiglu_grads", "quantization and transposition, including SwiGLU's"),
        (
            "void transformer_engine::cast_transpose_fused_kernel<false>",
            "quantization and transposition, including SwiGLU's",
        ),
        ("_step_adamw", "optimizer and clipping"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::", "optimizer and clipping"),
        ("_chunk_cat", "FSDP's casts and copies"),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at",
            "FSDP's casts and copies",
        ),
        ("triton_poi_fused__unsafe_view_mul_silu_2", "norms, RoPE, SwiGLU, loss"),
        ("_move_heads", "norms, RoPE, SwiGLU, loss"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>", REST),
    ],
)
def test_kind_of_a_kernel(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def event(name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_means_over_steps_and_the_span() -> None:
    events = [
        event("_chunk_cat", 0, 500),
        event("nvjet", 1000, 5000),
        event("_chunk_cat", 5500, 6000),
        event("nvjet", 6000, 9000),
    ]
    found = collect_kernels(events, 2)
    assert found.kernels == {"_chunk_cat": Kernel("_chunk_cat", 0.5, 1.0), "nvjet": Kernel("nvjet", 3.5, 1.0)}
    assert (found.span_ms, found.ms, found.num_kernels) == (4.5, 4.0, 2.0)


def build_kernels(span_ms: float, *kernels: Kernel) -> StepKernels:
    return StepKernels({kernel.name: kernel for kernel in kernels}, span_ms)


def test_rendered_table() -> None:
    product, update = Kernel("nvjet", 342.75, 400), Kernel("_step_adamw", 8.5, 5)
    found = {
        "ours-bf16": build_kernels(360.0, product, update, Kernel("tiny", 0.1, 79)),
        "ours-bf16, probed": build_kernels(365.0, product._replace(ms=340.0), update, Kernel("tiny", 0.2, 150)),
        "ours-bf16, snapshots": build_kernels(
            366.0, product, update, Kernel("Memcpy DtoH (Device -> Pinned)", 290.0, 40)
        ),
        "ours-bf16, sentinel off": build_kernels(359.0, product._replace(ms=344.0), update),
        "torchtitan": build_kernels(380.0, product, Kernel("multi_tensor_apply", 14.6, 1185)),
    }
    assert render_table(found) == (
        "|  | ours-bf16 | torchtitan |\n"
        "| --- | ---: | ---: |\n"
        "| attention | 0.0 | 0.0 |\n"
        "| quantization and transposition, including SwiGLU's | 0.0 | 0.0 |\n"
        "| GEMM | 342.8 | 342.8 |\n"
        "| optimizer and clipping | 8.5 | 14.6 |\n"
        "| FSDP's casts and copies | 0.0 | 0.0 |\n"
        "| norms, RoPE, SwiGLU, loss | 0.0 | 0.0 |\n"
        "| the rest | 0.1 | 0.0 |\n"
        "| **kernels** | **351.4** (484) | **357.4** (1,585) |\n"
        "| from the first to the last | 360.0 | 380.0 |\n"
        "\n"
        "ours-bf16: 79 kernels added by the sentinel, 0.10 ms; by a probe 71 more, 0.10 ms.\n"
        "\n"
        "ours-bf16: a snapshot is copied for 290.0 ms beside its step. The other kernels of the step take 351.2 ms "
        "instead of 351.4, from the first to the last 366.0 instead of 360.0: +0.08% at one snapshot in 20 steps."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "kernels: needs a GPU\n"


def test_an_unknown_model_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "2b"]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("kernels: ")
    assert "2b" in message
