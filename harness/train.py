"""Resume a run and train it, with the parts that `harness.build` made.

The loop reads from top to bottom as a step happens; nothing is hooked in from elsewhere. The device is not waited for:
what it computed in one step is read from the mailbox `sentinel.lag` steps later, on every rank alike, judged, and acted
upon.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from harness.build import Parts, build, describe, held, meter
from harness.config import compose
from harness.config.errors import (
    EXIT_BAD_CONFIG,
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_INTERRUPTED,
    ConfigError,
    StorageError,
)
from harness.config.schema import Config, check_world
from harness.control import stop_requests
from harness.control.apply import action_of, changes_of, refusal_of
from harness.control.commands import Command, Pause, Rate, Resume, SaveCheckpoint
from harness.control.inbox import REFUSED, intervention
from harness.control.stop_requests import StopRequest, signals_to
from harness.control.watcher import watching
from harness.core import rundir
from harness.core.events import Action, ActionKind, Outcome, ReducedRecord, RunEnded, to_json
from harness.core.gc_schedule import Collector
from harness.core.locking import run_lease
from harness.core.rundir import append_line
from harness.core.state import RunState
from harness.data.batch import Batch
from harness.data.batch_facts import as_record
from harness.distributed.collectives import broadcast, entered, from_first, jointly, together
from harness.distributed.world import World, connected, rank_from_environment
from harness.precision.attention import fast_attention
from harness.precision.fp8.engine import require_engine
from harness.precision.mixed_precision import able_products
from harness.recovery import recover
from harness.resume import Opened, open_run, resume
from harness.run import Ending, Run
from harness.run_corpus import settle_data
from harness.sentinel.device.step_report import HostFacts
from harness.sentinel.policy.state import RESTORES
from harness.step import evaluate, forward_backward, judge_and_update, measure_held_out
from harness.telemetry.event_reporter import Narrator
from harness.telemetry.heartbeat import Heartbeat, Phase
from harness.telemetry.manifest import write_manifest
from harness.telemetry.meters import memory_bytes

PAUSED_LOOK_S = 1.0


class Branches(NamedTuple):
    """What a rank does in a step and after it, in whose collectives all ranks must take part alike.

    All of it follows from state that ranks share. It travels in the digest of the step: ranks that part are named.
    """

    iteration: int
    step: int
    cursor: int
    generation: int
    probe: bool
    in_fp8: bool | None
    saves: bool
    """After the step, unless an earlier update turns out to be refused."""
    evaluates: bool
    planned: bool
    """Within the window of a planned change."""


def branches_of(run: Run, cursor: int, *, planned: bool = False) -> Branches:
    """The branches of the step that is about to begin."""
    cfg, parts, state = run.cfg, run.parts, run.state
    parts.products.use_fp8(not parts.sentinel.policy.in_fallback)
    return Branches(
        iteration=state.iteration,
        step=state.step,
        cursor=cursor,
        generation=state.generation,
        probe=state.iteration % cfg.sentinel.probe_every == 0 or parts.sentinel.looks_closer,
        in_fp8=parts.products.in_fp8,
        saves=parts.keeper.is_due(state.step + 1),
        evaluates=due(cfg.eval.every_steps, state.step + 1, cfg),
        planned=planned,
    )


def hear(run: Run, *, everything: bool = False, ending: Ending | None = None) -> Ending | None:
    """Tell what the device reported, correct the host's count, and do what it calls for; says why the run must end.

    `ending` is what was known before. A halt stands: what comes after it is told and decides nothing.
    """
    parts = run.parts
    for facts, values in parts.mailbox.take(everything=everything):
        is_halted = ending is not None and ending.is_halt
        record, action = hear_one(run, facts, values, is_halted=is_halted)
        if is_halted:
            continue
        if record.digests:
            reason = f"ranks decided differently: {record.digests}"
            ending = Ending(EXIT_HALTED, reason, after=record.iteration + run.cfg.sentinel.lag)
            continue
        further = act(run, action) or must_end(run, record)
        ending = further if ending is None or (further is not None and further.is_halt) else ending
        if record.command_waits and ending is None:
            ending = obey(run)
    for event in [*parts.keeper.news(), *parts.sentinel.news()]:
        run.narrator.note(event)
    return ending


def hear_one(
    run: Run, facts: HostFacts, values: Tensor, *, is_halted: bool = False
) -> tuple[ReducedRecord, Action | None]:
    """Tell one report, correct the host's count by it, and say what it calls for; nothing once the run is halted, or
    where ranks decided differently."""
    parts, state = run.parts, run.state
    if measured := parts.check.receive(facts.iteration):
        run.narrator.note(measured)
        parts.sentinel.measure(measured)
    record = run.tell(facts, values)
    state.learn(refused=record.refused)
    if is_halted or record.digests:
        return record, None
    findings, action = parts.sentinel.judge(record)
    for finding in findings:
        run.narrator.note(finding)
    parts.keeper.learn(
        record, state, doubtful_since=parts.sentinel.policy.doubtful_since, remembered=parts.sentinel.memory
    )
    return record, action


def act(run: Run, action: Action | None) -> Ending | None:
    """Carry out a decision and what follows from it, until nothing more is called for."""
    while action is not None:
        outcome = carry_out(run, action)
        if action.kind is ActionKind.halt:
            return Ending(EXIT_HALTED, action.reason)
        if outcome.is_torn:
            return Ending(EXIT_HALTED, outcome.reason)
        action = run.parts.sentinel.hear(outcome)
    return None


def carry_out(run: Run, action: Action) -> Outcome:
    """One action from its announcement to its outcome.

    Reports of steps that a restore has undone are told and go no further. Where it failed they are left in the mailbox,
    to be heard like all others: what waits for them, and the count of updates, stay right.
    """
    run.narrator.note(action)
    if action.kind is ActionKind.check:
        for facts, values in run.parts.mailbox.take(everything=True):  # of steps that stay; the policy waits meanwhile
            hear_one(run, facts, values)
    with run.heart.during(Phase.restore):
        outcome = recover(action, run.parts, run.state, root=run.directory.checkpoints)
    if action.kind in RESTORES and outcome.succeeded:
        for facts, values in run.parts.mailbox.take(everything=True):
            run.tell(facts, values)
    run.narrator.emit(outcome)
    return outcome


def obey(run: Run) -> Ending | None:
    """Hear the operator's orders and carry them out, on all ranks at the same iteration; a paused run stays in here."""
    is_paused = False
    while True:
        for command in broadcast(run.inbox.take() if run.inbox else []):
            is_paused = isinstance(command.order, Pause) or (is_paused and not isinstance(command.order, Resume))
            changes, ending = apply(run, command)
            event = intervention(command, run.state.iteration, changes)
            run.narrator.emit(event)
            if run.inbox:
                run.inbox.done(command, event)
            if ending is not None:
                return ending
        if not is_paused:
            return None
        run.heart.beat(run.state, Phase.pause)
        if run.inbox:
            run.inbox.wait(PAUSED_LOOK_S)
        if any(together(lambda: bool(run.stop))):
            return Ending(EXIT_INTERRUPTED, "stopped")


def apply(run: Run, command: Command) -> tuple[dict[str, Any], Ending | None]:
    """Do what one order says, if it can be done; returns what came of it, for the books, and why the run must end."""
    order, parts = command.order, run.parts
    if refusal := broadcast(refusal_of(run.directory, order) if run.inbox else ""):
        return {REFUSED: refusal}, None
    if isinstance(order, SaveCheckpoint):
        parts.keeper.ask()
    if isinstance(order, Rate):
        run.state.lr_factor = order.factor
    try:
        action = action_of(order, command.reason, parts, run.state)
    except OSError as error:
        return {REFUSED: f"cannot be done: {error}"}, None
    if action is None:
        return changes_of(order, None, None), None
    parts.sentinel.obey(action)
    outcome = carry_out(run, action)
    changes = changes_of(order, action, outcome)
    if outcome.is_torn:
        return changes, Ending(EXIT_HALTED, outcome.reason)
    return changes, act(run, parts.sentinel.hear(outcome))


def must_end(run: Run, record: ReducedRecord) -> Ending | None:
    """Why a run ends that nobody decided to end."""
    if run.state.refused_in_row >= run.cfg.sentinel.halt_after_refused:
        return Ending(EXIT_HALTED, f"{run.state.refused_in_row} updates refused in a row")
    return Ending(EXIT_INTERRUPTED, "stopped") if record.stop_requested else None


def due(every_steps: int, step: int, cfg: Config) -> bool:
    """Whether something that happens every so many steps, and after the last one, happens after this one."""
    return every_steps > 0 and (step % every_steps == 0 or step == cfg.train.num_steps)


def data_facts(parts: Parts, batch: Batch) -> dict[str, int]:
    """What this rank says of the data it read, for its slot."""
    assert batch.facts is not None, "held-out data has none"
    said = {"fingerprint": batch.facts.fingerprint, "plan": parts.batches.plan_digest()}
    compared = batch.facts.compared
    return said if compared is None else said | {"own_row": compared.own, "other_row": compared.other}


def host_facts(parts: Parts, state: RunState, batch: Batch, branches: Branches) -> HostFacts:
    """What the host knows of the step it has just issued."""
    return HostFacts(
        iteration=state.iteration,
        cursor=branches.cursor,
        tokens=state.tokens,
        probed=branches.probe,
        posted_s=time.perf_counter(),
        memory_bytes=memory_bytes(parts.world.device),
        batch=as_record(batch.facts, parts.batches.source_names),
        in_fp8=branches.in_fp8,
        in_planned_change=branches.planned,
        stride=parts.batches.compared_stride(branches.cursor) or 1,
    )


def train(run: Run) -> Ending:
    """The loop: until all steps are done, somebody asks for a stop, or the sentinel gives up."""
    cfg, parts, state = run.cfg, run.parts, run.state
    ending: Ending | None = None
    measure_held_out(parts, state)
    while state.step < cfg.train.num_steps and (ending is None or state.iteration < ending.after):
        run.heart.beat(state)
        begun_s = time.perf_counter() - parts.collectives.waited_s
        place = parts.ledger.following(state.cursor, state.given_back)
        cursor, window = place.batch, parts.planned.at(place.position, state)
        if begins := parts.planned.announce(window, cursor, state):
            run.narrator.note(begins)
        batch = parts.batches[cursor]
        branches = branches_of(run, cursor, planned=window is not None)
        forward_backward(parts, batch, cfg=cfg, probe=branches.probe)
        parts.signals.add_requests(
            stop=bool(run.stop),
            save=parts.keeper.is_due_by_clock(),
            command=run.inbox is not None and run.inbox.waits(),
        )
        busy_s = time.perf_counter() - parts.collectives.waited_s - begun_s
        parts.signals.add_host_facts(
            decision=parts.sentinel.digest_with(branches),
            busy_s=busy_s,
            device_s=parts.compute_clock.finish_step(),
            step_s=run.narrator.step_time_s,
        )
        parts.signals.add_data(**data_facts(parts, batch))
        parts.ring.finish_copy()
        report = judge_and_update(parts, cfg=cfg, probe=branches.probe, planned=branches.planned)

        batch_tokens = parts.batches.size(cursor) * cfg.train.sequence_length
        state.advance(next_cursor=place.cursor, given_back=place.given_back, tokens=batch_tokens)
        parts.mailbox.post(host_facts(parts, state, batch, branches), report)
        with run.heart.during(Phase.save):
            if parts.keeper.take_if_due(state):
                measure_held_out(parts, state)
        ending = hear(run, ending=ending)

        look = due(cfg.eval.every_steps, state.step, cfg)
        if look or ending is not None or state.step == cfg.train.num_steps:
            ending = hear(run, everything=True, ending=ending)
        if look and not (ending is not None and ending.is_halt):
            run.narrator.emit(evaluate(parts, state, cfg=cfg, beat=lambda: run.heart.beat(state, Phase.evaluate)))
        run.collector.turn()
    if ending is None or (state.step >= cfg.train.num_steps and ending.exit_code == EXIT_INTERRUPTED):
        return Ending(EXIT_DONE, "all steps done")
    return ending


def leave(run: Run, ending: Ending) -> Ending:
    """Say who asked for the end and save where the run stands, unless it halted: what was given up may be broken."""
    if ending.is_halt:
        run.parts.keeper.finish()
        for event in run.parts.keeper.news():
            run.narrator.note(event)
        return ending
    if ending.exit_code == EXIT_INTERRUPTED:
        ending = Ending(EXIT_INTERRUPTED, f"{ending.reason}: {run.stop.reason}")
        if run.parts.world.is_first and (asked := stop_requests.intervention(run.directory, run.state.iteration)):
            append_line(run.directory.interventions, to_json(asked))
            run.narrator.note(asked)
    is_done = ending.exit_code == EXIT_DONE
    with run.heart.during(Phase.save):
        is_saved = run.parts.keeper.save_last(run.state, is_done=is_done, remembered=run.parts.sentinel.memory)
    for event in run.parts.keeper.news():
        run.narrator.note(event)
    return ending if is_saved else Ending(EXIT_INTERRUPTED, f"{ending.reason}, but the last checkpoint was not saved")


Outfit = Callable[[Run], Run]
"""What may be wrapped around a run that is ready to begin; nothing, but for a drill."""


def as_built(run: Run) -> Run:
    return run


def run_worker(cfg: Config, outfit: Outfit = as_built) -> int:
    """One rank's whole life; returns the exit code of the contract."""
    stop = StopRequest()
    _, world_size, _ = rank_from_environment()
    check_world(cfg, world_size)
    with signals_to(stop), fast_attention(), run_lease.holding(), connected(cfg.parallel) as world:
        jointly(lambda: require_engine(cfg.precision, world.device))
        data = settle_data(cfg, world=world)
        opened = from_first(lambda: open_run(cfg, data))
        if opened.problem:
            raise ConfigError("", opened.problem)
        return run_opened(cfg, opened, world, stop, outfit)


def run_opened(cfg: Config, opened: Opened, world: World, stop: StopRequest, outfit: Outfit = as_built) -> int:
    """Build, resume and train in a directory that all ranks agree on."""
    directory = opened.run
    with (
        Heartbeat(directory, rank=world.rank, world_size=world.size, num_steps=cfg.train.num_steps) as heart,
        held(build(cfg, world, directory)) as parts,
        entered(Narrator(cfg, directory, world=world, meter=meter(cfg, world))) as narrator,
        entered(watching(directory, stop, is_first=world.is_first)) as inbox,
        Collector() as collector,
        able_products(cfg.precision.kind, world.device),
    ):
        from_first(lambda: write_manifest(directory, describe(cfg, parts)))
        state, told = resume(cfg, parts, opened)
        for event in told:
            narrator.emit(event)
        if any(key.startswith("data.") for key in opened.changes):
            parts.planned.resume_with_other_data(state.cursor)
        if opened.changes:
            narrator.emit(rundir.intervention(opened.changes, iteration=state.iteration))
        run = outfit(
            Run(
                cfg=cfg,
                directory=directory,
                parts=parts,
                state=state,
                narrator=narrator,
                stop=stop,
                inbox=inbox,
                heart=heart,
                collector=collector,
            )
        )
        code, reason, _ = leave(run, train(run))
        heart.end(code, reason)
        for incident in parts.sentinel.news(last=True):
            narrator.note(incident)
        narrator.end(
            RunEnded(time=time.time(), iteration=state.iteration, step=state.step, exit_code=code, reason=reason)
        )
    return code


def main() -> int:
    """The plain door: `torchrun --nproc-per-node N -m harness.train key=value ...`."""
    try:
        return run_worker(compose.load(sys.argv[1:]))
    except (ConfigError, StorageError) as error:
        if rank_from_environment()[0] == 0:
            print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_CRASHED)  # an interpreter that ends in order may wait for ranks that wait for this one


if __name__ == "__main__":
    sys.exit(main())
