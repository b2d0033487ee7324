"""What a snapshot and a save cost training, and how long a restore takes, beside `dcp.async_save` and its relatives.

    python -m tests.bench.checkpoint                                            a small model, also without a GPU
    python -m tests.bench.checkpoint +experiment=1b_bf16 --directory /scratch   1.26B parameters: 15 GB a checkpoint

One process, one rank, one run. In each round every contender saves once, in alternating order, so that a drift of the
machine hits all of them alike. A save begins on an idle device, between plain steps that are timed before and after it.

- called: how long the call holds the loop.
- stolen: what training loses in all: the time of the steps from the call until the checkpoint is safe, less what as
  many plain steps take. The table has the median over the rounds and its 90 % bootstrap interval.
- safe: when the checkpoint can be relied on, counted from the call.
- restored: time until the state is in place again, read from the disk and not from the page cache.

The control saves nothing and lasts as long as our own save: its "stolen" is the noise of the measurement. A first round
is not timed; it checks that each contender restores, bit for bit, what it was told to save. Only this harness verifies
hashes when it reads; `torch.save` leaves it to the kernel when the file reaches the disk. Each checkpoint is deleted
before the next is written. A contender that fails has a row that says why.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from harness.build import build
from harness.checkpoint.ring_cost import num_buffers
from harness.config.compose import load
from harness.core.rundir import RunDir
from harness.distributed.shards import local
from harness.distributed.world import connect, disconnect
from harness.model.size import num_parameters
from harness.precision.attention import fast_attention
from tests.bench.clock import order
from tests.bench.intervals import COVERAGE, estimate
from tests.bench.savers import CONTROL, OURS, Contender, Loop, Save, contenders, control

SMALL = (
    *("model=tiny", "model.dim=512", "model.ffn_dim=1408", "model.num_layers=6", "data=synthetic"),
    *("train.batch_size=2", "train.sequence_length=64", "parallel.device=auto"),
)
"""About 200 MB of state."""
SNAPSHOT = "this harness: snapshot in memory"
STOLEN = f"stolen from training, ms ({COVERAGE:.0%} interval)"
HEAD = f"| | saves | called, ms | {STOLEN} | safe after, s | restored after, s |"


class Cost(NamedTuple):
    plain_s: float
    """Of a plain step, before and after."""
    called_s: float
    stolen_s: float
    safe_s: float = math.nan
    restored_s: float = math.nan


def cost_of_save(loop: Loop, contender: Contender, *, plain_steps: int, restore: bool = True) -> Cost:
    """Save while training goes on until the checkpoint is safe, restore it if asked, and delete it."""
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
    restored_s = restored(loop, contender, path) if restore else math.nan
    shutil.rmtree(path)
    return Cost(plain_s, called_s, total_s - num_steps * plain_s, safe_s[0], restored_s)


def restored(loop: Loop, contender: Contender, path: Path) -> float:
    """Seconds of a restore from the disk; NaN where nothing was saved."""
    restore = contender.restore
    if restore is None:
        return math.nan
    drop_from_page_cache(path)
    return seconds_of(loop, lambda: restore(loop, path))


def cost_of_snapshot(loop: Loop, *, num_steps: int) -> Cost:
    """A snapshot before a few steps, against as many plain ones; then a rewind to it."""
    plain_s = loop.step_s(num_steps)
    ring, state = loop.parts.ring, loop.state
    begun_s = time.perf_counter()
    slot = ring.take_snapshot(state)
    called_s = time.perf_counter() - begun_s
    for _ in range(num_steps):
        loop.step()
    loop.wait()
    total_s = time.perf_counter() - begun_s
    plain_s = (plain_s + loop.step_s(num_steps)) / 2
    slot.complete(step=state.step, refused_in_row=0)
    restored_s = seconds_of(loop, lambda: ring.restore(slot))
    return Cost(plain_s, called_s, total_s - num_steps * plain_s, restored_s=restored_s)


def seconds_of(loop: Loop, work: Callable[[], object]) -> float:
    loop.wait()
    begun_s = time.perf_counter()
    work()
    loop.wait()
    return time.perf_counter() - begun_s


def drop_from_page_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def state_of(loop: Loop) -> dict[str, torch.Tensor]:
    """A copy of all that is saved, on the host."""
    loop.wait()
    return {name: local(tensor.detach()).to("cpu", copy=True) for name, tensor in loop.parts.tensors().items()}


def check_restores(loop: Loop, contender: Contender) -> Cost:
    """Save and restore once, which also warms the contender up; ends the run where the state is not the one saved."""
    saved: dict[str, torch.Tensor] = {}

    def begin_and_remember(loop: Loop, path: Path) -> Save:
        saved.update(state_of(loop))
        return contender.begin(loop, path)

    cost = cost_of_save(loop, contender._replace(begin=begin_and_remember), plain_steps=1)
    found = state_of(loop)
    wrong = [name for name in saved if not torch.equal(saved[name], found[name])]
    if contender.restore is not None and wrong:
        sys.exit(f"{contender.name}: {len(wrong)} of {len(saved)} tensors differ after a restore, such as {wrong[0]}")
    return cost


def row(name: str, costs: Sequence[Cost]) -> str:
    """Medians, with the interval of what was stolen; without it where there are too few saves for one."""
    stolen = estimate([cost.stolen_s * 1e3 for cost in costs])
    interval = f" ({stolen.low:.1f} to {stolen.high:.1f})" if stolen.has_interval else " (no interval)"
    return (
        f"| {name} | {len(costs)} | {median_of((cost.called_s for cost in costs), 1e3, '.1f')} | "
        f"{stolen.median:.1f}{interval} | "
        f"{median_of((cost.safe_s for cost in costs), 1, '.2f')} | "
        f"{median_of((cost.restored_s for cost in costs), 1, '.3f')} |"
    )


def median_of(values: Iterable[float], factor: float, form: str) -> str:
    known = [value * factor for value in values if not math.isnan(value)]
    return format(statistics.median(known), form) if known else "-"


def check_room(loop: Loop) -> int:
    """Bytes of the state, for which there must be room on the disk."""
    num_bytes = sum(local(tensor).nbytes for tensor in loop.parts.tensors().values())
    free = shutil.disk_usage(loop.directory).free
    if free < 1.2 * num_bytes:
        sys.exit(f"{loop.directory} has {free / 1e9:.1f} GB free, a checkpoint takes {num_bytes / 1e9:.1f} GB")
    return num_bytes


class Measured(NamedTuple):
    costs: dict[str, list[Cost]]
    num_bytes: int
    failures: dict[str, str]
    """Why a contender saved no more."""

    @property
    def step_s(self) -> float:
        """Of a plain step: the median over the run."""
        return statistics.median(cost.plain_s for costs in self.costs.values() for cost in costs)

    def as_json(self) -> dict[str, object]:
        rows = {name: [cost._asdict() for cost in costs] for name, costs in self.costs.items()}
        return {"step_s": self.step_s, "state_bytes": self.num_bytes, "torch": torch.__version__, "costs": rows} | {
            "failures": self.failures
        }


@contextmanager
def noted(failures: dict[str, str], loop: Loop, rival: Contender) -> Iterator[None]:
    """Whatever a rival raises ends its part; this harness and the control must not fail."""
    try:
        yield
    except Exception as error:
        if rival.name in (OURS, CONTROL):
            raise
        failures[rival.name] = f"{type(error).__name__}: {error}"
        loop.wait()
        shutil.rmtree(loop.directory / "checkpoint", ignore_errors=True)


def measure(
    loop: Loop,
    *,
    rounds: int,
    restores: int,
    snapshots: int,
    num_steps: int,
    on_round: Callable[[Measured], object] = lambda _: None,
) -> Measured:
    """Warm up and check every contender, then let all of them save once a round; each round is reported."""
    num_bytes = check_room(loop)
    for _ in range(num_buffers(loop.cfg.checkpoint.ring)):
        cost_of_snapshot(loop, num_steps=1)
    costs: dict[str, list[Cost]] = defaultdict(list)
    failures: dict[str, str] = {}
    with contenders(loop.parts.world.device) as sides:
        own, *rivals = sides
        sides.append(control(check_restores(loop, own).safe_s))
        for rival in rivals:
            with noted(failures, loop, rival):
                check_restores(loop, rival)
        for number in range(rounds):
            costs[SNAPSHOT] += [cost_of_snapshot(loop, num_steps=2) for _ in range(snapshots)]
            for side in [sides[index] for index in order(len(sides), number)]:
                if side.name not in failures:
                    with noted(failures, loop, side):
                        cost = cost_of_save(loop, side, plain_steps=num_steps, restore=number < restores)
                        costs[side.name].append(cost)
            ordered = {name: list(costs[name]) for name in (SNAPSHOT, *(side.name for side in sides))}
            on_round(measured := Measured(ordered, num_bytes, dict(failures)))
            print(f"round {number + 1} of {rounds} done", file=sys.stderr, flush=True)
    return measured


def render(measured: Measured, *, rounds: int, restores: int) -> str:
    state = f"state {measured.num_bytes / 1e9:.2f} GB, a plain step {measured.step_s * 1e3:.1f} ms"
    turns = f"{rounds} rounds, each contender once a round in alternating order"
    rows = [row(name, costs) if costs else f"| {name} | 0 | - | - | - | - |" for name, costs in measured.costs.items()]
    return "\n".join(
        [
            f"{state}, torch {torch.__version__}; {turns}; restores in {min(rounds, restores)} of them",
            "",
            HEAD,
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            *(f"\n{name} failed: {reason}" for name, reason in measured.failures.items()),
        ]
    )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.checkpoint", description="Time snapshots, saves and restores beside training."
    )
    parser.add_argument("overrides", nargs="*", default=list(SMALL), help="Hydra overrides")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=10, help="saves of each contender; 5 or more give an interval")
    parser.add_argument("--restores", type=int, default=3, help="rounds in which the checkpoint is also read back")
    parser.add_argument("--snapshots", type=int, default=2, help="snapshots a round")
    parser.add_argument("--steps", type=int, default=3, help="plain steps before and after each save")
    parser.add_argument("--threads", type=int, default=1, help="that train on a CPU; leave a core to the writer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there, after each round")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.snapshots, options.steps, options.threads) < 1:
        parser.error("--rounds, --snapshots, --steps and --threads must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    cfg = load(["checkpoint.every_steps=0", "checkpoint.ring.slots=2", *options.overrides])
    print(f"model {cfg.model.name}: {num_parameters(cfg.model) / 1e6:.1f}M parameters, ", end="")
    print(f"{cfg.train.batch_size} x {cfg.train.sequence_length} tokens, {cfg.precision.kind}", end=", ")
    print(f"{torch.get_num_threads()} CPU threads", flush=True)
    with fast_attention(), tempfile.TemporaryDirectory(dir=options.directory) as directory:
        world = connect(cfg.parallel)
        with closing(build(cfg, world, RunDir(Path(directory) / "run"))) as parts:
            measured = measure(
                Loop(cfg, parts, Path(directory)),
                rounds=options.rounds,
                restores=options.restores,
                snapshots=options.snapshots,
                num_steps=options.steps,
                on_round=partial(write_json, options.json),
            )
        disconnect()
    print(render(measured, rounds=options.rounds, restores=options.restores))


def write_json(path: Path | None, measured: Measured) -> None:
    if path is not None:
        path.write_text(json.dumps(measured.as_json(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
