"""Steps that were measured on one NVIDIA H200 (torch 2.11, CUDA 13.0), for the plan to be compared with.

Each row has the overrides of its configuration and the run it came from. The sentinel was on in every run. A step time
is the median round; a peak is the most that torch's allocator handed out. docs/plan.md has the same figures.
The first three runs are older than some kernels: at 1b in bf16 a step took 530 ms then and 514 ms later.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from harness.config.schema import Config
from tests.composed import load

BASE = ("+experiment=1b_bf16", "cluster=h200", "checkpoint.ring.slots=0")
"""1b, 8 x 4096 tokens, bf16, compiled."""
GIB, GB = 2**30, 1e9


class Run(NamedTuple):
    """Where a figure came from."""

    date: str
    command: str


STEP = Run("2026-11-15 03:04", "python -m tests.bench.step +experiment=1b_bf16 --variant ...")
DOCUMENTS = Run("2026-11-17 17:26", "python -m tests.bench.step +experiment=1b_bf16 --variant data.document_mask=true")
PLAN = Run("2026-11-15 09:29", "python -m tests.bench.plan")
FP8_MEMORY = Run("2026-11-18", "python -m tests.bench.plan --only fp8")
FITS = Run("2026-11-15 21:48", "python -m tests.bench.gpu --models 1b --also fits")
DELAYED_3B = Run("2026-11-16 00:25", "python -m tests.bench.gpu --models 3b --rows ours-fp8-delayed torchtitan")
TABLE = Run("2026-11-16 03:50", "python -m tests.bench.gpu --rows ours-bf16 ours-fp8 ours-fp8-delayed torchtitan")

OPTIMIZERS = Run(
    "2026-11-18 12:53",
    "python -m tests.bench.step +experiment=1b_bf16 --variant optim.moment_dtype=bf16 --variant optim=muon",
)


class Measured(NamedTuple):
    """One configuration."""

    name: str
    run: Run
    overrides: tuple[str, ...] = ()
    step_s: float | None = None
    """None: not recorded."""
    peak_bytes: float | None = None

    def config(self) -> Config:
        return config(*self.overrides)


@cache
def config(*overrides: str) -> Config:
    """The configuration of the rows, with overrides; composed once."""
    return load([*BASE, *overrides])


SELECTIVE, FULL = (f"parallel.activation_checkpointing={kind}" for kind in ("selective", "full"))
EAGER, RESHARDED = "parallel.compile=false", "parallel.reshard_after_forward=true"
FP8, DELAYED, BLOCK = "precision=fp8", "precision.fp8.recipe=delayed", "precision.fp8.recipe=block"
SEVEN_B = ("model=7b", "model.num_kv_heads=8")
"""The shape that was measured: 5.93B parameters."""
THREE_B = ("model=3b", "train.batch_size=4")
KEPT = ("precision.fp8.keep_first_blocks=1", "precision.fp8.keep_last_blocks=1")
LONG = ("train.batch_size=1", "train.sequence_length=32768", RESHARDED)

ROWS = (
    Measured("1b", TABLE, (), 8 * 4096 / 63_741, 63.4 * GIB),
    Measured("1b fp8", TABLE, (FP8,), 8 * 4096 / 82_210),
    Measured("1b fp8 delayed", TABLE, (FP8, DELAYED), 8 * 4096 / 83_718),
    Measured("3b", TABLE, THREE_B, 4 * 4096 / 30_394, 73.6 * GIB),
    Measured("3b fp8", TABLE, (*THREE_B, FP8), 4 * 4096 / 41_266),
    Measured("3b fp8 delayed", DELAYED_3B, (*THREE_B, FP8, DELAYED), 4 * 4096 / 40_613),
    Measured(
        "7b full, 4 sequences",
        FITS,
        (*SEVEN_B, "train.batch_size=4", FULL, RESHARDED),
        4 * 4096 / 11_864,
        90.9 * GIB,
    ),
    Measured(
        "7b selective, 1 sequence",
        FITS,
        (*SEVEN_B, "train.batch_size=1", SELECTIVE, RESHARDED),
        4096 / 11_789,
        89.0 * GIB,
    ),
    Measured("1b, 1 x 32,768 tokens", FITS, LONG, 32768 / 30_270, 61.4 * GIB),
    Measured("1b (1)", STEP, (), 8 * 4096 / 61_534, 63.7 * GIB),
    Measured("1b selective (1)", STEP, (SELECTIVE,), 8 * 4096 / 60_361, 49.8 * GIB),
    Measured("1b full (1)", STEP, (FULL,), 8 * 4096 / 50_812, 22.7 * GIB),
    Measured("1b not compiled", STEP, (EAGER,), 8 * 4096 / 51_179, 73.8 * GIB),
    Measured("1b document mask", DOCUMENTS, ("data.document_mask=true",), None, 63.5 * GIB),
    Measured("1b (3)", OPTIMIZERS, (), 8 * 4096 / 64_681, 63.5 * GIB),
    Measured("1b, moments in bf16", OPTIMIZERS, ("optim.moment_dtype=bf16",), 8 * 4096 / 64_679, 58.7 * GIB),
    Measured("1b Muon", OPTIMIZERS, ("optim=muon",), 8 * 4096 / 52_768, 59.2 * GIB),
    Measured("125m, 32 sequences", PLAN, ("model=125m", "train.batch_size=32"), 0.272, 38.83 * GB),
    Measured("1b (2)", PLAN, (), 0.530, 68.40 * GB),
    Measured("1b selective (2)", PLAN, (SELECTIVE,), 0.550, 53.38 * GB),
    Measured("1b full (2)", PLAN, (FULL,), 0.659, 24.42 * GB),
    Measured("1b not compiled (2)", PLAN, (EAGER,), None, 79.20 * GB),
    Measured("1b not compiled, selective", PLAN, (EAGER, SELECTIVE), 0.704, 58.26 * GB),
    Measured("1b not compiled, full", PLAN, (EAGER, FULL), 0.814, 24.44 * GB),
    Measured("1b will_reshard", PLAN, (RESHARDED,), None, 66.13 * GB),
    Measured("1b, micro-batches of 2", PLAN, ("train.micro_batch_size=2",), 0.592, 36.25 * GB),
    Measured("1b full, vocabulary 128,256", PLAN, (FULL, "model.vocab_size=128256"), 0.734, 31.09 * GB),
    Measured("3b selective", PLAN, (*THREE_B, SELECTIVE), 0.589, 67.22 * GB),
    Measured("3b full, 8 sequences", PLAN, ("model=3b", FULL), 1.363, 49.88 * GB),
    Measured("1b fp8, peak", FP8_MEMORY, (FP8,), None, 58.10 * GB),
    Measured("1b fp8 block", FP8_MEMORY, (FP8, BLOCK), None, 62.39 * GB),
    Measured("1b fp8, 2 blocks in bf16", FP8_MEMORY, (FP8, *KEPT), None, 58.57 * GB),
    Measured("1b fp8 selective", FP8_MEMORY, (FP8, SELECTIVE), None, 58.13 * GB),
    Measured("1b fp8 full", FP8_MEMORY, (FP8, FULL), None, 24.12 * GB),
    Measured("1b fp8 not compiled", FP8_MEMORY, (FP8, EAGER), None, 59.93 * GB),
    Measured("3b fp8, peak", FP8_MEMORY, (*THREE_B, FP8), None, 70.94 * GB),
    Measured("3b fp8 full, 8 sequences", FP8_MEMORY, ("model=3b", FP8, FULL), None, 49.24 * GB),
)
"""(1), (2), (3): the same configuration in other runs. The step times of 0.704 and 0.814 s were recorded as MFU, 45.2
and 39.1 %. The step times in fp8 are older than the peaks: the SwiGLU product was saved for backward then."""


class Shared(NamedTuple):
    """One long sequence of 1b on the ranks of a context group, with full checkpointing."""

    tokens: int
    num_ranks: int
    kernel_s: float
    """Of the first rank, without collectives; weights and moments are not sharded."""
    peak_bytes: float | None = None
    """Of a rank; weights and moments are sharded over the ranks."""

    def config(self) -> Config:
        sequence = (f"train.sequence_length={self.tokens}", "train.batch_size=1", "sentinel.held_out_rows=0")
        return config(FULL, *sequence, f"parallel.context={self.num_ranks}")


SHARED = (
    Shared(32_768, 1, 1.319, 22.6 * GIB),
    Shared(32_768, 4, 0.385, 8.2 * GIB),
    Shared(131_072, 1, 15.774, 40.5 * GIB),
    Shared(131_072, 2, 8.602),
    Shared(131_072, 4, 4.199, 13.3 * GIB),
)
"""2026-11-18: `python -m tests.bench.context kernels`; the peaks of 4 ranks: `python -m tests.bench.context memory`."""
