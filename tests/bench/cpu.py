"""How well the default run uses the cores of a machine without a GPU, compared with a plain torch loop.

    python -m tests.bench.cpu                                              the embedded default
    python -m tests.bench.cpu --variant parallel.reshard_after_forward=false
    OMP_WAIT_POLICY=passive python -m tests.bench.cpu                      threads that sleep while they wait

*Plain* is torch alone: one process with one thread per core, the same model, loss, data and AdamW, and
`clip_grad_norm_`; bf16 by autocast. *DDP* is the same with one rank per core in `DistributedDataParallel`. The others
run the complete loop of `harness.train` (FSDP2 over gloo, sentinel, log, heartbeat, snapshots in memory): as one rank
with one thread per core, and as the launcher starts it, one rank with one thread per core, with the overrides of each
`--variant` too. All sides are started once. Then they run blocks of steps one after the other, in rotating order; the
other sides sleep. CPU seconds are reported with wall-clock seconds: on a machine with other load only CPU seconds are
comparable. *Cores* is the mean number of busy cores.
Left out: startup, evaluations, checkpoints on disk, and MLflow, which runs in its own process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from harness.build import parameter_groups
from harness.config.compose import load
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.data.order.ledger import Ledger
from harness.data.sources import open_data
from harness.distributed.world import rank_from_environment
from harness.faults.site import intercept
from harness.model.init import initialize
from harness.model.loss import IGNORED
from harness.model.size import num_parameters
from harness.model.transformer import Transformer
from harness.optim.schedule import schedule_table
from harness.precision.mixed_precision import linear
from harness.run import Run
from harness.train import run_worker
from launch.local.ports import reserved_port
from tests.bench.clock import WARMUP_STEPS

FIXED_OVERRIDES = ("parallel.device=cpu", "telemetry=plain", "eval.every_steps=0", "checkpoint.every_steps=0")
PRECISIONS = (PrecisionKind.fp32, PrecisionKind.bf16)


class Block(NamedTuple):
    """Mean seconds per step of some consecutive steps: wall-clock time, and CPU time of all cores."""

    wall_s: float
    cpu_s: float


@final
class StepPermits:
    """Blocks a training process until its parent permits a number of steps."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_steps = self._left = 0
        self._wall_s = self._cpu_s = 0.0

    def acquire(self) -> None:
        """Called before each step: report a finished block and wait for the next; exit if the parent sends 0."""
        if self._left == 0:
            if self._num_steps:
                wall_s, cpu_s = time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s
                self._connection.send(Block(wall_s / self._num_steps, cpu_s / self._num_steps))
            self._num_steps = self._left = self._connection.recv()
            if self._num_steps == 0:
                sys.exit()
            self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._left -= 1


def train_harness(cfg: Config, permits: StepPermits) -> None:
    """Run one complete rank of the harness; each step waits for a permit."""

    def add_permits(run: Run) -> Run:
        return replace(run, heartbeat=intercept(run.heartbeat, "beat", permits.acquire, first=True))

    run_worker(cfg, add_permits)


def train_plain(cfg: Config, permits: StepPermits) -> None:
    """Train with a plain torch loop; with several ranks in `DistributedDataParallel`."""
    rank, world_size, _ = rank_from_environment()
    model = Transformer(cfg.model, sequence_length=cfg.train.sequence_length, linear=linear)
    initialize(model, cfg.model, seed=cfg.run.seed)
    groups = parameter_groups(model, cfg)
    compute: nn.Module = model
    if world_size > 1:
        dist.init_process_group("gloo")
        compute = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        [{"params": list(group.parameters.values()), "weight_decay": group.weight_decay} for group in groups],
        betas=(cfg.optim.beta1, cfg.optim.beta2),
        eps=cfg.optim.eps,
        fused=True,
    )
    rates = (cfg.optim.lr * schedule_table(cfg.optim, num_steps=cfg.train.num_steps)).tolist()
    batches, _ = open_data(cfg, rank=rank, world_size=world_size, device=torch.device("cpu"), ledger=Ledger())
    in_bf16 = cfg.precision.kind is PrecisionKind.bf16
    seed = world_size / (cfg.train.batch_size * cfg.train.sequence_length)  # DDP takes the mean over the ranks
    for index, rate in enumerate(rates):
        permits.acquire()
        batch = batches[index]
        if in_bf16:  # the chunked loss of the model does not run under autocast
            assert world_size == 1, "DDP only sees calls of the model itself"
            with torch.autocast("cpu", torch.bfloat16):
                logits = model.logits(batch.inputs, mask=model.mask_documents(batch.documents)).flatten(0, 1)
            objective = seed * cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")
        else:
            objective = compute(
                batch.inputs, batch.targets, seed=seed, mask=model.mask_documents(batch.documents)
            ).objective
        objective.backward()  # type: ignore[no-untyped-call]
        if cfg.optim.clip_norm is not None:
            clip_grad_norm_(model.parameters(), cfg.optim.clip_norm, foreach=True)
        for group, options in zip(groups, optimizer.param_groups, strict=True):
            options["lr"] = rate * group.lr_multiplier
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def run_rank(train: Callable[[Config, StepPermits], None], overrides: list[str], connection: Connection) -> None:
    """Entry point of a rank's process."""
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (discards the console output of the run)
    train(load(overrides), StepPermits(connection))


@final
@dataclass(kw_only=True)
class Side:
    """One training method: its processes, which wait for permits between blocks."""

    name: str
    train: Callable[[Config, StepPermits], None]
    overrides: list[str]
    num_ranks: int
    num_threads: int
    blocks: list[Block] = field(default_factory=list)

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._resources = ExitStack()
        port = self._resources.enter_context(reserved_port())
        self._processes, self._connections = [], []
        for rank in range(self.num_ranks):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=run_rank, args=(self.train, self.overrides, child_end), daemon=True)
            with set_environment(self._environment(rank, port)):
                process.start()
            child_end.close()
            self._processes.append(process)
            self._connections.append(parent_end)

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": str(self.num_threads),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }

    def run_block(self, num_steps: int) -> Block:
        """Run a block of steps on all ranks; returns the slowest wall time and the sum of CPU times."""
        for connection in self._connections:
            connection.send(num_steps)
        blocks_of_ranks: list[Block] = [connection.recv() for connection in self._connections]
        return Block(max(block.wall_s for block in blocks_of_ranks), sum(block.cpu_s for block in blocks_of_ranks))

    def stop(self) -> None:
        for connection in self._connections:
            connection.send(0)
        for process in self._processes:
            process.join()
        self._resources.close()


@contextmanager
def set_environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started in this block; torch reads them at import."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def build_sides(
    overrides: Sequence[str],
    variants: Sequence[str],
    precisions: Sequence[PrecisionKind],
    *,
    num_steps: int,
    directory: str,
) -> list[Side]:
    """All sides of the comparison; the first one is the baseline."""
    num_cores = len(os.sched_getaffinity(0))
    methods = [("plain", train_plain, 1, ""), ("DDP", train_plain, num_cores, ""), ("harness", train_harness, 1, "")]
    methods += [("harness", train_harness, num_cores, each) for each in ("", *variants)]
    all_sides: list[Side] = []
    for name, train, num_ranks, variant in methods:
        for precision in precisions:
            if name == "DDP" and precision is PrecisionKind.bf16:
                continue
            side_overrides = [*overrides, f"precision={precision}", *FIXED_OVERRIDES, *filter(None, variant.split(","))]
            side_overrides += [f"train.num_steps={num_steps}", f"run.dir={directory}", f"run.name=side{len(all_sides)}"]
            num_threads = num_cores // num_ranks
            side_name = f"{name}, {num_ranks} x {num_threads}, {precision}{variant and f', {variant}'}"
            side = Side(
                name=side_name, train=train, overrides=side_overrides, num_ranks=num_ranks, num_threads=num_threads
            )
            all_sides.append(side)
    return all_sides


def measure(all_sides: Sequence[Side], *, rounds: int, num_steps: int) -> None:
    for side in all_sides:
        side.start()
        side.run_block(WARMUP_STEPS)
    for number in range(rounds):
        first = number % len(all_sides)
        for side in [*all_sides[first:], *all_sides[:first]]:
            side.blocks.append(side.run_block(num_steps))
    for side in all_sides:
        side.stop()


def render_row(side: Side, baseline: Side, *, batch_tokens: int) -> str:
    """Medians over rounds; ratios are taken within a round."""
    pairs = list(zip(side.blocks, baseline.blocks, strict=True))
    rates = sorted(batch_tokens / block.wall_s for block in side.blocks)
    rate = statistics.median(rates)
    speedup = statistics.median(theirs.wall_s / ours.wall_s for ours, theirs in pairs)
    cpu_ratio = statistics.median(ours.cpu_s / theirs.cpu_s for ours, theirs in pairs)
    cpu_s = statistics.median(block.cpu_s for block in side.blocks)
    cores = statistics.median(block.cpu_s / block.wall_s for block in side.blocks)
    return (
        f"| {side.name} | {rate:,.0f} | {(rates[-1] - rates[0]) / rate:.0%} | {speedup:.2f} | {cpu_s * 1e3:.0f} "
        f"| {cpu_ratio:.2f} | {cores:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the default step on a CPU, compared with a plain loop.")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of every side")
    parser.add_argument(
        "--variant", action="append", default=[], help="one rank a core with overrides, comma-separated"
    )
    parser.add_argument("--precisions", nargs="+", type=PrecisionKind, choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    options = parser.parse_args()
    cfg = load(options.overrides)
    num_steps = max(cfg.train.num_steps, WARMUP_STEPS + options.rounds * options.steps + 1)
    with tempfile.TemporaryDirectory() as directory:
        all_sides = build_sides(
            options.overrides, options.variant, options.precisions, num_steps=num_steps, directory=directory
        )
        load_before = os.getloadavg()[0]
        measure(all_sides, rounds=options.rounds, num_steps=options.steps)
    batch = f"{cfg.train.batch_size} x {cfg.train.sequence_length} tokens"
    print(
        f"{cfg.model.name}, {num_parameters(cfg.model) / 1e6:.1f}M, {batch}; {options.rounds} rounds of {options.steps}"
    )
    print(f"{len(os.sched_getaffinity(0))} cores, load before {load_before:.1f}\n")
    print("| ranks x threads | tok/s | spread | x plain | CPU, ms a step | x plain | cores |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for side in all_sides:
        batch_tokens = cfg.train.batch_size * cfg.train.sequence_length
        print(render_row(side, all_sides[0], batch_tokens=batch_tokens))


if __name__ == "__main__":
    main()
