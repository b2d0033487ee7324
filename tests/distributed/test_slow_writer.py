"""A checkpoint writer that takes long: no rank counts as hung, and none waits for it while the others do not."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from harness import train
from harness.checkpoint import catalog
from harness.checkpoint.manager import CheckpointManager
from harness.checkpoint.ring import Ring
from harness.checkpoint.writer_thread import WriterThread
from harness.config.errors import EXIT_DONE, EXIT_HALTED
from harness.control.commands import Rollback
from harness.core.events import ReducedRecord
from harness.core.state import RunState
from harness.distributed.collectives import all_reduce_sum
from harness.distributed.world import connect, disconnect
from harness.telemetry.heartbeat import MOVING, Heartbeat, Phase
from tests.composed import load
from tests.distributed import cases, test_operator_commands, test_trials
from tests.distributed.faulty_runs import Fault, installed
from tests.distributed.pool import Pool

TIMEOUT_S = 5.0
"""Of a collective."""
DELETION_S = TIMEOUT_S + 3.0
STEPS = ("run.name=a", "model.num_layers=1", "train.num_steps=20", "checkpoint.every_steps=4", "checkpoint.keep=100")


@contextmanager
def recorded_phases(phases: list[Phase]) -> Iterator[None]:
    """Record the phase of the heartbeat whenever the training loop waits for a thread of the checkpoint manager."""
    beats: list[Heartbeat] = []
    enter: Callable[[Heartbeat], Heartbeat] = Heartbeat.__enter__
    wait: Callable[..., bool] = WriterThread.wait

    def recorded_enter(heartbeat: Heartbeat) -> Heartbeat:
        beats.append(heartbeat)
        return enter(heartbeat)

    def recorded_wait(writer: WriterThread[Any], within_s: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            phases.append(beats[-1]._phase)
        return wait(writer, within_s)

    with patch.object(Heartbeat, "__enter__", recorded_enter), patch.object(WriterThread, "wait", recorded_wait):
        yield


def halt(directory: str) -> tuple[int, list[Phase]]:
    """A run that halts at its first rejected update."""
    phases: list[Phase] = []
    with installed(Fault("weights", 0, factor=math.nan, iteration=6), []), recorded_phases(phases):
        code = train.run_worker(cases.tiny(*STEPS, "sentinel.halt_after_refused=1", directory=directory))
    return code, phases


def roll_back(directory: str) -> tuple[int, list[Phase]]:
    """A run that an operator rolls back."""
    phases: list[Phase] = []
    orders = {12: [Rollback(to_step=4)]}
    with recorded_phases(phases):
        result = test_operator_commands.run_worker_with_orders(directory, orders, (), *STEPS)
    return result.code, phases


def try_remedies(directory: str) -> tuple[int, list[Phase]]:
    """A run with a trial."""
    phases: list[Phase] = []
    overrides = ("run.name=a", *test_trials.STEPS, *test_trials.TRIALS)
    with installed(Fault("weights", 0, factor=30.0, iteration=test_trials.DAMAGE_AT), []), recorded_phases(phases):
        code = train.run_worker(cases.tiny(*overrides, directory=directory))
    return code, phases


@pytest.mark.full
@pytest.mark.parametrize(("case", "expected"), [(halt, EXIT_HALTED), (roll_back, EXIT_DONE), (try_remedies, EXIT_DONE)])
def test_the_loop_waits_for_the_writer_only_in_phases_that_may_take_long(
    ranks: Pool, tmp_path: Path, case: Callable[[str], tuple[int, list[Phase]]], expected: int
) -> None:
    """In other phases the launcher takes a rank without progress for hung after `launch.hang_after_s`."""
    ((code, phases),) = ranks.run(1, case, str(tmp_path))
    assert code == expected
    assert phases
    assert not set(phases) & MOVING


def save_while_rank_0_deletes(directory: str) -> bool:
    with manager_that_deletes(directory) as (checkpoints, state, step):
        step(checkpoints, state)
        all_reduce_sum(torch.zeros(1))  # as the next forward pass
        return checkpoints.save_last(state, is_done=False)


def roll_back_while_rank_0_deletes(directory: str) -> list[tuple[str, int]]:
    with manager_that_deletes(directory) as (checkpoints, _, _):
        return checkpoints.rollback_targets(until_step=2)


def taint_while_rank_0_deletes(directory: str) -> None:
    with manager_that_deletes(directory) as (checkpoints, _, _):
        checkpoints.taint_since(1, "a test")


Step = Callable[[CheckpointManager, RunState], None]


@contextmanager
def manager_that_deletes(directory: str) -> Iterator[tuple[CheckpointManager, RunState, Step]]:
    """A manager after three saves, while rank 0 deletes one of the checkpoints for longer than a collective waits."""
    overrides = ("checkpoint.keep=1", "checkpoint.every_steps=1", f"parallel.timeout_s={TIMEOUT_S}")
    cfg = load([*cases.TINY, "train.num_steps=100", *overrides])
    world, tensors, state = connect(cfg.parallel), {"model.weight": torch.zeros(3)}, RunState()
    ring = Ring(tensors, cfg=cfg.checkpoint.ring, world=world)
    checkpoints = CheckpointManager(cfg, Path(directory), ring=ring, world=world)
    delete, has_begun = catalog.delete, threading.Event()

    def delete_slowly(path: Path) -> bool:
        has_begun.set()
        time.sleep(DELETION_S)
        return delete(path)

    with patch.object(catalog, "delete", delete_slowly):
        for _ in range(3):
            take_step(checkpoints, state)
        if world.is_first:
            assert has_begun.wait(TIMEOUT_S)
        yield checkpoints, state, take_step
    checkpoints.close()
    disconnect()


def take_step(checkpoints: CheckpointManager, state: RunState) -> None:
    """One update with a save, which the writer starts."""
    state.advance(next_cursor=state.cursor + 1, tokens=10)
    checkpoints.snapshot_if_due(state)
    record = ReducedRecord(
        time=0.0,
        iteration=state.iteration,
        step=state.step,
        cursor=state.cursor,
        tokens=state.tokens,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        refused=False,
        stop_requested=False,
    )
    checkpoints.on_step_record(record, state)
    checkpoints.write_queued()


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (save_while_rank_0_deletes, True),
        (roll_back_while_rank_0_deletes, [("step-00000001-gen-0", 1)]),
        (taint_while_rank_0_deletes, None),
    ],
)
def test_no_rank_waits_alone_for_a_slow_deletion(
    ranks: Pool, tmp_path: Path, case: Callable[[str], Any], expected: Any
) -> None:
    assert ranks.run(2, case, str(tmp_path)) == [expected] * 2
