"""Resume a run and train it, with the parts that `harness.build` made.

The loop reads from top to bottom as a step happens; nothing is hooked in from elsewhere. The device is not waited for:
what it computed in one step is read from the mailbox `sentinel.lag` steps later, on every rank alike.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from harness import compose, requests, rundir
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
from harness.events import CheckpointJudged, EvalRecord, Event, RunEnded, RunStarted, to_json
from harness.model.transformer import document_mask
from harness.parallel import World, all_reduce_sum, broadcast, connect, disconnect, rank_from_environment
from harness.precision import fast_attention
from harness.requests import StopRequest, signals_to
from harness.rundir import RunDir, append_line
from harness.sentinel.gate import refuse_nonfinite
from harness.sentinel.report import HostFacts, pack, totals, unpack
from harness.state import RunState
from harness.telemetry.manifest import write_manifest
from harness.telemetry.meters import memory_bytes
from harness.telemetry.narrator import Narrator
from harness.telemetry.sinks import last_iteration


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
        parts.keeper.learn(record, state)
        if record.stop_requested:
            ending = Ending(EXIT_INTERRUPTED, "stopped")
        if state.refused_in_row >= cfg.sentinel.halt_after_refused:
            ending = Ending(EXIT_HALTED, f"{state.refused_in_row} updates refused in a row")
    for event in parts.keeper.news():
        narrator.note(event)
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


def train(cfg: Config, parts: Parts, state: RunState, narrator: Narrator, stop: StopRequest) -> Ending:
    """The loop: until all steps are done, a rank is asked to stop, or nothing but refusals comes back."""
    batch_tokens = cfg.train.batch_size * cfg.train.sequence_length
    ending = None
    while state.step < cfg.train.num_steps and ending is None:
        cursor = parts.ledger.next_index(state.cursor)
        batch = parts.batches[cursor]
        probe = state.iteration % cfg.sentinel.probe_every == 0
        forward_backward(parts, batch, cfg=cfg, probe=probe)
        parts.signals.add_requests(stop=bool(stop), save=parts.keeper.is_due_by_clock())
        parts.ring.finish_copy()
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
        parts.keeper.take_if_due(state)
        ending = hear(parts, state, narrator, cfg=cfg)

        look = due(cfg.eval.every_steps, state, cfg)
        if look or ending is not None or state.step == cfg.train.num_steps:
            ending = hear(parts, state, narrator, cfg=cfg, everything=True) or ending
        if look:
            narrator.emit(evaluate(parts, state, cfg=cfg))
    if ending is None or state.step >= cfg.train.num_steps:
        return Ending(EXIT_DONE, "all steps done")
    return ending


def leave(
    parts: Parts, state: RunState, narrator: Narrator, ending: Ending, *, run: RunDir, stop: StopRequest
) -> Ending:
    """Say who asked for the end and save where the run stands, unless it halted: what only refuses may be broken."""
    if ending.exit_code == EXIT_HALTED:
        return ending
    if ending.exit_code == EXIT_INTERRUPTED:
        ending = Ending(EXIT_INTERRUPTED, f"{ending.reason}: {stop.reason}")
        if parts.world.is_first and (asked := requests.intervention(run, state.iteration)):
            append_line(run.interventions, to_json(asked))
            narrator.note(asked)
    is_saved = parts.keeper.save_last(state, is_done=ending.exit_code == EXIT_DONE)
    for event in parts.keeper.news():
        narrator.note(event)
    return ending if is_saved else Ending(EXIT_INTERRUPTED, f"{ending.reason}, but the last checkpoint was not saved")


def resume(cfg: Config, parts: Parts, run: RunDir, *, last_seen: int) -> tuple[RunState, list[Event]]:
    """Continue from the newest checkpoint that is whole, or begin; what is there to tell comes with it."""
    found = store.load_newest(run.checkpoints, parts.tensors(), world=parts.world)
    state, directory = found.loaded or (RunState(), None)
    state.iteration = max(state.iteration, last_seen)
    if directory is not None:
        parts.keeper.continue_from(directory, state)
    now, iteration = time.time(), state.iteration
    told: list[Event] = [
        CheckpointJudged(
            time=now, iteration=iteration, directory=error.path.parent.name, health="damaged", reason=str(error)
        )
        for error in found.damage
    ]
    started = RunStarted(
        time=now,
        iteration=iteration,
        world_size=parts.world.size,
        num_steps=cfg.train.num_steps,
        step=state.step,
        resumed_from=directory,
    )
    return state, [*told, started]


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
        changes = rundir.prepare(cfg, run, iteration=seen)
        requests.clear(run)
        return Opened(run, seen, changes)
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
            stop.watch(run)
        state, told = resume(cfg, parts, run, last_seen=opened.last_iteration)
        for event in told:
            narrator.emit(event)
        if opened.changes:
            narrator.emit(rundir.intervention(opened.changes, iteration=state.iteration))
        ending = train(cfg, parts, state, narrator, stop)
        code, reason = leave(parts, state, narrator, ending, run=run, stop=stop)
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
