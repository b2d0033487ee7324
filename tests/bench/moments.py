"""Loss with AdamW's moments in bf16 (stochastic rounding) against fp32: the same seeds, data and schedule.

    python -m tests.bench.moments             125m, 300 steps of 16 x 1024 tokens, 3 seeds: a GPU
    python -m tests.bench.moments --steps 150 --seeds 6 model=tiny train.batch_size=8 train.sequence_length=64 \\
        precision=fp32 optim.lr=3e-3 optim.beta2=0.99

The corpus is that of `tests.bench.gpu.parity`: Python files, byte by byte. Every run is the training step with its
gate, in one process with one rank. Both moments of a seed start from the same weights and read the same batches, so the
difference within a seed is that of the moments. It is compared with the spread over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from harness.config.compose import load
from harness.config.optim import MomentDtype
from harness.core.rundir import RunDir
from harness.model.size import num_parameters
from harness.precision.attention import fast_attention
from tests.bench.gpu.parity import write_corpus
from tests.bench.intervals import estimate
from tests.bench.optimizers import Result, train


def render_moments(results: Mapping[MomentDtype, Sequence[Result]]) -> str:
    """The table of both, and a line with the difference within a seed and the spread over seeds."""
    lines = ["| moments | held-out loss | final loss | ms a step | GiB |", "|---|---:|---:|---:|---:|"]
    for dtype, runs in results.items():
        held_out = estimate([run.held_out for run in runs])
        lines.append(
            f"| {dtype} | {held_out.median:.4f} ({held_out.low:.4f} to {held_out.high:.4f}) | "
            f"{statistics.median(run.smoothed[-1] for run in runs):.4f} | "
            f"{1e3 * statistics.median(run.step_s for run in runs):.1f} | {runs[0].memory_gib:.2f} |"
        )
    exact, rounded = results[MomentDtype.fp32], results[MomentDtype.bf16]
    within = estimate([own.held_out / other.held_out - 1 for own, other in zip(rounded, exact, strict=True)])
    losses = [run.held_out for run in exact]
    spread = (max(losses) - min(losses)) / statistics.median(losses)
    lines.append(
        f"\nbf16 against fp32, within a seed: held-out loss {within.median:+.3%} "
        f"({within.low:+.3%} to {within.high:+.3%}, {within.num_samples} seeds); range over seeds in fp32 {spread:.3%}"
    )
    if refused := {str(dtype): sum(run.num_refused for run in runs) for dtype, runs in results.items()}:
        lines.append(f"updates rejected by the gate: {refused}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.moments", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of all runs")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    on_cuda = str(torch.cuda.is_available()).lower()
    with tempfile.TemporaryDirectory() as directory, fast_attention():
        corpus = Path(directory) / "library.bin"
        size = write_corpus(corpus)
        overrides = [
            *("model=125m", "data=files", f"data.sources.main.paths=[{corpus}]", "data.sources.main.dtype=uint16"),
            *("model.vocab_size=256", "train.batch_size=16", "train.sequence_length=1024", "precision=bf16"),
            *(f"train.num_steps={options.steps}", f"optim.warmup_steps={max(1, options.steps // 10)}"),
            *("telemetry=plain", "checkpoint.ring.slots=0", f"parallel.compile={on_cuda}", *options.overrides),
        ]
        cfg = load(overrides)
        tokens = cfg.train.batch_size * cfg.train.sequence_length
        print(f"model {cfg.model.name}: {num_parameters(cfg.model) / 1e6:.1f}M parameters, {size / 2**20:.0f} MiB text")
        print(f"{options.steps} steps of {tokens:,} tokens, {cfg.precision.kind}, beta2 {cfg.optim.beta2}", flush=True)
        results: dict[MomentDtype, list[Result]] = {dtype: [] for dtype in MomentDtype}
        for seed in range(options.seeds):
            for dtype in MomentDtype:
                run = RunDir(Path(directory))
                own = [*overrides, f"optim.moment_dtype={dtype}"]
                results[dtype].append(train("adamw", cfg.optim.lr, seed, own, run))
                print(f"seed {seed}: {dtype}: held-out {results[dtype][-1].held_out:.5f}", flush=True)
        print(render_moments(results))


if __name__ == "__main__":
    main()
