"""Resume a run and train it, with the parts that `harness.build` made.

The loop reads from top to bottom as a step happens; nothing is hooked in from elsewhere. The device is not waited for:
what it computed in one step is read from the mailbox `sentinel.lag` steps later, on every rank alike.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch

from harness import compose, rundir
from harness.build import Parts, build, describe, meter
from harness.checkpoint import store
from harness.config import (
    EXIT_BAD_CONFIG,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_INTERRUPTED,
    Config,
    ConfigError,
    check_world,
)
from harness.data.batch import Batch
from harness.data.facts import as_record
from harness.events import EvalRecord, RunEnded, RunStarted
from harness.model.transformer import document_mask
from harness.parallel import World, all_reduce_sum, broadcast, connect, disconnect, rank_from_environment
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


class Ending(NamedTuple):
    """Why the loop ends."""

    exit_code: int
    reason: str


def forward_backward(parts: Parts, batch: Batch, *, cfg: Config, probe: bool) -> None:
    """Gradients of the mean loss over the global batch, one micro-batch at a time."""
    seed = parts.scale.scale / (cfg.train.batch_size * cfg.train.sequence_length)
    for rows in batch.micro_batches(cfg.train.micro_batch_size or len(batch.inputs)):
        output = parts.model(rows.inputs, rows.targets, seed=seed, probe=probe, mask=mask_of(rows))
        output.objective.backward()
        parts.signals.add_forward(
            row_losses=output.row_losses,
            row_tokens=output.row_tokens,
            sources=rows.sources,
            z_loss=output.z_sum,
            layers=output.activation_square_sums,
        )


def mask_of(rows: Batch) -> torch.Tensor | None:
    """Who may attend to whom, where documents are kept apart."""
    return None if rows.documents is None else document_mask(rows.documents)


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


def hear(parts: Parts, state: RunState, narrator: Narrator, *, cfg: Config, everything: bool = False) -> Ending | None:
    """Tell what the device reported and correct the host's count; says why the run must end, if it must."""
    ending = None
    dynamic_scale = parts.scale.growth_interval is not None
    for facts, values in parts.mailbox.take(everything=everything):
        record = unpack(parts.signals.layout, facts, values, dim=cfg.model.dim, dynamic_scale=dynamic_scale)
        narrator.emit_step(record, posted_s=facts.posted_s)
        state.learn(refused=record.refused)
        if record.stop_requested:
            ending = Ending(EXIT_INTERRUPTED, "asked to stop")
        if state.refused_in_row >= cfg.sentinel.halt_after_refused:
            ending = Ending(EXIT_HALTED, f"{state.refused_in_row} updates refused in a row")
    return ending


def evaluate(parts: Parts, state: RunState, *, cfg: Config) -> EvalRecord:
    """Mean loss on the held-out batches, the same ones every time."""
    sums = torch.zeros(2, dtype=torch.float64, device=parts.world.device)
    with torch.no_grad():
        for index in range(min(cfg.eval.num_batches, len(parts.held_out))):
            batch = parts.held_out[index]
            for rows in batch.micro_batches(cfg.train.micro_batch_size or len(batch.inputs)):
                output = parts.model(rows.inputs, rows.targets, mask=mask_of(rows))
                sums += torch.stack([output.row_losses.sum(), output.row_tokens.sum()])
    loss_sum, tokens = all_reduce_sum(sums).tolist()  # sync: an evaluation is rare and its end is waited for
    return EvalRecord(
        time=time.time(), iteration=state.iteration, step=state.step, loss=loss_sum / tokens, tokens=int(tokens)
    )


def due(every_steps: int, state: RunState, cfg: Config) -> bool:
    """Whether something that happens every so many steps, and after the last one, happens now."""
    return every_steps > 0 and (state.step % every_steps == 0 or state.step == cfg.train.num_steps)


def train(cfg: Config, parts: Parts, state: RunState, narrator: Narrator, run: RunDir, stop: StopRequest) -> Ending:
    """The loop: until all steps are done, a rank is asked to stop, or nothing but refusals comes back."""
    batch_tokens = cfg.train.batch_size * cfg.train.sequence_length
    ending = None
    while state.step < cfg.train.num_steps and ending is None:
        cursor = parts.ledger.next_index(state.cursor)
        batch = parts.batches[cursor]
        probe = state.iteration % cfg.sentinel.probe_every == 0
        forward_backward(parts, batch, cfg=cfg, probe=probe)
        if stop:
            parts.signals.add_stop_request()
        report = judge_and_update(parts, cfg=cfg, probe=probe)

        state.advance(next_cursor=cursor + 1, tokens=batch_tokens)
        facts = HostFacts(
            iteration=state.iteration,
            cursor=cursor,
            tokens=state.tokens,
            probed=probe,
            posted_s=time.perf_counter(),
            memory_bytes=memory_bytes(parts.world.device),
            batch=as_record(batch.facts, parts.batches.source_names),
        )
        parts.mailbox.post(facts, report)
        ending = hear(parts, state, narrator, cfg=cfg)

        leaving = ending is not None or state.step == cfg.train.num_steps
        save = leaving or due(cfg.checkpoint.every_steps, state, cfg)
        look = due(cfg.eval.every_steps, state, cfg)
        if save or look:
            ending = hear(parts, state, narrator, cfg=cfg, everything=True) or ending
        if look:
            narrator.emit(evaluate(parts, state, cfg=cfg))
        if save and not (ending and ending.exit_code == EXIT_HALTED):  # what only refuses may be broken already
            tensors = parts.tensors()
            narrator.emit(store.save(run.checkpoints, tensors, state, world=parts.world, keep=cfg.checkpoint.keep))
    if ending is None or state.step >= cfg.train.num_steps:
        return Ending(EXIT_DONE, "all steps done")
    return ending


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
            return run_opened(cfg, opened, world, stop)
        finally:
            disconnect()


@dataclass(frozen=True, slots=True)
class Opened:
    """What rank 0 found on disk, for all ranks to hear."""

    run: RunDir
    last_iteration: int
    changes: dict[str, Any]
    """Keys that were changed on purpose since the run was last started."""
    problem: str = ""


def open_run(cfg: Config) -> Opened:
    """Name and create the run directory, or say why not."""
    rundir.name_run(cfg)
    run = rundir.locate(cfg)
    seen = max(last_iteration(run.events), 0)
    try:
        return Opened(run, seen, rundir.prepare(cfg, run, iteration=seen))
    except ConfigError as error:
        return Opened(run, seen, {}, problem=str(error))


def run_opened(cfg: Config, opened: Opened, world: World, stop: StopRequest) -> int:
    """Build, resume and train in a directory that all ranks agree on."""
    run = opened.run
    with (
        closing(build(cfg, world, run)) as parts,
        Narrator(cfg, run, world=world, meter=meter(cfg, world)) as narrator,
    ):
        if world.is_first:
            write_manifest(run, describe(cfg, parts))
        state, started = resume(cfg, parts, run, last_seen=opened.last_iteration)
        narrator.emit(started)
        if opened.changes:
            narrator.emit(rundir.intervention(opened.changes, iteration=state.iteration))
        code, reason = train(cfg, parts, state, narrator, run, stop)
        narrator.end(
            RunEnded(time=time.time(), iteration=state.iteration, step=state.step, exit_code=code, reason=reason)
        )
    return code


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
