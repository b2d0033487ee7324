"""The log as a tree of states: the state each step started from, and the path to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.replay.history import (
    AcceptedLevel,
    History,
    accepted_on_path,
    find_path,
    guilty_step,
    read,
    read_path,
)
from harness.config.errors import ConfigError
from harness.core.event_json import to_json
from harness.core.events import (
    Action,
    ActionKind,
    CheckpointSaved,
    Event,
    Finding,
    FindingKind,
    Outcome,
    RunStarted,
    StepRecord,
)


def started(iteration: int, resumed_from: str | None = None, size: int = 2) -> RunStarted:
    return RunStarted(time=0.0, iteration=iteration, world_size=size, num_steps=100, step=0, resumed_from=resumed_from)


def step(iteration: int, *, refused: bool = False, cursor: int | None = None) -> StepRecord:
    return StepRecord(
        time=0.0,
        iteration=iteration,
        step=iteration,
        cursor=iteration - 1 if cursor is None else cursor,
        tokens=0,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens_per_s=1.0,
        refused=refused,
        stop_requested=False,
        step_time_s=1.0,
        flops_per_s=1.0,
    )


def saved(iteration: int) -> CheckpointSaved:
    return CheckpointSaved(time=0.0, iteration=iteration, step=iteration, directory=f"at-{iteration}", seconds=0.0)


def outcome(iteration: int, target: str, kind: ActionKind = ActionKind.rewind, *, succeeded: bool = True) -> Outcome:
    return Outcome(time=0.0, iteration=iteration, kind=kind, incident=1, succeeded=succeeded, step=0, target=target)


def action(iteration: int, onset: int, incident: int = 1, *, kind: ActionKind = ActionKind.skip) -> Action:
    return Action(time=0.0, iteration=iteration, kind=kind, step=0, incident=incident, reason="", onset=onset)


def finding(iteration: int, onset: int, kind: FindingKind = FindingKind.loss_spike) -> Finding:
    return Finding(time=0.0, iteration=iteration, kind=kind, step=0, onset=onset, value=1, bound=1, message="")


ReadLog = Callable[[list[Event]], History]


@pytest.fixture
def read_log(tmp_path: Path) -> ReadLog:
    """Write a log and read it as a history."""

    def write(log: list[Event]) -> History:
        path = tmp_path / "events.jsonl"
        path.write_text("".join(f"{to_json(event)}\n" for event in log))
        return read(path)

    return write


def iterations(history: History, iteration: int, *available: str) -> tuple[str | None, list[int]]:
    path = find_path(history, iteration, available)
    return path.checkpoint, [record.iteration for record in read_path(history, path)]


PLAIN: list[Event] = [started(0), *map(step, range(1, 5)), saved(4), *map(step, range(5, 9)), saved(8), step(9)]


def test_a_resume_from_memory_continues_from_the_snapshot(read_log: ReadLog) -> None:
    log: list[Event] = [*PLAIN, started(9, "snapshot of iteration 6"), step(10)]
    assert iterations(read_log(log), 10, "at-4", "at-8") == ("at-4", [5, 6, 10])


def test_path_starts_at_the_newest_available_checkpoint(read_log: ReadLog) -> None:
    history = read_log(PLAIN)
    assert iterations(history, 9, "at-4", "at-8") == ("at-8", [9])
    assert iterations(history, 9, "at-4") == ("at-4", [5, 6, 7, 8, 9])
    assert iterations(history, 3, "at-4", "at-8") == (None, [1, 2, 3])
    assert iterations(history, 8, "at-8") == (None, [*range(1, 9)]), "saved after the step"
    assert find_path(history, 9, ["at-4", "at-8"]).older == "at-4"
    assert find_path(history, 9, ["at-4"]).older is None
    assert find_path(history, 9, ["at-4"]).num_iterations == 5
    assert find_path(history, 9, ["at-4"]).has_older
    assert not find_path(history, 9, []).has_older


def test_rejected_updates_are_skipped_except_the_last_step(read_log: ReadLog) -> None:
    history = read_log([started(0), step(1), step(2, refused=True), step(3), step(4, refused=True)])
    assert iterations(history, 4) == (None, [1, 3, 4])


@pytest.mark.parametrize("target", ["snapshot of iteration 4", "at-4", "at-4; at-8/manifest.json: hash differs"])
def test_path_follows_a_restore(target: str, read_log: ReadLog) -> None:
    history = read_log([*PLAIN, outcome(9, target), step(10), step(11)])
    assert iterations(history, 11, "at-4", "at-8") == ("at-4", [10, 11])
    assert iterations(history, 11) == (None, [1, 2, 3, 4, 10, 11])
    assert iterations(history, 9, "at-4", "at-8") == ("at-8", [9]), "the undone step can still be replayed"
    assert find_path(history, 11, ["at-4", "at-8"]).older is None, "a checkpoint of an undone step is not on the path"


def test_path_follows_restores_one_after_another(read_log: ReadLog) -> None:
    """The second one comes before a step, the third one goes back behind the others, and iterations were in flight."""
    twice: list[Event] = [outcome(9, "at-8"), outcome(9, "snapshot of iteration 6"), *map(step, range(10, 14))]
    history = read_log([*PLAIN, *twice, outcome(15, "snapshot of iteration 11"), *map(step, range(16, 19))])
    assert iterations(history, 18, "at-4", "at-8") == ("at-4", [5, 6, 10, 11, 16, 17, 18])
    history = read_log([*PLAIN, *twice, outcome(15, "snapshot of iteration 5"), *map(step, range(16, 19))])
    assert iterations(history, 18, "at-4", "at-8") == ("at-4", [5, 16, 17, 18])


def test_failed_restore_is_ignored(read_log: ReadLog) -> None:
    log: list[Event] = [*PLAIN, outcome(9, "", succeeded=False), step(10)]
    assert iterations(read_log(log), 10, "at-8") == ("at-8", [9, 10])


def test_path_follows_a_restart(read_log: ReadLog) -> None:
    history = read_log([*PLAIN, started(9, "at-8", size=4), step(10), step(11)])
    assert iterations(history, 11, "at-8") == ("at-8", [10, 11])
    assert history.world_size(9) == 2
    assert history.world_size(10) == 4
    again = read_log([*PLAIN, started(9), step(10)])
    assert iterations(again, 10, "at-8") == (None, [10])


def test_a_checkpoint_that_the_log_does_not_mention_is_not_the_initial_state(read_log: ReadLog) -> None:
    """The run began with an imported model, or a power failure took the line of a checkpoint that is whole."""
    imported = [started(0, "imported"), *PLAIN[1:]]
    assert iterations(read_log(imported), 3, "imported", "at-4") == ("imported", [1, 2, 3])
    assert not find_path(read_log(imported), 3, ["imported"]).has_older
    newer = find_path(read_log(imported), 6, ["imported", "at-4"])
    assert (newer.checkpoint, newer.older, newer.has_older) == ("at-4", "imported", True)
    assert not find_path(read_log(imported), 6, ["at-4"]).has_older
    lost = read_log([*PLAIN[:5], *map(step, range(5, 10)), started(9, "at-8"), step(10)])
    assert iterations(lost, 10, "at-8") == ("at-8", [10])
    with pytest.raises(ConfigError, match="iteration 10 began with at-8, which is neither on disk nor in the log"):
        find_path(lost, 10, ["at-4"])


def test_a_log_without_a_start_is_named(read_log: ReadLog) -> None:
    history = read_log([event for event in PLAIN if not isinstance(event, RunStarted)])
    with pytest.raises(ConfigError, match=rf"^{history.log}: has no run_started event before iteration 7"):
        history.world_size(7)


def accept(after: int, level: float | None = 2.0) -> list[Event]:
    """The loss of new data is accepted after an iteration; its record arrived one iteration before."""
    chosen = replace(action(after - 1, after - 1, kind=ActionKind.accept), level=level, grad_level=0.5)
    return [chosen, outcome(after, "", ActionKind.accept)]


def levels(history: History, iteration: int, *available: str) -> list[AcceptedLevel]:
    return accepted_on_path(history, find_path(history, iteration, available))


def test_levels_accepted_on_the_path_are_found(read_log: ReadLog) -> None:
    """A level that was accepted after the iteration of a checkpoint is not in it."""
    log: list[Event] = [started(0), *map(step, range(1, 5)), saved(4), *accept(4), *map(step, range(5, 10))]
    history = read_log(log)
    assert levels(history, 9) == levels(history, 9, "at-4") == levels(history, 5) == [(4, 2.0, 0.5)]
    assert levels(history, 4) == []
    log = [started(0), *map(step, range(1, 4)), *accept(3), step(4), saved(4), *map(step, range(5, 10))]
    assert levels(read_log(log), 9, "at-4") == []


def test_levels_that_a_restore_undid_are_not_on_the_path(read_log: ReadLog) -> None:
    log = [*PLAIN[:-1], *accept(8), outcome(8, "snapshot of iteration 6"), *map(step, range(9, 12)), *accept(11, 3.0)]
    history = read_log([*log, step(12), *accept(12, None), step(13)])
    assert levels(history, 13) == [(11, 3.0, 0.5), (12, None, 0.5)]
    log = [*PLAIN[:-1], outcome(8, "snapshot of iteration 6"), *accept(8), step(9)]
    assert levels(read_log(log), 9) == [(8, 2.0, 0.5)], "accepted after the restore"
    log = [*PLAIN, *accept(9), step(10), outcome(10, "snapshot of iteration 9"), step(11)]
    assert levels(read_log(log), 11) == [], "the snapshot of an iteration is taken before its report arrives"


def test_a_level_that_could_not_be_accepted_does_not_count(read_log: ReadLog) -> None:
    log = [*PLAIN, accept(9)[0], outcome(9, "", ActionKind.accept, succeeded=False), step(10)]
    assert levels(read_log(log), 10) == []


def test_logits_are_clipped_after_the_last_step_in_flight(read_log: ReadLog) -> None:
    """The outcome has its iteration. A restore does not end it, and a process that was killed before it will clip."""
    assert read_log(PLAIN).logits_clipped_after is None
    chosen = action(9, 9, kind=ActionKind.qk_clip)
    assert read_log([*PLAIN, chosen]).logits_clipped_after == 9
    log = [*PLAIN, chosen, outcome(10, "", ActionKind.qk_clip), step(11), outcome(11, "snapshot of iteration 6")]
    assert read_log(log).logits_clipped_after == 10


def test_guilty_step_is_the_rejected_one_or_the_onset(read_log: ReadLog) -> None:
    log = [*PLAIN, step(10, refused=True), step(11), finding(10, 10), action(11, 10)]
    assert guilty_step(read_log(log), 1).iteration == 10
    log = [*PLAIN, step(10), step(11), finding(11, 9), action(11, 10)]
    assert guilty_step(read_log(log), 1).iteration == 9


@pytest.mark.parametrize("kind", [ActionKind.rewind, ActionKind.rollback])
def test_guilty_step_of_a_restore_is_the_onset_of_what_called_for_it(kind: ActionKind, read_log: ReadLog) -> None:
    """The onset of a restore has a margin before it."""
    restore = action(10, 5, kind=kind)
    assert guilty_step(read_log([*PLAIN, step(10), finding(10, 10), restore]), 1).iteration == 10
    assert guilty_step(read_log([*PLAIN, step(10), finding(10, 7), finding(10, 8), restore]), 1).iteration == 7
    assert guilty_step(read_log([*PLAIN, step(10), restore]), 1).iteration == 5, "no finding: rejected updates"


def test_findings_of_other_incidents_in_the_margin_of_a_restore_are_ignored(read_log: ReadLog) -> None:
    before = [*PLAIN[:6], finding(5, 3), *PLAIN[6:]]
    log = [*before, step(10), finding(10, 9), action(10, 4, kind=ActionKind.rollback)]
    assert guilty_step(read_log(log), 1).iteration == 9


def test_findings_that_open_no_incident_do_not_move_the_guilty_step(read_log: ReadLog) -> None:
    log = [*PLAIN, step(10), finding(10, 2, FindingKind.slow), action(10, 10)]
    assert guilty_step(read_log(log), 1).iteration == 10


def test_unknown_incident_is_an_error_that_lists_incidents(read_log: ReadLog) -> None:
    with pytest.raises(ConfigError, match="no incident 7; incidents of this run: 1, 2"):
        guilty_step(read_log([*PLAIN, action(9, 9), action(9, 9, incident=2)]), 7)
    with pytest.raises(ConfigError, match="no incident 1; incidents of this run: none"):
        guilty_step(read_log(PLAIN), 1)
