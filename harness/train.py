"""The training loop, and the worker process that runs it.

Read `train` from top to bottom: a step happens in that order, and nothing is hooked in from elsewhere. The loop never
waits for the device. A step's report is read from the mailbox `sentinel.lag` steps later, on every rank alike; the
detectors and the policy process it, and the loop carries out the policy's action.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from harness.build import Parts, build, build_meter, closing_parts, run_manifest
from harness.checkpoint.io_retry import StoppedError
from harness.checkpoint.remote.upload_process import uploading
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
from harness.control.apply import continue_pause, find_interrupted_pause, run_operator_commands
from harness.control.inbox import append_intervention
from harness.control.stop_requests import StopRequest, signals_to
from harness.control.watcher import watching
from harness.core import rundir
from harness.core.events import Event, Intervention, ReducedRecord, RunEnded
from harness.core.gc_schedule import GcSchedule
from harness.core.locking import run_lease
from harness.core.safe_stream import safe_output
from harness.core.state import RunState
from harness.core.stderr_lines import print_warning
from harness.data.batch import Batch
from harness.data.batch_facts import facts_to_record
from harness.distributed.collectives import enter_on_all_ranks, run_on_all_ranks, run_on_rank_zero
from harness.distributed.compile_cache import compile_cache, compiles
from harness.distributed.determinism import DeterministicSettings, deterministic_algorithms
from harness.distributed.world import World, connected, rank_from_environment
from harness.precision.attention import fast_attention
from harness.precision.fp8.engine import require_engine
from harness.recomputation import choose_recomputation, explain_check_off
from harness.recovery import run_actions
from harness.remote_resume import restore_remote_run
from harness.resume import (
    Opened,
    accept_config,
    clear_old_stop_file,
    explain_lost_end,
    find_data_change,
    open_run,
    resume,
)
from harness.run import Ending, Run
from harness.run_corpus import RunData, require_planned, resolve_run_data
from harness.sentinel.device.step_report import HostFacts
from harness.start_check import check_determinism
from harness.step import (
    apply_update,
    evaluate,
    forward_backward,
    gate,
    held_out_mean,
    measure_held_out,
    reduce_signals,
    use_planned_precision,
)
from harness.telemetry.event_reporter import EventReporter, longest_end_s
from harness.telemetry.heartbeat import Heartbeat, Phase
from harness.telemetry.manifest import write_manifest
from harness.telemetry.meters import memory_bytes
from harness.telemetry.step_profiler import StepProfiler
from harness.telemetry.system_sampler import sampling_system


def train(run: Run) -> Ending:
    """Train until all steps are done, a stop is requested, or the sentinel halts the run."""
    cfg, parts, state = run.cfg, run.parts, run.state
    ending = continue_pause(run, train_step)
    use_planned_precision(parts, parts.ledger.next_batch(state.cursor, state.given_back).position, cfg=cfg)
    measure_held_out(parts, state)
    parts.ring.pin()
    run.profiler.plan(state)
    while state.step < cfg.train.num_steps and (ending is None or state.iteration < ending.after):
        run.heartbeat.beat(state)
        run.profiler.advance(state)
        train_step(run)
        with run.heartbeat.during(Phase.save):
            if parts.checkpoints.snapshot_if_due(state):
                measure_held_out(parts, state)
        ending = process_reports(run, ending=ending)

        issued, evaluates = state.step, is_due(cfg.eval.every_steps, state.step, cfg)
        if evaluates or ending is not None or issued == cfg.train.num_steps:
            ending = process_reports(run, everything=True, ending=ending)
        if evaluates and state.step == issued and not (ending is not None and ending.is_halt):
            run.reporter.emit_after_pause(
                evaluate(parts, state, cfg=cfg, beat=lambda: run.heartbeat.beat(state, Phase.evaluate))
            )
        run.gc_schedule.end_iteration()
    if ending is None or (state.step >= cfg.train.num_steps and ending.exit_code == EXIT_INTERRUPTED):
        return Ending(EXIT_DONE, "all steps done")
    return ending


def train_step(run: Run, *, is_trial: bool = False) -> None:
    """Issue one step: batch, forward and backward pass, one all-reduce of signals, gate, update, report.

    A step of a trial (`harness.trials`) announces nothing, because it may be undone.
    """
    cfg, parts, state = run.cfg, run.parts, run.state
    started_s = host_clock_s(parts)
    place = parts.ledger.next_batch(state.cursor, state.given_back)
    window = parts.planned.at(place.position, state)
    if not is_trial and (event := parts.planned.announce(window, place.batch, state)):
        run.reporter.emit_event(event)
    batch = parts.batches[place.batch]
    branches = choose_branches(run, place.batch, position=place.position, planned=window is not None)

    forward_backward(parts, batch, cfg=cfg, probe=branches.probe, recompute=branches.recompute)
    add_host_signals(run, batch, branches, started_s=started_s)
    signals = reduce_signals(parts, cfg=cfg, probe=branches.probe)
    decision = gate(parts, signals, planned=branches.planned)
    report = apply_update(parts, signals, decision)

    num_tokens = parts.batches.size(place.batch) * parts.batches.sequence_length
    state.advance(next_cursor=place.cursor, given_back=place.given_back, tokens=num_tokens)
    parts.mailbox.post(host_facts(parts, state, batch, branches), report)


class Branches(NamedTuple):
    """The branches that a rank takes in the coming step. Every rank must read the same ones, or a collective hangs.

    They follow from state that all ranks share. A digest of them is part of the step's all-reduce, so ranks that
    disagree are named.
    """

    iteration: int
    step: int
    cursor: int
    generation: int
    probe: bool
    in_fp8: bool | None
    saves: bool
    """A snapshot is due after the step, unless an earlier update turns out to be rejected."""
    evaluates: bool
    planned: bool
    """The step lies in the window after a planned change."""
    recompute: int | None = None
    """Compute the first micro-batch twice, once with the rows of the rank this many places on; None: no second time."""


def choose_branches(run: Run, cursor: int, *, position: int | None = None, planned: bool = False) -> Branches:
    """Choose the branches of the coming step, and switch fp8 and QK-clip on or off as the policy and `precision.phases`
    want it.

    `position`: where the run is, if the batch was given back from an earlier place.
    """
    cfg, parts, state = run.cfg, run.parts, run.state
    use_planned_precision(parts, cursor if position is None else position, cfg=cfg)
    if parts.sentinel.policy.clips_logits:
        parts.qk_clip.limit_logits(cfg.sentinel.detect.logit_bound)
    return Branches(
        iteration=state.iteration,
        step=state.step,
        cursor=cursor,
        generation=state.generation,
        probe=state.iteration % cfg.sentinel.probe_every == 0 or state.iteration in parts.sentinel.probe_at,
        in_fp8=parts.fp8_layers.in_fp8,
        saves=parts.checkpoints.is_due(state.step + 1),
        evaluates=is_due(cfg.eval.every_steps, state.step + 1, cfg),
        planned=planned,
        recompute=choose_recomputation(parts, iteration=state.iteration, cfg=cfg),
    )


def is_due(every_steps: int, step: int, cfg: Config) -> bool:
    """Whether something that happens every so many steps, and after the last one, happens after this step."""
    return every_steps > 0 and (step % every_steps == 0 or step == cfg.train.num_steps)


def host_clock_s(parts: Parts) -> float:
    """The host's clock, less the time that this rank has waited for others in collectives."""
    return time.perf_counter() - parts.comm_stats.waited_s


def add_host_signals(run: Run, batch: Batch, branches: Branches, *, started_s: float) -> None:
    """Add to the coming all-reduce what the host of this rank reports: requests, clocks, digests of decisions and data.

    Requests count for all ranks once they are reduced. Everything else goes into this rank's slot.
    """
    parts = run.parts
    parts.signals.add_requests(
        stop=bool(run.stop),
        save=parts.checkpoints.is_due_by_clock(),
        command=run.inbox is not None and run.inbox.waits(),
    )
    busy_s = host_clock_s(parts) - started_s
    parts.signals.add_host_facts(
        decision=parts.sentinel.digest_with(branches),
        busy_s=busy_s,
        device_s=parts.compute_clock.finish_step(),
        step_s=run.reporter.step_time_s,
    )
    assert batch.facts is not None, "held-out data has none"
    digests = {"fingerprint": batch.facts.fingerprint, "plan": parts.batches.plan_digest()}
    compared = batch.facts.compared
    rows = {} if compared is None else {"own_row": compared.own, "other_row": compared.other}
    parts.signals.add_data(**digests, **rows)


def host_facts(parts: Parts, state: RunState, batch: Batch, branches: Branches) -> HostFacts:
    """What the host knows of the step that it has just issued; the report of the step needs it later."""
    return HostFacts(
        iteration=state.iteration,
        cursor=branches.cursor,
        tokens=state.tokens,
        probed=branches.probe,
        posted_s=time.perf_counter(),
        memory_bytes=memory_bytes(parts.world.device),
        loader_wait_s=round(parts.batches.wait_s, 6),
        batch=facts_to_record(batch.facts, parts.batches.source_names),
        in_fp8=branches.in_fp8,
        in_planned_change=branches.planned,
        stride=(parts.batches.compared_stride(branches.cursor) or 1) * parts.world.context,
        batch_tokens=parts.batches.size(branches.cursor) * parts.batches.sequence_length,
        batch_size=parts.batches.size(branches.cursor),
        recomputed=branches.recompute,
    )


def process_reports(run: Run, *, everything: bool = False, ending: Ending | None = None) -> Ending | None:
    """Process the step reports that are ready, and carry out what they call for; returns why the run must end, or None.

    `everything` waits for all reports. `ending` is the reason known so far. A halt is final: later reports are only
    logged.
    """
    parts = run.parts
    for facts, values in parts.mailbox.read(everything=everything):
        is_halted = ending is not None and ending.is_halt
        record, action = run.process_report(facts, values, is_halted=is_halted)
        if is_halted:
            continue
        if record.digests:
            reason = f"ranks decided differently: {record.digests}"
            ending = Ending(EXIT_HALTED, reason, after=record.iteration + run.cfg.sentinel.lag)
            continue
        further = run_actions(run, action, train_step) or reason_to_end(run, record)
        ending = further if ending is None or (further is not None and further.is_halt) else ending
        if ending is None or not ending.is_halt:
            parts.checkpoints.write_queued()
        if record.command_waits and ending is None:
            ending = run_operator_commands(run, train_step)
    for event in [*parts.checkpoints.drain_events(), *parts.sentinel.drain_events()]:
        run.reporter.emit_event(event)
    return ending


def reason_to_end(run: Run, record: ReducedRecord) -> Ending | None:
    """Return why the run ends without a decision of the policy: too many rejected updates, or a stop request."""
    if run.state.refused_in_row >= run.cfg.sentinel.halt_after_refused:
        return Ending(EXIT_HALTED, f"{run.state.refused_in_row} updates rejected in a row")
    return Ending(EXIT_INTERRUPTED, "stopped") if record.stop_requested else None


def finish_run(run: Run, ending: Ending) -> Ending:
    """Save a last checkpoint, and log who asked for the stop. A halted run saves nothing: its state may be damaged."""
    if ending.is_halt:
        run.parts.ring.end_sharing()
        with run.heartbeat.during(Phase.save):
            run.parts.checkpoints.finish()
        for event in run.parts.checkpoints.drain_events():
            run.reporter.emit_event(event)
        return ending
    asked: Intervention | None = None
    if ending.exit_code == EXIT_INTERRUPTED:
        ending = Ending(EXIT_INTERRUPTED, f"{ending.reason}: {run.stop.reason}")
        if run.parts.world.is_first and (asked := stop_requests.stop_event(run.directory, run.state.iteration)):
            run.reporter.emit_event(asked)
    is_done = ending.exit_code == EXIT_DONE
    if is_done:
        with run.heartbeat.during(Phase.evaluate):
            damage = describe_last_damage(run)
        if damage:
            is_done, ending = False, Ending(EXIT_DONE, f"{ending.reason}, but {damage}")
    with run.heartbeat.during(Phase.save):
        is_saved = run.parts.checkpoints.save_last(run.state, is_done=is_done, remembered=run.parts.sentinel.memory)
    if asked is not None:
        append_intervention(run.directory, asked)
    for event in run.parts.checkpoints.drain_events():
        run.reporter.emit_event(event)
    if is_saved:
        run.parts.ring.end_sharing()
    return ending if is_saved else Ending(EXIT_INTERRUPTED, f"{ending.reason}, but the last checkpoint was not saved")


def describe_last_damage(run: Run) -> str:
    """What is wrong with the last state of the run, by its held-out loss; empty: nothing. Collective.

    Damage by the last update shows in no training loss, because no step follows it.
    """
    highest = run.parts.sentinel.policy.highest_held_out_loss(before=run.state.iteration)
    if highest is None:
        return ""
    loss = held_out_mean(run.parts)
    if loss is None or loss <= highest:
        return ""
    return f"the held-out loss of the last state is {loss:.4f}, above {highest:.4f}: its checkpoint is not marked good"


RunWrapper = Callable[[Run], Run]
"""Wraps the parts of a run that is ready to start. Only drills and tests use it, to inject faults."""


def unwrapped(run: Run) -> Run:
    """The wrapper of an ordinary run: changes nothing."""
    return run


def run_worker(cfg: Config, wrap: RunWrapper = unwrapped) -> int:
    """Run one rank from start to end; returns its exit code."""
    stop = StopRequest()
    _, world_size, _ = rank_from_environment()
    check_world(cfg, world_size)
    with (
        signals_to(stop),
        run_lease.naming_full_disk(Path(cfg.run.dir)),
        deterministic_algorithms(enabled=cfg.run.deterministic) as settings,
        fast_attention(),
        run_lease.holding(),
        connected(cfg.parallel, ranks_per_gpu=cfg.launch.ranks_per_gpu) as world,
        compile_cache(Path(cfg.run.dir), enabled=compiles(cfg.parallel, world.device)) as obstacle,
    ):
        if world.is_first and obstacle:
            print(f"compiled kernels are not kept for the next start: {obstacle}", flush=True)
        run_on_rank_zero(lambda: clear_old_stop_file(cfg))
        run_on_all_ranks(lambda: require_engine(cfg.precision, world.device))
        restore_remote_run(cfg, is_stopping=lambda: bool(stop))
        data = resolve_run_data(cfg, world=world, is_stopping=lambda: bool(stop))
        opened = run_on_rank_zero(lambda: open_run(cfg, data))
        if opened.problem:
            raise ConfigError("", opened.problem)
        try:
            return train_opened_run(cfg, data, opened, world, stop, wrap, settings)
        except StoppedError as stopped:
            stopped.error.is_shared = True
            raise stopped.error from None


def train_opened_run(
    cfg: Config,
    data: RunData,
    opened: Opened,
    world: World,
    stop: StopRequest,
    wrap: RunWrapper,
    settings: DeterministicSettings,
) -> int:
    """Build all parts, resume from the newest checkpoint, train, and end the run.

    The processes that read the configuration of the run start after it is accepted.
    """
    directory = opened.run
    with (
        Heartbeat(directory, rank=world.rank, world_size=world.size, num_steps=cfg.train.num_steps) as heartbeat,
        sampling_system(directory, world, heartbeat, every_s=cfg.telemetry.system_every_s),
        closing_parts(
            build(
                cfg,
                world,
                directory,
                record=data.record,
                shares_snapshots=True,
                is_stopping=lambda: bool(stop),
            )
        ) as parts,
        enter_on_all_ranks(watching(directory, stop, is_first=world.is_first)) as inbox,
        GcSchedule() as gc_schedule,
    ):
        run_on_rank_zero(lambda: write_manifest(directory, run_manifest(cfg, parts, settings)))
        state, events = resume(cfg, parts, opened)
        require_planned(data, state.cursor)
        if settings.is_on and state.step < cfg.train.num_steps:
            line = check_determinism(parts, state, cfg=cfg)
            if world.is_first:
                print(f"run.deterministic: {line}{settings.describe_kept()}", flush=True)
        run_on_rank_zero(lambda: accept_config(cfg, data, opened))
        with (
            uploading(directory, cfg.checkpoint.remote, is_first=world.is_first),
            enter_on_all_ranks(EventReporter(cfg, directory, world=world, meter=build_meter(cfg, world))) as reporter,
            StepProfiler(
                directory,
                cfg.profile,
                rank=world.rank,
                world_size=world.size,
                device=world.device,
                last_step=cfg.train.num_steps,
            ) as profiler,
        ):
            run = Run(
                cfg=cfg,
                directory=directory,
                parts=parts,
                state=state,
                reporter=reporter,
                stop=stop,
                inbox=inbox,
                heartbeat=heartbeat,
                gc_schedule=gc_schedule,
                profiler=profiler,
                pause=run_on_rank_zero(lambda: find_interrupted_pause(directory)),
            )
            report_start(run, opened, events)
            run = wrap(run)
            code, reason, _ = finish_run(run, train(run))
            heartbeat.end(code, reason, state, wait_s=longest_end_s(cfg))
            for incident in parts.sentinel.drain_events(last=True):
                reporter.emit_event(incident)
            reporter.end(
                RunEnded(time=time.time(), iteration=state.iteration, step=state.step, exit_code=code, reason=reason),
                is_stopping=lambda: bool(stop),
            )
    return code


def report_start(run: Run, opened: Opened, events: list[Event]) -> None:
    """Report what was found at the start and what changed since the last one, and plan the window after a change."""
    cfg, parts, state, is_first = run.cfg, run.parts, run.state, run.parts.world.is_first
    if is_first and (line := explain_check_off(cfg, parts.world)):
        print(line, flush=True)
    if is_first and (line := explain_lost_end(opened, state, num_steps=cfg.train.num_steps)):
        print_warning(line)
    for event in events:
        run.reporter.emit_after_pause(event)
    parts.planned.resume(run_on_rank_zero(lambda: find_data_change(run.directory)), state.cursor)
    if is_first and (dtypes := opened.changes.get("optim.moment_dtype")) and state.step:
        print(f"optim.moment_dtype: the moments of step {state.step} were {dtypes[0]}, are {dtypes[1]}", flush=True)
    if opened.changes:
        run.reporter.emit_after_pause(rundir.make_config_change_event(opened.changes, iteration=state.iteration))


@safe_output()
def main() -> int:
    """Entry point of `torchrun --nproc-per-node N -m harness.train key=value ...`.

    An error that all ranks have is printed by rank 0. A rank that fails before it has joined the others, or in data
    that only it reads, prints the error itself, because rank 0 waits for it; of invalid arguments, only the first rank
    of a machine does.
    """
    rank, _, local_rank = rank_from_environment()
    prints = local_rank == 0
    try:
        cfg = compose.load(sys.argv[1:])
        prints = True
        return run_worker(cfg)
    except (ConfigError, StorageError) as error:
        if rank == 0 or (prints and not error.is_shared):
            print(f"harness: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)
        code = EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG
        if error.is_of_one_rank and not error.is_shared:
            sys.stdout.flush()
            os._exit(code)  # as below
        return code
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_CRASHED)  # a normal interpreter exit may wait for ranks that wait for this one


if __name__ == "__main__":
    sys.exit(main())
