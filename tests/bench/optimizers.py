"""Loss and step time of AdamW and Muon: the same tokens, the same schedule, several learning rates and seeds.

    python -m tests.bench.optimizers          125m, 300 steps of 16 x 1024 tokens, 2 seeds, 2 learning rates
    python -m tests.bench.optimizers --steps 60 --seeds 1 --lr 3e-3 model=tiny train.batch_size=8 \\
        train.sequence_length=64 precision=fp32

The corpus is that of `tests.bench.gpu.parity`: Python files, byte by byte. Every run is the training step with its
gate, in one process with one rank. Both optimizers get each learning rate, because Muon's updates are scaled to the
size of AdamW's; the table marks the best one of each. Seeds change the initial weights and the order of the data.
Printed are the median over seeds and the range, the first step at which the smoothed loss is as low as AdamW's final
one at its best learning rate, and the median time of a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from harness.build import build
from harness.config.compose import load
from harness.config.optim import OptimizerKind
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.world import connect, disconnect
from harness.model.size import num_parameters
from harness.precision.attention import fast_attention
from harness.sentinel.device.step_report import DECIDED
from harness.step import evaluate
from tests.bench.clock import release_memory
from tests.bench.gpu.parity import SMOOTHING_STEPS, write_corpus
from tests.bench.intervals import estimate
from tests.bench.step import run_step

BLOCK_STEPS = 10
"""Steps between two readings of the clock, each of which waits for the device."""
WARMUP_BLOCKS = 2
"""Blocks that are not timed: compilation and first allocations."""
REFUSED = 2
"""Place of the skip mask among the last values of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run."""

    optimizer: str
    lr: float
    losses: NDArray[np.float64]
    """Training loss of each step."""
    held_out: float
    """Held-out loss at the end, in nats a byte."""
    step_s: float
    memory_gib: float
    num_refused: int

    @property
    def name(self) -> str:
        return f"{self.optimizer} {self.lr:g}"

    @property
    def smoothed(self) -> NDArray[np.float64]:
        """Mean over the last `SMOOTHING_STEPS` steps, or a fifth of a short run, from the first step with that many."""
        width = min(SMOOTHING_STEPS, max(1, len(self.losses) // 5))
        return np.convolve(self.losses, np.full(width, 1 / width), mode="valid")


def train(optimizer: str, lr: float, seed: int, overrides: Sequence[str], run: RunDir) -> Result:
    """Train one run to its end."""
    cfg = load([*overrides, f"optim={optimizer}", f"optim.lr={lr}", f"run.seed={seed}"])
    world = connect(cfg.parallel)
    parts = build(cfg, world, run)
    on_cuda = world.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    reports, readings = [], []
    for index in range(cfg.train.num_steps):
        if index % BLOCK_STEPS == 0:
            if on_cuda:
                torch.cuda.synchronize()
            readings.append(time.perf_counter())
        reports.append(run_step(parts, cfg, index).clone())
    layout = parts.signals.layout
    joined = torch.stack(reports).cpu()
    losses = torch.stack([layout.scalar(row, "loss") / layout.scalar(row, "tokens") for row in joined])
    blocks = np.diff(readings)[WARMUP_BLOCKS:] / BLOCK_STEPS
    result = Result(
        optimizer=optimizer,
        lr=lr,
        losses=losses.double().numpy(),
        held_out=evaluate(parts, RunState(), cfg=cfg).loss,
        step_s=float(np.median(blocks)) if len(blocks) else float("nan"),
        memory_gib=torch.cuda.max_memory_allocated() / 2**30 if on_cuda else float("nan"),
        num_refused=int((joined[:, joined.shape[1] - DECIDED + REFUSED] == 1).sum()),
    )
    parts.close()
    disconnect()
    del parts, reports
    release_memory()
    return result


class Setup(NamedTuple):
    """What all runs of a comparison share."""

    cfg: Config
    overrides: list[str]
    directory: RunDir


@contextmanager
def prepare_runs(overrides: Sequence[str], *, num_steps: int, num_seeds: int) -> Iterator[Setup]:
    """Write the corpus, and print what is trained."""
    on_cuda = str(torch.cuda.is_available()).lower()
    with tempfile.TemporaryDirectory() as directory, fast_attention():
        corpus = Path(directory) / "library.bin"
        size = write_corpus(corpus)
        combined = [
            *("model=125m", "data=files", f"data.sources.main.paths=[{corpus}]", "data.sources.main.dtype=uint16"),
            *("model.vocab_size=256", "train.batch_size=16", "train.sequence_length=1024", "precision=bf16"),
            *(f"train.num_steps={num_steps}", f"optim.warmup_steps={max(1, num_steps // 10)}"),
            *("telemetry=plain", "checkpoint.ring.slots=0", f"parallel.compile={on_cuda}", *overrides),
        ]
        cfg = load(combined)
        tokens = cfg.train.batch_size * cfg.train.sequence_length
        print(f"model {cfg.model.name}: {num_parameters(cfg.model) / 1e6:.1f}M parameters, {size / 2**20:.0f} MiB text")
        what = f"{cfg.precision.kind}, beta2 {cfg.optim.beta2}, {num_seeds} seeds"
        print(f"{num_steps} steps of {tokens:,} tokens, {what}", flush=True)
        yield Setup(cfg, combined, RunDir(Path(directory)))


class Cells(NamedTuple):
    """Runs with different seeds, as cells of a table."""

    held_out: str
    final_loss: str
    step_ms: str
    memory_gib: str


def summarize(runs: Sequence[Result]) -> Cells:
    held_out = estimate([run.held_out for run in runs])
    return Cells(
        held_out=f"{held_out.median:.4f} ({held_out.low:.4f} to {held_out.high:.4f})",
        final_loss=f"{statistics.median(run.smoothed[-1] for run in runs):.4f}",
        step_ms=f"{1e3 * statistics.median(run.step_s for run in runs):.1f}",
        memory_gib=f"{runs[0].memory_gib:.2f}",
    )


def steps_to(result: Result, loss: float) -> int | None:
    """The first step at which the smoothed loss is at most `loss`; None if it never is."""
    reached = np.flatnonzero(result.smoothed <= loss)
    return int(reached[0]) + len(result.losses) - len(result.smoothed) + 1 if len(reached) else None


def best_lr(results: Sequence[Result], optimizer: str) -> float:
    """The learning rate with the lowest median held-out loss."""
    rates = sorted({result.lr for result in results if result.optimizer == optimizer})
    return min(rates, key=lambda lr: statistics.median(r.held_out for r in select(results, optimizer, lr)))


def select(results: Sequence[Result], optimizer: str, lr: float) -> list[Result]:
    return [result for result in results if result.optimizer == optimizer and result.lr == lr]


def render(results: Sequence[Result]) -> str:
    """The table of all runs, and a line that compares both optimizers at their best learning rates."""
    lines = ["| optimizer | lr | held-out loss | final loss | steps to AdamW's final loss | ms a step | GiB |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    kinds = dict.fromkeys(result.optimizer for result in results)
    best = {kind: best_lr(results, kind) for kind in kinds}
    goal = None
    if OptimizerKind.adamw in best:
        goal = statistics.median(each.smoothed[-1] for each in select(results, "adamw", best["adamw"]))
    for kind in kinds:
        for lr in sorted({result.lr for result in results if result.optimizer == kind}):
            runs = select(results, kind, lr)
            cells = summarize(runs)
            mark = " (best)" if lr == best[kind] else ""
            reached = [None if goal is None else steps_to(run, goal) for run in runs]
            steps = "-" if any(step is None for step in reached) else f"{statistics.median(filter(None, reached)):.0f}"
            lines.append(
                f"| {kind} | {lr:g}{mark} | {cells.held_out} | {cells.final_loss} | {steps} | {cells.step_ms} | "
                f"{cells.memory_gib} |"
            )
    if {"adamw", "muon"} <= set(kinds):
        adamw, muon = (select(results, kind, best[kind]) for kind in ("adamw", "muon"))
        loss = statistics.median(r.held_out for r in muon) / statistics.median(r.held_out for r in adamw) - 1
        pace = statistics.median(r.step_s for r in muon) / statistics.median(r.step_s for r in adamw)
        lines.append(
            f"\nmuon against adamw, each at its best lr: held-out loss {loss:+.2%}, time of a step x {pace:.3f}"
        )
    if refused := {run.name: run.num_refused for run in results if run.num_refused}:
        lines.append(f"updates rejected by the gate: {refused}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.optimizers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of all runs")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", default="6e-4,2e-3", help="learning rates of both, comma-separated")
    options = parser.parse_args()
    with prepare_runs(options.overrides, num_steps=options.steps, num_seeds=options.seeds) as setup:
        results = []
        for seed in range(options.seeds):
            for lr in map(float, options.lr.split(",")):
                for optimizer in OptimizerKind:
                    results.append(train(optimizer, lr, seed, setup.overrides, setup.directory))
                    last = results[-1]
                    pace = f"{1e3 * last.step_s:.1f} ms a step"
                    print(f"seed {seed}: {last.name}: held-out {last.held_out:.4f}, {pace}", flush=True)
        print(render(results))


if __name__ == "__main__":
    main()
