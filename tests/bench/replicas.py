"""Cost of snapshots in shared memory and of their replicas: bytes, seconds, and the ratio of step times.

    python -m tests.bench.replicas                                       the default model
    python -m tests.bench.replicas model.dim=512 model.ffn_dim=1408 model.num_layers=6

One run of two gloo ranks on this machine, each a node of its own. A window is `checkpoint.ring.every_steps` steps with
one snapshot in it. In each round there is one window of each kind, in alternating order, so that a drift of the machine
affects all of them equally:

- taken: the snapshot is copied into the ring, and nothing else.
- published: it is also hashed, and a later start can resume from it.
- sent: it is also sent to the partner, which hashes it and keeps it.

The background work of a window is part of its time. The ratio is the time of a window over that of the `taken` window
of the same round; the table has the median over the rounds and its 90 % bootstrap interval.
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

from harness.build import build
from harness.checkpoint import integrity
from harness.config.compose import load
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.collectives import gather_results
from harness.distributed.world import connect, disconnect
from harness.model.size import num_parameters
from harness.step import finish_step, forward_backward
from tests.bench.clock import round_order
from tests.bench.intervals import COVERAGE, estimate
from tests.distributed.pool import Pool

KINDS = ("taken", "published", "sent")
TRUST_AFTER = 2
"""Steps after which a snapshot is trusted: one step was computed from it, and its report has arrived."""
HEAD = f"| snapshot | window, ms | ratio ({COVERAGE:.0%} interval) |\n|---|---:|---:|"


class Measured(NamedTuple):
    """One rank's measurements."""

    num_bytes: int
    copy_s: list[float]
    hash_s: list[float]
    send_s: list[float]
    window_s: dict[str, list[float]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.replicas")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    cfg = load(["parallel.device=cpu", "telemetry=plain", *args.overrides, "checkpoint.ring.replicas=1"])
    pool = Pool()
    with tempfile.TemporaryDirectory() as directory:
        first, *_ = pool.run(2, measure_rank, cfg, directory, args.rounds)
    pool.close()
    print(render_table(cfg, first))
    return 0


def measure_rank(cfg: Config, directory: str, rounds: int) -> Measured:
    """Run all windows on this rank."""
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    world = connect(cfg.parallel)
    parts = build(cfg, world, RunDir(Path(directory)), shares_snapshots=True)
    shared, num_steps, iteration = parts.ring.shared, cfg.checkpoint.ring.every_steps, 0
    assert shared is not None, "the default directory is used"
    keeper = shared.keeper
    assert keeper is not None
    shared.begin_start("bench", None)
    measured = Measured(shared.num_bytes, [], [], [], {kind: [] for kind in KINDS})
    for number in range(rounds + 1):
        for index in round_order(len(KINDS), number):
            kind = KINDS[index]
            gather_results(lambda: None)
            shared.keeper = keeper if kind == "sent" else None
            begun_s = time.perf_counter()
            for step in range(num_steps):
                forward_backward(parts, parts.batches[iteration % 64], cfg=cfg, probe=False)
                parts.ring.finish_copy()
                finish_step(parts, cfg=cfg, probe=False)
                iteration += 1
                if step == 0:
                    copied_s = time.perf_counter()
                    slot = parts.ring.take_snapshot(RunState(iteration=iteration, step=iteration))
                    copied_s = time.perf_counter() - copied_s
                    slot.complete(step=iteration, refused_in_row=0)
                if step == TRUST_AFTER and kind != "taken":
                    parts.ring.trust(iteration)
            shared.wait()
            window_s = time.perf_counter() - begun_s
            if number == 0:
                continue  # warms up
            measured.window_s[kind].append(window_s)
            measured.copy_s.append(copied_s)
            if kind == "sent":
                assert keeper.last is not None
                assert keeper.last.is_intact
                measured.send_s.append(keeper.last.seconds)
                hashed_s = time.perf_counter()
                integrity.hash_buffer(slot.block.view)
                measured.hash_s.append(time.perf_counter() - hashed_s)
    parts.ring.end_sharing()
    parts.close()
    disconnect()
    return measured


def render_table(cfg: Config, measured: Measured) -> str:
    """The figures of rank 0 as text and a table."""
    size_mb = measured.num_bytes / 1e6
    parts = {"copy": measured.copy_s, "hash": measured.hash_s, "send and receive": measured.send_s}
    medians = {name: statistics.median(seconds) for name, seconds in parts.items()}
    lines = [
        f"{num_parameters(cfg.model) / 1e6:.1f}M parameters, {size_mb:.1f} MB per rank and snapshot, "
        f"windows of {cfg.checkpoint.ring.every_steps} steps, {len(measured.send_s)} of each kind",
        *(f"{name}: {1e3 * seconds:.1f} ms, {size_mb / 1e3 / seconds:.2f} GB/s" for name, seconds in medians.items()),
        "",
        HEAD,
    ]
    taken = measured.window_s["taken"]
    for kind in KINDS:
        windows = measured.window_s[kind]
        ratio = estimate([mine / other for mine, other in zip(windows, taken, strict=True)])
        interval = "1" if kind == "taken" else f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        lines.append(f"| {kind} | {1e3 * statistics.median(windows):.0f} | {interval} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
