"""Memory and kernel time of a rank that shares long sequences with others (`parallel.context`), on one GPU.

    python -m tests.bench.context attention --tokens 32768 131072        the kernels of one layer
    python -m tests.bench.context kernels --tokens 131072 --ranks 1 4    all kernels of a step of 1b
    python -m tests.bench.context memory --tokens 131072 --ranks 4       peak memory of real NCCL ranks

`attention`: forward and backward time of one layer for the first and the last rank of a group, and for one rank with
the whole sequence. "cuDNN" is Transformer Engine on each chunk, "FlashAttention-2" is `causal_lower_right` on each.
`kernels`: one process computes the part of the first rank of a group. Nothing is exchanged: it gets its own keys and
values N times, which takes the same kernels. So no collective and no other process disturbs the times. Weights and
moments are not sharded; without activation checkpointing long sequences may not fit.
`memory`: N ranks share the GPU, and collectives go over loopback sockets, which takes minutes with long sequences.
Memory is the peak of torch's allocator on a rank in its first step; weights and moments are sharded over the ranks.
A step has one sequence. Every row is measured in processes of its own and printed at once. A row that does not fit into
the memory, or takes longer than `--limit` seconds, says so.
Left out: the time of the collectives.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import harness.distributed.context
from harness.build import Parts, build
from harness.config.compose import load
from harness.config.errors import EXIT_BAD_CONFIG, ConfigError
from harness.config.schema import Config, check_world
from harness.core.rundir import RunDir
from harness.distributed.context import ContextSplit, _Membership
from harness.distributed.world import connect, disconnect
from harness.model.attention_layer import Attention
from harness.model.attention_mask import causal_block_mask
from harness.precision.attention import fast_attention
from harness.precision.te_attention import te_attention, te_attention_obstacle
from harness.step import finish_step, forward_backward
from tests.bench import attention
from tests.bench.gpu.kernels import device_events
from tests.bench.gpu.scatter_cost import shortest_launches
from tests.gpu.nccl import read_logs, run_ranks

WARMUP_STEPS, NUM_STEPS = 1, 2
WORKER = "import sys; from tests.bench import context; getattr(context, sys.argv[2])(*sys.argv[1:2], *sys.argv[3:])"
EXIT_FAILED = 1
OUT_OF_MEMORY = "OutOfMemoryError"
LIMIT_S = 230.0
"""Seconds for one row."""
GROUP = "one process"
"""Name of a context group without other ranks."""
TE, FLEX = "cuDNN", "flex_attention"
RESULT = "result.json"


class StepCost(NamedTuple):
    """What a step costs one rank."""

    memory_bytes: int
    kernel_ms: float
    attention_ms: float
    longest: str = ""
    """The kernels that take the most time."""


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


# The kernels of one layer


def by_chunks(split: ContextSplit, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> attention.Attend:
    """Attention of the two chunks of a rank, each on the keys up to its end."""

    def attend_both(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ends = split.chunk_ends(key.shape[1])
        chunks = zip(split.take(query, 1).chunk(2, dim=1), ends, strict=True)
        return torch.cat([attend(chunk, key[:, :end], value[:, :end]) for chunk, end in chunks], dim=1)

    return attend_both


def by_flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    bias = causal_lower_right(query.shape[-2], key.shape[-2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=cast(Any, bias), scale=attention.SCALE, enable_gqa=True
        )
    return attended.transpose(1, 2)


def attention_kernels(tokens: int, num_ranks: int) -> Iterator[tuple[str, attention.Attend]]:
    """Names and kernels; all take the whole sequence, and compute the part of one rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    if num_ranks == 1:
        yield "SDPA, cuDNN", attention.by_sdpa()
        yield "`flex_attention`", attention.by_flex(causal_block_mask(tokens, device))
        return
    for rank in (0, num_ranks - 1):
        split = ContextSplit(num_ranks, rank)
        flex = attention.by_flex(causal_block_mask(tokens, device, split))

        def by_te(query: Tensor, key: Tensor, value: Tensor, *, is_fixed: bool, own: ContextSplit = split) -> Tensor:
            ends = own.chunk_ends(key.shape[1])
            return te_attention(own.take(query, 1), key, value, attention.SCALE, deterministic=is_fixed, ends=ends)

        if obstacle := te_attention_obstacle(attention.HEAD_DIM):
            print(f"no cuDNN on chunks: {obstacle}", file=sys.stderr, flush=True)
        else:
            yield f"rank {rank}: cuDNN", lambda *inputs, run=by_te: run(*inputs, is_fixed=False)
            yield f"rank {rank}: cuDNN, deterministic", lambda *inputs, run=by_te: run(*inputs, is_fixed=True)
        yield (
            f"rank {rank}: `flex_attention`",
            lambda query, *inputs, own=split, run=flex: run(own.take(query, 1), *inputs),
        )
        yield f"rank {rank}: FlashAttention-2", by_chunks(split, by_flash)


def measure_part(attend: attention.Attend, tokens: int, num_ranks: int) -> attention.Times:
    """Like `attention.measure`, with a gradient of the part that is computed."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    heads = (attention.NUM_HEADS, attention.NUM_KV_HEADS, attention.NUM_KV_HEADS)
    leaves = [
        torch.randn((1, tokens, number, attention.HEAD_DIM), device="cuda", generator=generator)
        .to(torch.bfloat16)
        .requires_grad_()
        for number in heads
    ]
    gradient = torch.randn_like(leaves[0][:, : tokens // num_ranks].detach())
    found: list[tuple[float, float]] = []
    first: tuple[Tensor, ...] | None = None
    has_same_bits = True
    for _ in range(1 + (attention.LONG_REPEATS if tokens >= attention.LONG else attention.NUM_REPEATS)):
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        begin.record()
        attended = attend(*leaves)
        middle.record()
        grads = torch.autograd.grad(attended, leaves, gradient)
        end.record()
        torch.cuda.synchronize()
        found.append((begin.elapsed_time(middle), middle.elapsed_time(end)))
        first = first or grads
        has_same_bits = has_same_bits and all(torch.equal(*pair) for pair in zip(first, grads, strict=True))
    forward_ms, backward_ms = min(found[1:], key=sum)
    return attention.Times(forward_ms, backward_ms, has_same_bits)


def run_attention(options: argparse.Namespace) -> int:
    te_attention_obstacle(attention.HEAD_DIM)  # loads Transformer Engine before torch loads cuDNN
    print("| tokens | ranks | kernel | forward ms | backward ms | sum ms | same bits |", flush=True)
    print("|---:|---:|---|---:|---:|---:|---|", flush=True)
    for tokens in options.tokens:
        for num_ranks in options.ranks:
            for name, attend in attention_kernels(tokens, num_ranks):
                cells = [f"{tokens:,}", str(num_ranks), name]
                try:
                    with fast_attention():
                        times = measure_part(attend, tokens, num_ranks)
                except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    cells += [reason[:90].replace("|", "/"), "", "", ""]
                else:
                    total_ms = times.forward_ms + times.backward_ms
                    cells += [f"{ms:.2f}" for ms in (times.forward_ms, times.backward_ms, total_ms)]
                    cells.append("yes" if times.has_same_bits else "no")
                print(f"| {' | '.join(cells)} |", flush=True)
                torch.cuda.empty_cache()
    return 0


# All kernels of a step


def share_alone(parts: Parts, split: ContextSplit) -> None:
    """Let a model of whole sequences compute one rank's part of them, without the other ranks."""
    harness.distributed.context._MEMBERSHIPS[GROUP] = _Membership(cast(Any, None), parts.comm_stats)
    context = cast(Any, harness.distributed.context)
    context.all_gather_stack = lambda block, num_ranks, _: block.expand(num_ranks, *block.shape).contiguous()
    context.reduce_scatter_stack = lambda stacked, _: stacked[split.rank].clone()
    model = parts.model
    model.context = split
    for module in model.modules():
        if isinstance(module, Attention):
            module.context, module.uses_te = split, not split.te_obstacle
    for name in ("cos", "sin"):
        table = getattr(model, name)
        setattr(model, name, table.new_empty(table.shape[0] // split.size, table.shape[1]))
    model.init_buffers()


def profile_alone(directory: str, given: str) -> None:
    """Profile the part of the first rank of a group, in one process; writes its cost."""
    tokens, num_ranks, kernel, overrides = json.loads(given)
    torch.set_float32_matmul_precision("high")
    cfg = build_config(tokens, 1, overrides)
    head_dim = cfg.model.head_dim
    obstacle = te_attention_obstacle(head_dim) if kernel == TE else f"{FLEX} is measured"
    assert kernel != TE or num_ranks == 1 or not obstacle, obstacle
    with fast_attention(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as root:
        warnings.simplefilter("ignore")
        world = connect(cfg.parallel)
        with closing(build(cfg, world, RunDir(Path(root)))) as parts:
            if num_ranks > 1:
                share_alone(parts, ContextSplit(num_ranks, 0, GROUP, obstacle))
            run = step_runner(parts, cfg)
            run(WARMUP_STEPS)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            found = shortest_launches(device_events(run, NUM_STEPS), NUM_STEPS)
            memory_bytes = torch.cuda.max_memory_allocated()
            longest = sorted(found.kernels.values(), key=lambda each: -each.ms)[:5]
            names = "; ".join(f"{each.name[:60]} {each.ms:.1f} ms" for each in longest)
            cost = StepCost(memory_bytes, found.ms, found.ms_of_kind("attention"), names)
            Path(directory, RESULT).write_text(json.dumps(cost))
        disconnect()


def step_runner(parts: Parts, cfg: Config) -> Callable[[int], None]:
    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            began_s = time.perf_counter()
            forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
            finish_step(parts, cfg=cfg, probe=False)
            torch.cuda.synchronize()
            print(f"a step took {time.perf_counter() - began_s:.1f} s", flush=True)

    return run


# Memory of real ranks


def measure_rank(directory: str, given: str) -> None:
    """Run one step on this rank, and write its peak memory."""
    tokens, num_ranks, overrides = json.loads(given)
    torch.set_float32_matmul_precision("high")
    cfg = build_config(tokens, num_ranks, overrides)
    with fast_attention(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as root:
        warnings.simplefilter("ignore")
        world = connect(cfg.parallel, ranks_per_gpu=num_ranks)
        with closing(build(cfg, world, RunDir(Path(root)))) as parts:
            torch.cuda.reset_peak_memory_stats()
            step_runner(parts, cfg)(1)
            cost = StepCost(torch.cuda.max_memory_allocated(), 0.0, 0.0)
            Path(directory, f"{world.rank}-{RESULT}").write_text(json.dumps(cost))
        disconnect()


def measure(worker: str, num_processes: int, limit_s: float, *given: object) -> list[StepCost] | str:
    """The cost of each rank; or why there is none."""
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root)
        (directory / "logs").mkdir()
        arguments = (worker, json.dumps(given))
        try:
            codes = run_ranks(directory, num_ranks=num_processes, worker=WORKER, arguments=arguments, limit_s=limit_s)
        except subprocess.TimeoutExpired:
            codes = [EXIT_FAILED]
        logs = read_logs(directory)
        files = sorted(directory.glob(f"*{RESULT}"))
        if len(files) == num_processes:
            return [StepCost(*json.loads(file.read_text())) for file in files]
        print(logs[-6000:], file=sys.stderr, flush=True)
        if OUT_OF_MEMORY in logs:
            return "out of memory"
        return f"no result within {limit_s:.0f} s" if codes == [EXIT_FAILED] else "failed"


def run_steps(options: argparse.Namespace) -> int:
    is_memory = options.what == "memory"
    head = (
        "| tokens | ranks | GiB of a rank |"
        if is_memory
        else "| tokens | ranks | attention | GiB | kernels, ms | attention, ms |"
    )
    print(head, flush=True)
    print("|" + "---:|" * (head.count("|") - 1), flush=True)
    has_failed = False
    for tokens in options.tokens:
        for num_ranks in options.ranks:
            began_s = time.perf_counter()
            for kernel in [""] if is_memory or num_ranks == 1 else options.kernels:
                if is_memory:
                    given: tuple[object, ...] = (tokens, num_ranks, options.overrides)
                    found = measure("measure_rank", num_ranks, options.limit, *given)
                else:
                    given = (tokens, num_ranks, kernel or TE, options.overrides)
                    found = measure("profile_alone", 1, options.limit, *given)
                cells = [f"{tokens:,}", str(num_ranks)] + ([] if is_memory else [kernel or "SDPA"])
                if isinstance(found, str):
                    has_failed = has_failed or found != "out of memory"
                    cells += [found] + [""] * (0 if is_memory else 2)
                else:
                    cells.append(f"{max(cost.memory_bytes for cost in found) / 2**30:.1f}")
                    if not is_memory:
                        cells += [f"{found[0].kernel_ms:,.0f}", f"{found[0].attention_ms:,.0f}"]
                        print(f"longest: {found[0].longest}", file=sys.stderr, flush=True)
                print(f"| {' | '.join(cells)} |", flush=True)
            print(f"{tokens} tokens, {num_ranks} ranks: {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    return EXIT_FAILED if has_failed else 0


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.context", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("attention", "kernels", "memory"), help="what to measure")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072], metavar="N", help="sequence lengths")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="ranks of a sequence")
    parser.add_argument("--kernels", nargs="+", default=[TE, FLEX], choices=(TE, FLEX), help="kernels of attention")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="for one row")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_args(arguments)
    try:
        for tokens in options.tokens:
            for num_ranks in options.ranks:
                build_config(tokens, num_ranks, options.overrides)
    except ConfigError as error:
        print(f"context: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if not torch.cuda.is_available():
        print("context: needs a GPU", file=sys.stderr)
        return EXIT_BAD_CONFIG
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    return run_attention(options) if options.what == "attention" else run_steps(options)


if __name__ == "__main__":
    sys.exit(main())
