"""A resume continues with the memory of a checkpoint and the log behind it, as if the run had not ended."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.event_json import to_json
from harness.core.events import Action, ActionKind, Event, Incident, Outcome, RunStarted
from harness.sentinel.policy.policy import Policy
from harness.sentinel.policy.policy_state import RESTORES
from harness.sentinel.sentinel import Sentinel
from harness.telemetry.event_log import events_since
from tests import composed
from tests.analysis.postmortem.stories import healthy

CFG = composed.load().sentinel
LAG = CFG.lag
K = ActionKind
REWOUND_STEPS = 4


class LoggedRun:
    """A run that logs what a training run logs. `num_in_flight`: reports that a restore finds and logs only."""

    def __init__(self, *, num_in_flight: int = 0) -> None:
        self.num_in_flight = num_in_flight
        self.sentinel = Sentinel.start(CFG)
        self.log: list[Event] = [RunStarted(time=0.0, iteration=0, world_size=2, num_steps=900, step=0)]
        self.iteration = self.step = 0
        self.memories: dict[int, dict[str, Any]] = {}
        """Iteration -> what a checkpoint of that iteration holds."""
        self.taken: list[ActionKind] = []

    def iterate(self, *, is_rejected: bool = False, **facts: Any) -> None:
        """Run one iteration, and carry out what it calls for."""
        self.iteration += 1
        self.step += not is_rejected
        row = replace(healthy(self.iteration), step=self.step, cursor=self.iteration - 1, **facts)
        if is_rejected:
            row = replace(row, refused=True, loss=math.nan, grad_norm=math.nan, nonfinite_ranks=[1])
        self.log.append(row)
        findings, action = self.sentinel.process_record(row)
        self.log += findings
        self.memories[self.iteration] = as_stored(self.sentinel)
        while action is not None:
            self.taken.append(action.kind)
            self.log.append(action)
            action = self.sentinel.on_outcome(self.carry_out(action))
        self.log += self.sentinel.drain_events()

    def iterate_clean(self, num: int) -> None:
        for _ in range(num):
            self.iterate()

    def carry_out(self, action: Action) -> Outcome:
        """Log the outcome of an action; the steps in flight are logged too, and a restore undoes them."""
        if action.kind in RESTORES:
            self.sentinel.rewind(self.memories[self.iteration - REWOUND_STEPS])
            for _ in range(self.num_in_flight):
                self.iteration += 1
                self.log.append(replace(healthy(self.iteration), step=self.step + 1))
            self.step -= REWOUND_STEPS
        done = Outcome(
            time=0.0,
            iteration=self.iteration,
            kind=action.kind,
            incident=action.incident,
            succeeded=True,
            step=self.step,
        )
        self.log.append(done)
        return done


def as_stored(sentinel: Sentinel) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(json.dumps(sentinel.memory()))
    return stored


def resumed(run: LoggedRun, memory: dict[str, Any], iteration: int, directory: Path) -> Sentinel:
    """The sentinel of a start that resumes from a state of this iteration."""
    path = directory / "events.jsonl"
    path.write_text("".join(to_json(event) + "\n" for event in run.log))
    sentinel = Sentinel.start(CFG)
    sentinel.resume(copy.deepcopy(memory), events_since(path, iteration))
    return sentinel


def continued(run: LoggedRun, iteration: int, directory: Path) -> LoggedRun:
    """The next start of a run, which resumes from its checkpoint of this iteration."""
    again = LoggedRun()
    again.sentinel = resumed(run, run.memories[iteration], iteration, directory)
    again.iteration, again.step = run.iteration, run.step
    again.sentinel.policy.policy_state.resume(again.iteration, again.step)
    again.sentinel.rewind(as_stored(run.sentinel))  # the detectors of both see the same records
    return again


def incidents_of(run: LoggedRun) -> list[dict[str, Any]]:
    return [asdict(event) for event in run.log if isinstance(event, Incident)]


def with_nan_gradient() -> LoggedRun:
    """An incident that is open at the end: rank 1 had a NaN gradient at iteration 100."""
    run = LoggedRun()
    run.iterate_clean(99)
    run.iterate(is_rejected=True, group_grad_norms={"embedding": 0.3, "head": math.nan})
    run.iterate_clean(60)
    assert incidents_of(run) == []
    return run


def with_rejections(*, last: int) -> LoggedRun:
    """Two rejected updates; the second is that of iteration `last`, and 20 clean ones follow."""
    run = LoggedRun()
    run.iterate_clean(99)
    run.iterate(is_rejected=True)
    run.iterate_clean(last - 101)
    run.iterate(is_rejected=True)
    run.iterate_clean(20)
    assert run.taken == 2 * [ActionKind.skip]
    return run


def restored(*, num_in_flight: int = 0) -> LoggedRun:
    """A run whose weights are not finite in its last iteration, and which ends after the restore."""
    run = LoggedRun(num_in_flight=num_in_flight)
    run.iterate_clean(120)
    run.iterate(is_rejected=True, param_norm=math.nan, group_param_norms={"blocks.0": math.nan})
    assert run.taken[0] in RESTORES
    return run


def folded(run: LoggedRun) -> dict[str, Any]:
    return Policy.replay(CFG.policy, run.log, lag=LAG).state()


@pytest.mark.parametrize("iteration", [118, 119, 120, 121])
def test_a_resume_probes_the_steps_that_the_run_would_have_probed(iteration: int, tmp_path: Path) -> None:
    """A finding in fp8 and a return to fp8 request a probe: before, at or after the state that is resumed from."""
    run = LoggedRun()
    run.iterate_clean(119)
    run.iterate(is_rejected=True, in_fp8=True)
    assert run.sentinel.probe_at == {120 + LAG}
    run.iterate()
    back = Action(time=0, iteration=121, kind=K.precision, step=120, incident=0, reason="", onset=121, in_fp8=True)
    run.log.append(back)
    run.sentinel.on_operator_action(back)
    assert run.sentinel.probe_at == {120 + LAG, 121 + LAG}
    memory = run.memories[iteration]
    assert resumed(run, memory, iteration, tmp_path).probe_at == run.sentinel.probe_at
    del memory["probe_at"]
    del run.log[-1]
    older = resumed(run, memory, iteration, tmp_path)
    assert older.probe_at == ({120 + LAG} if iteration < 120 else set()), "a checkpoint of an earlier version"


def test_a_rewind_keeps_the_requested_probe() -> None:
    run = LoggedRun()
    run.iterate_clean(120)
    run.iterate(is_rejected=True, in_fp8=True, param_norm=math.nan, group_param_norms={"blocks.0": math.nan})
    assert run.taken[0] in RESTORES
    assert run.sentinel.probe_at == {121 + LAG}


@pytest.mark.parametrize("iteration", [119, 120, 121])
def test_each_decision_counts_once_after_a_resume(iteration: int, tmp_path: Path) -> None:
    run = with_rejections(last=120)
    again = resumed(run, run.memories[iteration], iteration, tmp_path)
    assert again.policy.policy_state.budgets.num_spent == {"skip": 2}
    assert again.policy.state() == run.sentinel.policy.state() == folded(run)


@pytest.mark.parametrize("num_in_flight", [0, LAG])
def test_a_restore_counts_once_after_a_resume_from_the_last_checkpoint(num_in_flight: int, tmp_path: Path) -> None:
    run = restored(num_in_flight=num_in_flight)
    again = resumed(run, as_stored(run.sentinel), run.iteration, tmp_path)
    assert again.policy.state() == run.sentinel.policy.state() == folded(run)


def test_a_second_resume_from_the_same_checkpoint_counts_each_decision_once(tmp_path: Path) -> None:
    """The first start resumed and was stopped before its first record; it saved nothing."""
    run = restored()
    memory, iteration = as_stored(run.sentinel), run.iteration
    between = resumed(run, memory, iteration, tmp_path)
    assert as_stored(between)["decided"] == memory["decided"] != []
    again = resumed(run, as_stored(between), iteration, tmp_path)
    assert again.policy.state() == run.sentinel.policy.state()


def test_decisions_of_later_records_are_applied(tmp_path: Path) -> None:
    """Only the decisions of the checkpoint's own iteration are known, although later ones look alike."""
    run = with_rejections(last=120)
    again = resumed(run, run.memories[100], 100, tmp_path)
    assert again.policy.policy_state.budgets.num_spent == {"skip": 2}
    assert again.policy.state() == run.sentinel.policy.state()


def test_a_checkpoint_of_an_earlier_version_resumes_as_before(tmp_path: Path) -> None:
    run = with_rejections(last=120)
    memory = {key: run.memories[119][key] for key in ("detectors", "policy", "digest")}
    again = resumed(run, memory, 119, tmp_path)
    assert again.policy.state() == run.sentinel.policy.state()


@pytest.mark.parametrize("iteration", [99, 100, 150])
def test_an_incident_that_was_open_at_a_restart_is_reported_completely(iteration: int, tmp_path: Path) -> None:
    """Also if the checkpoint is older than the incident, or of its iteration."""
    run = with_nan_gradient()
    again = continued(run, iteration, tmp_path)
    for each in (run, again):
        each.iterate_clean(CFG.policy.clean_steps)
    (reported,) = incidents_of(again)
    assert [reported] == incidents_of(run)
    assert (reported["ranks"], reported["groups"], reported["cursors"]) == ([1], ["head"], [99])
    assert (reported["last"], reported["actions"]) == (100, ["skip"])


def test_an_incident_is_reported_once_although_a_resume_closes_it_again(tmp_path: Path) -> None:
    run = with_nan_gradient()
    run.iterate_clean(CFG.policy.clean_steps)
    assert len(incidents_of(run)) == 1
    again = continued(run, 150, tmp_path)
    assert again.sentinel.drain_events() == []
    run.log = [event for event in run.log if not isinstance(event, Incident)]
    (reported,) = continued(run, 150, tmp_path).sentinel.drain_events()
    assert (reported.ranks, reported.is_open) == ([1], False), "its line was lost"


def test_a_record_that_a_restore_undid_does_not_prolong_its_incident(tmp_path: Path) -> None:
    run = restored(num_in_flight=1)
    run.log[-2] = replace(healthy(run.iteration), step=run.step, refused=True)
    again = resumed(run, run.memories[120], 120, tmp_path)
    assert again.drain_events(last=True)[0].last == run.sentinel.drain_events(last=True)[0].last == 121


def test_a_restart_after_a_halt_forgets_its_incident(tmp_path: Path) -> None:
    run = with_nan_gradient()
    given: dict[str, Any] = {"time": 0.0, "iteration": run.iteration, "step": run.step}
    run.log.append(Action(kind=ActionKind.halt, incident=1, reason="", onset=100, **given))
    run.log.append(RunStarted(time=0.0, iteration=run.iteration, world_size=2, num_steps=900, step=run.step))
    assert resumed(run, run.memories[150], 150, tmp_path).incident_log.entries == {}


def iterate_at(sentinel: Sentinel, iteration: int, lr: float, *, is_rejected: bool = False) -> Action | None:
    row = replace(healthy(iteration), lr=lr)
    if is_rejected:
        row = replace(row, refused=True, loss=math.nan, grad_norm=math.nan)
    return sentinel.process_record(row).action


@pytest.mark.parametrize("restores", [False, True], ids=["resume", "restore"])
def test_a_learning_rate_that_was_changed_on_purpose_is_no_jump(restores: bool) -> None:
    """A bad batch behind it is skipped; after a jump it would cost a rewind."""
    first = Sentinel.start(CFG)
    for iteration in range(1, 101):
        assert iterate_at(first, iteration, 3e-4) is None
    memory = as_stored(first)
    again = Sentinel.start(CFG)
    again.schedule_changed_at = 100
    again.resume(memory, (), iteration=100)
    last = 100
    if restores:
        for iteration in range(101, 201):
            assert iterate_at(again, iteration, 1e-4) is None
        again.rewind(memory, iteration=100)
        last = 200
    for iteration in range(last + 1, last + 11):
        assert iterate_at(again, iteration, 1e-4) is None
    skip = iterate_at(again, last + 11, 1e-4, is_rejected=True)
    assert skip is not None
    assert skip.kind is ActionKind.skip


@pytest.mark.parametrize(
    ("changed_at", "lr", "kinds"),
    [
        pytest.param(100, 8e-4, [], id="raised"),
        pytest.param(100, 1e-3, ["lr_jump"], id="raised far, as more steps do at the end of a cosine schedule"),
        pytest.param(99, 1e-4, ["lr_jump"], id="in a state from after the change"),
    ],
)
def test_which_learning_rates_are_jumps_after_a_resume(changed_at: int, lr: float, kinds: list[str]) -> None:
    first = Sentinel.start(CFG)
    for iteration in range(1, 101):
        assert iterate_at(first, iteration, 3e-4) is None
    again = Sentinel.start(CFG)
    again.schedule_changed_at = changed_at
    again.resume(as_stored(first), (), iteration=100)
    rows = [replace(healthy(iteration), lr=lr) for iteration in (101, 102)]
    findings = [found for row in rows for found in again.process_record(row)[0]]
    assert [found.kind for found in findings] == kinds
