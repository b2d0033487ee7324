"""What safety costs: time stolen from training by a snapshot and by a save, and time to come back; beside torch's own.

    python -m tests.bench.checkpoint                                   a small model, also without a GPU
    python -m tests.bench.checkpoint +experiment=1b_bf16 --directory /scratch   1.26B parameters: 15 GB a checkpoint

One process, one rank, one run; steps are those of the loop, and the host runs ahead of the device as far as it does
there. *Called* is how long the call itself holds the loop. *Stolen* is all that training loses: the time of the steps
from the call until the state is safe, less what as many plain steps take, measured before and after. *Safe* is when the
checkpoint can be relied on, counted from the call. *Back* is how long it takes until the state is in place again; what
lies on disk is read from the disk, not from the page cache. Contenders are used as their documentation shows: none of
them checks what it reads, and `torch.save` leaves it to the kernel when the file reaches the disk. Each checkpoint is
deleted before the next is written.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from harness.build import build
from harness.checkpoint.cadence import num_buffers
from harness.compose import load
from harness.model.size import num_parameters
from harness.parallel import connect, disconnect, local
from harness.precision import fast_attention
from harness.rundir import RunDir
from tests.bench.savers import Contender, Loop, contenders

SMALL = ("model=50m", "data=synthetic", "train.batch_size=2", "train.sequence_length=64", "parallel.device=auto")


class Cost(NamedTuple):
    called_s: float
    stolen_s: float
    safe_s: float
    back_s: float


def cost_of_save(loop: Loop, contender: Contender, *, plain_steps: int) -> Cost:
    """Save while training goes on until it is safe, then bring it back from the disk, then delete it."""
    path = loop.directory / "checkpoint"
    plain_s = loop.step_s(plain_steps)
    safe_s: list[float] = []
    begun_s = time.perf_counter()
    save = contender.begin(loop, path)
    save.work.add_done_callback(lambda _: safe_s.append(time.perf_counter() - begun_s))
    called_s = time.perf_counter() - begun_s
    num_steps = 0
    while not safe_s:
        loop.step(save.before_update if num_steps == 0 else None)
        num_steps += 1
    loop.wait()
    total_s = time.perf_counter() - begun_s
    save.work.result()
    plain_s = (plain_s + loop.step_s(plain_steps)) / 2
    forget(path)
    back_s = seconds_of(loop, lambda: contender.bring_back(loop, path))
    shutil.rmtree(path)
    return Cost(called_s, total_s - num_steps * plain_s, safe_s[0], back_s)


def cost_of_snapshot(loop: Loop, *, num_steps: int) -> Cost:
    """A snapshot before a few steps, against as many plain ones; then back to it."""
    plain_s = loop.step_s(num_steps)
    ring, state = loop.parts.ring, loop.state
    begun_s = time.perf_counter()
    slot = ring.take(state)
    called_s = time.perf_counter() - begun_s
    for _ in range(num_steps):
        loop.step()
    loop.wait()
    total_s = time.perf_counter() - begun_s
    plain_s = (plain_s + loop.step_s(num_steps)) / 2
    slot.settle(step=state.step, refused_in_row=0)
    back_s = seconds_of(loop, lambda: ring.restore(slot))
    return Cost(called_s, total_s - num_steps * plain_s, math.nan, back_s)


def seconds_of(loop: Loop, work: Callable[[], object]) -> float:
    loop.wait()
    begun_s = time.perf_counter()
    work()
    loop.wait()
    return time.perf_counter() - begun_s


def forget(directory: Path) -> None:
    """Have the kernel drop what it remembers of the files, so that they are read from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def row(name: str, costs: list[Cost], step_s: float) -> str:
    """Medians, with the range of what was stolen."""
    called, stolen, safe, back = (statistics.median(values) for values in zip(*costs, strict=True))
    shares = sorted(cost.stolen_s / step_s for cost in costs)
    safe_text = "-" if math.isnan(safe) else f"{safe:.2f}"
    return (
        f"| {name} | {called * 1e3:.1f} | {stolen * 1e3:.1f} | {stolen / step_s:.1%} ({shares[0]:.1%} to "
        f"{shares[-1]:.1%}) | {safe_text} | {back:.3f} |"
    )


def check_room(loop: Loop) -> int:
    """Bytes of the state, for which there must be room on the disk."""
    num_bytes = sum(local(tensor).nbytes for tensor in loop.parts.tensors().values())
    free = shutil.disk_usage(loop.directory).free
    if free < 1.2 * num_bytes:
        sys.exit(f"{loop.directory} has {free / 1e9:.1f} GB free, a checkpoint takes {num_bytes / 1e9:.1f} GB")
    return num_bytes


def measure(loop: Loop, *, rounds: int, snapshots: int, num_steps: int) -> None:
    """Warm up, check the room on the disk, and print the table row by row."""
    num_bytes = check_room(loop)
    for _ in range(num_buffers(loop.cfg.checkpoint.ring)):
        cost_of_snapshot(loop, num_steps=1)
    step_s = statistics.median(loop.step_s(num_steps) for _ in range(3))
    print(f"state {num_bytes / 1e9:.2f} GB, a plain step {step_s * 1e3:.1f} ms", end="; ")
    print(f"medians of {snapshots} snapshots and {rounds} saves of each kind\n")
    print("| | called, ms | stolen, ms | of a step (range) | safe after, s | back after, s |")
    print("|---|---|---|---|---|---|")
    own = [cost_of_snapshot(loop, num_steps=2) for _ in range(snapshots)]
    print(row("snapshot in memory, and rewind", own, step_s), flush=True)
    with contenders(loop.parts.world.device) as rows:
        for contender in rows:
            costs = [cost_of_save(loop, contender, plain_steps=num_steps) for _ in range(rounds)]
            if costs:
                print(row(contender.name, costs, step_s), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time snapshots and saves beside training.")
    parser.add_argument("overrides", nargs="*", default=list(SMALL), help="Hydra overrides")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind")
    parser.add_argument("--snapshots", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="plain steps beside each of them")
    options = parser.parse_args()
    cfg = load(["checkpoint.every_steps=0", "checkpoint.ring.slots=2", *options.overrides])
    print(f"model {cfg.model.name}: {num_parameters(cfg.model) / 1e6:.1f}M parameters, ", end="")
    print(f"{cfg.train.batch_size} x {cfg.train.sequence_length} tokens, {cfg.precision.kind}")
    with fast_attention(), tempfile.TemporaryDirectory(dir=options.directory) as directory:
        world = connect(cfg.parallel)
        with closing(build(cfg, world, RunDir(Path(directory) / "run"))) as parts:
            loop = Loop(cfg, parts, Path(directory))
            measure(loop, rounds=options.rounds, snapshots=options.snapshots, num_steps=options.steps)
        disconnect()


if __name__ == "__main__":
    main()
