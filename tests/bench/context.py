"""Memory and kernel time of a rank with long sequences, on 1, 2 and 4 NCCL ranks that share each sequence on one GPU.

    python -m tests.bench.context                                        1b, 32k and 128k tokens
    python -m tests.bench.context --tokens 32768 --ranks 2               one row
    python -m tests.bench.context parallel.activation_checkpointing=none

A step has one sequence. Each rank is a process of its own, and all of them share the GPU. Memory is the peak of torch's
allocator on a rank; weights and moments are sharded over the ranks, so it falls faster than the activations do. Time
slices of other ranks and waits for them make wall time useless, and lengthen kernels that are interrupted. So NCCL's
kernels do not count, and each other launch counts with its shortest time over the profiled steps. The table has the
largest memory and the longest kernel time of all ranks, and the shortest: the difference shows the balance. A row that
does not fit into the memory says so.
Left out: the time of the collectives, which on one GPU go over loopback sockets.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from harness.build import build
from harness.config.compose import load
from harness.config.errors import EXIT_BAD_CONFIG, ConfigError
from harness.config.schema import Config, check_world
from harness.core.rundir import RunDir
from harness.distributed.world import connect, disconnect
from harness.precision.attention import fast_attention
from harness.step import finish_step, forward_backward
from tests.bench.gpu.kernels import device_events
from tests.bench.gpu.scatter_cost import shortest_launches
from tests.gpu.nccl import read_logs, run_ranks

WARMUP_STEPS, NUM_STEPS = 1, 2
"""Few: with four ranks the collectives of a step of 128k tokens take about a minute over loopback."""
WORKER = "import sys; from tests.bench.context import run_rank; run_rank(*sys.argv[1:])"
EXIT_FAILED = 1
OUT_OF_MEMORY = "OutOfMemoryError"


class RankCost(NamedTuple):
    """What a step costs one rank."""

    memory_bytes: int
    kernel_ms: float
    attention_ms: float


def build_config(tokens: int, num_ranks: int, overrides: Sequence[str]) -> Config:
    cfg = load(
        [
            "+experiment=1b_bf16",
            "parallel.activation_checkpointing=full",
            "checkpoint.ring.slots=0",
            "telemetry=plain",
            f"train.sequence_length={tokens}",
            "train.batch_size=1",
            "sentinel.held_out_rows=0",
            *overrides,
            f"parallel.context={num_ranks}",
            f"launch.ranks_per_gpu={num_ranks}",
        ]
    )
    check_world(cfg, num_ranks)
    return cfg


def run_rank(directory: str, given: str) -> None:
    """Profile one setting on this rank, and write its cost."""
    tokens, num_ranks, overrides = json.loads(given)
    torch.set_float32_matmul_precision("high")
    cfg = build_config(tokens, num_ranks, overrides)
    with fast_attention(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as root:
        warnings.simplefilter("ignore")
        world = connect(cfg.parallel, ranks_per_gpu=num_ranks)
        with closing(build(cfg, world, RunDir(Path(root)))) as parts:

            def run(num_steps: int) -> None:
                for _ in range(num_steps):
                    forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
                    finish_step(parts, cfg=cfg, probe=False)

            run(WARMUP_STEPS)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            found = shortest_launches(device_events(run, NUM_STEPS), NUM_STEPS)
            cost = RankCost(torch.cuda.max_memory_allocated(), found.ms, found.ms_of_kind("attention"))
            Path(directory, "results", f"{world.rank}.json").write_text(json.dumps(cost))
        disconnect()


def measure(tokens: int, num_ranks: int, overrides: Sequence[str]) -> list[RankCost] | str:
    """The cost of each rank; or why there is none."""
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root)
        for name in ("logs", "results"):
            (directory / name).mkdir()
        given = json.dumps([tokens, num_ranks, list(overrides)])
        if any(run_ranks(directory, num_ranks=num_ranks, worker=WORKER, arguments=(given,))):
            logs = read_logs(directory)
            print(logs[-4000:], file=sys.stderr, flush=True)
            return "out of memory" if OUT_OF_MEMORY in logs else "failed"
        files = [directory / "results" / f"{rank}.json" for rank in range(num_ranks)]
        return [RankCost(*json.loads(file.read_text())) for file in files]


def render_row(tokens: int, num_ranks: int, found: list[RankCost] | str) -> str:
    if isinstance(found, str):
        return f"| {tokens:,} | {num_ranks} | {found} | | | |"
    kernels = [cost.kernel_ms for cost in found]
    return (
        f"| {tokens:,} | {num_ranks} | {max(cost.memory_bytes for cost in found) / 2**30:.1f} | {max(kernels):,.0f} | "
        f"{min(kernels):,.0f} | {max(cost.attention_ms for cost in found):,.0f} |"
    )


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.context", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072], metavar="N", help="sequence lengths")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="ranks of a sequence")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_args(arguments)
    settings = [(tokens, num_ranks) for tokens in options.tokens for num_ranks in options.ranks]
    try:
        for setting in settings:
            build_config(*setting, options.overrides)
    except ConfigError as error:
        print(f"context: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if not torch.cuda.is_available():
        print("context: needs a GPU", file=sys.stderr)
        return EXIT_BAD_CONFIG
    print("| tokens | ranks | GiB per rank | kernels, ms | of the fastest rank, ms | attention, ms |", flush=True)
    print("|---:|---:|---:|---:|---:|---:|", flush=True)
    found = []
    for setting in settings:
        found.append(measure(*setting, options.overrides))
        print(render_row(*setting, found[-1]), flush=True)
    return EXIT_FAILED if "failed" in found else 0


if __name__ == "__main__":
    sys.exit(main())
