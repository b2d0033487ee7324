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

ROOT = Path(__file__).resolve().parent.parent
BESIDE = Path(sys.prefix) / "triton"
pytestmark = pytest.mark.skipif(not BESIDE.exists(), reason="needs Triton, which `make test` installs beside torch")

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from harness import kernels

TYPES = {"count": "i32", "width": "i32", "stride": "i32", "values": "*bf16", "rounded": "*u8"}
found = [each for each in vars(kernels).values() if isinstance(each, JITFunction)]
for kernel in found:
    names = kernel.arg_names
    types = {name: "constexpr" if name == "block" else TYPES.get(name, "*fp32") for name in names}
    source = ASTSource(kernel, signature=types, constexprs={(names.index("block"),): kernels.BLOCK})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "cubin" in made.asm, kernel
    print(kernel.__name__)
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
    assert {"_step_adamw", "_sum_state", "_note_rounded"} <= set(names)


def test_interpreted_they_do_what_torch_does() -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_kernels.py")
    told = run(*words, TRITON_INTERPRET="1")
    assert " passed" in told
    assert "skipped" not in told
    assert "failed" not in told


def test_triton_has_nothing_to_complain_of_at_the_exit() -> None:
    loaded = "from harness.loading import loading\nwith loading():\n    import torch, triton.language"
    assert run("-c", loaded) == ""
