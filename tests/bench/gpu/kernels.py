"""Where a step goes on a GPU: its kernels by kind, by torch's profiler, of this harness and of torchtitan.

    python -m tests.bench.gpu.kernels --model 1b --rows ours-bf16 ours-fp8 torchtitan --torchtitan DIR

A row is built and warmed up as in `tests.bench.gpu`, then a few steps are listed; of this harness those with its
sentinel, one that is probed, and those without. torchtitan comes first, before this harness replaces an operator of
FSDP. What the sentinel adds is told by kernels whose number differs: all others are the same work, a little faster or
slower. Milliseconds of a step, means; the span is from the first kernel to the last, with the profiler on. `--names`
lists the dearest kernels.
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
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from harness.build import build
from harness.config.errors import EXIT_BAD_CONFIG, ConfigError
from harness.core.rundir import RunDir
from harness.distributed.world import World, connect, disconnect
from harness.precision.attention import fast_attention
from tests.bench import sentinel
from tests.bench.clock import WARMUP_STEPS, let_go
from tests.bench.gpu import titan
from tests.bench.gpu.contender import failure
from tests.bench.gpu.ours import WAYS
from tests.bench.gpu.peer import Job, Loop, batches_of
from tests.bench.gpu.setting import BATCH_SIZES, PROBE_EVERY, Setting

OURS, TITAN = ("ours-bf16", "ours-fp8", "ours-fp8-delayed"), "torchtitan"
NUM_STEPS = 3
"""That are listed."""
KINDS: Mapping[str, Sequence[str]] = {
    "attention": ("sdpa", "cudnn::fusion", "fmha", "flash"),
    "rounding and transposing, SwiGLU with it": (
        "_quantize_",
        "_fit_scale",
        "_update_amax",
        "_count_",
        "transformer_engine",
    ),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "optimizer and clipping": ("_step_adamw", "_sum_squares", "_reduce_sums", "multi_tensor_apply", "_sum_state"),
    "FSDP's casts and copies": ("chunk_cat", "copy_kernel", "Memcpy DtoD", "split_with_sizes"),
    "norms, rotation, SwiGLU, loss": (
        *("triton_", "_move_heads", "_differentiate_loss", "_scale", "elementwise_kernel<128, 2"),
        *("compute_grad_weight", "CatArray"),
    ),
}
"""What of a kernel's name tells its kind; the first that fits."""
REST = "the rest"


class Kernel(NamedTuple):
    """All of one name; of one step."""

    name: str
    ms: float
    times: float


class Listed(NamedTuple):
    kernels: dict[str, Kernel]
    span_ms: float

    @property
    def ms(self) -> float:
        return sum(kernel.ms for kernel in self.kernels.values())

    @property
    def num_kernels(self) -> float:
        return sum(kernel.times for kernel in self.kernels.values())

    def of_kind(self, kind: str) -> float:
        return sum(kernel.ms for kernel in self.kernels.values() if kind_of(kernel.name) == kind)

    def beyond(self, other: Listed) -> Kernel:
        """What it has and the other has not."""
        none = Kernel("", 0.0, 0.0)
        pairs = [(self.kernels.get(name, none), other.kernels.get(name, none)) for name in self.kernels | other.kernels]
        differ = [(own, their) for own, their in pairs if own.times != their.times]
        return Kernel(
            "", sum(own.ms - their.ms for own, their in differ), sum(own.times - their.times for own, their in differ)
        )


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), REST)


def listed(run: Callable[[int], object], num_steps: int) -> Listed:
    """The kernels of so many steps."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run(num_steps)
        torch.cuda.synchronize()
    return gathered([event for event in seen.events() or () if event.device_type.name == "CUDA"], num_steps)


def gathered(events: Sequence[object], num_steps: int) -> Listed:
    spans: dict[str, list[float]] = defaultdict(list)
    ranges = [(event.name, event.time_range) for event in events]  # type: ignore[attr-defined]
    for name, span in ranges:
        spans[name].append((span.end - span.start) / 1e3)
    kernels = {name: Kernel(name, sum(each) / num_steps, len(each) / num_steps) for name, each in sorted(spans.items())}
    begin, end = min(span.start for _, span in ranges), max(span.end for _, span in ranges)
    return Listed(kernels, (end - begin) / 1e3 / num_steps)


def of_ours(name: str, world: World, setting: Setting, run: RunDir) -> Iterator[tuple[str, Listed]]:
    """With the sentinel, in a probed step, and without."""
    cfg = setting.config(*WAYS[name].overrides)
    with closing(build(cfg, world, run)) as parts:
        watched, plain = sentinel.sides(cfg, parts, run)
        watched.run(PROBE_EVERY)
        plain.run(WARMUP_STEPS)
        probed = listed(watched.run, 1)
        yield name, listed(watched.run, NUM_STEPS)
        yield f"{name}, probed", probed
        yield f"{name}, sentinel off", listed(plain.run, NUM_STEPS)


def of_titan(directory: Path | None, world: World, setting: Setting, run: RunDir) -> Iterator[tuple[str, Listed]]:
    job = Job(setting.config(), world, setting.is_compiled)
    batches = batches_of(job, run, range(WARMUP_STEPS + NUM_STEPS))
    with titan.peer(directory).start(job) as step:
        loop = Loop(step, batches)
        loop.run(WARMUP_STEPS)
        yield TITAN, listed(loop.run, NUM_STEPS)


def table(found: Mapping[str, Listed]) -> str:
    shown = {name: each for name, each in found.items() if "," not in name}
    lines = [line("", shown), line("---", ["---:"] * len(shown))]
    for kind in (*KINDS, REST):
        lines += [line(kind, (f"{each.of_kind(kind):.1f}" for each in shown.values()))]
    lines += [
        line("**kernels**", (f"**{each.ms:.1f}** ({each.num_kernels:,.0f})" for each in shown.values())),
        line("from the first to the last", (f"{each.span_ms:.1f}" for each in shown.values())),
    ]
    for name in shown:
        if f"{name}, probed" in found:
            of_step = shown[name].beyond(found[f"{name}, sentinel off"])
            of_probe = found[f"{name}, probed"].beyond(shown[name])
            lines += [
                "",
                f"{name}: {of_step.times:,.0f} kernels more by the sentinel, {of_step.ms:.2f} ms; in a probed step "
                f"{of_probe.times:,.0f} besides, {of_probe.ms:.2f} ms.",
            ]
    return "\n".join(lines)


def line(first: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.kernels", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="1b", help="name of conf/model")
    parser.add_argument("--rows", nargs="+", choices=(*OURS, TITAN), default=[*OURS, TITAN], metavar="ROW")
    parser.add_argument("--torchtitan", type=Path, metavar="DIR", help="a directory that holds the package")
    parser.add_argument("--names", type=int, default=0, metavar="N", help="list the dearest kernels of each row")
    return parser.parse_args(arguments)


def setting_of(model: str) -> Setting:
    batch_size = BATCH_SIZES.get(model, 8)
    return Setting(
        model=model, sequence_length=4096, batch_size=batch_size, rounds=1, steps=PROBE_EVERY, is_compiled=True
    )


def listed_row(name: str, options: argparse.Namespace, world: World, run: RunDir) -> dict[str, Listed]:
    """One row, told as it is known; what fails is told too, and the others go on."""
    setting, found = setting_of(options.model), {}
    sides = of_ours(name, world, setting, run) if name in OURS else of_titan(options.torchtitan, world, setting, run)
    try:
        for side, each in sides:
            found[side] = each
            print(f"{side}: {each.ms:.1f} ms in {each.num_kernels:,.0f} kernels", flush=True)
            for kernel in sorted(each.kernels.values(), key=lambda kernel: -kernel.ms)[: options.names]:
                print(f"{kernel.ms:9.3f} ms {kernel.times:7.1f}  {kernel.name[:100]}", flush=True)
    except (Exception, SystemExit) as error:
        print(f"{name}: {failure(error)['failed']}", flush=True)
        found = {}
    let_go()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        cfg = setting_of(options.model).config()
    except ConfigError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if not torch.cuda.is_available():
        print("kernels: needs a GPU", file=sys.stderr)
        return EXIT_BAD_CONFIG
    torch.set_float32_matmul_precision("high")
    found: dict[str, Listed] = {}
    with fast_attention(), tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = connect(cfg.parallel)
        for name in sorted(options.rows, key=lambda name: name != TITAN):
            found |= listed_row(name, options, world, RunDir(Path(root)))
        disconnect()
    print(f"\n{table({name: found[name] for name in sorted(found, key=lambda name: name == TITAN)})}")
    return 0 if all(name in found for name in options.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
