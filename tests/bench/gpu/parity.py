"""Does fp8 train as well as bf16? Complete runs with the same seed and the same batches, and their loss curves.

    python -m tests.bench.gpu.parity                        125m, 1,000 steps of 16 x 1024 tokens, a few minutes
    python -m tests.bench.gpu.parity train.batch_size=8 --steps 2000 --seeds 0 1 2
    python -m tests.bench.gpu.parity precision.fp8.recipe=block --picture parity.png
    python -m tests.bench.gpu.parity --engine emulated --steps 60 model=tiny --no-compile

The corpus is available on every machine: the Python files of the standard library and of torch, byte by byte, ordered
by a hash of their names. All runs are `python -m harness.train` with the sentinel on, at the same time; their speed is
not measured. Each seed has other weights and other batches. Losses are smoothed by a mean over the last steps; the
criterion is the final difference of the smoothed curves, for every seed. While the loss falls fast, a run that is a few
steps ahead differs by several percent, whatever the reason. So a twin of the bf16 run takes each batch in two halves,
which only changes rounding, and a neighbour starts from weights that are 0.1 % larger. If the neighbour ends as far
from bf16 as fp8 does, in either direction, then the difference shows how runs diverge and not what fp8 costs. The
learning rate is small for the same reason: at three times this rate two bf16 runs end up to half a percent apart, and
two fp8 runs one percent.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from harness.config.compose import load
from harness.core import event_json
from harness.core.events import StepRecord

CORPUS_BYTES = 32 * 2**20
SMOOTHING_STEPS = 50
MAX_FINAL_DIFFERENCE = 0.01
BATCH_SIZE = 16
NEIGHBOUR = 1.001
"""Factor of the initial weights of a run that starts close to the first one."""
VARIANTS = ("fp8", "fp8-block", "fp8-delayed", "twin", "neighbour")
DEFAULT_VARIANTS = ("fp8", "twin", "neighbour")
LEARNING_RATE = 1.0e-4
"""The usual 6e-4 for 125m parameters and half a million tokens, scaled by the square root of the batch size."""


class Curve(NamedTuple):
    name: str
    losses: NDArray[np.float64]

    @property
    def smoothed(self) -> NDArray[np.float64]:
        """Mean over the last `SMOOTHING_STEPS` steps, from the first step with that many."""
        return np.convolve(self.losses, np.full(SMOOTHING_STEPS, 1 / SMOOTHING_STEPS), mode="valid")


def write_corpus(path: Path) -> int:
    """Write the corpus; returns its size in bytes."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent]
    files = [
        file for root in roots for file in root.rglob("*.py") if "site-packages" not in file.relative_to(root).parts
    ]
    texts = (file.read_bytes() for file in sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest()))
    joined = b"".join(_take_bytes(texts, CORPUS_BYTES))
    np.frombuffer(joined, dtype=np.uint8).astype(np.uint16).tofile(path)
    return len(joined)


def _take_bytes(texts: Iterable[bytes], size: int) -> Iterable[bytes]:
    for text in texts:
        if size <= 0:
            return
        size -= len(text)
        yield text


def train(name: str, overrides: list[str], root: Path) -> Curve:
    """Train one run in a subprocess."""
    command = [sys.executable, "-m", "harness.train", f"run.dir={root}", f"run.name={name}", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [event for event in event_json.read(root / name / "events.jsonl") if isinstance(event, StepRecord)]
    assert not any(record.refused for record in records), f"{name}: an update was refused"
    return Curve(name, np.array([record.loss for record in records]))


def relative_differences(curves: list[Curve]) -> dict[str, NDArray[np.float64]]:
    """Name -> relative difference of the smoothed curve to the first one."""
    first, *others = curves
    return {curve.name: curve.smoothed / first.smoothed - 1 for curve in others}


def draw(seeds: list[list[Curve]], path: Path) -> None:
    """The curves of the first seed, and the differences of all seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for curve in seeds[0]:
        steps = np.arange(SMOOTHING_STEPS, len(curve.losses) + 1)
        above.plot(steps, curve.smoothed, label=curve.name, linewidth=1)
    above.set_ylabel(f"loss (nats a byte), mean of {SMOOTHING_STEPS} steps")
    above.set_yscale("log")
    above.legend()
    below.axhline(0, linewidth=1, color="C0")
    for curves in seeds:
        for number, difference in enumerate(relative_differences(curves).values(), start=1):
            steps = np.arange(SMOOTHING_STEPS, SMOOTHING_STEPS + len(difference))
            below.plot(steps, 100 * difference, linewidth=1, color=f"C{number}")
    below.set_ylabel("over bf16 (%)")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.parity", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of all runs")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="each trains all variants")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=DEFAULT_VARIANTS,
        help="compared with bf16, which always runs",
    )
    parser.add_argument("--jobs", type=int, help="runs at the same time; default: all")
    parser.add_argument("--engine", choices=["transformer_engine", "emulated"], default="transformer_engine")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = options.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        size = write_corpus(root / "library.bin")
        planned = {seed: variants(root, seed, options) for seed in options.seeds}
        with ThreadPoolExecutor(options.jobs or sum(map(len, planned.values()))) as pool:
            jobs = [
                [pool.submit(train, name, overrides, root / f"seed{seed}") for name, overrides in runs.items()]
                for seed, runs in planned.items()
            ]
            seeds = [[job.result() for job in of_seed] for of_seed in jobs]
    print(f"{size / 2**20:.0f} MiB of Python, {options.steps} steps: " + " ".join(options.overrides))
    for seed, curves in zip(options.seeds, seeds, strict=True):
        print(f"\nseed {seed}")
        print_differences(curves)
    print()
    final = {
        name: [relative_differences(curves)[name][-1] for curves in seeds] for name in relative_differences(seeds[0])
    }
    for name, values in final.items():
        mean = sum(values) / len(values)
        print(f"{name} at the end: mean {mean:+.2%}, of {', '.join(f'{value:+.2%}' for value in values)}")
    if options.picture:
        draw(seeds, options.picture)
    fp8_values = [value for name, values in final.items() if name.startswith("fp8") for value in values]
    return 0 if all(abs(value) < MAX_FINAL_DIFFERENCE for value in fp8_values) else 1


def variants(root: Path, seed: int, options: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> overrides of the runs of a seed; the first is the one that the others are compared with."""
    warmup = min(100, options.steps // 10)
    common = [
        *("model=125m", "data=files", f"data.sources.main.paths=[{root}/library.bin]"),
        *("data.sources.main.dtype=uint16", "model.vocab_size=256"),
        *(f"train.batch_size={BATCH_SIZE}", "train.sequence_length=1024", "eval.every_steps=0"),
        *(f"train.num_steps={options.steps}", f"optim.warmup_steps={warmup}", f"optim.lr={LEARNING_RATE}"),
        *("telemetry=plain", "checkpoint.every_steps=0", f"parallel.compile={str(options.compile).lower()}"),
        f"run.seed={seed}",
        *options.overrides,
    ]
    cfg = load(common)
    fp8 = ["precision=fp8", f"precision.fp8.engine={options.engine}"]
    changes = {
        "fp8": fp8,
        "fp8-block": [*fp8, "precision.fp8.recipe=block"],
        "fp8-delayed": [*fp8, "precision.fp8.recipe=delayed"],
        "twin": ["precision=bf16", f"train.micro_batch_size={cfg.train.batch_size // 2}"],
        "neighbour": ["precision=bf16", f"model.init_std={cfg.model.init_std * NEIGHBOUR}"],
    }
    return {"bf16": [*common, "precision=bf16"]} | {name: [*common, *changes[name]] for name in options.variants}


def print_differences(curves: list[Curve]) -> None:
    found, num_steps = relative_differences(curves), len(curves[0].losses)
    for step in sorted({SMOOTHING_STEPS, *range(num_steps // 5, num_steps + 1, max(1, num_steps // 5))}):
        if step >= SMOOTHING_STEPS:
            at = step - SMOOTHING_STEPS
            others = "  ".join(f"{name} {difference[at]:+.2%}" for name, difference in found.items())
            print(f"step {step:>6}: bf16 {curves[0].smoothed[at]:.4f}  {others}")
    for name, difference in found.items():
        half = largest_difference(difference, num_steps // 2)
        print(f"largest difference of {name} in the second half: {half:.2%}")


def largest_difference(difference: NDArray[np.float64], first: int) -> float:
    """The largest difference from step `first` on; at least the last one is included."""
    return float(np.abs(difference[min(first, len(difference) - 1) :]).max())


if __name__ == "__main__":
    sys.exit(main())
