"""The Triton kernels without a GPU: they compile for Hopper, and give the right results in Triton's interpreter.

Triton comes with torch for CUDA. For these tests it is installed in a directory of its own, which only their
subprocesses import from: torch behaves differently if it finds Triton, and other CPU tests must not see that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BESIDE = Path(sys.prefix) / "triton"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not BESIDE.exists(), reason="needs Triton, which `make test` installs beside torch"),
]

COMPILED = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from harness.kernels import adamw, bit_digest, chunk_cat, cross_entropy, fp8_quantize, grad_norm, multi_tensor, muon
from harness.kernels import rope, swiglu

TYPES = {
    **dict.fromkeys(("count", "width", "height", "length", "every", "ignored", "num_tensors"), "i32"),
    **dict.fromkeys(("stride", "before_stride", "after_stride"), "i32"),
    **dict.fromkeys(("values", "before", "out", "gate", "up", "tensor", "logits", "buffer"), "*bf16"),
    **dict.fromkeys(("fused_qkv", "query", "key", "value"), "*bf16"),
    **dict.fromkeys(("after", "rows", "columns", "gate_rows", "gate_columns", "up_rows", "up_columns"), "*u8"),
    "product": "*u8",
    **dict.fromkeys(("requantize", "is_stale", "counts"), "*i32"),
    **dict.fromkeys(("targets", "table", "ends", "digests"), "*i64"),
    "moments": "*bf16",
    "keys": "*i32",
    "patterns": "*i16",
    "num_programs": "i32",
}
FIXED = {"block": 1024, "dtype": tl.float8e4nv, "limit": 448.0, "underflow": 2.0**-10, "most": 2.0**100, "step": 4}
FIXED |= {"product_dtype": tl.float8e4nv, "product_limit": 448.0}
FIXED |= {"num_queries": 16, "num_keys": 8, "half": 64, "group": 8, "num_rows": 4, "is_backward": True}
FIXED |= {"max_tensors": 256, "unit": 4, "shift": 2**40 + 1}
WITHIN = {"_swiglu", "_swiglu_grads", "num_tiles_to_requantize", "_corner", "tile_at", "write_quantized"}
WITHIN |= {"_quantize_tile", "_quantize_swiglu_tile", "_grads_of_tile", "_row_at", "_underflows", "count_zeros"}
WITHIN |= {"_amax_of_tiles", "find_piece", "load_entry", "_first_row_and_head", "_head_offsets", "_angle_offsets"}
WITHIN |= {"_rotate", "_copy", "_copy_piece", "_mix", "_round_to_bf16", "store_update_sums"}
WITHIN |= {"quantize_tile", "write_columns"}
modules = (adamw, bit_digest, chunk_cat, cross_entropy, fp8_quantize, grad_norm, multi_tensor, muon, rope, swiglu)
found = {
    name: value for module in modules for name, value in vars(module).items() if isinstance(value, JITFunction)
}
def compile_kernel(name, kernel, all_types, all_fixed):
    names = kernel.arg_names
    types = {each: "constexpr" if each in all_fixed else all_types.get(each, "*fp32") for each in names}
    fixed = {(names.index(each),): value for each, value in all_fixed.items() if each in names}
    out = triton.compile(ASTSource(kernel, signature=types, constexprs=fixed), target=GPUTarget("cuda", 90, 32))
    assert "cubin" in out.asm, name
    print(name)

for name, kernel in found.items():
    if name not in WITHIN:
        compile_kernel(name, kernel, TYPES, FIXED)
compile_kernel("_step_adamw:fp32", adamw._step_adamw, TYPES | {"moments": "*fp32"}, FIXED | {"keys": None})
"""


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(BESIDE)]), "OMP_NUM_THREADS": "1"}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    names = run("-c", COMPILED, TRITON_CACHE_DIR=str(tmp_path)).split()
    assert {
        "_step_adamw",
        "_step_adamw:fp32",
        "_sum_patterns",
        "_blend_momentum",
        "_apply_directions",
        "_chunk_cat",
        "_chunk_cat_and_square",
        "_count_underflow",
        "_count_swiglu_grad_underflow",
        "_quantize_swiglu_grads",
        "_move_heads",
    } <= set(names)


def test_interpreted_kernels_match_torch_and_do_not_wait_for_the_device() -> None:
    names = ("test_kernels", "test_multi_tensor", "test_muon_kernels", "test_rope", "test_grad_norm_fusion")
    files = ["tests/kernels/guard_finds_syncs.py", *(f"tests/gpu/{name}.py" for name in names)]
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.guarded_kernels")
    output = run("-m", "pytest", *options, *files, TRITON_INTERPRET="1")
    assert " passed" in output
    assert "skipped" not in output
    assert "failed" not in output


def test_triton_prints_nothing_at_exit() -> None:
    loaded = "from harness.core.fast_imports import loading\nwith loading():\n    import torch, triton.language"
    assert run("-c", loaded) == ""
