"""What the sentinel costs: a step with it against the same step without, in turns in one run.

    python -m tests.bench.sentinel                          a small model, also without a GPU
    python -m tests.bench.sentinel +experiment=1b_bf16      1.26B parameters, 4k x 8 tokens

*On* is the loop's own step: signals, probes every `sentinel.probe_every` steps, the all-reduce, the gate, the update
it can reject, the report to the host, and there reading it, detectors, policy and the checkpoint manager. *Off* is the
least that trains the same model on the same data: forward, backward, the norm of the gradient by the same kernel, and
the same AdamW with clipping folded in; nothing is read back, and the host stays at most `sentinel.lag` steps ahead, as
it does in the loop. Both go on with the same weights. Blocks of steps alternate, and so does which of the two comes
first; a block is timed after a step of run-up until the device is idle and all reports are judged. *Costs* is the
median over rounds of on / off - 1, with its range. *Judging* is the host's time for one report, the wait for it not
included; on a GPU the device computes the next step meanwhile.
Left out: snapshots (`tests.bench.checkpoint`), the log and MLflow, which are not the sentinel's; sums of the loss by
row, which the model gives either way; what more ranks add, which is the norm of each gradient before its reduction and
a longer report (`tests.bench.host`); fp16, where a plain trainer would need a loss scaler of its own.
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
from harness.step import finish_step, forward_backward, mask_of
from harness.telemetry.meters import Meter, memory_bytes
from tests.bench.clock import SETTLING_STEPS, WARMUP_STEPS, Block, in_turns, led, nothing

SMALL = ("model=tiny", "data=synthetic", "train.batch_size=8", "train.sequence_length=128", "parallel.device=auto")


@dataclass(slots=True)
class Watched:
    """Steps as the loop makes them."""

    cfg: Config
    parts: Parts
    state: RunState
    root: Path
    meter: Meter
    judging_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def run(self, num_steps: int, begin: Callable[[], None] = nothing) -> None:
        self.meter.resume(time.perf_counter())
        for _ in led(num_steps, begin):
            self.step()
        self.hear(everything=True)

    def step(self) -> None:
        cfg, parts, state = self.cfg, self.parts, self.state
        begun_s = time.perf_counter() - parts.comm_stats.waited_s
        batch = parts.batches[state.cursor]
        probe = state.iteration % cfg.sentinel.probe_every == 0
        forward_backward(parts, batch, cfg=cfg, probe=probe)
        parts.signals.add_requests(stop=False, save=parts.checkpoints.is_due_by_clock(), command=False)
        busy_s = time.perf_counter() - parts.comm_stats.waited_s - begun_s
        parts.signals.add_host_facts(decision=parts.sentinel.digest, busy_s=busy_s)
        report = finish_step(parts, cfg=cfg, probe=probe)
        parts.mailbox.post(self.facts(batch, probe=probe), report)
        self.hear()

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
        )

    def hear(self, *, everything: bool = False) -> None:
        for facts, values in self.parts.mailbox.read(everything=everything):
            begun_s = time.perf_counter()
            self.judge(facts, values)
            self.judging_s.append(time.perf_counter() - begun_s)

    def judge(self, facts: HostFacts, values: torch.Tensor) -> None:
        parts, state = self.parts, self.state
        read = unpack_report(
            parts.signals.layout,
            facts,
            values,
            dim=self.cfg.model.dim,
            dynamic_scale=False,
            clip_norm=self.cfg.optim.clip_norm,
            replicate=parts.world.replicate,
        )
        rates = self.meter.tick(facts.posted_s)
        record = replace(read, step_time_s=rates.step_time_s, tokens_per_s=rates.tokens_per_s)
        self.losses.append(record.loss)
        state.correct_step(refused=record.refused)
        _, action = parts.sentinel.process_record(record)
        doubtful_since = parts.sentinel.policy.doubtful_since
        parts.checkpoints.on_step_record(record, state, doubtful_since=doubtful_since, remembered=parts.sentinel.memory)
        self.act(action)

    def act(self, action: Action | None) -> None:
        """To watch costs next to nothing; anything else would make the two sides differ."""
        while action is not None:
            if action.kind is not ActionKind.watch:
                sys.exit(f"iteration {action.iteration}, {action.kind}: {action.reason}; there is nothing to compare")
            action = self.parts.sentinel.on_outcome(recover(action, self.parts, self.state, root=self.root))


@dataclass(slots=True)
class Plain:
    """Steps as any trainer makes them."""

    cfg: Config
    parts: Parts
    state: RunState
    """Shared with the other side: whose turn it is takes the next batch, at the learning rate the other has reached."""
    rates: list[float]
    _ahead: deque[torch.cuda.Event] = field(default_factory=deque)

    def run(self, num_steps: int, begin: Callable[[], None] = nothing) -> None:
        for _ in led(num_steps, begin):
            self.step()
        self._ahead.clear()

    def step(self) -> None:
        cfg, parts = self.cfg, self.parts
        batch = parts.batches[self.state.cursor]
        self.state.cursor += 1
        seed = 1 / (cfg.train.batch_size * cfg.train.sequence_length)
        for rows in batch.micro_batches(cfg.train.micro_batch_size or len(batch.inputs)):
            with parts.fp8_layers.probing(False):
                parts.model(rows.inputs, rows.targets, seed=seed, mask=mask_of(rows)).objective.backward()
        parts.fp8_layers.update_scale_history(torch.zeros((), device=parts.world.device))
        self.update()
        if parts.world.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._ahead.append(event)
            if len(self._ahead) > cfg.sentinel.lag:
                self._ahead.popleft().synchronize()

    def update(self) -> None:
        """AdamW without a gate: only the norm decides what the gradient is divided by."""
        update, clip_norm, device = self.parts.update, self.cfg.optim.clip_norm, self.parts.world.device
        divisor = torch.ones((), device=device)
        if clip_norm is not None:
            square_sums_of = square_sums_in_one_launch if update.own_kernel else square_sums
            squares = square_sums_of([p.grad for p in update.parameters.values() if p.grad is not None])
            divisor = (squares.sum().sqrt() / clip_norm).clamp(min=1.0)
        rate = self.rates[min(self.state.step, len(self.rates) - 1)]
        for group, options in zip(update.groups, update.adamw.param_groups, strict=True):
            options["lr"].fill_(rate * group.lr_multiplier)
        update.step_optimizer(skip_mask=torch.zeros((), device=device), divisor=divisor)
        update.adamw.zero_grad(set_to_none=True)


class Round(NamedTuple):
    on: Block
    off: Block

    @property
    def cost(self) -> float:
        return self.on.step_s / self.off.step_s - 1


def sides(cfg: Config, parts: Parts, root: RunDir) -> tuple[Watched, Plain]:
    """Both ways to train the same model."""
    state = RunState()
    rates = [cfg.optim.lr * each for each in schedule_table(cfg.optim, num_steps=cfg.train.num_steps)]
    return Watched(cfg, parts, state, root.checkpoints, build_meter(cfg, parts.world)), Plain(cfg, parts, state, rates)


def measure(watched: Watched, plain: Plain, *, rounds: int, num_steps: int) -> list[Round]:
    """Warm up and take turns."""
    for side in (watched.run, plain.run):
        side(WARMUP_STEPS - SETTLING_STEPS)
    watched.judging_s.clear()
    taken = in_turns((watched.run, plain.run), rounds=rounds, num_steps=num_steps, device=watched.parts.world.device)
    return [Round(on, off) for on, off in taken]


def row(name: str, measured: list[Round], judging_s: list[float]) -> str:
    """Medians, with the range of the cost."""
    on_s = statistics.median(each.on.step_s for each in measured)
    off_s = statistics.median(each.off.step_s for each in measured)
    costs = sorted(each.cost for each in measured)
    slowest_s = sorted(judging_s)[int(0.99 * (len(judging_s) - 1))]
    return (
        f"| {name} | {off_s * 1e3:.2f} | {on_s * 1e3:.2f} | {statistics.median(costs):+.2%} ({costs[0]:+.2%} to "
        f"{costs[-1]:+.2%}) | {statistics.median(judging_s) * 1e6:.0f} / {slowest_s * 1e6:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step with the sentinel and without.")
    parser.add_argument("overrides", nargs="*", default=list(SMALL), help="Hydra overrides")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    options = parser.parse_args()
    cfg = load([*options.overrides, "checkpoint.every_steps=0", "checkpoint.ring.slots=0"])
    if cfg.precision.kind is PrecisionKind.fp16:
        sys.exit("precision=fp16 needs a loss scaler on the other side: choose fp32 or bf16")
    if options.steps % cfg.sentinel.probe_every:
        sys.exit(f"--steps must be a multiple of sentinel.probe_every={cfg.sentinel.probe_every}: equal blocks")
    with fast_attention(), tempfile.TemporaryDirectory() as directory:
        world = connect(cfg.parallel)
        root = RunDir(Path(directory))
        with closing(build(cfg, world, root)) as parts:
            watched, plain = sides(cfg, parts, root)
            measured = measure(watched, plain, rounds=options.rounds, num_steps=options.steps)
        disconnect()
    print(f"{options.rounds} rounds of {options.steps} steps each, a probe every {cfg.sentinel.probe_every}\n")
    print("| | off, ms | on, ms | costs (range) | judging on the host, us (median / p99) |")
    print("|---|---:|---:|---:|---:|")
    size = f"{num_parameters(cfg.model) / 1e6:.1f}M, {cfg.train.batch_size} x {cfg.train.sequence_length} tokens"
    print(row(f"{cfg.model.name}, {size}, {cfg.precision.kind}", measured, watched.judging_s))


if __name__ == "__main__":
    main()
