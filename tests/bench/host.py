"""Host time for the report of one step: unpack it, summarise the ranks, run detectors and policy.

    python -m tests.bench.host                     world sizes from 1 to 16,384, a few seconds
    python -m tests.bench.host --steps 2000        more steps

Reports are like those of a run, with noise in every slot and a probe every tenth step; in one step of a hundred a rank
has a bad gradient and the update is refused. Columns: size of a report (kB); `unpack`, with its summary of the ranks;
detectors and policy; and the sum of both (us, median and 99th percentile). This happens once per step on every
rank, while the device computes the next step.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
from torch import Tensor

from harness.config.compose import load
from harness.core.events import StepRecord
from harness.sentinel.device.gate import GateDecision
from harness.sentinel.device.signals import SignalLayout
from harness.sentinel.device.slots import SLOTS
from harness.sentinel.device.step_report import HostFacts, pack_report, totals, unpack_report
from harness.sentinel.sentinel import Sentinel

WORLD_SIZES = (1, 8, 64, 1024, 4096, 16384)
REPLICATE = 8
NUM_LAYERS = 32
TOKENS = 2.0**22
PROBE_EVERY, BAD_EVERY = 10, 100
NUM_WARMUP = 20


def build_layout(num_ranks: int) -> SignalLayout:
    blocks = tuple(f"blocks.{layer}" for layer in range(NUM_LAYERS))
    return SignalLayout(
        groups=("embedding", *blocks, "norm", "head"), layers=blocks[::4], sources=("web", "code"), num_ranks=num_ranks
    )


def build_report(layout: SignalLayout, number: int, generator: torch.Generator) -> Tensor:
    """Build the report that the device would send for one step."""

    def noise(*size: int) -> Tensor:
        return 1 + 0.05 * torch.randn(*size, generator=generator)

    reduced = torch.zeros(layout.size)
    loss = 2.0 + 4.0 / math.sqrt(number + 1)
    layout.scalar(reduced, "loss").fill_(loss * TOKENS).mul_(noise(1)[0] * 0.1 + 0.9)
    layout.scalar(reduced, "tokens").fill_(TOKENS)
    for name in ("group_squares", "group_params", "group_moments", "layer_squares"):
        part = layout.part(reduced, name)
        part.copy_(noise(len(part)) / len(part))
    slots = layout.slots(reduced)
    for name, level in (("loss", loss), ("grad_square", 0.01), ("busy_s", 0.4)):
        slots[SLOTS.index(name)] = level * noise(layout.num_ranks)
    slots[SLOTS.index("decision")] = 12345.0
    replicate = REPLICATE if layout.num_ranks % REPLICATE == 0 else 1
    slots[SLOTS.index("weights_low")] = torch.arange(layout.num_ranks // replicate).repeat(replicate).float()
    is_bad = number % BAD_EVERY == BAD_EVERY - 1
    if is_bad:
        slots[SLOTS.index("grad_square"), number % layout.num_ranks] = math.nan
        layout.group_squares(reduced)[3] = math.nan
    refuse = torch.tensor(float(is_bad))
    decision = GateDecision(skip_mask=refuse, overflow=refuse, bounds=torch.tensor([9.0, 30.0]))
    scale = torch.ones(())
    total = totals(layout, reduced, scale=scale, expected_tokens=int(TOKENS))
    step = torch.tensor(number - number // BAD_EVERY)
    return pack_report(reduced, total, decision=decision, lr=torch.tensor(3e-4), step=step, scale=scale)


def measure(num_ranks: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step for unpacking, and for detectors and policy."""
    layout = build_layout(num_ranks)
    sentinel = Sentinel.start(load([]).sentinel)
    generator = torch.Generator().manual_seed(0)
    unpack_s, decide_s = [], []
    for number in range(num_steps + NUM_WARMUP):
        report = build_report(layout, number, generator)
        facts = HostFacts(
            iteration=number + 1,
            cursor=number,
            tokens=0,
            probed=number % PROBE_EVERY == 0,
            posted_s=0.0,
            memory_bytes=0,
            batch={"fingerprint": str(number)},
        )
        start_s = time.perf_counter()
        record = unpack(layout, facts, report)
        unpacked_s = time.perf_counter()
        sentinel.process_record(record)
        unpack_s.append(unpacked_s - start_s)
        decide_s.append(time.perf_counter() - unpacked_s)
    return unpack_s[NUM_WARMUP:], decide_s[NUM_WARMUP:]


def unpack(layout: SignalLayout, facts: HostFacts, report: Tensor) -> StepRecord:
    replicate = REPLICATE if layout.num_ranks % REPLICATE == 0 else 1
    return unpack_report(layout, facts, report, dim=4096, dynamic_scale=False, clip_norm=1.0, replicate=replicate)


def microseconds(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1e6:.0f} / {ordered[int(0.99 * (len(ordered) - 1))] * 1e6:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each world size")
    num_steps = parser.parse_args().steps
    print("| ranks | report, kB | unpack, us (median / p99) | detectors and policy, us | together, us |")
    print("|---:|---:|---:|---:|---:|")
    for num_ranks in WORLD_SIZES:
        unpack_s, decide_s = measure(num_ranks, num_steps)
        total = [sum(each) for each in zip(unpack_s, decide_s, strict=True)]
        size_kb = build_layout(num_ranks).size * 4 / 1000
        columns = [microseconds(each) for each in (unpack_s, decide_s, total)]
        print(f"| {num_ranks} | {size_kb:.1f} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
