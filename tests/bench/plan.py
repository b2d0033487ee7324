"""What the plan says and what a GPU says: memory by phase of a step, and its time, of several configurations.

    python -m tests.bench.plan                 all of them on one GPU of 140 GB: about a quarter of an hour
    python -m tests.bench.plan --only fp8      those whose name begins so
    python -m tests.bench.plan --tensors       also which tensors there were, by size, after forward and at the peak

Each configuration is built and stepped in turn, in one process and one rank. A step is taken apart: forward, backward,
update, each with the most that torch's allocator had handed out meanwhile; another one is probed. The CUDA context is
outside of torch's count and told by itself. What is in fp8 is left out where Transformer Engine is not installed.
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
from harness.step import finish_step, forward_backward, mask_of
from tests.bench.step import one_step

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
    """Bytes that torch's allocator had handed out."""

    state: int
    """Between steps."""
    kept: int
    """After the last forward pass of the step."""
    forward_peak: int
    backward_peak: int
    update_peak: int
    peak: int
    """Of a step."""
    peak_ever: int
    """With the first steps, which compile."""


def probed_peak(parts: Parts, cfg: Config, index: int) -> int:
    """Of a step in which everything is watched."""
    torch.cuda.reset_peak_memory_stats()
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=True)
    finish_step(parts, cfg=cfg, probe=True)
    return torch.cuda.max_memory_allocated()


def dissected(parts: Parts, cfg: Config, index: int, *, sizes: list[str]) -> Phases:
    """One step, phase by phase; it waits for the device in between and is not to be timed."""
    ever, state = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    seed = parts.loss_scale.value / (cfg.train.batch_size * cfg.train.sequence_length)
    batch = parts.batches[index]
    forward_peaks, backward_peaks, kept = [], [], 0
    for rows in batch.micro_batches(cfg.train.micro_batch_size or len(batch.inputs)):
        torch.cuda.reset_peak_memory_stats()
        output = parts.model(rows.inputs, rows.targets, seed=seed, probe=False, mask=mask_of(rows))
        kept = torch.cuda.memory_allocated()
        forward_peaks.append(torch.cuda.max_memory_allocated())
        sizes[:] = told(Counter(size for _, size in placed_sizes()))
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


def told(sizes: Counter[int]) -> list[str]:
    largest = sorted(sizes.items(), key=lambda item: -item[0] * item[1])[:NUM_SIZES]
    return [f"{count} x {size / 1e6:.1f} MB" for size, count in largest]


def sizes_at_peak(parts: Parts, cfg: Config, index: int) -> list[str]:
    """What was there when the most was there in one step: what there was before it, and what came and went since."""
    live = dict(placed_sizes())
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    one_step(parts, cfg, index)
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    total = sum(live.values())
    most, at_peak = total, dict(live)
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_requested":
            total -= live.pop(event["addr"], 0)
        if total > most:
            most, at_peak = total, dict(live)
    return [f"{most / 1e9:.2f} GB in all", *told(Counter(at_peak.values()))]


def placed_sizes() -> Iterator[tuple[int, int]]:
    """Where each tensor lies, and its bytes."""
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield address, block["requested_size"]
            address += block["size"]


def measure(name: str, words: list[str], *, run: RunDir, tensors: bool) -> None:
    """Build, step, and print what was foreseen beside what was seen."""
    torch._dynamo.reset()
    cfg = load([*BASE, *words])
    if cfg.precision.kind is PrecisionKind.fp8 and importlib.util.find_spec("transformer_engine") is None:
        print(f"{name}: Transformer Engine is not installed")
        return
    world = connect(cfg.parallel)
    parts = build(cfg, world, run)
    for index in range(WARM_UP_STEPS):
        one_step(parts, cfg, index)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for index in range(TIMED_STEPS):
        one_step(parts, cfg, WARM_UP_STEPS + index)
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - began_s) / TIMED_STEPS
    kept_sizes: list[str] = []
    seen = dissected(parts, cfg, WARM_UP_STEPS + TIMED_STEPS, sizes=kept_sizes)
    compare(name, cfg, seen, probed=probed_peak(parts, cfg, WARM_UP_STEPS + TIMED_STEPS + 1), step_s=step_s)
    if tensors:
        at_peak = sizes_at_peak(parts, cfg, WARM_UP_STEPS + TIMED_STEPS + 2)
        print(f"  after forward: {', '.join(kept_sizes)}\n  at the peak: {', '.join(at_peak)}", flush=True)
    parts.close()
    disconnect()
    del parts
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def compare(name: str, cfg: Config, seen: Phases, *, probed: int, step_s: float) -> None:
    foreseen = memory(cfg, world_size=1)
    rows = {
        "state": (foreseen.state_bytes, seen.state),
        "kept after forward": (foreseen.kept_bytes, seen.kept),
        "peak in forward": (foreseen.forward_peak_bytes, seen.forward_peak),
        "peak in backward": (foreseen.backward_peak_bytes, seen.backward_peak),
        "peak in update": (foreseen.update_peak_bytes, seen.update_peak),
        "peak": (foreseen.peak_bytes, seen.peak),
        "peak where probed": (foreseen.peak_bytes, probed),
    }
    print(f"{name}")
    for part, (said, was) in rows.items():
        print(f"  {part:<20}{said / 1e9:>9.2f} GB  {was / 1e9:>9.2f} GB  {said / was - 1:>+8.1%}")
    step_time_s = plan(cfg, world_size=1).step_time_s
    assert step_time_s is not None
    print(f"  {'step':<20}{1e3 * step_time_s:>9.1f} ms  {1e3 * step_s:>9.1f} ms  {step_time_s / step_s - 1:>+8.1%}")
    print(f"  ever {seen.peak_ever / 2**30:.1f} GiB; {json.dumps(asdict(seen))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold the plan against a GPU.")
    parser.add_argument("--only", default="", metavar="NAME", help="configurations whose name begins so")
    parser.add_argument("--tensors", action="store_true", help="which tensors there were, by size")
    options = parser.parse_args()
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {total / 1e9:.1f} GB, {outside / 1e9:.2f} GB of it"
    )
    print(f"are the context's\n{'':<22}{'plan':>12}{'measured':>14}{'error':>10}")
    with fast_attention():
        for name, words in CONFIGS.items():
            if name.startswith(options.only):
                measure(name, words, run=RunDir(Path("runs/bench-plan")), tensors=options.tensors)


if __name__ == "__main__":
    main()
