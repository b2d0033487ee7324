"""Training time that a snapshot and a save cost, and the time of a restore, compared with torch's ways to save.

    python -m tests.bench.checkpoint                                            a small model, also without a GPU
    python -m tests.bench.checkpoint +experiment=1b_bf16 --directory /scratch   1.26B parameters: 15 GB a checkpoint

One process, one rank, one run. In each round every contender saves once, in alternating order, so that a drift of the
machine affects all of them equally. A save starts on an idle device. Plain steps, without a save, are timed before and
after it.

- called: how long the call blocks the loop.
- stolen: the total cost to training: the time of the steps from the call until the checkpoint is safe, minus the time
  of as many plain steps. The table has the median over the rounds and its 90 % bootstrap interval.
- safe: time from the call until the checkpoint is complete.
- restored: time to restore the state, read from the disk and not from the page cache.

The control saves nothing and takes as long as a save of this harness: its "stolen" is the noise of the measurement. The
first round is not timed; it checks that each contender restores the saved state bit for bit. Only this harness verifies
hashes when it reads; `torch.save` does not call fsync. Each checkpoint is deleted before the next is written. The row
of a contender that fails has the error message.
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
from tests.bench.clock import round_order
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
    """Mean seconds of a plain step, before and after the save."""
    called_s: float
    stolen_s: float
    safe_s: float = math.nan
    restored_s: float = math.nan


def measure_save(loop: Loop, contender: Contender, *, plain_steps: int, restore: bool = True) -> Cost:
    """Save, train until the checkpoint is safe, restore it if `restore` is set, and delete it."""
    path = loop.directory / "checkpoint"
    plain_s = loop.step_s(plain_steps)
    safe_s: list[float] = []
    start_s = time.perf_counter()
    save = contender.begin(loop, path)
    save.work.add_done_callback(lambda _: safe_s.append(time.perf_counter() - start_s))
    called_s = time.perf_counter() - start_s
    num_steps = 0
    while not safe_s:
        loop.step(save.before_update if num_steps == 0 else None)
        num_steps += 1
    loop.wait()
    total_s = time.perf_counter() - start_s
    save.work.result()
    plain_s = (plain_s + loop.step_s(plain_steps)) / 2
    restored_s = time_restore(loop, contender, path) if restore else math.nan
    shutil.rmtree(path)
    return Cost(plain_s, called_s, total_s - num_steps * plain_s, safe_s[0], restored_s)


def time_restore(loop: Loop, contender: Contender, path: Path) -> float:
    """Seconds of a restore from the disk; NaN if the contender saves nothing."""
    restore = contender.restore
    if restore is None:
        return math.nan
    drop_from_page_cache(path)
    return time_call(loop, lambda: restore(loop, path))


def measure_snapshot(loop: Loop, *, num_steps: int) -> Cost:
    """Take a snapshot before some steps, compare them with as many plain steps, then restore the snapshot."""
    plain_s = loop.step_s(num_steps)
    ring, state = loop.parts.ring, loop.state
    start_s = time.perf_counter()
    slot = ring.take_snapshot(state)
    called_s = time.perf_counter() - start_s
    for _ in range(num_steps):
        loop.step()
    loop.wait()
    total_s = time.perf_counter() - start_s
    plain_s = (plain_s + loop.step_s(num_steps)) / 2
    slot.complete(step=state.step, refused_in_row=0)
    restored_s = time_call(loop, lambda: ring.restore(slot))
    return Cost(plain_s, called_s, total_s - num_steps * plain_s, restored_s=restored_s)


def time_call(loop: Loop, work: Callable[[], object]) -> float:
    loop.wait()
    start_s = time.perf_counter()
    work()
    loop.wait()
    return time.perf_counter() - start_s


def drop_from_page_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copy_state(loop: Loop) -> dict[str, torch.Tensor]:
    """A copy of the saved tensors, on the host."""
    loop.wait()
    return {name: local(tensor.detach()).to("cpu", copy=True) for name, tensor in loop.parts.tensors().items()}


def check_restores(loop: Loop, contender: Contender) -> Cost:
    """Save and restore once, which also warms up the contender; exit if the restored state differs."""
    saved: dict[str, torch.Tensor] = {}

    def copy_state_and_begin(loop: Loop, path: Path) -> Save:
        saved.update(copy_state(loop))
        return contender.begin(loop, path)

    cost = measure_save(loop, contender._replace(begin=copy_state_and_begin), plain_steps=1)
    restored = copy_state(loop)
    different = [name for name in saved if not torch.equal(saved[name], restored[name])]
    if contender.restore is not None and different:
        sys.exit(
            f"{contender.name}: {len(different)} of {len(saved)} tensors differ after a restore, such as {different[0]}"
        )
    return cost


def render_row(name: str, costs: Sequence[Cost]) -> str:
    """Medians, and the interval of the stolen time if there are enough saves for one."""
    stolen = estimate([cost.stolen_s * 1e3 for cost in costs])
    interval = f" ({stolen.low:.1f} to {stolen.high:.1f})" if stolen.has_interval else " (no interval)"
    return (
        f"| {name} | {len(costs)} | {render_median((cost.called_s for cost in costs), 1e3, '.1f')} | "
        f"{stolen.median:.1f}{interval} | "
        f"{render_median((cost.safe_s for cost in costs), 1, '.2f')} | "
        f"{render_median((cost.restored_s for cost in costs), 1, '.3f')} |"
    )


def render_median(values: Iterable[float], factor: float, format_spec: str) -> str:
    known = [value * factor for value in values if not math.isnan(value)]
    return format(statistics.median(known), format_spec) if known else "-"


def check_disk_space(loop: Loop) -> int:
    """Return the bytes of the state; exit if the disk has too little space for it."""
    num_bytes = sum(local(tensor).nbytes for tensor in loop.parts.tensors().values())
    free = shutil.disk_usage(loop.directory).free
    if free < 1.2 * num_bytes:
        sys.exit(f"{loop.directory} has {free / 1e9:.1f} GB free, a checkpoint takes {num_bytes / 1e9:.1f} GB")
    return num_bytes


class Measurements(NamedTuple):
    costs: dict[str, list[Cost]]
    num_bytes: int
    failures: dict[str, str]
    """Error message of each contender that failed."""

    @property
    def step_s(self) -> float:
        """Median seconds of a plain step."""
        return statistics.median(cost.plain_s for costs in self.costs.values() for cost in costs)

    def as_json(self) -> dict[str, object]:
        rows = {name: [cost._asdict() for cost in costs] for name, costs in self.costs.items()}
        return {"step_s": self.step_s, "state_bytes": self.num_bytes, "torch": torch.__version__, "costs": rows} | {
            "failures": self.failures
        }


@contextmanager
def record_failure(failures: dict[str, str], loop: Loop, rival: Contender) -> Iterator[None]:
    """Record an exception of a rival in `failures`; raise one of this harness or the control."""
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
    on_round: Callable[[Measurements], object] = lambda _: None,
) -> Measurements:
    """Warm up and check every contender, then save once with each of them a round; call `on_round` after each."""
    num_bytes = check_disk_space(loop)
    for _ in range(num_buffers(loop.cfg.checkpoint.ring)):
        measure_snapshot(loop, num_steps=1)
    costs: dict[str, list[Cost]] = defaultdict(list)
    failures: dict[str, str] = {}
    with contenders(loop.parts.world.device) as sides:
        own, *rivals = sides
        sides.append(control(check_restores(loop, own).safe_s))
        for rival in rivals:
            with record_failure(failures, loop, rival):
                check_restores(loop, rival)
        for number in range(rounds):
            costs[SNAPSHOT] += [measure_snapshot(loop, num_steps=2) for _ in range(snapshots)]
            for side in [sides[index] for index in round_order(len(sides), number)]:
                if side.name not in failures:
                    with record_failure(failures, loop, side):
                        cost = measure_save(loop, side, plain_steps=num_steps, restore=number < restores)
                        costs[side.name].append(cost)
            ordered = {name: list(costs[name]) for name in (SNAPSHOT, *(side.name for side in sides))}
            on_round(measurements := Measurements(ordered, num_bytes, dict(failures)))
            print(f"round {number + 1} of {rounds} done", file=sys.stderr, flush=True)
    return measurements


def render(measurements: Measurements, *, rounds: int, restores: int) -> str:
    state = f"state {measurements.num_bytes / 1e9:.2f} GB, a plain step {measurements.step_s * 1e3:.1f} ms"
    order = f"{rounds} rounds, each contender once a round in alternating order"
    rows = [
        render_row(name, costs) if costs else f"| {name} | 0 | - | - | - | - |"
        for name, costs in measurements.costs.items()
    ]
    return "\n".join(
        [
            f"{state}, torch {torch.__version__}; {order}; restores in {min(rounds, restores)} of them",
            "",
            HEAD,
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            *(f"\n{name} failed: {reason}" for name, reason in measurements.failures.items()),
        ]
    )


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.checkpoint", description="Time snapshots, saves and restores during training."
    )
    parser.add_argument("overrides", nargs="*", default=list(SMALL), help="Hydra overrides")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=10, help="saves of each contender; 5 or more give an interval")
    parser.add_argument("--restores", type=int, default=3, help="rounds in which the checkpoint is also read back")
    parser.add_argument("--snapshots", type=int, default=2, help="snapshots a round")
    parser.add_argument("--steps", type=int, default=3, help="plain steps before and after each save")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads that train on a CPU; leave a core to the writer"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there, after each round")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.snapshots, options.steps, options.threads) < 1:
        parser.error("--rounds, --snapshots, --steps and --threads must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_args(arguments)
    torch.set_num_threads(options.threads)
    cfg = load(["checkpoint.every_steps=0", "checkpoint.ring.slots=2", *options.overrides])
    print(f"model {cfg.model.name}: {num_parameters(cfg.model) / 1e6:.1f}M parameters, ", end="")
    print(f"{cfg.train.batch_size} x {cfg.train.sequence_length} tokens, {cfg.precision.kind}", end=", ")
    print(f"{torch.get_num_threads()} CPU threads", flush=True)
    with fast_attention(), tempfile.TemporaryDirectory(dir=options.directory) as directory:
        world = connect(cfg.parallel)
        with closing(build(cfg, world, RunDir(Path(directory) / "run"))) as parts:
            measurements = measure(
                Loop(cfg, parts, Path(directory)),
                rounds=options.rounds,
                restores=options.restores,
                snapshots=options.snapshots,
                num_steps=options.steps,
                on_round=partial(write_json, options.json),
            )
        disconnect()
    print(render(measurements, rounds=options.rounds, restores=options.restores))


def write_json(path: Path | None, measurements: Measurements) -> None:
    if path is not None:
        path.write_text(json.dumps(measurements.as_json(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
