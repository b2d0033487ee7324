"""The extra sections of `--also`: the cost of snapshots and saves, and which configurations fit on the device.

Snapshots and saves are measured as in `tests.bench.checkpoint`, with the first model of the table. Configurations that
may fit are run for some steps, compiled and with resharding, and compared with the plan: peak of allocated memory, and
tokens/s. Without a GPU the model of the table replaces the large ones.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness.analysis.plan.plan import Plan, plan
from harness.build import build
from harness.checkpoint.ring_cost import num_buffers
from harness.config.compose import load
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.distributed.world import connect, disconnect
from tests.bench.checkpoint import Cost, check_disk_space, measure_save, measure_snapshot
from tests.bench.clock import Block, release_memory, time_block
from tests.bench.gpu.setting import Setting
from tests.bench.savers import Contender, Loop, begin_harness_save, restore_harness
from tests.bench.step import StepLoop

SNAPSHOT_EVERY = 20
SNAPSHOT_STEPS = 5
"""Steps over which the cost of a snapshot is measured; its copy takes less than one step."""
NUM_SNAPSHOTS, NUM_SAVES = 6, 2
FIT_STEPS, FIT_WARMUP_STEPS = 3, 2
HOST_GB = 100
"""Host memory for the copy of the state; 7b with 8 key-value heads needs 71 GB on one rank."""


class Section(NamedTuple):
    text: str
    values: dict[str, Any]


class Case(NamedTuple):
    """A configuration that may fit."""

    model: str
    sequence_length: int
    batch_size: int
    checkpointing: str
    num_kv_heads: int | None = None
    """Key and value heads; None: those of the model."""

    @property
    def name(self) -> str:
        kept = "nothing recomputed" if self.checkpointing == "none" else f"{self.checkpointing} checkpointing"
        heads = "" if self.num_kv_heads is None else f" with {self.num_kv_heads} key-value heads"
        return f"{self.model}{heads}, {self.batch_size} x {self.sequence_length}, {kept}"


class Fit(NamedTuple):
    name: str
    tokens: int
    """Tokens per step."""
    block: Block | None
    """None if it did not fit."""
    planned_bytes: int
    planned_tokens_per_s: float | None


CASES: tuple[Case, ...] = (
    Case("7b", 4096, 1, "selective", 8),
    Case("7b", 4096, 2, "selective", 8),
    Case("7b", 4096, 1, "full", 8),
    Case("7b", 4096, 4, "full", 8),
    Case("1b", 32768, 1, "none"),
)


def measure_snapshots(setting: Setting, directory: Path) -> Section:
    """The share of training time that snapshots take."""
    with open_loop(setting, directory) as loop:
        for _ in range(num_buffers(loop.cfg.checkpoint.ring)):
            measure_snapshot(loop, num_steps=1)
        step_s = statistics.median(loop.step_s(SNAPSHOT_STEPS) for _ in range(3))
        costs = [measure_snapshot(loop, num_steps=SNAPSHOT_STEPS) for _ in range(NUM_SNAPSHOTS)]
    return render_snapshot(costs, step_s)


def render_snapshot(costs: list[Cost], step_s: float) -> Section:
    shares = sorted(cost.stolen_s / (SNAPSHOT_EVERY * step_s) for cost in costs)
    share, called_s = statistics.median(shares), statistics.median(cost.called_s for cost in costs)
    text = (
        f"A snapshot every {SNAPSHOT_EVERY} steps of {step_s * 1e3:.1f} ms costs {share:+.2%} of the time "
        f"({shares[0]:+.2%} to {shares[-1]:+.2%} over {len(shares)}); its call blocks the loop for "
        f"{called_s * 1e3:.1f} ms."
    )
    return Section(text, {"share": share, "shares": shares, "called_s": called_s, "step_s": step_s})


def measure_saves(setting: Setting, directory: Path) -> Section:
    """How long a background save blocks the loop."""
    with open_loop(setting, directory) as loop, ThreadPoolExecutor(max_workers=1) as writer:
        check_disk_space(loop)
        measure_snapshot(loop, num_steps=1)
        contender = Contender("", partial(begin_harness_save, writer), restore_harness)
        costs = [measure_save(loop, contender, plain_steps=SNAPSHOT_STEPS) for _ in range(NUM_SAVES)]
    return render_save(costs)


def render_save(costs: list[Cost]) -> Section:
    _, called, stolen, safe, restored = (statistics.median(values) for values in zip(*costs, strict=True))
    text = (
        f"A background save blocks the loop for {called * 1e3:.1f} ms and costs {stolen * 1e3:.0f} ms of training time "
        f"until it is safe, after {safe:.1f} s; a restore takes {restored:.1f} s (medians of {len(costs)})."
    )
    return Section(text, {"called_s": called, "stolen_s": stolen, "safe_s": safe, "restored_s": restored})


@contextmanager
def open_loop(setting: Setting, directory: Path) -> Iterator[Loop]:
    """The training loop whose time is measured."""
    cfg = setting.config("precision=bf16", "checkpoint.ring.slots=2")
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        world = connect(cfg.parallel)
        try:
            with closing(build(cfg, world, RunDir(Path(temporary) / "run"))) as parts:
                yield Loop(cfg, parts, Path(temporary))
        finally:
            disconnect()


def measure_fits(setting: Setting, directory: Path) -> Section:
    """Run each case for some steps."""
    cases = CASES
    if not torch.cuda.is_available():
        small = partial(Case, setting.model, setting.sequence_length, setting.batch_size)
        cases = (small("selective"), small("full"))
    fits_of_cases = [try_case(case, setting, directory) for case in cases]
    return Section(render(fits_of_cases), {"fits": [as_dict(fit) for fit in fits_of_cases]})


def try_case(case: Case, setting: Setting, directory: Path) -> Fit:
    overrides = (
        "+experiment=1b_bf16",
        f"cluster={'h200' if torch.cuda.is_available() else 'auto'}",
        f"model={case.model}",
        *([] if case.num_kv_heads is None else [f"model.num_kv_heads={case.num_kv_heads}"]),
        f"train.batch_size={case.batch_size}",
        f"train.sequence_length={case.sequence_length}",
        f"parallel.activation_checkpointing={case.checkpointing}",
        f"parallel.compile={str(setting.is_compiled).lower()}",
        "parallel.reshard_after_forward=true",
        "checkpoint.ring.slots=0",
        f"checkpoint.ring.memory_gb={HOST_GB}",
    )
    cfg = load(list(overrides))
    try:
        block = run_case(cfg, RunDir(directory / "fits"))
    except torch.OutOfMemoryError:
        block = None
    release_memory()
    fit = build_fit(case, block, plan(cfg, world_size=1))
    print(render_row(fit), flush=True)
    return fit


def run_case(cfg: Config, run: RunDir) -> Block:
    world = connect(cfg.parallel)
    try:
        with closing(build(cfg, world, run)) as parts:
            loop = StepLoop(parts, cfg, index=0)
            loop.run(FIT_WARMUP_STEPS)
            return time_block(loop.run, FIT_STEPS, world.device)
    finally:
        disconnect()


def build_fit(case: Case, block: Block | None, planned: Plan) -> Fit:
    return Fit(
        name=case.name,
        tokens=case.batch_size * case.sequence_length,
        block=block,
        planned_bytes=planned.memory.peak_bytes,
        planned_tokens_per_s=None if planned.pace is None else planned.pace.tokens_per_s,
    )


def render(fits_of_cases: list[Fit]) -> str:
    head = "| what fits | tokens/s | planned | peak GiB | planned |\n|---|---:|---:|---:|---:|"
    return "\n".join([head, *map(render_row, fits_of_cases)])


def render_row(fit: Fit) -> str:
    rate = "does not fit" if fit.block is None else f"{fit.tokens / fit.block.step_s:,.0f}"
    peak = "-" if fit.block is None else f"{fit.block.peak_bytes / 2**30:.1f}"
    planned = "-" if fit.planned_tokens_per_s is None else f"{fit.planned_tokens_per_s:,.0f}"
    return f"| {fit.name} | {rate} | {planned} | {peak} | {fit.planned_bytes / 2**30:.1f} |"


def as_dict(fit: Fit) -> dict[str, Any]:
    return {
        "name": fit.name,
        "tokens_per_s": None if fit.block is None else fit.tokens / fit.block.step_s,
        "peak_bytes": None if fit.block is None else fit.block.peak_bytes,
        "planned_tokens_per_s": fit.planned_tokens_per_s,
        "planned_bytes": fit.planned_bytes,
    }


SECTIONS: dict[str, Callable[[Setting, Path], Section]] = {
    "snapshot": measure_snapshots,
    "save": measure_saves,
    "fits": measure_fits,
}
