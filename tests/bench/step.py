"""Speed of one training step on this machine: tokens/s, model FLOP/s, MFU and peak memory.

    python -m tests.bench.step +experiment=1b_bf16               one GPU, 1.26B parameters, 4k x 8 tokens
    python -m tests.bench.step --variant parallel.compile=false  the same and a variant, in one run
    python -m tests.bench.step +experiment=1b_bf16 --documents 512 --variant data.document_mask=true

Variants are built, warmed up and timed one after the other, in one process with one rank. The result is the median of
several rounds. On a GPU, FLOP/s are also compared with a large bf16 matmul that is measured in the same run.
`--documents` replaces the corpus of all variants by a file of documents with that mean length.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from harness.build import Parts, build
from harness.config.compose import load
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.distributed.world import connect, disconnect
from harness.model.size import flops_per_token, num_parameters
from harness.precision.attention import fast_attention
from harness.step import finish_step, forward_backward
from harness.telemetry.meters import peak_flops
from tests.bench.clock import WARMUP_STEPS, do_nothing, iterate_steps, matmul_flops_per_s, release_memory, time_block

HELD_OUT_BATCHES = 200
"""Batches of `--documents` beside the trained ones, so that the held-out share has at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    tokens_per_s: float
    spread: float
    """(slowest - fastest) / median of the rounds."""
    flops_per_s: float
    mfu: float | None
    memory_gib: float
    first_loss: float
    last_loss: float


def run_step(parts: Parts, cfg: Config, index: int) -> torch.Tensor:
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=False)
    return finish_step(parts, cfg=cfg, probe=False)


@dataclass(slots=True)
class StepLoop:
    """Runs consecutive steps, each with the next batch."""

    parts: Parts
    cfg: Config
    index: int
    report: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """The report of the last step."""

    def run(self, num_steps: int, begin: Callable[[], None] = do_nothing) -> None:
        for _ in iterate_steps(num_steps, begin):
            self.report = run_step(self.parts, self.cfg, self.index)
            self.index += 1


def mean_loss(parts: Parts, report: torch.Tensor) -> float:
    layout = parts.signals.layout
    return float(layout.scalar(report, "loss") / layout.scalar(report, "tokens"))


def measure(name: str, overrides: list[str], *, rounds: int, steps: int, run: RunDir) -> Row:
    """Build, warm up, and time `rounds` blocks of `steps` steps."""
    cfg = load(overrides)
    world = connect(cfg.parallel)
    parts = build(cfg, world, run)
    first_loss = mean_loss(parts, run_step(parts, cfg, 0))
    loop = StepLoop(parts, cfg, index=1)
    loop.run(WARMUP_STEPS - 1)
    blocks = [time_block(loop.run, steps, world.device) for _ in range(rounds)]
    seconds = [block.step_s for block in blocks]
    tokens = cfg.train.batch_size * cfg.train.sequence_length
    median = statistics.median(seconds)
    flops = tokens * flops_per_token(cfg.model, cfg.train.sequence_length) / median
    device_name = torch.cuda.get_device_name() if world.device.type == "cuda" else None
    peak = peak_flops(device_name, cfg.cluster.peak_tflops)
    row = Row(
        name=name,
        tokens_per_s=tokens / median,
        spread=(max(seconds) - min(seconds)) / median,
        flops_per_s=flops,
        mfu=None if peak is None else flops / peak,
        memory_gib=max(block.peak_bytes for block in blocks) / 2**30,
        first_loss=first_loss,
        last_loss=mean_loss(parts, loop.report),
    )
    parts.close()
    disconnect()
    del parts, loop
    release_memory()
    return row


def write_documents(path: Path, *, mean_length: int, num_tokens: int, vocab_size: int) -> list[str]:
    """Write random tokens as documents of geometric lengths, each ended by token 0, and return the overrides that read
    them."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, min(vocab_size, 2**16), num_tokens, dtype=np.uint16)
    tokens[generator.random(num_tokens) < 1 / mean_length] = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens.tofile(path)
    return ["data=files", f"data.sources.main.paths=[{path.resolve()}]", "data.eod_token=0"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the training step of one configuration and its variants.")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of every variant")
    parser.add_argument("--variant", action="append", default=[], help="further overrides, comma-separated")
    parser.add_argument("--documents", type=int, metavar="MEAN", help="train on documents of this mean length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    cfg = load(options.overrides)
    run = RunDir(Path("runs/bench"))
    overrides = options.overrides
    if options.documents is not None:
        num_batches = 2 * (WARMUP_STEPS + options.rounds * options.steps) + HELD_OUT_BATCHES
        overrides = overrides + write_documents(
            run.path / "documents.bin",
            mean_length=options.documents,
            num_tokens=num_batches * cfg.train.batch_size * (cfg.train.sequence_length + 1),
            vocab_size=cfg.model.vocab_size,
        )
    matmul = matmul_flops_per_s()
    print(f"model {cfg.model.name}: {num_parameters(cfg.model) / 1e6:.1f}M parameters, ", end="")
    print(f"{cfg.train.batch_size} x {cfg.train.sequence_length} tokens, {cfg.precision.kind}")
    if matmul is not None:
        print(f"bf16 matmul 8192^3: {matmul / 1e12:.0f} TFLOP/s")
    print(f"{'variant':<44} {'tok/s':>9} {'spread':>7} {'TFLOP/s':>8} {'MFU':>6} {'of matmul':>9} {'GiB':>6}  loss")
    with fast_attention():
        for variant in ["", *options.variant]:
            extra = [override for override in variant.split(",") if override]
            row = measure(
                variant or "as given",
                [*overrides, *extra],
                rounds=options.rounds,
                steps=options.steps,
                run=run,
            )
            mfu = "-" if row.mfu is None else f"{row.mfu:.1%}"
            share = "-" if matmul is None else f"{row.flops_per_s / matmul:.1%}"
            print(
                f"{row.name:<44} {row.tokens_per_s:>9.0f} {row.spread:>7.1%} {row.flops_per_s / 1e12:>8.3f} "
                f"{mfu:>6} {share:>9} {row.memory_gib:>6.1f}  {row.first_loss:.3f} -> {row.last_loss:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
