"""Operator commands run on all ranks at the same iteration, are logged, and have the documented effect."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

import pytest

from harness import train
from harness.analysis.replay import history
from harness.analysis.replay.request import choose_path, plan_replay
from harness.analysis.replay.rerun import replay_config, run_replay_worker
from harness.build import Parts
from harness.checkpoint import catalog, io_retry, store
from harness.checkpoint.catalog import Health
from harness.checkpoint.manager import CheckpointManager
from harness.config.errors import EXIT_INTERRUPTED, StorageError
from harness.control import apply, stop_requests, watcher
from harness.control import inbox as commands
from harness.control.commands import (
    ExcludeSource,
    Order,
    Pause,
    Precision,
    Profile,
    Rate,
    Resume,
    Reweight,
    Rollback,
    SaveCheckpoint,
    Skip,
    SkipBatches,
    UnskipBatches,
    in_words,
)
from harness.control.inbox import REFUSED
from harness.control.watcher import Watcher
from harness.core import event_json
from harness.core.event_json import to_json
from harness.core.events import (
    Action,
    ActionKind,
    CheckpointJudged,
    CheckpointSaved,
    Event,
    Finding,
    FindingKind,
    Intervention,
    Outcome,
    RunEnded,
    RunRestarted,
    RunStarted,
    StepRecord,
)
from harness.core.rundir import RunDir, append_line, locate
from harness.data.order.ledger import Exclusion, Ledger
from harness.distributed.world import rank_from_environment
from harness.optim.update import LR_RECOVERY_RATE
from harness.sentinel.policy.policy_state import RESTORES
from harness.telemetry.event_log import last_recorded_iteration
from tests.checkpoint.storage import failing
from tests.distributed import faulty_runs
from tests.distributed.cases import digest, state_on_disk, tiny
from tests.distributed.faulty_runs import Fault
from tests.distributed.pool import Pool
from tests.distributed.test_sentinel import STEPS, check_replay, events_of

pytestmark = pytest.mark.full

LAG = 1
NUM_STEPS = 18
OVERRIDES = (
    *STEPS,
    f"train.num_steps={NUM_STEPS}",
    "optim.schedule=constant",  # a run of any length has the steps of the control run
    "checkpoint.every_steps=4",
    "checkpoint.ring.every_steps=2",
    f"sentinel.lag={LAG}",
)
WHO, WHY = "ada", "the floor moved"
Orders = Mapping[int, Sequence[Order]]
WhenPaused = Callable[[RunDir], None]


@dataclass(frozen=True)
class RankResult:
    """The result of a run, on one rank."""

    code: int
    state: str
    """Digest of all tensors that a checkpoint would hold."""
    num_steps_started: int
    """Steps that this rank started."""
    steps_started_at_pauses: list[int]
    """Steps that it had started when the paused run got its next command, for each pause."""


def send(run: RunDir, *orders: Order) -> None:
    for order in orders:
        commands.send(run, order, who=WHO, reason=WHY)


def resume(run: RunDir) -> None:
    send(run, Resume())


def stop(run: RunDir) -> None:
    run.stop.touch()


def damage_checkpoint_and_roll_back(run: RunDir) -> None:
    for path in (run.checkpoints / "step-00000004-gen-0").glob("*.distcp"):
        path.write_bytes(b"torn")
    send(run, Rollback(to_step=4), Resume())


def break_ledger_and_skip(run: RunDir) -> None:
    run.ledger.mkdir()
    send(run, Skip(num_batches=3), Resume())


def roll_back_to_4(run: RunDir) -> None:
    send(run, Rollback(to_step=4))


def run_worker_with_failing_restore(
    directory: str, orders: Orders, when_paused: Sequence[WhenPaused], *overrides: str
) -> RankResult:
    """As `run_worker_with_orders`, with a disk that fails after the tensors of a checkpoint were filled."""
    original: Callable[..., None] = getattr(store, "load_shards")  # noqa: B009  (which store only imports)

    def load_shards(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        raise OSError(errno.EIO, "Input/output error")

    with patch.object(store, "load_shards", load_shards):
        return run_worker_with_orders(directory, orders, when_paused, *overrides)


def run_until_stopped_in_rollback(
    directory: str, orders: Orders, when_paused: Sequence[WhenPaused], *overrides: str
) -> tuple[str, int]:
    """As `run_worker_with_orders`, with a checkpoint that rank 1 cannot read. Rank 0 gets SIGTERM when the ranks wait
    before the second attempt. Returns the error, and the number of failed reads on this rank."""
    is_first = rank_from_environment()[0] == 0

    def print_warning(_: str) -> None:
        if is_first:
            os.kill(os.getpid(), signal.SIGTERM)

    times = 0 if is_first else math.inf
    with (
        failing("step-00000004-gen-0/__1_0.distcp", times=times) as failed,
        patch.object(io_retry, "print_warning", print_warning),
        pytest.raises(StorageError) as ended,
    ):
        run_worker_with_orders(directory, orders, when_paused, *overrides)
    return str(ended.value), len(failed)


def run_worker_with_fault(
    fault: Fault, directory: str, orders: Orders, when_paused: Sequence[WhenPaused], *overrides: str
) -> RankResult:
    """As `run_worker_with_orders`, with a fault."""
    with faulty_runs.installed(fault, []):
        return run_worker_with_orders(directory, orders, when_paused, *overrides)


def run_worker_with_save_by_clock(
    asked_in: int, directory: str, orders: Orders, when_paused: Sequence[WhenPaused], *overrides: str
) -> RankResult:
    """As `run_worker_with_orders`; in the step `asked_in` the clock requests a save."""
    num_calls = 0

    def is_due_by_clock(manager: CheckpointManager) -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls == asked_in and manager._world.is_first

    with patch.object(CheckpointManager, "is_due_by_clock", is_due_by_clock):
        return run_worker_with_orders(directory, orders, when_paused, *overrides)


def run_worker_with_orders(
    directory: str, orders: Orders, when_paused: Sequence[WhenPaused], *overrides: str
) -> RankResult:
    """A run that gets commands in the n-th step it starts and runs them in that step; and others in the n-th pause."""
    cfg = tiny(*overrides, directory=directory)
    run, num_steps_started, state = locate(cfg), 0, ""
    steps_started_at_pauses: list[int] = []
    compute: Callable[..., None] = getattr(train, "forward_backward")  # noqa: B009  (which train only imports)
    original_finish_run, original_wait, original_waits, original_look = (
        train.finish_run,
        Watcher.wait,
        Watcher.waits,
        Watcher.look,
    )
    look_lock = Lock()

    def forward_backward(parts: Parts, *arguments: Any, **options: Any) -> None:
        nonlocal num_steps_started
        num_steps_started += 1
        if parts.world.is_first:
            send(run, *orders.get(num_steps_started, ()))
        compute(parts, *arguments, **options)

    def look(inbox: Watcher) -> None:
        with look_lock:
            original_look(inbox)

    def waits(inbox: Watcher) -> bool:
        """Reads what is on disk now, not what the watcher thread found last."""
        inbox.look()
        return original_waits(inbox)

    def wait(inbox: Watcher, timeout_s: float) -> bool:
        has_command = original_wait(inbox, timeout_s)
        number = len(steps_started_at_pauses)
        if number < len(when_paused) and num_steps_started not in steps_started_at_pauses:
            steps_started_at_pauses.append(num_steps_started)
            when_paused[number](run)
        return has_command

    def finish_run(left: Any, ending: Any) -> Any:
        nonlocal state
        state = digest(left.parts.tensors())
        return original_finish_run(left, ending)

    with (
        patch.multiple(train, forward_backward=forward_backward, finish_run=finish_run),
        patch.object(apply, "PAUSE_POLL_S", 0.05),
        patch.multiple(Watcher, look=look, waits=waits, wait=wait),
        patch.multiple(watcher, LOOK_EVERY_S=0.05, WORD_EVERY_S=0.0),
    ):
        code = train.run_worker(cfg)
    return RankResult(code, state, num_steps_started, steps_started_at_pauses)


@dataclass(frozen=True)
class FinishedRun:
    """A run on all ranks, and its run directory."""

    run: RunDir
    result: RankResult
    log: list[Event]

    @property
    def records(self) -> list[StepRecord]:
        return events_of(StepRecord, self.log)

    @property
    def last_of_step(self) -> dict[int, StepRecord]:
        """The records that led to the present weights."""
        return {record.step: record for record in self.records}


def run_with_orders(
    ranks: Pool,
    directory: Path,
    name: str,
    orders: Orders,
    *overrides: str,
    when_paused: Sequence[WhenPaused] = (),
    case: Callable[..., RankResult] = run_worker_with_orders,
) -> FinishedRun:
    """A run on two ranks, which must end equally; replaying its log must give its decisions."""
    all_overrides = (f"run.name={name}", *OVERRIDES, *overrides)
    results = ranks.run(2, case, str(directory), orders, when_paused, *all_overrides)
    assert len({(result.code, result.state, result.num_steps_started) for result in results}) == 1
    run = RunDir(directory / name)
    log = list(event_json.read(run.events))
    check_replay(log, *OVERRIDES, *overrides)
    return FinishedRun(run, results[0], log)


def check_answers(finished: FinishedRun, *orders: Order) -> list[Intervention]:
    """The logged interventions of a run; asserts that no command is pending and no incident was opened."""
    written = commands.interventions(finished.run)
    assert written == events_of(Intervention, finished.log)
    assert [(event.who, event.reason) for event in written] == [(WHO, WHY)] * len(orders)
    assert [event.changes["command"] for event in written] == [in_words(order) for order in orders]
    assert all(0 <= event.time - event.changes["asked_time"] < 60 for event in written)
    assert not commands.waiting(finished.run)
    assert {action.incident for action in events_of(Action, finished.log)} <= {0}
    return written


def step_results(records: Sequence[StepRecord]) -> dict[int, tuple[float, float, float, int]]:
    """The exact results of each step."""
    return {record.step: (record.loss, record.grad_norm, record.lr, record.cursor) for record in records}


def restart_worker_with_orders(
    directory: str, orders: Orders, when_paused: Sequence[WhenPaused], *overrides: str
) -> RankResult:
    """As `run_worker_with_orders`, as the launcher starts the ranks again inside the job."""
    with patch.dict(os.environ, {stop_requests.RESTART_COUNT: "1"}):
        return run_worker_with_orders(directory, orders, when_paused, *overrides)


def test_a_pause_holds_when_the_ranks_start_again_inside_the_job(ranks: Pool, tmp_path: Path) -> None:
    paused = run_with_orders(ranks, tmp_path, "victim", {3: [Pause()]}, "train.num_steps=6", when_paused=[stop])
    assert paused.result.code == EXIT_INTERRUPTED
    paused.run.stop.unlink()
    restart = RunRestarted(time=time.time(), iteration=paused.log[-1].iteration, step=4, number=1, reason="rank 1 died")
    append_line(paused.run.events, to_json(restart))

    again = partial(run_with_orders, when_paused=[resume], case=restart_worker_with_orders)
    resumed = again(ranks, tmp_path, "victim", {}, "train.num_steps=6")
    (*_, start) = [place for place, event in enumerate(resumed.log) if isinstance(event, RunStarted)]
    begun = resumed.log[start]
    assert isinstance(begun, RunStarted)
    later: list[Event] = [event for event in resumed.log[start:] if isinstance(event, Intervention | StepRecord)]
    kept, goes_on = later[:2]
    assert isinstance(kept, Intervention)
    assert (kept.changes["command"], kept.who, kept.reason) == ("pause", WHO, WHY)
    assert isinstance(goes_on, Intervention)
    assert goes_on.changes["command"] == "resume"
    steps = [record.step for record in events_of(StepRecord, later)]
    assert steps == [*range(begun.step + 1, 7)]
    assert resumed.result.code == 0


@pytest.fixture(scope="module")
def control(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run without commands."""
    finished = run_with_orders(ranks, tmp_path_factory.mktemp("control"), "control", {})
    assert finished.result.code == 0
    assert check_answers(finished) == []
    return finished


def test_a_run_with_skipped_batches_equals_one_that_excluded_them(ranks: Pool, tmp_path: Path) -> None:
    """Batches 7 and 8 are excluded from the start, so that the next three are 5, 6 and 9."""
    run = RunDir(tmp_path / "victim")
    run.path.mkdir()
    Ledger.load(run.ledger).exclude(7, 8, "known before")
    num_steps = "train.num_steps=9"
    finished = run_with_orders(ranks, tmp_path, "victim", {4: [Skip(num_batches=3)]}, num_steps)
    (answer,) = check_answers(finished, Skip(num_batches=3))
    assert answer.iteration == 4 + LAG == 5
    assert (answer.changes["num_batches"], answer.changes["batches"]) == (3, [5, 9])
    entry = list(Ledger.load(run.ledger))[1]
    assert isinstance(entry, Exclusion)
    assert (entry.first, entry.last) == (5, 9)
    assert WHY in entry.reason
    assert [record.cursor for record in finished.records] == [*range(5), *range(10, 14)]
    check_twin(ranks, tmp_path, finished, num_steps)


def check_twin(ranks: Pool, directory: Path, finished: FinishedRun, *overrides: str) -> FinishedRun:
    """A run that starts with the final ledger reads the same batches and ends bit-identical."""
    faulty_runs.copy_ledger(finished.run.path, directory / "twin")
    twin = run_with_orders(ranks, directory, "twin", {}, *overrides)
    assert twin.result.code == finished.result.code == 0
    assert twin.result.state == finished.result.state
    assert step_results(twin.records) == step_results(list(finished.last_of_step.values()))
    return twin


def test_batches_are_excluded_and_re_included_by_their_index(ranks: Pool, tmp_path: Path) -> None:
    """Batch 7 is re-included after the run has passed it, batch 14 before."""
    skips, read = [SkipBatches(first=6, last=8), SkipBatches(first=13, last=15)], SkipBatches(first=2, last=5)
    unskips = [UnskipBatches(first=7, last=7), UnskipBatches(first=14, last=14)]
    num_steps = "train.num_steps=14"
    finished = run_with_orders(ranks, tmp_path, "victim", {3: [*skips, read], 8: unskips}, num_steps)
    *done, refused, passed, ahead = check_answers(finished, *skips, read, *unskips)
    assert [event.changes["batches"] for event in done] == [[6, 8], [13, 15]]
    assert refused.changes[REFUSED].startswith("skip: the run is at batch 4 and has read 2 of batches 2..5; undo that")
    assert (passed.iteration, passed.changes["batches"], ahead.changes["batches"]) == (9, [[7, 7]], [[14, 14]])
    cursors = [record.cursor for record in finished.records]
    assert cursors == [*range(6), *range(9, 12), 7, 12, 14, *range(16, 18)]
    assert [action.kind for action in events_of(Action, finished.log)] == [
        *(ActionKind.skip, ActionKind.skip),
        *(ActionKind.include, ActionKind.include),
    ]
    check_twin(ranks, tmp_path, finished, num_steps)


def test_a_batch_that_was_given_back_and_damages_the_weights_is_excluded_again(ranks: Pool, tmp_path: Path) -> None:
    """Batches 5 to 8 are consumed after batch 12. Batch 7 makes a weight NaN each time it is consumed."""
    skipped, given_back = SkipBatches(first=5, last=8), UnskipBatches(first=5, last=8)
    finished = run_with_orders(
        ranks,
        tmp_path,
        "victim",
        {2: [skipped], 8: [given_back]},
        case=partial(run_worker_with_fault, Fault("weights", 1, factor=math.nan, batch=7)),
    )
    assert finished.result.code == 0
    (restored,) = [each for each in events_of(Outcome, finished.log) if each.kind in RESTORES]
    assert restored.succeeded
    (action,) = [each for each in events_of(Action, finished.log) if each.kind is restored.kind]
    first, last = action.exclude
    assert 5 <= first <= 7 <= last <= 8, "no other batch is excluded"
    check_twin(ranks, tmp_path, finished)


def test_a_rollback_excludes_the_named_batches(ranks: Pool, tmp_path: Path) -> None:
    early, late = Rollback(to_step=10, exclude=(6, 12)), Rollback(to_step=10, exclude=(10, 12))
    finished = run_with_orders(ranks, tmp_path, "victim", {13: [early, late]})
    refused, answer = check_answers(finished, early, late)
    assert "was trained on batches up to 7, and batch 6 is to be excluded" in refused.changes[REFUSED]
    assert (answer.changes["target"], answer.changes["batches"]) == ("step-00000008-gen-0", [10, 12])
    assert [record.cursor for record in finished.records][14:] == [*range(8, 10), *range(13, NUM_STEPS + 3)]
    check_twin(ranks, tmp_path, finished)


def test_a_rolled_back_run_ends_like_the_control_run(ranks: Pool, control: FinishedRun, tmp_path: Path) -> None:
    finished = run_with_orders(ranks, tmp_path, "victim", {13: [Rollback(to_step=10)]})
    (answer,) = check_answers(finished, Rollback(to_step=10))
    applied_at, target = 13 + LAG, "step-00000008-gen-0"
    assert answer.iteration == applied_at
    done = {key: answer.changes[key] for key in ("to_step", "target", "steps_lost", "step")}
    assert done == {"to_step": 10, "target": target, "steps_lost": applied_at - 8, "step": 8}
    (outcome,) = events_of(Outcome, finished.log)
    assert (outcome.kind, outcome.incident, outcome.target) == (ActionKind.rollback, 0, target)

    saved = [event.directory for event in events_of(CheckpointSaved, finished.log)]
    older, abandoned, newer = saved[:2], saved[2:3], saved[3:]
    assert (older[-1], abandoned) == (target, ["step-00000012-gen-0"])
    assert newer == [f"step-{step:08d}-gen-1" for step in (12, 16, NUM_STEPS)]
    health = {each.name: each.health for each in catalog.list_checkpoints(finished.run.checkpoints)}
    assert [name for name in saved if health.get(name, Health.tainted) is not Health.tainted] == [*older, *newer]
    assert state_on_disk(finished.run.checkpoints / newer[-1]).generation == 1

    assert finished.result.code == 0
    assert [record.step for record in finished.records] == [*range(1, applied_at + 1), *range(9, NUM_STEPS + 1)]
    assert finished.result.state == control.result.state
    assert step_results(list(finished.last_of_step.values())) == step_results(control.records)


@pytest.mark.parametrize("asked_in", [12, 14], ids=["snapshot waits for its report", "request is in flight"])
def test_a_requested_save_survives_a_rollback(ranks: Pool, tmp_path: Path, asked_in: int) -> None:
    """The rollback drops the snapshot, or the report with the request; the next update is saved instead.

    No checkpoint is good: 9 clean steps make one, 6 were undone, and 8 follow.
    """
    case = partial(run_worker_with_save_by_clock, asked_in)
    order = Rollback(to_step=8)
    overrides = ("train.num_steps=16", "checkpoint.every_steps=8", "checkpoint.good_after_steps=9")
    finished = run_with_orders(ranks, tmp_path, "victim", {13: [order]}, *overrides, case=case)
    (answer,) = check_answers(finished, order)
    assert (answer.iteration, answer.changes["step"]) == (13 + LAG, 8)
    saved = [event.directory for event in events_of(CheckpointSaved, finished.log)]
    expected = [(8, 0), (9, 1), (16, 1)]
    assert saved == [catalog.name_of(step, generation) for step, generation in expected]
    assert "good" not in [event.health for event in events_of(CheckpointJudged, finished.log)]


def test_learning_rate_falls_at_once_and_rises_slowly(ranks: Pool, control: FinishedRun, tmp_path: Path) -> None:
    orders = [Rate(factor=0.5), Rate(factor=1.0)]
    num_steps = 13
    overrides = (f"train.num_steps={num_steps}", "checkpoint.every_steps=7")
    finished = run_with_orders(ranks, tmp_path, "victim", {6: orders[:1], 9: orders[1:]}, *overrides)
    lowered, restored = check_answers(finished, *orders)
    assert (lowered.iteration, restored.iteration) == (6 + LAG, 9 + LAG)
    assert (lowered.changes["factor"], restored.changes["factor"]) == (0.5, 1.0)
    assert [action.lr_scale for action in events_of(Action, finished.log)] == [0.5, 1.0]
    scheduled = control.last_of_step
    shares = {record.iteration: record.lr / scheduled[record.step].lr for record in finished.records}
    assert all(share == 1.0 for iteration, share in shares.items() if iteration <= lowered.iteration)
    between = range(lowered.iteration + 1, restored.iteration + 1)
    assert [shares[iteration] for iteration in between] == pytest.approx([0.5] * len(between))
    rising = [shares[iteration] for iteration in range(restored.iteration + 1, num_steps + 1)]
    assert rising == pytest.approx([1 - 0.5 * (1 - LR_RECOVERY_RATE) ** (nth + 1) for nth in range(len(rising))])
    assert not [finding for finding in events_of(Finding, finished.log) if finding.kind is FindingKind.lr_jump]
    assert finished.result.code == 0
    found = replay_last_step(ranks, finished.run, *overrides)
    assert (found["checkpoint"], found["num_on_the_way"]) == ("step-00000007-gen-0", num_steps - 8)
    assert (found["left_the_log_at"], found["nature"]) == (None, "deterministic"), "each step has its own rate"


def replay_last_step(ranks: Pool, run: RunDir, *overrides: str) -> dict[str, Any]:
    cfg = tiny(*OVERRIDES, *overrides, f"run.name={run.path.name}", directory=str(run.path.parent))
    log = history.read(run.events)
    path = choose_path(run, log, last_recorded_iteration(run.events))
    request = plan_replay(run, cfg, log, path, ranks=2, report=run.path / "replay.json")
    assert ranks.run(2, run_replay_worker, request, replay_config(cfg)) == [0, 0]
    result: dict[str, Any] = json.loads(request.report.read_text())
    return result


def test_a_lowered_lr_survives_a_rollback_and_a_lost_checkpoint(
    ranks: Pool, control: FinishedRun, tmp_path: Path
) -> None:
    """The weights of step 8 are older than the command; it still holds, applies at once, and causes no finding."""
    orders: Orders = {9: [Rate(factor=0.5)], 12: [Rollback(to_step=8)], 13 + LAG: [Pause()]}
    finished = run_with_orders(ranks, tmp_path, "victim", orders, when_paused=[stop])
    check_answers(finished, Rate(factor=0.5), Rollback(to_step=8), Pause())
    shutil.rmtree(finished.run.checkpoints / f"step-{finished.records[-1].step:08d}-gen-1")
    again = run_with_orders(ranks, tmp_path, "victim", {})
    (_, resumed) = events_of(RunStarted, again.log)
    assert resumed.resumed_from == "step-00000008-gen-0"
    later = [record for record in again.records if record.iteration > 9 + LAG]
    assert [record.step for record in later] == [11, 12, 13, 9, 10, *range(9, NUM_STEPS + 1)]
    scheduled = control.last_of_step
    assert [record.lr / scheduled[record.step].lr for record in later] == pytest.approx([0.5] * len(later))
    assert not [finding for finding in events_of(Finding, again.log) if finding.kind is FindingKind.lr_jump]


def test_fp8_is_switched_off_and_on_by_commands(ranks: Pool, tmp_path: Path) -> None:
    orders: Orders = {2: [Precision(kind="bf16")], 5: [Precision(kind="fp8")]}
    finished = run_with_orders(ranks, tmp_path, "victim", orders, "precision=fp8_emulated", "train.num_steps=8")
    check_answers(finished, Precision(kind="bf16"), Precision(kind="fp8"))
    left, back = 2 + LAG, 5 + LAG
    assert [record.iteration for record in finished.records if not record.in_fp8] == [*range(left + 1, back + 1)]
    assert [(action.in_fp8, action.until) for action in events_of(Action, finished.log)] == [
        (False, None),
        (True, None),
    ]


MIXED = ("data=mixture", "data.phases=[]", "data.sources.text.kind=synthetic")


def test_an_excluded_source_is_not_read_and_the_last_one_is_kept(ranks: Pool, tmp_path: Path) -> None:
    orders = [ExcludeSource(source="text"), ExcludeSource(source="synthetic")]
    finished = run_with_orders(ranks, tmp_path, "victim", {3: orders}, *MIXED, "train.num_steps=7")
    excluded, refused = check_answers(finished, *orders)
    applied_at = 3 + LAG
    assert excluded.iteration == refused.iteration == applied_at
    assert REFUSED not in excluded.changes
    assert refused.changes[REFUSED] == "exclude: without 'synthetic' no source would have a weight above 0"
    for record in finished.records:
        present = {"synthetic"} if record.iteration > applied_at else {"synthetic", "text"}
        assert set(record.source_losses) == present
        assert {name for name, rows in record.batch["rows"].items() if rows} == present
    assert finished.result.code == 0
    assert [record.step for record in finished.records] == list(range(1, 8))


STRATIFIED = (
    *("data.synthetic.num_samples=1000", "data.synthetic.rare_tokens=4", "data.synthetic.rare_probability=0.002"),
    *("data.synthetic.zipf_exponent=0", "data.stratify.rare_below=90", "data.stratify.max_per_batch=1"),
)


@pytest.mark.parametrize("limits", [(), STRATIFIED], ids=["plain", "stratified"])
def test_reweighted_sources_hold_after_a_resume(ranks: Pool, tmp_path: Path, limits: tuple[str, ...]) -> None:
    mixed = (*MIXED, *limits, "train.num_steps=12")
    order = Reweight(weights={"text": 3.0, "synthetic": 1.0})
    orders: Orders = {3: [order], 6: [Pause()]}
    stopped = run_with_orders(ranks, tmp_path, "victim", orders, *mixed, when_paused=[stop])
    answer, _ = check_answers(stopped, order, Pause())
    assert (answer.iteration, answer.changes["weights"]) == (3 + LAG, {"text": 3.0, "synthetic": 1.0})
    finished = run_with_orders(ranks, tmp_path, "victim", {}, *mixed)
    rows = [record.batch["rows"] for record in finished.records[3 + LAG :]]
    share = sum(each.get("text", 0) for each in rows) / sum(sum(each.values()) for each in rows)
    assert abs(share - 0.75) < 0.02
    check_twin(ranks, tmp_path, finished, *mixed)


def test_checkpoint_pause_and_rejected_commands_change_nothing(
    ranks: Pool, control: FinishedRun, tmp_path: Path
) -> None:
    early, unknown = Rollback(to_step=2), ExcludeSource(source="web")
    profile, no_rank = Profile(num_steps=2, ranks=(1,)), Profile(num_steps=2, ranks=(0, 7))
    orders: Orders = {2: [early, unknown], 5: [no_rank, profile], 8: [SaveCheckpoint()], 12: [Pause()]}
    finished = run_with_orders(ranks, tmp_path, "victim", orders, when_paused=[resume])
    no_target, no_source, no_such_rank, profiled, saved, paused, resumed = check_answers(
        finished, early, unknown, no_rank, profile, SaveCheckpoint(), Pause(), Resume()
    )
    assert "no rank 7; the run has ranks 0 to 1" in no_such_rank.changes[REFUSED]
    folder = finished.run.profiles / f"iteration-{5 + LAG + 1:08d}"
    assert profiled.changes["folder"] == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["rank-1.kernels.txt", "rank-1.trace.json.gz"]
    assert "no checkpoint at or before step 2" in no_target.changes[REFUSED]
    assert "no source 'web'" in no_source.changes[REFUSED]
    assert not [event for event in (saved, paused, resumed) if REFUSED in event.changes]
    assert not events_of(Action, finished.log)

    assert saved.iteration == 8 + LAG
    (checkpoint,) = [
        event for event in events_of(CheckpointSaved, finished.log) if event.step not in (4, 8, 12, 16, NUM_STEPS)
    ]
    assert checkpoint.step == saved.iteration + 1
    assert state_on_disk(finished.run.checkpoints / checkpoint.directory).step == checkpoint.step

    assert paused.iteration == resumed.iteration == 12 + LAG
    assert finished.result.steps_started_at_pauses == [12 + LAG]
    places = [finished.log.index(event) for event in (paused, resumed)]
    assert not events_of(StepRecord, finished.log[slice(*places)]), "no step runs in between"
    assert finished.result.code == 0
    assert finished.result.state == control.result.state
    assert step_results(finished.records) == step_results(control.records)


def test_a_failed_restore_and_a_ledger_that_cannot_be_written_change_nothing(
    ranks: Pool, control: FinishedRun, tmp_path: Path
) -> None:
    """The rollback comes while the snapshot of step 8 waits for its report: that save and later ones are kept. Of the
    skip, which comes later, all ranks learn that only rank 0 could not record it."""
    when_paused = [damage_checkpoint_and_roll_back, break_ledger_and_skip]
    finished = run_with_orders(ranks, tmp_path, "victim", {7: [Pause()], 13: [Pause()]}, when_paused=when_paused)
    restore, skip = Rollback(to_step=4), Skip(num_batches=3)
    _, not_restored, _, _, not_skipped, _ = check_answers(finished, Pause(), restore, Resume(), Pause(), skip, Resume())
    assert not_restored.iteration == 7 + LAG == 8
    assert not_restored.changes[REFUSED] == "there is no state to restore"
    assert "Is a directory" in not_skipped.changes[REFUSED]
    kept = {each.name for each in catalog.list_checkpoints(finished.run.checkpoints)}
    assert kept == {f"step-{step:08d}-gen-0" for step in (8, 12, 16, NUM_STEPS)}
    assert (finished.result.code, finished.result.state) == (0, control.result.state), "no rank skipped anything"


def test_a_rollback_that_fails_halfway_halts_the_run(ranks: Pool, tmp_path: Path) -> None:
    finished = run_with_orders(
        ranks, tmp_path, "victim", {8: [Pause()]}, when_paused=[roll_back_to_4], case=run_worker_with_failing_restore
    )
    _, refused = check_answers(finished, Pause(), Rollback(to_step=4))
    assert "failed halfway" in refused.changes[REFUSED]
    assert finished.result.code == 3
    ended = finished.log[-1]
    assert isinstance(ended, RunEnded)
    assert "rollback to step-00000004-gen-0 failed halfway" in ended.reason
    assert max(each.step for each in catalog.list_checkpoints(finished.run.checkpoints)) == 8, (
        "partially restored weights are not saved"
    )


def test_a_stop_while_a_rollback_waits_for_storage_ends_the_run_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    """`checkpoint.retry_s` is 300: the ranks would wait for longer than a test may take."""
    arguments = (str(tmp_path), {8: [Pause()]}, [roll_back_to_4], "run.name=victim", *OVERRIDES)
    (first, num_first), (second, num_second) = ranks.run(2, run_until_stopped_in_rollback, *arguments)
    run = RunDir(tmp_path / "victim")
    assert first == second
    assert first.startswith(f"{run.checkpoints}/step-00000004-gen-0: cannot be read on ")
    assert (num_first, num_second) == (0, 1)
    log = list(event_json.read(run.events))
    assert [event.kind for event in events_of(Action, log)] == [ActionKind.rollback]
    assert not events_of(Outcome, log), "the policy does not decide on a failed rollback"
    usable = [each for each in catalog.list_checkpoints(run.checkpoints) if each.health is not Health.tainted]
    assert [each.step for each in usable] == [4], "weights that are partly restored are not saved"
    again = ranks.run(2, run_worker_with_orders, str(tmp_path), {}, [resume], "run.name=victim", *OVERRIDES)
    assert [result.code for result in again] == [0, 0]


def test_a_paused_run_can_be_stopped_and_resumed(ranks: Pool, control: FinishedRun, tmp_path: Path) -> None:
    finished = run_with_orders(ranks, tmp_path, "victim", {8: [Pause()]}, when_paused=[stop])
    (paused,) = check_answers(finished, Pause())
    assert finished.result.code == 75
    assert finished.result.num_steps_started == paused.iteration == 8 + LAG
    assert finished.result.steps_started_at_pauses == [8 + LAG]
    ended = finished.log[-1]
    assert isinstance(ended, RunEnded)
    assert (ended.exit_code, ended.step, ended.reason) == (75, paused.iteration, "stopped: STOP file")
    again = run_with_orders(ranks, tmp_path, "victim", {})
    assert again.result.code == 0
    assert again.result.state == control.result.state
    assert step_results(again.records) == step_results(control.records)
