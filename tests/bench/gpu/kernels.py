"""The kernels of a training step on a GPU by kind, from torch's profiler, of this harness and of torchtitan.

    python -m tests.bench.gpu.kernels --model 1b --rows ours-bf16 ours-fp8 torchtitan --torchtitan DIR

A row is built and warmed up as in `tests.bench.gpu`, then some steps are profiled; for this harness: steps with the
sentinel, one step with a probe, steps that each copy a snapshot to the host, and steps without the sentinel. torchtitan
runs first, before this harness replaces an operator of FSDP. The kernels that the sentinel adds are those whose count
differs; all others do the same work. The table has mean milliseconds per step; the span is from the first kernel to the
last, with the profiler on. `--names` lists the kernels that take the most time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from harness.build import build
from harness.config.errors import EXIT_BAD_CONFIG, ConfigError
from harness.core.rundir import RunDir
from harness.distributed.world import World, connect, disconnect
from harness.precision.attention import fast_attention
from tests.bench import sentinel
from tests.bench.clock import WARMUP_STEPS, release_memory
from tests.bench.gpu import titan
from tests.bench.gpu.contender import describe_failure
from tests.bench.gpu.ours import VARIANTS
from tests.bench.gpu.peer import Job, Loop, load_batches
from tests.bench.gpu.setting import BATCH_SIZES, PROBE_EVERY, Setting

RING_SLOTS, SNAPSHOT_EVERY = 2, 20
"""Slots of the ring, and the distance in steps of two snapshots for which their cost is printed."""
OURS, TITAN = ("ours-bf16", "ours-fp8", "ours-fp8-delayed"), "torchtitan"
NUM_STEPS = 3
"""Profiled steps."""
KINDS: Mapping[str, Sequence[str]] = {
    "attention": ("sdpa", "cudnn::fusion", "fmha", "flash", "flex_attention"),
    "quantization and transposition, including SwiGLU's": (
        "_quantize_",
        "_fit_scale",
        "_update_amax",
        "_count_",
        "transformer_engine",
    ),
    "GEMM": ("nvjet", "gemm", "cutlass", "splitK"),
    "optimizer and clipping": ("_step_adamw", "_sum_squares", "_reduce_sums", "multi_tensor_apply", "_sum_state"),
    "FSDP's casts and copies": ("chunk_cat", "copy_kernel", "Memcpy DtoD", "split_with_sizes"),
    "norms, RoPE, SwiGLU, loss": (
        *("triton_", "_move_heads", "_differentiate_loss", "_scale", "elementwise_kernel<128, 2"),
        *("compute_grad_weight", "CatArray"),
    ),
}
"""Kind -> parts of kernel names; the first match counts."""
REST = "the rest"
TO_HOST = "Memcpy DtoH"


class Kernel(NamedTuple):
    """All launches of one kernel name, per step."""

    name: str
    ms: float
    times: float


class StepKernels(NamedTuple):
    kernels: dict[str, Kernel]
    span_ms: float

    @property
    def ms(self) -> float:
        return sum(kernel.ms for kernel in self.kernels.values())

    @property
    def num_kernels(self) -> float:
        return sum(kernel.times for kernel in self.kernels.values())

    def ms_of_kind(self, kind: str) -> float:
        return sum(kernel.ms for kernel in self.kernels.values() if kind_of(kernel.name) == kind)

    def ms_of(self, part: str) -> float:
        """Time of the kernels with this part in their names."""
        return sum(kernel.ms for kernel in self.kernels.values() if part in kernel.name)

    def minus(self, other: StepKernels) -> Kernel:
        """Time and launches of the kernels whose count differs, minus those of the other."""
        none = Kernel("", 0.0, 0.0)
        pairs = [(self.kernels.get(name, none), other.kernels.get(name, none)) for name in self.kernels | other.kernels]
        differ = [(own, their) for own, their in pairs if own.times != their.times]
        return Kernel(
            "", sum(own.ms - their.ms for own, their in differ), sum(own.times - their.times for own, their in differ)
        )


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), REST)


def profile_steps(run: Callable[[int], object], num_steps: int) -> StepKernels:
    """Profile the kernels of some steps."""
    return collect_kernels(device_events(run, num_steps), num_steps)


def device_events(run: Callable[[int], object], num_steps: int) -> list[Any]:
    """The kernels and copies that some steps launch, without the ranges that torch marks around them."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run(num_steps)
        torch.cuda.synchronize()
    events = profiler.events() or ()
    return [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]


def collect_kernels(events: Sequence[object], num_steps: int) -> StepKernels:
    spans: dict[str, list[float]] = defaultdict(list)
    ranges = [(event.name, event.time_range) for event in events]  # type: ignore[attr-defined]
    for name, span in ranges:
        spans[name].append((span.end - span.start) / 1e3)
    kernels = {name: Kernel(name, sum(each) / num_steps, len(each) / num_steps) for name, each in sorted(spans.items())}
    begin, end = min(span.start for _, span in ranges), max(span.end for _, span in ranges)
    return StepKernels(kernels, (end - begin) / 1e3 / num_steps)


def profile_harness(name: str, world: World, setting: Setting, run: RunDir) -> Iterator[tuple[str, StepKernels]]:
    """Profile steps with the sentinel, a probed step, steps with a snapshot each, and steps without the sentinel."""
    cfg = setting.config(*VARIANTS[name].overrides, f"checkpoint.ring.slots={RING_SLOTS}")
    with closing(build(cfg, world, run)) as parts:

        def run_with_snapshots(num_steps: int) -> None:
            for _ in range(num_steps):
                parts.ring.take_snapshot(with_sentinel.state)
                with_sentinel.step()
            with_sentinel.read_reports(everything=True)

        with_sentinel, without_sentinel = sentinel.build_sides(cfg, parts, run)
        with_sentinel.run(PROBE_EVERY)
        without_sentinel.run(WARMUP_STEPS)
        probed = profile_steps(with_sentinel.run, 1)
        yield name, profile_steps(with_sentinel.run, NUM_STEPS)
        yield f"{name}, probed", probed
        run_with_snapshots(1 + RING_SLOTS)
        yield f"{name}, snapshots", profile_steps(run_with_snapshots, NUM_STEPS)
        yield f"{name}, sentinel off", profile_steps(without_sentinel.run, NUM_STEPS)


def profile_titan(
    directory: Path | None, world: World, setting: Setting, run: RunDir
) -> Iterator[tuple[str, StepKernels]]:
    job = Job(setting.config(), world, setting.is_compiled)
    batches = load_batches(job, run, range(WARMUP_STEPS + NUM_STEPS))
    with titan.build_peer(directory).start(job) as step:
        loop = Loop(step, batches)
        loop.run(WARMUP_STEPS)
        yield TITAN, profile_steps(loop.run, NUM_STEPS)


def render_table(found: Mapping[str, StepKernels]) -> str:
    columns = {name: each for name, each in found.items() if "," not in name}
    lines = [render_line("", columns), render_line("---", ["---:"] * len(columns))]
    for kind in (*KINDS, REST):
        lines += [render_line(kind, (f"{each.ms_of_kind(kind):.1f}" for each in columns.values()))]
    lines += [
        render_line("**kernels**", (f"**{each.ms:.1f}** ({each.num_kernels:,.0f})" for each in columns.values())),
        render_line("from the first to the last", (f"{each.span_ms:.1f}" for each in columns.values())),
    ]
    for name in columns:
        if f"{name}, probed" in found:
            added = columns[name].minus(found[f"{name}, sentinel off"])
            added_by_probe = found[f"{name}, probed"].minus(columns[name])
            lines += [
                "",
                f"{name}: {added.times:,.0f} kernels added by the sentinel, {added.ms:.2f} ms; by a probe "
                f"{added_by_probe.times:,.0f} more, {added_by_probe.ms:.2f} ms.",
            ]
        if f"{name}, snapshots" in found:
            lines += ["", f"{name}: {describe_snapshot(columns[name], found[f'{name}, snapshots'])}"]
    return "\n".join(lines)


def describe_snapshot(without: StepKernels, with_snapshot: StepKernels) -> str:
    """What one snapshot in each step adds to it, and the share of that if there is one in `SNAPSHOT_EVERY` steps."""
    copied_ms = with_snapshot.ms_of(TO_HOST) - without.ms_of(TO_HOST)
    share = (with_snapshot.span_ms - without.span_ms) / without.span_ms / SNAPSHOT_EVERY
    return (
        f"a snapshot is copied for {copied_ms:.1f} ms beside its step. The other kernels of the step take "
        f"{with_snapshot.ms - copied_ms:.1f} ms instead of {without.ms:.1f}, from the first to the last "
        f"{with_snapshot.span_ms:.1f} instead of {without.span_ms:.1f}: {share:+.2%} at one snapshot in "
        f"{SNAPSHOT_EVERY} steps."
    )


def render_line(first: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.kernels", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="1b", help="name of conf/model")
    parser.add_argument("--rows", nargs="+", choices=(*OURS, TITAN), default=[*OURS, TITAN], metavar="ROW")
    parser.add_argument("--torchtitan", type=Path, metavar="DIR", help="a directory that holds the package")
    parser.add_argument("--names", type=int, default=0, metavar="N", help="list the N slowest kernels of each row")
    return parser.parse_args(arguments)


def build_setting(model: str) -> Setting:
    batch_size = BATCH_SIZES.get(model, 8)
    return Setting(
        model=model, sequence_length=4096, batch_size=batch_size, rounds=1, steps=PROBE_EVERY, is_compiled=True
    )


def profile_row(name: str, options: argparse.Namespace, world: World, run: RunDir) -> dict[str, StepKernels]:
    """Profile and print one row; an error is printed, and the other rows continue."""
    setting, found = build_setting(options.model), {}
    if name in OURS:
        profiles = profile_harness(name, world, setting, run)
    else:
        profiles = profile_titan(options.torchtitan, world, setting, run)
    try:
        for side, each in profiles:
            found[side] = each
            print(f"{side}: {each.ms:.1f} ms in {each.num_kernels:,.0f} kernels", flush=True)
            for kernel in sorted(each.kernels.values(), key=lambda kernel: -kernel.ms)[: options.names]:
                print(f"{kernel.ms:9.3f} ms {kernel.times:7.1f}  {kernel.name[:100]}", flush=True)
    except (Exception, SystemExit) as error:
        print(f"{name}: {describe_failure(error)['failed']}", flush=True)
        found = {}
    release_memory()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_args(arguments)
    try:
        cfg = build_setting(options.model).config()
    except ConfigError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if not torch.cuda.is_available():
        print("kernels: needs a GPU", file=sys.stderr)
        return EXIT_BAD_CONFIG
    torch.set_float32_matmul_precision("high")
    found: dict[str, StepKernels] = {}
    with fast_attention(), tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = connect(cfg.parallel)
        for name in sorted(options.rows, key=lambda name: name != TITAN):
            found |= profile_row(name, options, world, RunDir(Path(root)))
        disconnect()
    print(f"\n{render_table({name: found[name] for name in sorted(found, key=lambda name: name == TITAN)})}")
    return 0 if all(name in found for name in options.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
