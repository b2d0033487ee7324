"""Build a run, resume it, train it: the only code that knows everybody.

The loop reads from top to bottom as a step happens; nothing is hooked in from elsewhere. The device is not waited for:
what it computed in one step is read from the mailbox `sentinel.lag` steps later, on every rank alike.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch

from harness import compose, rundir
from harness.build import Parts, build, describe, meter
from harness.checkpoint import store
from harness.config import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, Config, ConfigError, check_world
from harness.data.batches import Batch
from harness.events import EvalRecord, RunEnded, RunStarted
from harness.parallel import all_reduce_sum, broadcast, connect, disconnect, rank_from_environment
from harness.precision import fast_attention
from harness.rundir import RunDir
from harness.sentinel.gate import refuse_nonfinite
from harness.sentinel.report import HostFacts, pack, totals, unpack
from harness.state import RunState
from harness.telemetry.manifest import write_manifest
from harness.telemetry.meters import memory_bytes
from harness.telemetry.narrator import Narrator
from harness.telemetry.sinks import last_iteration


@dataclass(slots=True)
class StopRequest:
    """Set by a signal, heard by all ranks through the next all-reduce."""

    received: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.received)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if signal.SIGINT in self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received.append(number)


def forward_backward(parts: Parts, batch: Batch, *, cfg: Config, probe: bool) -> None:
    """Gradients of the mean loss over the global batch, one micro-batch at a time."""
    seed = parts.scale.scale / (cfg.train.batch_size * cfg.train.sequence_length)
    for micro_batch in batch.micro_batches(cfg.train.micro_batch_size or len(batch.inputs)):
        output = parts.model(micro_batch.inputs, micro_batch.targets, seed=seed, probe=probe)
        output.objective.backward()
        parts.signals.add_forward(
            loss=output.loss_sum,
            z_loss=output.z_sum,
            tokens=output.num_tokens,
            layers=output.activation_square_sums,
        )


def judge_and_update(parts: Parts, *, cfg: Config, probe: bool) -> torch.Tensor:
    """Reduce the signals, refuse or apply the update, and report; all on the device."""
    parts.signals.add_gradients()
    if probe:
        parts.signals.add_state([moments["exp_avg_sq"] for moments in parts.update.state().values()])
    reduced = parts.signals.reduce()
    scale = parts.scale.scale.clone()
    expected = cfg.train.batch_size * cfg.train.sequence_length
    total = totals(parts.signals.layout, reduced, scale=scale, expected_tokens=expected)
    refuse = refuse_nonfinite(loss=total.loss, grad_norm=total.grad_norm)
    lr = parts.update.apply(refuse=refuse, grad_norm=total.grad_norm, divisor=total.divisor)
    parts.scale.update(refuse)
    return pack(reduced, total, refused=refuse, lr=lr, step=parts.update.step, scale=scale)


def hear(parts: Parts, state: RunState, narrator: Narrator, *, cfg: Config, everything: bool = False) -> bool:
    """Tell what the device reported and correct the host's count; true when some rank was asked to stop."""
    stop = False
    dynamic_scale = parts.scale.growth_interval is not None
    for facts, values in parts.mailbox.take(everything=everything):
        record = unpack(parts.signals.layout, facts, values, dim=cfg.model.dim, dynamic_scale=dynamic_scale)
        narrator.emit_step(record)
        if record.refused:
            state.take_back_refused()
        stop = stop or record.stop_requested
    return stop


def evaluate(parts: Parts, state: RunState, *, cfg: Config) -> EvalRecord:
    """Mean loss on the held-out batches, the same ones every time."""
    sums = torch.zeros(2, dtype=torch.float64, device=parts.world.device)
    with torch.no_grad():
        for index in range(min(cfg.eval.num_batches, len(parts.held_out))):
            batch = parts.held_out[index]
            for micro_batch in batch.micro_batches(cfg.train.micro_batch_size or len(batch.inputs)):
                output = parts.model(micro_batch.inputs, micro_batch.targets)
                sums += torch.stack([output.loss_sum, output.num_tokens])
    loss_sum, tokens = all_reduce_sum(sums).tolist()  # sync: an evaluation is rare and its end is waited for
    return EvalRecord(
        time=time.time(), iteration=state.iteration, step=state.step, loss=loss_sum / tokens, tokens=int(tokens)
    )


def due(every_steps: int, state: RunState, cfg: Config) -> bool:
    """Whether something that happens every so many steps, and after the last one, happens now."""
    return every_steps > 0 and (state.step % every_steps == 0 or state.step == cfg.train.num_steps)


def train(cfg: Config, parts: Parts, state: RunState, narrator: Narrator, run: RunDir, stop: StopRequest) -> int:
    """The loop. Returns the exit code: done, or interrupted and resumable."""
    batch_tokens = cfg.train.batch_size * cfg.train.sequence_length
    stopping = False
    while state.step < cfg.train.num_steps and not stopping:
        cursor = parts.ledger.next_index(state.cursor)
        batch = parts.batches[cursor]
        probe = state.iteration % cfg.sentinel.probe_every == 0
        forward_backward(parts, batch, cfg=cfg, probe=probe)
        if stop:
            parts.signals.add_stop_request()
        report = judge_and_update(parts, cfg=cfg, probe=probe)

        state.advance(next_cursor=cursor + 1, tokens=batch_tokens)
        facts = HostFacts(state.iteration, cursor, state.tokens, probe, memory_bytes(parts.world.device))
        parts.mailbox.post(facts, report)
        stopping = hear(parts, state, narrator, cfg=cfg)

        save = stopping or due(cfg.checkpoint.every_steps, state, cfg) or state.step == cfg.train.num_steps
        look = due(cfg.eval.every_steps, state, cfg)
        if save or look:
            stopping |= hear(parts, state, narrator, cfg=cfg, everything=True)
        if look:
            narrator.emit(evaluate(parts, state, cfg=cfg))
        if save:
            narrator.emit(
                store.save(run.checkpoints, parts.tensors(), state, world=parts.world, keep=cfg.checkpoint.keep)
            )
    return EXIT_DONE if state.step >= cfg.train.num_steps else EXIT_INTERRUPTED


def resume(cfg: Config, parts: Parts, run: RunDir, *, last_seen: int) -> tuple[RunState, RunStarted]:
    """Continue from the newest checkpoint, or begin."""
    found = store.load_newest(run.checkpoints, parts.tensors(), world=parts.world)
    state, directory = found or (RunState(), None)
    state.iteration = max(state.iteration, last_seen)
    started = RunStarted(
        time=time.time(),
        iteration=state.iteration,
        world_size=parts.world.size,
        num_steps=cfg.train.num_steps,
        step=state.step,
        resumed_from=directory,
    )
    return state, started


@contextmanager
def signals_to(stop: StopRequest) -> Iterator[None]:
    """SIGTERM and SIGINT ask for a stop; a second SIGINT insists."""
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_worker(cfg: Config) -> int:
    """One rank's whole life; returns the exit code of the contract."""
    stop = StopRequest()
    _, world_size, _ = rank_from_environment()
    check_world(cfg, world_size)
    with signals_to(stop), fast_attention():
        try:
            world = connect(cfg.parallel)
            opened = broadcast(open_run(cfg) if world.is_first else None)
            assert opened is not None
            if opened.problem:
                raise ConfigError("", opened.problem)
            run = opened.directory
            parts = build(cfg, world, run)
            if world.is_first:
                write_manifest(run, describe(cfg, parts))
            with Narrator(cfg, run, world=world, meter=meter(cfg, world)) as narrator:
                state, started = resume(cfg, parts, run, last_seen=opened.last_iteration)
                narrator.emit(started)
                code = train(cfg, parts, state, narrator, run, stop)
                reason = "all steps done" if code == EXIT_DONE else "asked to stop"
                narrator.end(
                    RunEnded(
                        time=time.time(), iteration=state.iteration, step=state.step, exit_code=code, reason=reason
                    )
                )
            return code
        finally:
            disconnect()


@dataclass(frozen=True, slots=True)
class Opened:
    """What rank 0 found on disk, for all ranks to hear."""

    directory: RunDir
    last_iteration: int
    problem: str


def open_run(cfg: Config) -> Opened:
    """Name and create the run directory, or say why not."""
    rundir.name_run(cfg)
    run, problem = rundir.locate(cfg), ""
    try:
        rundir.prepare(cfg, run)
    except ConfigError as error:
        problem = str(error)
    return Opened(run, max(last_iteration(run.events), 0), problem)


def main() -> int:
    """The plain door: `torchrun --nproc-per-node N -m harness.train key=value ...`."""
    try:
        return run_worker(compose.load(sys.argv[1:]))
    except ConfigError as error:
        if rank_from_environment()[0] == 0:
            print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main())
