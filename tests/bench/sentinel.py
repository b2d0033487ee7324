"""Cost of the sentinel: a step with it compared with the same step without it, alternating in one run.

    python -m tests.bench.sentinel                          a small model, also without a GPU
    python -m tests.bench.sentinel +experiment=1b_bf16      1.26B parameters, 4k x 8 tokens

*On* is the step of the training loop: signals, probes every `sentinel.probe_every` steps, the all-reduce, the gate, the
update that it can reject, and the report to the host, which is unpacked and passed to detectors, policy and checkpoint
manager. *Off* is the minimum that trains the same model on the same data: forward, backward, the gradient norm by the
same kernel, and the same AdamW with fused clipping. It reads nothing back, and the host stays at most `sentinel.lag`
steps ahead, as in the loop. Both update the same weights. Blocks of steps alternate, and so does which of the two is
first. A block is timed after a run-up step, until the device is idle and all reports are processed. *Costs* is the
median over rounds of on / off - 1, with its range. *Report processing* is the host time for one report, without the
wait for it; on a GPU the device computes the next step at the same time.
Left out: snapshots (`tests.bench.checkpoint`), log and MLflow, which are not part of the sentinel; loss sums by row,
which the model computes in both cases; the cost of more ranks, which is the norm of each gradient before its reduction
(`tests.bench.gpu.scatter_cost`) and a longer report (`tests.bench.host`); fp16, for which the plain side would need a
loss scaler.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from harness.build import Parts, build, build_meter
from harness.config.compose import load
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.core.events import Action, ActionKind
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.data.batch import Batch
from harness.data.batch_facts import facts_to_record
from harness.distributed.world import connect, disconnect
from harness.model.size import num_parameters
from harness.optim.schedule import schedule_table
from harness.precision.attention import fast_attention
from harness.recovery import recover
from harness.sentinel.device.local_sums import square_sums, square_sums_in_one_launch
from harness.sentinel.device.step_report import HostFacts, unpack_report
from harness.step import finish_step, forward_backward
from harness.telemetry.meters import Meter, memory_bytes
from tests.bench.clock import SETTLING_STEPS, WARMUP_STEPS, Block, alternate, do_nothing, iterate_steps

SMALL = ("model=tiny", "data=synthetic", "train.batch_size=8", "train.sequence_length=128", "parallel.device=auto")


@dataclass(slots=True)
class SentinelSteps:
    """The steps of the training loop, with the sentinel."""

    cfg: Config
    parts: Parts
    state: RunState
    root: Path
    meter: Meter
    recompute: int | None = None
    """Whose rows every step computes again; None: nobody's."""
    report_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def run(self, num_steps: int, begin: Callable[[], None] = do_nothing) -> None:
        self.meter.resume(time.perf_counter())
        for _ in iterate_steps(num_steps, begin):
            self.step()
        self.read_reports(everything=True)

    def step(self) -> None:
        cfg, parts, state = self.cfg, self.parts, self.state
        start_s = time.perf_counter() - parts.comm_stats.waited_s
        batch = parts.batches[state.cursor]
        probe = state.iteration % cfg.sentinel.probe_every == 0
        forward_backward(parts, batch, cfg=cfg, probe=probe, recompute=self.recompute)
        parts.signals.add_requests(stop=False, save=parts.checkpoints.is_due_by_clock(), command=False)
        busy_s = time.perf_counter() - parts.comm_stats.waited_s - start_s
        parts.signals.add_host_facts(decision=parts.sentinel.digest, busy_s=busy_s)
        report = finish_step(parts, cfg=cfg, probe=probe)
        parts.mailbox.post(self.facts(batch, probe=probe), report)
        self.read_reports()

    def facts(self, batch: Batch, *, probe: bool) -> HostFacts:
        cursor = self.state.cursor
        self.state.advance(next_cursor=cursor + 1, tokens=self.cfg.train.batch_size * self.cfg.train.sequence_length)
        return HostFacts(
            iteration=self.state.iteration,
            cursor=cursor,
            tokens=self.state.tokens,
            probed=probe,
            posted_s=time.perf_counter(),
            memory_bytes=memory_bytes(self.parts.world.device),
            batch=facts_to_record(batch.facts, self.parts.batches.source_names),
            in_fp8=self.parts.fp8_layers.in_fp8,
            recomputed=self.recompute,
        )

    def read_reports(self, *, everything: bool = False) -> None:
        for facts, values in self.parts.mailbox.read(everything=everything):
            start_s = time.perf_counter()
            self.process_report(facts, values)
            self.report_s.append(time.perf_counter() - start_s)

    def process_report(self, facts: HostFacts, values: torch.Tensor) -> None:
        parts, state = self.parts, self.state
        unpacked = unpack_report(
            parts.signals.layout,
            facts,
            values,
            dim=self.cfg.model.dim,
            dynamic_scale=False,
            clip_norm=self.cfg.optim.clip_norm,
            replicate=parts.world.replicate,
        )
        rates = self.meter.tick(facts.posted_s)
        record = replace(unpacked, step_time_s=rates.step_time_s, tokens_per_s=rates.tokens_per_s)
        self.losses.append(record.loss)
        state.correct_step(refused=record.refused)
        _, action = parts.sentinel.process_record(record)
        doubtful_since = parts.sentinel.policy.doubtful_since
        parts.checkpoints.on_step_record(record, state, doubtful_since=doubtful_since, remembered=parts.sentinel.memory)
        self.carry_out(action)
        parts.checkpoints.write_queued()

    def carry_out(self, action: Action | None) -> None:
        """Carry out `watch` actions, which are cheap; exit on any other, which would make the two sides differ."""
        while action is not None:
            if action.kind is not ActionKind.watch:
                sys.exit(
                    f"iteration {action.iteration}, {action.kind}: {action.reason}; the two sides cannot be compared"
                )
            action = self.parts.sentinel.on_outcome(recover(action, self.parts, self.state, root=self.root))


@dataclass(slots=True)
class PlainSteps:
    """Plain training steps, without the sentinel."""

    cfg: Config
    parts: Parts
    state: RunState
    """Shared with the other side: each step takes the next batch, at the learning rate of `state.step`."""
    rates: list[float]
    _ahead: deque[torch.cuda.Event] = field(default_factory=deque)

    def run(self, num_steps: int, begin: Callable[[], None] = do_nothing) -> None:
        for _ in iterate_steps(num_steps, begin):
            self.step()
        self._ahead.clear()

    def step(self) -> None:
        cfg, parts = self.cfg, self.parts
        batch = parts.batches[self.state.cursor]
        self.state.cursor += 1
        seed = 1 / (cfg.train.batch_size * cfg.train.sequence_length)
        for rows in batch.micro_batches(cfg.train.micro_batch_size or len(batch.inputs)):
            with parts.fp8_layers.probing(False), parts.emulation:
                parts.model(
                    rows.inputs, rows.targets, seed=seed, mask=parts.model.mask_documents(rows.documents)
                ).objective.backward()
        parts.fp8_layers.update_scale_history(torch.zeros((), device=parts.world.device))
        self.update()
        if parts.world.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._ahead.append(event)
            if len(self._ahead) > cfg.sentinel.lag:
                self._ahead.popleft().synchronize()

    def update(self) -> None:
        """The optimizer without a gate; the gradient is divided by norm / clip_norm if that is above 1."""
        update, clip_norm, device = self.parts.update, self.cfg.optim.clip_norm, self.parts.world.device
        divisor = torch.ones((), device=device)
        if clip_norm is not None:
            square_sums_of = square_sums_in_one_launch if update.own_kernel else square_sums
            squares = square_sums_of([p.grad for p in update.parameters.values() if p.grad is not None])
            divisor = (squares.sum().sqrt() / clip_norm).clamp(min=1.0)
        rate = self.rates[min(self.state.step, len(self.rates) - 1)]
        update.set_rates(torch.full((), rate, device=device))
        update.step_optimizer(skip_mask=torch.zeros((), device=device), divisor=divisor)
        update.clear_gradients()


class Round(NamedTuple):
    on: Block
    off: Block

    @property
    def cost(self) -> float:
        return self.on.step_s / self.off.step_s - 1


def build_sides(cfg: Config, parts: Parts, root: RunDir) -> tuple[SentinelSteps, PlainSteps]:
    """Build both sides over the same model."""
    state = RunState()
    rates = (cfg.optim.lr * schedule_table(cfg.optim, num_steps=cfg.train.num_steps)).tolist()
    with_sentinel = SentinelSteps(cfg, parts, state, root.checkpoints, build_meter(cfg, parts.world))
    return with_sentinel, PlainSteps(cfg, parts, state, rates)


def measure(with_sentinel: SentinelSteps, without_sentinel: PlainSteps, *, rounds: int, num_steps: int) -> list[Round]:
    """Warm up both sides and time them in alternation."""
    for side in (with_sentinel.run, without_sentinel.run):
        side(WARMUP_STEPS - SETTLING_STEPS)
    with_sentinel.report_s.clear()
    blocks = alternate(
        (with_sentinel.run, without_sentinel.run),
        rounds=rounds,
        num_steps=num_steps,
        device=with_sentinel.parts.world.device,
    )
    return [Round(on, off) for on, off in blocks]


def render_row(name: str, measured: list[Round], report_s: list[float]) -> str:
    """Medians, with the range of the cost."""
    on_s = statistics.median(each.on.step_s for each in measured)
    off_s = statistics.median(each.off.step_s for each in measured)
    costs = sorted(each.cost for each in measured)
    slowest_s = sorted(report_s)[int(0.99 * (len(report_s) - 1))]
    return (
        f"| {name} | {off_s * 1e3:.2f} | {on_s * 1e3:.2f} | {statistics.median(costs):+.2%} ({costs[0]:+.2%} to "
        f"{costs[-1]:+.2%}) | {statistics.median(report_s) * 1e6:.0f} / {slowest_s * 1e6:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step with the sentinel and without.")
    parser.add_argument("overrides", nargs="*", default=list(SMALL), help="Hydra overrides")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    options = parser.parse_args()
    cfg = load([*options.overrides, "checkpoint.every_steps=0", "checkpoint.ring.slots=0"])
    if cfg.precision.kind is PrecisionKind.fp16:
        sys.exit("precision=fp16 would need a loss scaler on the plain side: choose fp32 or bf16")
    if options.steps % cfg.sentinel.probe_every:
        sys.exit(f"--steps must be a multiple of sentinel.probe_every={cfg.sentinel.probe_every}, for equal blocks")
    with fast_attention(), tempfile.TemporaryDirectory() as directory:
        world = connect(cfg.parallel)
        root = RunDir(Path(directory))
        with closing(build(cfg, world, root)) as parts:
            with_sentinel, without_sentinel = build_sides(cfg, parts, root)
            measured = measure(with_sentinel, without_sentinel, rounds=options.rounds, num_steps=options.steps)
        disconnect()
    print(f"{options.rounds} rounds of {options.steps} steps each, a probe every {cfg.sentinel.probe_every}\n")
    print("| | off, ms | on, ms | costs (range) | report processing on the host, us (median / p99) |")
    print("|---|---:|---:|---:|---:|")
    size = f"{num_parameters(cfg.model) / 1e6:.1f}M, {cfg.train.batch_size} x {cfg.train.sequence_length} tokens"
    print(render_row(f"{cfg.model.name}, {size}, {cfg.precision.kind}", measured, with_sentinel.report_s))


if __name__ == "__main__":
    main()
