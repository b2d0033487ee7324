"""How fast one step is: tokens/s, model FLOP/s, MFU and peak memory of the loop's own step, on this machine.

    python -m tests.bench.step +experiment=1b_bf16               one GPU, 1.26B parameters, 4k x 8 tokens
    python -m tests.bench.step --variant parallel.compile=false  the same, beside a variant in the same run

Each variant is built, warmed up and timed in turn, in one process and one rank; several rounds, the median counts. On a
GPU the rate of a large bf16 matrix product, measured in the same run, is the second yardstick beside the datasheet's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.build import Parts, build
from harness.compose import load
from harness.config import Config
from harness.model.size import flops_per_token, num_parameters
from harness.parallel import connect, disconnect
from harness.precision import fast_attention
from harness.rundir import RunDir
from harness.step import forward_backward, judge_and_update
from harness.telemetry.meters import memory_bytes, peak_flops

WARMUP_STEPS = 4


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


def one_step(parts: Parts, cfg: Config, index: int) -> torch.Tensor:
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=False)
    return judge_and_update(parts, cfg=cfg, probe=False)


def loss_of(parts: Parts, report: torch.Tensor) -> float:
    layout = parts.signals.layout
    return float(layout.scalar(report, "loss") / layout.scalar(report, "tokens"))


def measure(name: str, overrides: list[str], *, rounds: int, steps: int, run: RunDir) -> Row:
    """Build, warm up, and time `rounds` of `steps`."""
    cfg = load(overrides)
    world = connect(cfg.parallel)
    parts = build(cfg, world, run)
    first_loss = loss_of(parts, one_step(parts, cfg, 0))
    for index in range(1, WARMUP_STEPS):
        one_step(parts, cfg, index)
    seconds = []
    for number in range(rounds):
        wait_for(world.device)
        begun = time.perf_counter()
        for index in range(steps):
            report = one_step(parts, cfg, WARMUP_STEPS + number * steps + index)
        wait_for(world.device)
        seconds.append((time.perf_counter() - begun) / steps)
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
        memory_gib=memory_bytes(world.device) / 2**30,
        first_loss=first_loss,
        last_loss=loss_of(parts, report),
    )
    parts.batches.close()
    parts.held_out.close()
    disconnect()
    del parts
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return row


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_flops_per_s(size: int = 8192, repeats: int = 20) -> float | None:
    """Rate of a bf16 matrix product on random data; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    left, right = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        left @ right
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the training step of one configuration and its variants.")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of every variant")
    parser.add_argument("--variant", action="append", default=[], help="further overrides, comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    cfg = load(options.overrides)
    run = RunDir(Path("runs/bench"))
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
                [*options.overrides, *extra],
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
