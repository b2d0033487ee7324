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
from collections.abc import Mapping, Sequence

from harness.config.optim import MomentDtype
from tests.bench.intervals import estimate
from tests.bench.optimizers import Result, prepare_runs, summarize, train


def render_moments(results: Mapping[MomentDtype, Sequence[Result]]) -> str:
    """The table of both, and a line with the difference within a seed and the spread over seeds."""
    lines = ["| moments | held-out loss | final loss | ms a step | GiB |", "|---|---:|---:|---:|---:|"]
    for dtype, runs in results.items():
        lines.append(f"| {dtype} | {' | '.join(summarize(runs))} |")
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
    with prepare_runs(options.overrides, num_steps=options.steps, num_seeds=options.seeds) as setup:
        results: dict[MomentDtype, list[Result]] = {dtype: [] for dtype in MomentDtype}
        for seed in range(options.seeds):
            for dtype in MomentDtype:
                own = [*setup.overrides, f"optim.moment_dtype={dtype}"]
                results[dtype].append(train("adamw", setup.cfg.optim.lr, seed, own, setup.directory))
                print(f"seed {seed}: {dtype}: held-out {results[dtype][-1].held_out:.5f}", flush=True)
        print(render_moments(results))


if __name__ == "__main__":
    main()
