"""The plan compared with a GPU: memory by phase of a step, and step time, of several configurations.

    python -m tests.bench.plan                 all configurations on one GPU of 140 GB: about 15 minutes
    python -m tests.bench.plan --only fp8      configurations whose name starts with fp8
    python -m tests.bench.plan --tensors       also list live tensors by size, after forward and at the peak

Configurations are built and stepped one after the other, in one process with one rank. For one step, the peak of
allocated memory is measured in forward, backward and update; for another step, with a probe. The CUDA context is not
part of torch's count and is printed separately. fp8 needs Transformer Engine; without it these rows are skipped.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from harness.analysis.plan.memory import memory
from harness.analysis.plan.plan import plan
from harness.build import Parts, build
from harness.config.compose import load
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.distributed.world import connect, disconnect
from harness.precision.attention import fast_attention
from harness.step import finish_step, forward_backward
from tests.bench.step import run_step

BASE = ["+experiment=1b_bf16", "cluster=h200", "checkpoint.ring.slots=0", "train.num_steps=20"]
CONFIGS = {
    "125m": ["model=125m", "train.batch_size=32"],
    "1b": [],
    "1b selective": ["parallel.activation_checkpointing=selective"],
    "1b full": ["parallel.activation_checkpointing=full"],
    "1b not compiled": ["parallel.compile=false"],
    "1b not compiled selective": ["parallel.compile=false", "parallel.activation_checkpointing=selective"],
    "1b not compiled full": ["parallel.compile=false", "parallel.activation_checkpointing=full"],
    "1b resharded": ["parallel.reshard_after_forward=true"],
    "1b micro-batches": ["train.micro_batch_size=2"],
    "1b documents apart": ["data.document_mask=true", "train.batch_size=4"],
    "1b wide vocabulary": ["model.vocab_size=128256", "parallel.activation_checkpointing=full"],
    "3b selective": ["model=3b", "train.batch_size=4", "parallel.activation_checkpointing=selective"],
    "3b full": ["model=3b", "parallel.activation_checkpointing=full"],
    "fp8 1b": ["precision=fp8"],
    "fp8 1b block": ["precision=fp8", "precision.fp8.recipe=block"],
    "fp8 1b two blocks kept": [
        "precision=fp8",
        "precision.fp8.keep_first_blocks=1",
        "precision.fp8.keep_last_blocks=1",
    ],
    "fp8 1b selective": ["precision=fp8", "parallel.activation_checkpointing=selective"],
    "fp8 1b full": ["precision=fp8", "parallel.activation_checkpointing=full"],
    "fp8 1b not compiled": ["precision=fp8", "parallel.compile=false"],
    "fp8 3b": ["precision=fp8", "model=3b", "train.batch_size=4"],
    "fp8 3b full": ["precision=fp8", "model=3b", "parallel.activation_checkpointing=full"],
}
WARM_UP_STEPS, TIMED_STEPS = 3, 3
NUM_SIZES = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Bytes allocated by torch."""

    state: int
    """Between steps."""
    kept: int
    """After the last forward pass of the step."""
    forward_peak: int
    backward_peak: int
    update_peak: int
    peak: int
    """Peak of the step."""
    peak_ever: int
    """Peak including the first steps, which compile."""


def measure_probed_peak(parts: Parts, cfg: Config, index: int) -> int:
    """Peak memory of a step with a probe."""
    torch.cuda.reset_peak_memory_stats()
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=True)
    finish_step(parts, cfg=cfg, probe=True)
    return torch.cuda.max_memory_allocated()


def measure_phases(parts: Parts, cfg: Config, index: int, *, sizes: list[str]) -> Phases:
    """Measure one step phase by phase."""
    ever, state = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    seed = parts.loss_scale.value / (cfg.train.batch_size * cfg.train.sequence_length)
    batch = parts.batches[index]
    forward_peaks, backward_peaks, kept = [], [], 0
    for rows in batch.micro_batches(cfg.train.micro_batch_size or len(batch.inputs)):
        torch.cuda.reset_peak_memory_stats()
        output = parts.model(
            rows.inputs, rows.targets, seed=seed, probe=False, mask=parts.model.mask_documents(rows.documents)
        )
        kept = torch.cuda.memory_allocated()
        forward_peaks.append(torch.cuda.max_memory_allocated())
        sizes[:] = render_sizes(Counter(size for _, size in live_allocations()))
        torch.cuda.reset_peak_memory_stats()
        output.objective.backward()
        backward_peaks.append(torch.cuda.max_memory_allocated())
        parts.signals.add_forward(
            row_losses=output.row_losses,
            row_tokens=output.row_tokens,
            sources=rows.sources,
            z_loss=output.z_sum,
            layers=None,
            token_losses=None,
        )
        del output
    torch.cuda.reset_peak_memory_stats()
    finish_step(parts, cfg=cfg, probe=True)
    update_peak = torch.cuda.max_memory_allocated()
    forward_peak, backward_peak = max(forward_peaks), max(backward_peaks)
    peak = max(forward_peak, backward_peak, update_peak)
    return Phases(
        state=state,
        kept=kept,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        update_peak=update_peak,
        peak=peak,
        peak_ever=max(ever, peak),
    )


def render_sizes(sizes: Counter[int]) -> list[str]:
    largest = sorted(sizes.items(), key=lambda item: -item[0] * item[1])[:NUM_SIZES]
    return [f"{count} x {size / 1e6:.1f} MB" for size, count in largest]


def sizes_at_peak(parts: Parts, cfg: Config, index: int) -> list[str]:
    """Sizes of the live allocations at the memory peak of one step, from torch's allocation history."""
    live = dict(live_allocations())
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    run_step(parts, cfg, index)
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    total = sum(live.values())
    peak, at_peak = total, dict(live)
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_requested":
            total -= live.pop(event["addr"], 0)
        if total > peak:
            peak, at_peak = total, dict(live)
    return [f"{peak / 1e9:.2f} GB in all", *render_sizes(Counter(at_peak.values()))]


def live_allocations() -> Iterator[tuple[int, int]]:
    """Address and bytes of each live allocation."""
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield address, block["requested_size"]
            address += block["size"]


def measure(name: str, overrides: list[str], *, run: RunDir, tensors: bool) -> None:
    """Build, run steps, and print planned and measured values."""
    torch._dynamo.reset()
    cfg = load([*BASE, *overrides])
    if cfg.precision.kind is PrecisionKind.fp8 and importlib.util.find_spec("transformer_engine") is None:
        print(f"{name}: Transformer Engine is not installed")
        return
    world = connect(cfg.parallel)
    parts = build(cfg, world, run)
    for index in range(WARM_UP_STEPS):
        run_step(parts, cfg, index)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for index in range(TIMED_STEPS):
        run_step(parts, cfg, WARM_UP_STEPS + index)
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - start_s) / TIMED_STEPS
    kept_sizes: list[str] = []
    measured = measure_phases(parts, cfg, WARM_UP_STEPS + TIMED_STEPS, sizes=kept_sizes)
    compare(name, cfg, measured, probed=measure_probed_peak(parts, cfg, WARM_UP_STEPS + TIMED_STEPS + 1), step_s=step_s)
    if tensors:
        at_peak = sizes_at_peak(parts, cfg, WARM_UP_STEPS + TIMED_STEPS + 2)
        print(f"  after forward: {', '.join(kept_sizes)}\n  at the peak: {', '.join(at_peak)}", flush=True)
    parts.close()
    disconnect()
    del parts
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def compare(name: str, cfg: Config, measured: Phases, *, probed: int, step_s: float) -> None:
    planned = memory(cfg, world_size=1)
    rows = {
        "state": (planned.state_bytes, measured.state),
        "kept after forward": (planned.kept_bytes, measured.kept),
        "peak in forward": (planned.forward_peak_bytes, measured.forward_peak),
        "peak in backward": (planned.backward_peak_bytes, measured.backward_peak),
        "peak in update": (planned.update_peak_bytes, measured.update_peak),
        "peak": (planned.peak_bytes, measured.peak),
        "peak where probed": (planned.peak_bytes, probed),
    }
    print(f"{name}")
    for part, (planned_bytes, measured_bytes) in rows.items():
        error = planned_bytes / measured_bytes - 1
        print(f"  {part:<20}{planned_bytes / 1e9:>9.2f} GB  {measured_bytes / 1e9:>9.2f} GB  {error:>+8.1%}")
    step_time_s = plan(cfg, world_size=1).step_time_s
    assert step_time_s is not None
    print(f"  {'step':<20}{1e3 * step_time_s:>9.1f} ms  {1e3 * step_s:>9.1f} ms  {step_time_s / step_s - 1:>+8.1%}")
    print(f"  ever {measured.peak_ever / 2**30:.1f} GiB; {json.dumps(asdict(measured))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the plan with a GPU.")
    parser.add_argument("--only", default="", metavar="NAME", help="only configurations whose name starts with NAME")
    parser.add_argument("--tensors", action="store_true", help="list live tensors by size")
    options = parser.parse_args()
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {total / 1e9:.1f} GB, {outside / 1e9:.2f} GB of it"
    )
    print(f"are the context's\n{'':<22}{'plan':>12}{'measured':>14}{'error':>10}")
    with fast_attention():
        for name, overrides in CONFIGS.items():
            if name.startswith(options.only):
                measure(name, overrides, run=RunDir(Path("runs/bench-plan")), tensors=options.tensors)


if __name__ == "__main__":
    main()
