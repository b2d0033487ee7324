"""How well the default run uses the cores of a machine without a GPU, against the loop that everybody would write.

    python -m tests.bench.cpu                                              the embedded default
    python -m tests.bench.cpu --variant parallel.reshard_after_forward=false
    OMP_WAIT_POLICY=passive python -m tests.bench.cpu                      threads that sleep where they wait

*Plain* is torch alone: one process with a thread for each core, the same model, loss, data and AdamW, and
`clip_grad_norm_`; bf16 by autocast. The others are the loop of `harness.train` itself with everything in it (FSDP2 over
gloo, sentinel, log, heartbeat, snapshots in memory), as one rank with a thread for each core and as the launcher starts
it: one rank a core, one thread each; a variant too. All of them are started once and then take turns, a block of steps
at a time and in changing order; who is not on turn sleeps. Seconds of processors are counted beside those of the clock:
on a machine that others use as well they are what can be compared. *Cores* is how many of them were at work on average.
Left out: the start, evaluations, checkpoints on disk and MLflow, which works in a process of its own.
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
from torch.nn.utils import clip_grad_norm_

from harness.build import parameter_groups
from harness.config.compose import load
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.data.order.ledger import Ledger
from harness.data.sources import open_data
from harness.faults.site import intercept
from harness.model.init import initialize
from harness.model.size import num_parameters
from harness.model.transformer import Transformer
from harness.optim.schedule import schedule_table
from harness.precision.mixed_precision import linear
from harness.run import Run
from harness.step import mask_of
from harness.train import run_worker
from launch.local.ports import reserved_port
from tests.bench.clock import WARMUP_STEPS

NOT_MEASURED = ("parallel.device=cpu", "telemetry=plain", "eval.every_steps=0", "checkpoint.every_steps=0")
PRECISIONS = (PrecisionKind.fp32, PrecisionKind.bf16)


class Block(NamedTuple):
    """A few steps in a row: seconds of one of them, by the clock and of all processors."""

    wall_s: float
    cpu_s: float


@final
class Turns:
    """Lets a process go on only while it is its turn."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._num_steps = self._left = 0
        self._wall_s = self._cpu_s = 0.0

    def step(self) -> None:
        """A step is about to begin; where it is not to begin, this does not return."""
        if self._left == 0:
            if self._num_steps:
                wall_s, cpu_s = time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s
                self._line.send(Block(wall_s / self._num_steps, cpu_s / self._num_steps))
            self._num_steps = self._left = self._line.recv()
            if self._num_steps == 0:
                sys.exit()
            self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._left -= 1


def train_in_turns(cfg: Config, turns: Turns) -> None:
    """One rank of the harness, whole; its loop moves when it is told to."""

    def outfit(run: Run) -> Run:
        return replace(run, heart=intercept(run.heart, "beat", turns.step, first=True))

    run_worker(cfg, outfit)


def train_plainly(cfg: Config, turns: Turns) -> None:
    """The loop that everybody writes."""
    model = Transformer(cfg.model, sequence_length=cfg.train.sequence_length, linear=linear)
    initialize(model, cfg.model, seed=cfg.run.seed)
    groups = parameter_groups(model, cfg)
    optimizer = torch.optim.AdamW(
        [{"params": list(group.parameters.values()), "weight_decay": group.weight_decay} for group in groups],
        betas=(cfg.optim.beta1, cfg.optim.beta2),
        eps=cfg.optim.eps,
        fused=True,
    )
    rates = [cfg.optim.lr * each for each in schedule_table(cfg.optim, num_steps=cfg.train.num_steps)]
    batches, _ = open_data(cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=Ledger())
    in_bf16 = cfg.precision.kind is PrecisionKind.bf16
    seed = 1 / (cfg.train.batch_size * cfg.train.sequence_length)
    for index, rate in enumerate(rates):
        turns.step()
        batch = batches[index]
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            output = model(batch.inputs, batch.targets, seed=seed, mask=mask_of(batch))
        output.objective.backward()
        if cfg.optim.clip_norm is not None:
            clip_grad_norm_(model.parameters(), cfg.optim.clip_norm, foreach=True)
        for group, options in zip(groups, optimizer.param_groups, strict=True):
            options["lr"] = rate * group.lr_multiplier
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def be_a_rank(train: Callable[[Config, Turns], None], overrides: list[str], line: Connection) -> None:
    """The first function of a process."""
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (what a run says to a person)
    train(load(overrides), Turns(line))


@final
@dataclass(kw_only=True)
class Side:
    """One way to train, as processes that wait for their turn."""

    name: str
    train: Callable[[Config, Turns], None]
    overrides: list[str]
    num_ranks: int
    num_threads: int
    blocks: list[Block] = field(default_factory=list)

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._resources = ExitStack()
        port = self._resources.enter_context(reserved_port())
        self._processes, self._lines = [], []
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=be_a_rank, args=(self.train, self.overrides, theirs), daemon=True)
            with environment(self._environment(rank, port)):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._lines.append(ours)

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

    def turn(self, num_steps: int) -> Block:
        """A block of steps of all its ranks."""
        for line in self._lines:
            line.send(num_steps)
        told: list[Block] = [line.recv() for line in self._lines]
        return Block(max(block.wall_s for block in told), sum(block.cpu_s for block in told))

    def end(self) -> None:
        for line in self._lines:
            line.send(0)
        for process in self._processes:
            process.join()
        self._resources.close()


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """What a process that is started meanwhile finds: torch reads it as it is loaded."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def sides(overrides: Sequence[str], variants: Sequence[str], *, num_steps: int, directory: str) -> list[Side]:
    """Everybody who takes part; the first one is what the others are held against."""
    num_cores = len(os.sched_getaffinity(0))
    ways = [("plain", train_plainly, 1, ""), ("harness", train_in_turns, 1, "")]
    ways += [("harness", train_in_turns, num_cores, each) for each in ("", *variants)]
    taking_part: list[Side] = []
    for name, train, num_ranks, variant in ways:
        for precision in PRECISIONS:
            words = [*overrides, f"precision={precision}", *NOT_MEASURED, *filter(None, variant.split(","))]
            words += [f"train.num_steps={num_steps}", f"run.dir={directory}", f"run.name=side{len(taking_part)}"]
            num_threads = num_cores // num_ranks
            title = f"{name}, {num_ranks} x {num_threads}, {precision}{variant and f', {variant}'}"
            side = Side(name=title, train=train, overrides=words, num_ranks=num_ranks, num_threads=num_threads)
            taking_part.append(side)
    return taking_part


def measure(taking_part: Sequence[Side], *, rounds: int, num_steps: int) -> None:
    for side in taking_part:
        side.start()
        side.turn(WARMUP_STEPS)
    for number in range(rounds):
        first = number % len(taking_part)
        for side in [*taking_part[first:], *taking_part[:first]]:
            side.blocks.append(side.turn(num_steps))
    for side in taking_part:
        side.end()


def row(side: Side, yardstick: Side, *, batch_tokens: int) -> str:
    """Medians over rounds; ratios are taken within a round."""
    pairs = list(zip(side.blocks, yardstick.blocks, strict=True))
    rates = sorted(batch_tokens / block.wall_s for block in side.blocks)
    rate = statistics.median(rates)
    faster = statistics.median(theirs.wall_s / ours.wall_s for ours, theirs in pairs)
    dearer = statistics.median(ours.cpu_s / theirs.cpu_s for ours, theirs in pairs)
    cpu_s = statistics.median(block.cpu_s for block in side.blocks)
    cores = statistics.median(block.cpu_s / block.wall_s for block in side.blocks)
    return (
        f"| {side.name} | {rate:,.0f} | {(rates[-1] - rates[0]) / rate:.0%} | {faster:.2f} | {cpu_s * 1e3:.0f} "
        f"| {dearer:.2f} | {cores:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the default step on CPU, beside a plain loop.")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of every side")
    parser.add_argument(
        "--variant", action="append", default=[], help="one rank a core with overrides, comma-separated"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    options = parser.parse_args()
    cfg = load(options.overrides)
    num_steps = max(cfg.train.num_steps, WARMUP_STEPS + options.rounds * options.steps + 1)
    with tempfile.TemporaryDirectory() as directory:
        taking_part = sides(options.overrides, options.variant, num_steps=num_steps, directory=directory)
        load_before = os.getloadavg()[0]
        measure(taking_part, rounds=options.rounds, num_steps=options.steps)
    batch = f"{cfg.train.batch_size} x {cfg.train.sequence_length} tokens"
    print(
        f"{cfg.model.name}, {num_parameters(cfg.model) / 1e6:.1f}M, {batch}; {options.rounds} rounds of {options.steps}"
    )
    print(f"{len(os.sched_getaffinity(0))} cores, load before {load_before:.1f}\n")
    print("| ranks x threads | tok/s | spread | x plain | CPU, ms a step | x plain | cores |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for side in taking_part:
        batch_tokens = cfg.train.batch_size * cfg.train.sequence_length
        print(row(side, taking_part[0], batch_tokens=batch_tokens))


if __name__ == "__main__":
    main()
