"""The harness's own kernels where there is no GPU: they compile for one, and interpreted they do what they should.

Triton comes with torch for CUDA. For these tests it is installed apart, where only their own processes find it: what
torch does besides where it finds Triton is nothing that other tests of a CPU should see.
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
from harness.kernels import gradients, lists, rotation, rounding, state, swiglu

TYPES = {
    **dict.fromkeys(("count", "width", "height", "length", "every", "ignored", "num_tensors"), "i32"),
    **dict.fromkeys(("stride", "before_stride", "after_stride"), "i32"),
    **dict.fromkeys(("values", "before", "made", "gate", "up", "tensor", "logits"), "*bf16"),
    **dict.fromkeys(("joint", "query", "key", "value"), "*bf16"),
    **dict.fromkeys(("after", "rows", "columns", "gate_rows", "gate_columns", "up_rows", "up_columns"), "*u8"),
    **dict.fromkeys(("again", "is_wrong"), "*i32"),
    **dict.fromkeys(("targets", "table", "ends"), "*i64"),
}
FIXED = {"block": 1024, "dtype": tl.float8e4nv, "limit": 448.0, "vanishing": 2.0**-10, "most": 2.0**100, "step": 4}
FIXED |= {"num_queries": 16, "num_keys": 8, "half": 64, "group": 8, "num_rows": 4, "is_back": True}
FIXED |= {"room": 256, "unit": 4}
WITHIN = {"_product", "_slopes", "num_tiles_again", "_corner", "tile_at", "write_rounded", "_largest_of"}
WITHIN |= {"_round_tile", "_round_product_tile", "_slopes_of_tile", "_row_at", "_vanishes", "add_to_meter"}
WITHIN |= {"piece", "entry", "_place", "_heads_at", "_angles_at", "_turn", "_copy"}
rooms = (gradients, lists, rotation, rounding, state, swiglu)
found = {name: each for room in rooms for name, each in vars(room).items() if isinstance(each, JITFunction)}
for name, kernel in found.items():
    if name in WITHIN:
        continue
    names = kernel.arg_names
    types = {each: "constexpr" if each in FIXED else TYPES.get(each, "*fp32") for each in names}
    fixed = {(names.index(each),): value for each, value in FIXED.items() if each in names}
    made = triton.compile(ASTSource(kernel, signature=types, constexprs=fixed), target=GPUTarget("cuda", 90, 32))
    assert "cubin" in made.asm, name
    print(name)
"""


def run(*words: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(BESIDE)])} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    names = run("-c", COMPILED, TRITON_CACHE_DIR=str(tmp_path)).split()
    assert {"_step_adamw", "_join", "_note_rounded", "_count_slopes", "_round_slopes", "_move_heads"} <= set(names)


def test_interpreted_they_do_what_torch_does() -> None:
    files = [f"tests/gpu/{name}.py" for name in ("test_kernels", "test_lists", "test_rotation")]
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.guarded_kernels")
    told = run("-m", "pytest", *options, *files, TRITON_INTERPRET="1")
    assert " passed" in told
    assert "skipped" not in told
    assert "failed" not in told


READING = """
import torch
from harness.kernels import gradients, lists
from tests import guarded_kernels

tensors = [torch.ones(5), torch.ones(7)]
guarded_kernels.guard(gradients)
assert gradients.sum_squares(tensors).flatten().tolist() == [5, 7]
gradients.table_of = lambda *given: lists.table_of(*given) if given[0][0].sum() > 0 else None
gradients.sum_squares(tensors)
"""


def test_a_launcher_that_reads_the_device_is_found() -> None:
    with pytest.raises(
        AssertionError, match=r"would wait for the device:\s+harness/kernels/gradients\.py:\d+: bool\(\)"
    ):
        run("-c", READING, TRITON_INTERPRET="1")


def test_triton_has_nothing_to_complain_of_at_the_exit() -> None:
    loaded = "from harness.core.fast_imports import loading\nwith loading():\n    import torch, triton.language"
    assert run("-c", loaded) == ""
