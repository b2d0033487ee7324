"""Cost of snapshots in shared memory and of their replicas: bytes, seconds, and the ratio of step times.

    python -m tests.bench.replicas                                       the default model
    python -m tests.bench.replicas model.dim=512 model.ffn_dim=1408 model.num_layers=6
    python -m tests.bench.replicas model=125m parallel.device=cuda train.batch_size=8 train.sequence_length=1024
    python -m tests.bench.replicas model=125m parallel.device=cuda --ranks 1      no replicas; steps of full speed

One run of two ranks on this machine, each a node of its own; on CUDA they share the GPU. A window is
`checkpoint.ring.every_steps` steps. In each round there is one window of each kind, in alternating order, so that a
drift of the machine affects all of them equally:

- none: no snapshot.
- taken: the snapshot is copied into the ring, and nothing else.
- published: it is also hashed, and a later start can resume from it.
- sent: it is also sent to the partner, which hashes it and keeps it.

The background work of a window is part of its time; on CUDA a window ends when the device is idle. The ratio is the
time of a window over that of the `none` window of the same round; the table has the median over the rounds and its 90 %
bootstrap interval. The copy is also timed alone: on CUDA that is the time for which it occupies the device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.build import Parts, build
from harness.checkpoint import integrity
from harness.checkpoint.ring_cost import num_buffers
from harness.config.compose import load
from harness.config.parallel import DeviceKind
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.collectives import gather_results
from harness.distributed.world import connect, disconnect
from harness.model.size import num_parameters
from harness.precision.attention import fast_attention
from harness.step import finish_step, forward_backward
from tests.bench.clock import round_order, wait_for
from tests.bench.intervals import COVERAGE, estimate
from tests.distributed.pool import Pool

KINDS = ("none", "taken", "published", "sent")
TRUST_AFTER = 2
"""Steps after which a snapshot is trusted: one step was computed from it, and its report has arrived."""
HEAD = f"| snapshot | window, ms | ratio ({COVERAGE:.0%} interval) |\n|---|---:|---:|"
LIMIT_S = 3600.0
SHARED = "checkpoint.ring.shared_dir=/dev/shm"


class Measured(NamedTuple):
    """One rank's measurements."""

    num_bytes: int
    num_buffers: int
    """Buffers of that size on this rank."""
    call_s: list[float]
    """For how long the host issues the copy; on CPU it is the copy."""
    copy_s: list[float]
    """The copy alone, until it is complete."""
    hash_s: list[float]
    send_s: list[float]
    window_s: dict[str, list[float]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.replicas")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_intermixed_args(argv)
    cfg = configure(args.overrides, num_ranks=args.ranks)
    pool = Pool(timeout_s=LIMIT_S)
    with tempfile.TemporaryDirectory() as directory:
        first, *_ = pool.run(args.ranks, measure_rank, cfg, directory, args.rounds)
    pool.close()
    print(render_table(cfg, first, num_ranks=args.ranks))
    return 0


def configure(overrides: Sequence[str], *, num_ranks: int) -> Config:
    """The config of the run: on CUDA all ranks share one GPU."""
    cfg = load(["parallel.device=cpu", "telemetry=plain", SHARED, *overrides])
    cfg.checkpoint.ring.replicas = int(num_ranks > 1)
    if cfg.parallel.device is DeviceKind.cuda:
        cfg.launch.nproc = cfg.launch.ranks_per_gpu = num_ranks
    return cfg


def measure_rank(cfg: Config, directory: str, rounds: int) -> Measured:
    """Run all windows on this rank."""
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    world = connect(cfg.parallel, ranks_per_gpu=cfg.launch.ranks_per_gpu)
    parts = build(cfg, world, RunDir(Path(directory)), shares_snapshots=True)
    shared, num_steps, iteration = parts.ring.shared, cfg.checkpoint.ring.every_steps, 0
    assert shared is not None, f"no room in {cfg.checkpoint.ring.shared_path}"
    keeper = shared.keeper
    assert (keeper is None) == (world.size == 1)
    kinds = KINDS if keeper is not None else KINDS[:-1]
    buffers = num_buffers(cfg.checkpoint.ring) + shared.num_replica_buffers
    shared.begin_start("bench", None)
    measured = Measured(shared.num_bytes, buffers, [], [], [], [], {kind: [] for kind in kinds})
    for number in range(rounds + 1):
        for index in round_order(len(kinds), number):
            kind, is_counted = kinds[index], number > 0  # the first round warms up
            wait_for(world.device)
            gather_results(lambda: None)
            shared.keeper = keeper if kind == "sent" else None
            begun_s = time.perf_counter()
            for step in range(num_steps):
                iteration += 1
                run_step(parts, cfg, iteration)
                if step == 0 and kind != "none":
                    called_s = time.perf_counter()
                    slot = parts.ring.take_snapshot(RunState(iteration=iteration, step=iteration))
                    called_s = time.perf_counter() - called_s
                    slot.complete(step=iteration, refused_in_row=0)
                    measured.call_s.extend([called_s] * is_counted)
                if step == TRUST_AFTER and kind in ("published", "sent"):
                    parts.ring.trust(iteration)
            shared.wait()
            wait_for(world.device)
            if is_counted:
                measured.window_s[kind].append(time.perf_counter() - begun_s)
                measured.copy_s.append(time_copy(parts, iteration))
                if kind == kinds[-1]:
                    hashed_s = time.perf_counter()
                    integrity.hash_buffer(slot.block.view)
                    measured.hash_s.append(time.perf_counter() - hashed_s)
                if kind == "sent" and keeper is not None:
                    assert keeper.last is not None
                    assert keeper.last.is_intact
                    measured.send_s.append(keeper.last.seconds)
    parts.ring.end_sharing()
    parts.close()
    disconnect()
    return measured


def run_step(parts: Parts, cfg: Config, iteration: int) -> None:
    with fast_attention():
        forward_backward(parts, parts.batches[iteration % 64], cfg=cfg, probe=False)
    finish_step(parts, cfg=cfg, probe=False)


def time_copy(parts: Parts, iteration: int) -> float:
    """Seconds of one snapshot with nothing else on the device. The snapshot is never trusted."""
    wait_for(parts.world.device)
    begun_s = time.perf_counter()
    parts.ring.take_snapshot(RunState(iteration=iteration)).wait()
    return time.perf_counter() - begun_s


def render_table(cfg: Config, measured: Measured, *, num_ranks: int) -> str:
    """The figures of rank 0 as text and a table."""
    size_mb = measured.num_bytes / 1e6
    parts = {"copy": measured.copy_s, "hash": measured.hash_s, "send and receive": measured.send_s}
    medians = {name: statistics.median(seconds) for name, seconds in parts.items() if seconds}
    base = measured.window_s[KINDS[0]]
    window_s = statistics.median(base)
    lines = [
        f"{num_parameters(cfg.model) / 1e6:.1f}M parameters, {num_ranks} ranks on {cfg.parallel.device}, "
        f"{size_mb:.1f} MB per rank and snapshot, windows of {cfg.checkpoint.ring.every_steps} steps, "
        f"{len(base)} of each kind",
        f"host memory: {measured.num_buffers} buffers, {measured.num_buffers * size_mb / 1e3:.2f} GB per rank",
        f"the host issues the copy in {1e3 * statistics.median(measured.call_s):.2f} ms",
        *(
            f"{name}: {1e3 * seconds:.1f} ms, {size_mb / 1e3 / seconds:.2f} GB/s, {seconds / window_s:.2%} of a window"
            for name, seconds in medians.items()
        ),
        "",
        HEAD,
    ]
    for kind, windows in measured.window_s.items():
        ratio = estimate([mine / other for mine, other in zip(windows, base, strict=True)])
        interval = "1" if kind == KINDS[0] else f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        lines.append(f"| {kind} | {1e3 * statistics.median(windows):.0f} | {interval} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
