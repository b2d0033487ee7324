"""Which orders a run can carry out, and what an operator is told before one is sent."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.config.errors import ConfigError
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
)
from harness.control.order_checks import check_order, untainted_checkpoints
from harness.control.order_effect import describe_effect, incident_batches, next_batch_of, parse_batches
from harness.core.event_json import to_json
from harness.core.events import (
    Action,
    ActionKind,
    Event,
    Incident,
    Outcome,
    RunEnded,
    RunRestarted,
    RunStarted,
    StepRecord,
)
from harness.core.locking import directory_lease, run_lease
from harness.core.locking.lease_holder import this_process
from harness.core.rundir import RunDir, append_line
from harness.data.order.ledger import Ledger

CONFIG = (
    "train: {batch_size: 4, sequence_length: 100}\n"
    "data: {sources: {web: {weight: 1.0}, books: {weight: 2.0}, code: {weight: 0.5}},"
    " phases: [{from_batch: 100, weights: {code: 0.0}}]}"
)
STARTED = RunStarted(time=1.0, iteration=0, world_size=2, num_steps=900, step=0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "first")
    run.path.mkdir()
    run.config.write_text(CONFIG)
    return run


def save_checkpoint(run: RunDir, step: int, cursor: int, generation: int = 0) -> None:
    path = run.checkpoints / catalog.name_of(step, generation)
    path.mkdir(parents=True)
    (path / catalog.STATE_FILE).write_text(json.dumps({"cursor": cursor}))


def write_log(run: RunDir, *events: Event) -> None:
    for event in events:
        append_line(run.events, to_json(event))


def step_record(step: int, cursor: int) -> StepRecord:
    return StepRecord(
        time=1.0,
        iteration=step,
        step=step,
        cursor=cursor,
        tokens=0,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens_per_s=1.0,
        refused=False,
        stop_requested=False,
        step_time_s=1.0,
        flops_per_s=1.0,
    )


def test_a_rollback_restores_only_untainted_checkpoints(run: RunDir) -> None:
    for step, generation in [(90, 0), (40, 1), (100, 0), (50, 1), (30, 0)]:
        (run.checkpoints / catalog.name_of(step, generation)).mkdir(parents=True)
    catalog.mark(run.checkpoints / catalog.name_of(50, 1), Health.tainted, "spike")

    def targets(step: int) -> list[tuple[int, int]]:
        return [(each.step, each.generation) for each in untainted_checkpoints(run, step)]

    assert targets(95) == [(40, 1), (90, 0), (30, 0)], "the newest generation comes first"
    assert targets(40) == [(40, 1), (30, 0)]
    assert targets(39) == [(30, 0)]
    check_order(run, Rollback(to_step=30))
    with pytest.raises(ConfigError, match="has no checkpoint at or before step 29 that is not tainted"):
        check_order(run, Rollback(to_step=29))
    append_line(run.events, to_json(step_record(45, 50)))
    check_order(run, Rollback(to_step=45))
    with pytest.raises(ConfigError, match="rollback: must be to step 45, the last, or before, got 46"):
        check_order(run, Rollback(to_step=46))


def test_an_order_does_not_end_a_planned_phase_in_bf16(run: RunDir) -> None:
    phases = "[{from_batch: 40, from_fraction: null, kind: bf16}, {from_batch: 60, from_fraction: null, kind: fp8}]"
    run.config.write_text(f"{CONFIG}\nprecision: {{kind: fp8, phases: {phases}}}\n")
    fp8, bf16 = Precision(kind="fp8"), Precision(kind="bf16")
    check_order(run, fp8)
    for cursor, is_refused in [(38, False), (39, True), (58, True), (59, False)]:
        append_line(run.events, to_json(step_record(cursor, cursor)))
        check_order(run, bf16)
        if is_refused:
            message = (
                rf"^precision: batch {cursor + 1} is in a phase in bf16 that precision.phases plans from batch 40;"
            )
            with pytest.raises(ConfigError, match=message):
                check_order(run, fp8)
        else:
            check_order(run, fp8)
    run.config.write_text(f"{CONFIG}\nprecision: {{kind: fp8}}\n")
    check_order(run, fp8)
    run.config.write_text(f"{CONFIG}\nprecision: {{kind: bf16}}\n")
    with pytest.raises(ConfigError, match="was not started in fp8"):
        check_order(run, bf16)


def test_the_last_source_cannot_be_excluded(run: RunDir) -> None:
    for name in ("web", "books", "code"):
        check_order(run, ExcludeSource(source=name))
    with pytest.raises(ConfigError, match=r"exclude: no source 'wine'; .* has web, books, code"):
        check_order(run, ExcludeSource(source="wine"))
    last = "exclude: without 'web' no source would have a weight above 0"
    with pytest.raises(ConfigError, match=last):
        check_order(run, ExcludeSource(source="web"), before=[Pause(), ExcludeSource(source="books")])
    Ledger.load(run.ledger).reweight(50, {"books": 0.0}, "incident 1")
    with pytest.raises(ConfigError, match=last):
        check_order(run, ExcludeSource(source="web"))
    check_order(run, ExcludeSource(source="code"))
    Ledger.load(run.ledger).reweight(50, {"books": 1.0}, "a mistake")
    check_order(run, ExcludeSource(source="web"))
    with pytest.raises(ConfigError, match=r"^reweight: no source .* above 0, or the weights no finite sum"):
        check_order(run, Reweight(weights={"web": 1.7e308, "books": 1.7e308}))


@pytest.mark.parametrize("content", ["", "[", "data: 3", "data: {sources: [web], phases: []}"])
def test_a_config_without_sources_is_an_error(run: RunDir, content: str) -> None:
    run.config.write_text(content)
    with pytest.raises(ConfigError, match=r"config.yaml: has no data.sources and data.phases"):
        check_order(run, ExcludeSource(source="web"))


@pytest.mark.parametrize(
    "order", [Skip(num_batches=3), Rate(factor=2), SaveCheckpoint(), Profile(num_steps=1), Pause(), Resume()]
)
def test_other_orders_are_always_valid(run: RunDir, order: Order) -> None:
    check_order(run, order)


def test_a_reweight_needs_known_sources_and_leaves_one(run: RunDir) -> None:
    check_order(run, Reweight(weights={"web": 0.0, "code": 3.0}))
    with pytest.raises(ConfigError, match=r"reweight: no source 'wine'; .* has web, books, code"):
        check_order(run, Reweight(weights={"web": 1.0, "wine": 1.0}))
    none_left = "reweight: no source would have a weight above 0"
    with pytest.raises(ConfigError, match=none_left):
        check_order(run, Reweight(weights={"web": 0.0, "books": 0.0}))
    with pytest.raises(ConfigError, match=none_left):
        check_order(run, Reweight(weights={"web": 0.0}), before=[Reweight(weights={"books": 0.0})])
    check_order(run, Reweight(weights={"web": 0.0}), before=[Reweight(weights={"books": 0.0, "code": 1.0})])


def test_a_skip_must_exclude_something_and_an_unskip_re_include_something(run: RunDir) -> None:
    Ledger.load(run.ledger).exclude(10, 19, "incident 1")
    with pytest.raises(ConfigError, match=r"^skip: already excluded: batches 12\.\.19"):
        check_order(run, SkipBatches(first=12, last=19))
    check_order(run, SkipBatches(first=12, last=20))
    with pytest.raises(ConfigError, match=r"^unskip: .* excludes no batch of 20\.\.25; its ledger is .*ledger.jsonl"):
        check_order(run, UnskipBatches(first=20, last=25))
    check_order(run, UnskipBatches(first=19, last=25))
    check_order(run, UnskipBatches(first=20, last=25), before=[SkipBatches(first=20, last=20)])


def test_a_rollback_excludes_only_what_its_checkpoint_has_not_read(run: RunDir) -> None:
    save_checkpoint(run, 30, cursor=33)
    save_checkpoint(run, 60, cursor=66)
    check_order(run, Rollback(to_step=60, exclude=(66, 70)))
    with pytest.raises(ConfigError) as error:
        check_order(run, Rollback(to_step=70, exclude=(65, 70)))
    assert str(error.value) == (
        "rollback: step-00000060-gen-0 was trained on batches up to 65, and batch 65 is to be excluded;"
        " choose an earlier --to; checkpoints: step 60 (candidate), step 30 (candidate)"
    )
    check_order(run, Rollback(to_step=59, exclude=(65, 70)))
    (run.checkpoints / "step-00000060-gen-0" / catalog.STATE_FILE).write_text('{"step": 60, "cur')
    check_order(run, Rollback(to_step=70, exclude=(65, 70)))


def test_the_next_batch_is_known_from_the_log(run: RunDir) -> None:
    ledger = Ledger()
    assert next_batch_of(run, ledger) == 0, "a run without a log is at its first batch"
    write_log(run, STARTED)
    assert next_batch_of(run, ledger) == 0
    write_log(run, step_record(1, 0), step_record(2, 7))
    assert next_batch_of(run, ledger) == 8
    ledger.give_back([[3, 3]], 8, "a mistake")
    write_log(run, step_record(3, 3))
    assert next_batch_of(run, ledger) == 8, "batch 3 was read out of its place"
    restored = Outcome(time=1.0, iteration=4, kind=ActionKind.rollback, incident=1, succeeded=True, step=1)
    write_log(run, restored)
    assert next_batch_of(run, ledger) is None
    write_log(run, step_record(2, 1))
    assert next_batch_of(run, ledger) == 2
    write_log(run, RunStarted(time=2.0, iteration=5, world_size=2, num_steps=9, step=1, resumed_from="step-1"))
    assert next_batch_of(run, ledger) is None


def test_an_operator_sees_what_a_skip_excludes(run: RunDir) -> None:
    write_log(run, STARTED, step_record(9, 8))
    Ledger.load(run.ledger).exclude(10, 11, "incident 1")
    effect = "excludes 3 batches, 9 to 13, 1,200 tokens if it is applied now, at batch 9"
    assert describe_effect(run, Skip(num_batches=3)) == effect
    effect = "excludes 2 batches, 12 to 13, 800 tokens; the run is at batch 9"
    assert describe_effect(run, SkipBatches(first=10, last=13)) == effect
    effect = "excludes batch 812, 400 tokens; the run is at batch 9"
    assert describe_effect(run, SkipBatches(first=812, last=812)) == effect
    with pytest.raises(ConfigError) as error:
        describe_effect(run, SkipBatches(first=7, last=12))
    assert str(error.value) == (
        "skip: the run is at batch 9 and has read 2 of batches 7..12; undo that with"
        " rollback --to STEP --exclude 7..12, or skip later batches"
    )
    with pytest.raises(ConfigError, match=r"^skip: the run is at batch 9 and has read batch 7; undo that"):
        describe_effect(run, SkipBatches(first=7, last=7))
    sizes = {"version": 1, "batch_sizes": [[0, 4], [13, 8]], "sources": {}}
    run.corpus.write_text(json.dumps(sizes))
    effect = "excludes 2 batches, 12 to 13, 1,200 tokens; the run is at batch 9"
    assert describe_effect(run, SkipBatches(first=12, last=13)) == effect, "batch 13 is larger"
    run.config.write_text("{}")
    assert describe_effect(run, SkipBatches(first=12, last=12)) == "excludes batch 12; the run is at batch 9"


def test_an_operator_sees_when_re_included_batches_are_read(run: RunDir) -> None:
    write_log(run, STARTED, step_record(9, 8))
    ledger = Ledger.load(run.ledger)
    ledger.exclude(3, 4, "incident 1")
    ledger.exclude(20, 25, "by an operator: boilerplate")
    effect = (
        "re-includes 4 batches, 4 to 22, 1,600 tokens: 1 that the run has passed are read next,"
        " 3 are read in their place"
    )
    assert describe_effect(run, UnskipBatches(first=4, last=22)) == effect
    only = describe_effect(run, UnskipBatches(first=20, last=22))
    assert only == "re-includes 3 batches, 20 to 22, 1,200 tokens: 3 are read in their place"


def test_the_place_of_a_dead_run_is_not_known(run: RunDir) -> None:
    """Its next start goes on from a checkpoint, before its last record."""
    write_log(run, STARTED, step_record(9, 8))
    leases, alive = run.path / run_lease.FOLDER, this_process()
    leases.mkdir()
    for number, holder in enumerate((alive, replace(alive, started=alive.started - 1))):
        assert (
            describe_effect(run, Skip(num_batches=1)) == "excludes batch 9, 400 tokens if it is applied now, at batch 9"
        )
        descriptor = directory_lease.create(leases, number, holder)
        assert descriptor is not None
        os.close(descriptor)
    assert describe_effect(run, Skip(num_batches=5)) == "excludes the next 5 batches from where the run goes on"
    assert describe_effect(run, Skip(num_batches=1)) == "excludes the next batch from where the run goes on"
    assert describe_effect(run, SkipBatches(first=7, last=7)) == "excludes batch 7, 400 tokens", "it may be read again"


@pytest.mark.parametrize(
    "event",
    [
        RunEnded(time=1.0, iteration=9, step=9, exit_code=1, reason="out of memory"),
        RunRestarted(time=1.0, iteration=9, step=9, number=1, reason="rank 1 was killed"),
    ],
)
def test_the_place_of_a_run_before_its_next_start_is_not_known(run: RunDir, event: Event) -> None:
    write_log(run, STARTED, step_record(9, 8), event)
    assert next_batch_of(run, Ledger()) is None


def test_an_unskip_of_batches_that_a_waiting_command_excludes(run: RunDir) -> None:
    write_log(run, STARTED, step_record(9, 8))
    effect = "re-includes nothing now: batches 20..25 not excluded yet"
    assert describe_effect(run, UnskipBatches(first=20, last=25)) == effect


def test_an_operator_sees_the_checkpoint_and_the_batches_of_a_rollback(run: RunDir) -> None:
    for step in (10, 20, 30):
        save_checkpoint(run, step, cursor=step)
    catalog.mark(run.checkpoints / catalog.name_of(20, 0), Health.good, "clean")
    catalog.mark(run.checkpoints / catalog.name_of(30, 0), Health.tainted, "spike")
    effect = "restores step-00000020-gen-0 (good); excludes no batch"
    assert describe_effect(run, Rollback(to_step=20)) == effect
    listed = "checkpoints: step 30 (tainted), step 20 (good), step 10 (candidate)"
    effect = f"restores step-00000020-gen-0 (good), the newest at or before step 25; {listed}"
    effect += "; excludes 3 batches, 21 to 23, 1,200 tokens"
    assert describe_effect(run, Rollback(to_step=25, exclude=(21, 23))) == effect
    for step in range(40, 100, 10):
        save_checkpoint(run, step, cursor=step)
    assert "step 90 (candidate), step 80 " in describe_effect(run, Rollback(to_step=25))
    assert "step 20 (good), and 1 older; excludes no batch" in describe_effect(run, Rollback(to_step=25))


def test_an_operator_sees_that_a_reweight_overrides_the_phases(run: RunDir) -> None:
    write_log(run, STARTED, step_record(9, 8))
    order = Reweight(weights={"web": 0.25, "code": 2.0})
    effect = "sets web=0.25, code=2 now, from batch 9 on"
    assert describe_effect(run, order) == f"{effect}; data.phases no longer changes these weights"
    run.config.write_text("data: {phases: []}")
    assert describe_effect(run, order) == effect
    assert describe_effect(run, Pause()) == ""


def test_the_batches_of_an_incident_come_from_its_event_its_actions_or_its_iterations(run: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"^--incident: .*first has no incident 1 in its log"):
        incident_batches(run, 1)
    common: dict[str, Any] = {"time": 1.0, "step": 5, "reason": "-"}
    skip = Action(iteration=41, kind=ActionKind.skip, incident=1, onset=40, exclude=[44, 44], **common)
    watch = Action(iteration=60, kind=ActionKind.watch, incident=2, onset=58, **common)
    write_log(run, *(step_record(step, step + 3) for step in range(56, 63)), skip, watch)
    assert incident_batches(run, 1) == (44, 44)
    assert incident_batches(run, 2) == (61, 63), "iterations 58 to 60 read these"
    closed = Incident(
        time=1.0,
        iteration=70,
        number=1,
        kinds=["loss_spike"],
        onset=40,
        onset_step=40,
        last=45,
        last_step=45,
        verdict="cured",
        cursors=[47, 42],
    )
    write_log(run, closed)
    assert incident_batches(run, 1) == (42, 47)
    with pytest.raises(ConfigError, match="has no incident 3 in its log"):
        incident_batches(run, 3)


def test_a_range_has_two_ends() -> None:
    assert parse_batches("812..831") == (812, 831)
    assert parse_batches("812") == (812, 812)
    for text in ("", "..", "8..", "8-9", "8...9", "few"):
        with pytest.raises(ConfigError, match=r"must be A\.\.B, first and last batch, got"):
            parse_batches(text)
