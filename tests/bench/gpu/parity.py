"""Does fp8 learn what bf16 learns? Runs of the product itself, same seed, same batches, one curve beside the other.

    python -m tests.bench.gpu.parity                        125m, 1,000 steps of 16 x 1024 tokens, a few minutes
    python -m tests.bench.gpu.parity precision.fp8.recipe=block --picture parity.png
    python -m tests.bench.gpu.parity --engine emulated --steps 60 model=tiny --no-compile

The text is what every machine has: the Python that lies in the interpreter's library and in torch, byte by byte, files
in the order of a hash of their names. All runs are `python -m harness.train` with the sentinel on, at the same time:
how fast they are is for the table to say. Losses are smoothed by a mean over the last steps; what counts is how far
apart the smoothed curves end. On the way, while a loss falls fast, a run that learns a few steps sooner is percents
ahead, whatever the reason. So there is a twin of the run in bf16 that takes each batch in halves: it rounds its sums
elsewhere and does nothing else, and what fp8 differs by is told beside what the twin differs by. The rate is small
because of it: at three times this rate two runs in bf16 end up to half a percent apart, and two in fp8 one percent.
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

from harness.core import events
from harness.core.events import StepRecord

CORPUS_BYTES = 32 * 2**20
SMOOTHED_OVER = 50
BOUND = 0.01
BATCH_SIZE = 16
RATE = 1.0e-4
"""What is usual for 125m parameters, 6e-4 for half a million tokens, by the root of the batch."""


class Curve(NamedTuple):
    name: str
    losses: NDArray[np.float64]

    @property
    def smoothed(self) -> NDArray[np.float64]:
        """The mean of the last steps, from the first step that has so many."""
        return np.convolve(self.losses, np.full(SMOOTHED_OVER, 1 / SMOOTHED_OVER), mode="valid")


def gather(path: Path) -> int:
    """Write the corpus; returns its bytes."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent]
    files = [
        file for root in roots for file in root.rglob("*.py") if "site-packages" not in file.relative_to(root).parts
    ]
    texts = (file.read_bytes() for file in sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest()))
    joined = b"".join(_until(texts, CORPUS_BYTES))
    np.frombuffer(joined, dtype=np.uint8).astype(np.uint16).tofile(path)
    return len(joined)


def _until(texts: Iterable[bytes], size: int) -> Iterable[bytes]:
    for text in texts:
        if size <= 0:
            return
        size -= len(text)
        yield text


def trained(name: str, overrides: list[str], root: Path) -> Curve:
    """One run, in a process of its own."""
    command = [sys.executable, "-m", "harness.train", f"run.dir={root}", f"run.name={name}", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [event for event in events.read(root / name / "events.jsonl") if isinstance(event, StepRecord)]
    assert not any(record.refused for record in records), f"{name}: an update was refused"
    return Curve(name, np.array([record.loss for record in records]))


def differences(curves: list[Curve]) -> dict[str, NDArray[np.float64]]:
    """Of the smoothed curves to the first one, relative, by name."""
    first, *others = curves
    return {curve.name: curve.smoothed / first.smoothed - 1 for curve in others}


def draw(curves: list[Curve], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for curve in curves:
        steps = np.arange(SMOOTHED_OVER, len(curve.losses) + 1)
        above.plot(steps, curve.smoothed, label=curve.name, linewidth=1)
    above.set_ylabel(f"loss (nats a byte), mean of {SMOOTHED_OVER} steps")
    above.set_yscale("log")
    above.legend()
    below.axhline(0, linewidth=1, color="C0")
    for number, difference in enumerate(differences(curves).values(), start=1):
        steps = np.arange(SMOOTHED_OVER, SMOOTHED_OVER + len(difference))
        below.plot(steps, 100 * difference, linewidth=1, color=f"C{number}")
    below.set_ylabel("over bf16 (%)")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.parity", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("overrides", nargs="*", help="of both runs")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--engine", choices=["transformer_engine", "emulated"], default="transformer_engine")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    options = parser.parse_args()
    warmup = min(100, options.steps // 10)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        size = gather(root / "library.bin")
        common = [
            *("model=125m", "data=files", f"data.sources.main.paths=[{root}/library.bin]"),
            "data.sources.main.dtype=uint16",
            *(
                "model.vocab_size=256",
                f"train.batch_size={BATCH_SIZE}",
                "train.sequence_length=1024",
                "eval.every_steps=0",
            ),
            *(f"train.num_steps={options.steps}", f"optim.warmup_steps={warmup}", f"optim.lr={RATE}"),
            *("telemetry=plain", "checkpoint.every_steps=0", f"parallel.compile={str(options.compile).lower()}"),
            *options.overrides,
        ]
        ways = {
            "bf16": ["precision=bf16"],
            "fp8": ["precision=fp8", f"precision.fp8.engine={options.engine}"],
            "twin": ["precision=bf16", f"train.micro_batch_size={BATCH_SIZE // 2}"],
        }
        with ThreadPoolExecutor() as crew:
            runs = [crew.submit(trained, name, [*common, *way], root) for name, way in ways.items()]
            curves = [run.result() for run in runs]
    print(f"{size / 2**20:.0f} MiB of Python, {options.steps} steps: " + " ".join(options.overrides))
    found = differences(curves)
    for step in sorted({SMOOTHED_OVER, *range(options.steps // 5, options.steps + 1, max(1, options.steps // 5))}):
        if step >= SMOOTHED_OVER:
            at = step - SMOOTHED_OVER
            told = "  ".join(f"{name} {difference[at]:+.2%}" for name, difference in found.items())
            print(f"step {step:>6}: bf16 {curves[0].smoothed[at]:.4f}  {told}")
    for name, difference in found.items():
        whole, half = (worst_of(difference, first) for first in (warmup, options.steps // 2))
        print(f"largest difference of {name} after the warm-up: {whole:.2%}, in the second half: {half:.2%}")
    if options.picture:
        draw(curves, options.picture)
    return 0 if abs(found["fp8"][-1]) < BOUND else 1


def worst_of(difference: NDArray[np.float64], first: int) -> float:
    """The largest of all that are smoothed over steps after the first ones; at least the last."""
    return float(np.abs(difference[min(first, len(difference) - 1) :]).max())


if __name__ == "__main__":
    sys.exit(main())
