"""What the host does with one step's report: read it, summarise the ranks, suspect, decide.

    python -m tests.bench.host                     worlds of 1 to 16,384 ranks, a few seconds
    python -m tests.bench.host --steps 2000        more of them

Reports are as a run makes them, with noise in every slot and a probe every tenth step; one step in a hundred has a rank
with a bad gradient and is refused. Columns: what is read with each step (kB), `unpack` with its summary of the ranks,
detectors and policy, and both together (us, median and 99th percentile). It happens once a step on every rank, while
the device computes the next one.
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

WORLDS = (1, 8, 64, 1024, 4096, 16384)
REPLICATE = 8
NUM_LAYERS = 32
TOKENS = 2.0**22
PROBE_EVERY, BAD_EVERY = 10, 100
NUM_WARMUP = 20


def layout_of(num_ranks: int) -> SignalLayout:
    blocks = tuple(f"blocks.{layer}" for layer in range(NUM_LAYERS))
    return SignalLayout(
        groups=("embedding", *blocks, "norm", "head"), layers=blocks[::4], sources=("web", "code"), num_ranks=num_ranks
    )


def report_of(layout: SignalLayout, number: int, generator: torch.Generator) -> Tensor:
    """What the device would have said of one step."""

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
    slots[SLOTS.index("weight_digest")] = torch.arange(layout.num_ranks // replicate).repeat(replicate).float()
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
    """Seconds of each step: of unpacking, and of judging."""
    layout = layout_of(num_ranks)
    sentinel = Sentinel.start(load([]).sentinel)
    generator = torch.Generator().manual_seed(0)
    unpack_s, judge_s = [], []
    for number in range(num_steps + NUM_WARMUP):
        report = report_of(layout, number, generator)
        facts = HostFacts(
            iteration=number + 1,
            cursor=number,
            tokens=0,
            probed=number % PROBE_EVERY == 0,
            posted_s=0.0,
            memory_bytes=0,
            batch={"fingerprint": str(number)},
        )
        began_s = time.perf_counter()
        record = read(layout, facts, report)
        read_s = time.perf_counter()
        sentinel.process_record(record)
        unpack_s.append(read_s - began_s)
        judge_s.append(time.perf_counter() - read_s)
    return unpack_s[NUM_WARMUP:], judge_s[NUM_WARMUP:]


def read(layout: SignalLayout, facts: HostFacts, report: Tensor) -> StepRecord:
    replicate = REPLICATE if layout.num_ranks % REPLICATE == 0 else 1
    return unpack_report(layout, facts, report, dim=4096, dynamic_scale=False, clip_norm=1.0, replicate=replicate)


def microseconds(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1e6:.0f} / {ordered[int(0.99 * (len(ordered) - 1))] * 1e6:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each world")
    num_steps = parser.parse_args().steps
    print("| ranks | report, kB | unpack, us (median / p99) | detectors and policy, us | together, us |")
    print("|---:|---:|---:|---:|---:|")
    for num_ranks in WORLDS:
        unpack_s, judge_s = measure(num_ranks, num_steps)
        together = [sum(each) for each in zip(unpack_s, judge_s, strict=True)]
        size_kb = layout_of(num_ranks).size * 4 / 1000
        columns = [microseconds(each) for each in (unpack_s, judge_s, together)]
        print(f"| {num_ranks} | {size_kb:.1f} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
