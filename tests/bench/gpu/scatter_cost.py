"""Device time of the sentinel with two NCCL ranks on one GPU, from torch's profiler.

    python -m tests.bench.gpu.scatter_cost --only copy                 the copy of the gradients alone: seconds
    python -m tests.bench.gpu.scatter_cost                             1b, micro-batches of 4k and 32k tokens
    python -m tests.bench.gpu.scatter_cost --layers 6 --tokens 4096    fewer layers of the same width

With several ranks each rank measures its gradients before they are reduced. First table: that pass for the groups of
gradients that FSDP reduces together, as part of FSDP's copy into the reduce-scatter input and as a pass of its own,
without other processes on the GPU. Second table: steps of two ranks. Time slices of the other rank and waits for it
make wall time useless there, and lengthen kernels that are interrupted. So NCCL's kernels do not count, and each other
launch counts with its shortest time over the profiled steps.
Sides: `on`, the step of the training loop; `separate`, the same with the measurement in a pass of its own; `off`, the
same training without the sentinel (`tests.bench.sentinel`) and with torch's own reduce-scatter. The cost is the time of
the kernels whose number of launches differs between a side and `off`: gate, signals, norms before the reduction, and
what the measurement adds to the copy. The per-layer norms and the AdamW kernel with its digest are the same on all
sides. The figures are means over both ranks. The number of the sentinel's small kernels does not depend on the depth:
fewer layers overstate its share.
Left out: probed steps (`tests.bench.gpu.kernels`), and the sentinel's all-reduce, which is an NCCL kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

from harness.build import Parts, build
from harness.config.errors import EXIT_BAD_CONFIG, ConfigError
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.distributed.copy_sums import CopySums, request_sums
from harness.distributed.reduce_scatter import MeasuredReduceScatter
from harness.distributed.torch_private import chunk_cat
from harness.distributed.torch_private.fsdp_collectives import DefaultReduceScatter
from harness.distributed.world import connect, disconnect
from harness.model.transformer import Transformer
from harness.precision.attention import fast_attention
from harness.precision.mixed_precision import linear
from tests.bench import sentinel
from tests.bench.clock import do_nothing, release_memory
from tests.bench.gpu.kernels import Kernel, StepKernels, device_events, profile_steps
from tests.bench.gpu.setting import PROBE_EVERY, Setting
from tests.gpu.nccl import read_logs, run_ranks

NUM_RANKS, SEQUENCE_LENGTH = 2, 4096
WARMUP_STEPS = 2
"""Steps before the first side; the first one compiles, and is the only one with a probe."""
NUM_STEPS = 3
"""Profiled steps of each side, after one that is not profiled."""
NUM_COPIES = 20
SIDES = ("on", "separate", "off")
COPY, FUSED_COPY = "_chunk_cat", "_chunk_cat_and_square"
WORKER = "import sys; from tests.bench.gpu.scatter_cost import run_rank; run_rank(*sys.argv[1:])"
EXIT_FAILED = 1


class CopyTimes(NamedTuple):
    """Device microseconds of one copy of a group of gradients."""

    group: str
    num_values: int
    plain_us: float
    fused_us: float
    separate_us: float
    """The norm in a pass of its own."""


class SideTimes(NamedTuple):
    """Device time of a step, without NCCL's kernels; of one rank, or the mean over ranks."""

    ms: float
    added_ms: float
    """What the sentinel adds; 0 for `off`."""
    added_kernels: float
    copy_ms: float
    """The copies into the reduce-scatter input."""

    @property
    def share(self) -> float:
        return self.added_ms / self.ms


def shortest_launches(events: Sequence[Any], num_steps: int) -> StepKernels:
    """The kernels of a step; each launch counts with its shortest time over the steps.

    Every step launches the same kernels in the same order. For a kernel for which that is not so, the mean counts.
    """
    by_name: dict[str, list[Any]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "nccl" not in event.name.lower():
            by_name[event.name].append(event.time_range)
    kernels = {}
    for name, ranges in sorted(by_name.items()):
        durations_ms = [(each.end - each.start) / 1e3 for each in ranges]
        per_step, rest = divmod(len(ranges), num_steps)
        launches = [durations_ms[first::per_step] for first in range(per_step)]
        ms = sum(durations_ms) / num_steps if rest else sum(map(min, launches))
        kernels[name] = Kernel(name, ms, len(ranges) / num_steps)
    span = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    return StepKernels(kernels, span / 1e3 / num_steps)


def summarize(found: Mapping[str, StepKernels]) -> dict[str, SideTimes]:
    """The times of each side; `off` is what the others are compared with."""
    summary = {}
    for name, side in found.items():
        added = side.minus(found["off"])
        copy_ms = sum(kernel.ms for kernel in side.kernels.values() if kernel.name in (COPY, FUSED_COPY))
        summary[name] = SideTimes(side.ms, added.ms, added.times, copy_ms)
    return summary


def mean_of_ranks(ranks: Sequence[Mapping[str, SideTimes]]) -> dict[str, SideTimes]:
    return {
        name: SideTimes(*map(statistics.fmean, zip(*(rank[name] for rank in ranks), strict=True))) for name in ranks[0]
    }


def build_config(options: argparse.Namespace, tokens: int, *overrides: str) -> Config:
    """Two ranks with one micro-batch of `tokens` each."""
    num_rows = tokens // SEQUENCE_LENGTH
    setting = Setting(
        model=options.model,
        sequence_length=SEQUENCE_LENGTH,
        batch_size=NUM_RANKS * num_rows,
        rounds=1,
        steps=PROBE_EVERY,
        is_compiled=True,
    )
    depth = () if options.layers is None else (f"model.num_layers={options.layers}",)
    return setting.config("precision=bf16", f"train.micro_batch_size={num_rows}", *depth, *overrides)


def profile_sides(
    cfg: Config, parts: Parts, run: RunDir, profile: Callable[[Callable[[int], object], int], StepKernels]
) -> dict[str, StepKernels]:
    """Profile some steps of each side, on the same weights."""
    with_sentinel, without_sentinel = sentinel.build_sides(cfg, parts, run)
    modules = [module for module in parts.model.modules() if isinstance(module, FSDPModule)]
    stats = parts.comm_stats
    scatters = {
        "on": MeasuredReduceScatter(stats),
        "separate": MeasuredReduceScatter(stats, before_measuring=[lambda _: None]),
        "off": DefaultReduceScatter(),
    }
    with_sentinel.run(WARMUP_STEPS)
    found = {}
    for name in SIDES:
        for module in modules:
            module.set_custom_reduce_scatter(scatters[name])
        side = without_sentinel.run if name == "off" else with_sentinel.run
        side(1, do_nothing)
        found[name] = profile(lambda num_steps, side=side: side(num_steps, do_nothing), NUM_STEPS)  # type: ignore[misc]
    assert with_sentinel.state.iteration <= cfg.sentinel.probe_every, "a profiled step had a probe"
    return found


def profile_shortest(run: Callable[[int], object], num_steps: int) -> StepKernels:
    return shortest_launches(device_events(run, num_steps), num_steps)


def run_rank(directory: str, given: str) -> None:
    """Profile all settings on this rank; one line of JSON for each."""
    options = argparse.Namespace(**json.loads(given))
    torch.set_float32_matmul_precision("high")
    with fast_attention(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as root:
        warnings.simplefilter("ignore")
        world = connect(build_config(options, options.tokens[0]).parallel)
        with Path(directory, "results", f"{world.rank}.jsonl").open("w") as file:
            for tokens in options.tokens:
                began_s = time.perf_counter()
                cfg = build_config(options, tokens)
                with closing(build(cfg, world, RunDir(Path(root)))) as parts:
                    found = profile_sides(cfg, parts, RunDir(Path(root)), profile_shortest)
                del parts
                release_memory()
                if world.is_first:
                    print_kernels(found, options.names)
                print(f"{tokens} tokens: {time.perf_counter() - began_s:.0f} s", flush=True)
                file.write(json.dumps({name: tuple(side) for name, side in summarize(found).items()}) + "\n")
        disconnect()


def print_kernels(found: Mapping[str, StepKernels], num_names: int) -> None:
    """The kernels with the largest difference from `off`."""
    none = Kernel("", 0.0, 0.0)
    for name, side in found.items():
        print(f"{name}: {side.ms:.3f} ms in {side.num_kernels:,.0f} kernels", flush=True)
        for kernel in sorted(side.kernels.values(), key=lambda kernel: -kernel.ms)[:num_names]:
            off = found["off"].kernels.get(kernel.name, none)
            print(
                f"{kernel.ms:9.3f} ms {kernel.times:7.1f}, off {off.ms:9.3f} ms {off.times:7.1f}  {kernel.name[:90]}",
                flush=True,
            )


def measure_copies(cfg: Config) -> list[CopyTimes]:
    """Copy the gradients of a block, and of what is outside the blocks, for two ranks."""
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=cfg.train.sequence_length, linear=linear, own_kernels=False)
    block = {id(parameter) for parameter in model.blocks[0].parameters()}
    in_blocks = {id(parameter) for each in model.blocks for parameter in each.parameters()}
    groups = {
        "one block": [parameter.shape for parameter in model.parameters() if id(parameter) in block],
        "embedding, head, last norm": [p.shape for p in model.parameters() if id(p) not in in_blocks],
    }
    return [measure_copy(name, shapes) for name, shapes in groups.items()]


def measure_copy(group: str, shapes: Sequence[torch.Size]) -> CopyTimes:
    gradients = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    width = sum(-(-each.shape[0] // NUM_RANKS) * each[:1].numel() for each in gradients)
    out, sums = torch.empty(NUM_RANKS * width, device="cuda"), CopySums()

    def copy_all(num_times: int) -> None:
        for _ in range(num_times):
            chunk_cat.fsdp_chunk_cat(gradients, 0, NUM_RANKS, out=out.view(NUM_RANKS, -1))
            request_sums(out, sums)
            chunk_cat.fsdp_chunk_cat(gradients, 0, NUM_RANKS, out=out.view(NUM_RANKS, -1))
            torch.linalg.vector_norm(out, dtype=torch.float32)

    copy_all(3)
    found = profile_steps(copy_all, NUM_COPIES)
    plain, fused = (found.kernels[name].ms * 1e3 for name in (COPY, FUSED_COPY))
    num_values = sum(gradient.numel() for gradient in gradients)
    return CopyTimes(group, num_values, plain, fused, found.ms * 1e3 - plain - fused)


def render_copies(found: Sequence[CopyTimes]) -> str:
    lines = [
        "| gradients of | values | copy, us | copy with squares, us | added, us | norm in its own pass, us |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each.group} | {each.num_values / 1e6:.1f}M | {each.plain_us:.1f} | {each.fused_us:.1f} | "
        f"{each.fused_us - each.plain_us:+.1f} | {each.separate_us:.1f} |"
        for each in found
    ]
    return "\n".join(lines)


def render_sides(found: Mapping[int, Mapping[str, SideTimes]]) -> str:
    lines = [
        "| tokens of a micro-batch | kernels, ms | the sentinel's, ms | of these in the copy, ms | launches | share | "
        "share with a pass of its own |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for tokens, sides in found.items():
        on, separate, off = (sides[name] for name in SIDES)
        lines.append(
            f"| {tokens:,} | {on.ms:.2f} | {on.added_ms:.3f} | {on.copy_ms - off.copy_ms:.3f} | "
            f"{on.added_kernels:.0f} | {100 * on.share:.2f} % | {100 * separate.share:.2f} % |"
        )
    return "\n".join(lines)


def profile_ranks(options: argparse.Namespace) -> dict[int, dict[str, SideTimes]] | None:
    """Start the ranks and read their results; None if one has failed."""
    given = {name: getattr(options, name) for name in ("model", "layers", "tokens", "names")}
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root)
        for name in ("logs", "results"):
            (directory / name).mkdir()
        codes = run_ranks(directory, num_ranks=NUM_RANKS, worker=WORKER, arguments=(json.dumps(given),))
        if any(codes):
            print(read_logs(directory), file=sys.stderr)
            return None
        print((directory / "logs" / "rank-0.txt").read_text())
        return read_results(directory / "results", options.tokens)


def read_results(directory: Path, tokens: Sequence[int]) -> dict[int, dict[str, SideTimes]]:
    ranks = [
        [json.loads(line) for line in (directory / f"{rank}.jsonl").read_text().splitlines()]
        for rank in range(NUM_RANKS)
    ]
    return {
        number: mean_of_ranks([{name: SideTimes(*side) for name, side in each.items()} for each in of_setting])
        for number, of_setting in zip(tokens, zip(*ranks, strict=True), strict=True)
    }


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.scatter_cost", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="1b", help="name of conf/model")
    parser.add_argument("--layers", type=int, help="layers; default: those of the model")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[4096, 32768], metavar="N", help="tokens of a micro-batch of a rank"
    )
    parser.add_argument("--only", choices=("copy", "ranks"), help="one of the two tables")
    parser.add_argument("--names", type=int, default=0, metavar="N", help="list the N slowest kernels of each side")
    options = parser.parse_args(arguments)
    if any(number < SEQUENCE_LENGTH or number % SEQUENCE_LENGTH for number in options.tokens):
        parser.error(f"--tokens: must be multiples of {SEQUENCE_LENGTH}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_args(arguments)
    try:
        cfg = build_config(options, options.tokens[0])
    except ConfigError as error:
        print(f"scatter_cost: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if not torch.cuda.is_available():
        print("scatter_cost: needs a GPU", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if options.only != "ranks":
        print(render_copies(measure_copies(cfg)), flush=True)
        release_memory()
    if options.only != "copy":
        found = profile_ranks(options)
        if found is None:
            return EXIT_FAILED
        print(render_sides(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
