"""Each cause is identified from a log that holds only its signs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.postmortem.measures import measure, num_failed_recoveries, weight_growth
from harness.analysis.postmortem.rules.causes import KNOWN, Cause, CauseStatus, RuleResult
from harness.analysis.postmortem.rules.hypotheses import RULES, rank_causes, root_cause
from harness.analysis.postmortem.rules.rate_rules import find_rate_change
from harness.analysis.postmortem.rules.remedies import REMEDIES, remedy_of, restore_commands
from harness.analysis.replay.history import REPLAY_FILE
from harness.checkpoint.catalog import Health, mark, name_of
from harness.core.events import Action, ActionKind, CheckpointSaved, Event, FindingKind, RunStarted, StepRecord
from tests.analysis.postmortem import stories
from tests.analysis.postmortem.stories import FP8, FP16, ONSET, SETTINGS, evidence_of, log_of, write
from tests.composed import load
from tests.sentinel.series import record

SLOW = SETTINGS.replace("beta2: 0.95", "beta2: 0.999")
STORIES: list[tuple[Callable[[], list[Event]], str, Cause]] = [
    (stories.poisoned, SETTINGS, Cause.long_tail_token),
    (stories.scrambled, SETTINGS, Cause.scrambled_data),
    (stories.one_rank, SETTINGS, Cause.corrupted_rank),
    (stories.torn, SETTINGS, Cause.corrupted_rank),
    (stories.rate_jump, SETTINGS, Cause.lr_discontinuity),
    (stories.lost_moments, SLOW, Cause.optimizer_reset),
    (stories.stale_moment, SLOW, Cause.beta2_stale),
    (stories.overflow, FP16, Cause.fp16_overflow),
    (stories.unfit, FP8, Cause.fp8_range),
    (stories.growing, SETTINGS, Cause.structural),
    (stories.duplicated, SETTINGS, Cause.data_duplicate),
    (stories.planned_phase, stories.PHASED, Cause.planned_change),
    (stories.planned_phase, SETTINGS, Cause.planned_change),
    (stories.hot_start, stories.HOT, Cause.lr_too_high),
    (stories.hot_resume, stories.RAISED, Cause.lr_too_high),
    (stories.longer_schedule, SETTINGS, Cause.lr_discontinuity),
    (stories.broken_update, SETTINGS, Cause.destructive_update),
    (stories.cascade, stories.BF16, Cause.numerical_cascade),
    (stories.bad_rank, SETTINGS, Cause.corrupted_rank),
    (stories.bad_shard, SETTINGS, Cause.scrambled_data),
]
"""Known stories with the settings of their run and the cause that must come first."""
IDS = [f"{story.__name__}-{number}" for number, (story, _, _) in enumerate(STORIES)]
VARIED_SEEDS = (1, 2, 3)


def ranked(tmp_path: Path, log: list[Event], settings: str = SETTINGS) -> list[RuleResult]:
    evidence = evidence_of(write(tmp_path / "run", log, settings))
    return rank_causes(evidence, measure(evidence))


@pytest.mark.parametrize(("story", "settings", "cause"), STORIES, ids=IDS)
def test_only_the_true_cause_is_known(
    tmp_path: Path, story: Callable[[], list[Event]], settings: str, cause: Cause
) -> None:
    first, *others = ranked(tmp_path, story(), settings)
    assert first.cause is cause
    assert first.score >= 0.7
    assert first.support is not None
    assert [other.cause for other in others if other.score >= KNOWN] == []
    assert all(other.reason.text for other in others), "what is not the cause says why"


@pytest.mark.full
@pytest.mark.parametrize("seed", VARIED_SEEDS)
@pytest.mark.parametrize(("story", "settings", "cause"), STORIES, ids=IDS)
def test_the_cause_is_the_same_in_other_runs(
    tmp_path: Path, story: Callable[[], list[Event]], settings: str, cause: Cause, seed: int
) -> None:
    """The rules were not written from these logs."""
    first, *others = ranked(tmp_path, stories.vary(story(), seed), settings)
    assert first.cause is cause
    assert [other.cause for other in others if other.score >= KNOWN] == []


def test_every_cause_has_a_rule_and_a_remedy(tmp_path: Path) -> None:
    assert len(RULES) == len(Cause)
    assert {result.cause for result in ranked(tmp_path, stories.poisoned())} == set(Cause) == set(REMEDIES)


def test_overrides_of_every_remedy_compose(tmp_path: Path) -> None:
    evidence = evidence_of(write(tmp_path / "run", stories.poisoned(), FP8))
    evidence.run.settings["launch.kind"] = "slurm"
    remedies = [remedy_of(cause, evidence) for cause in Cause]
    assert sum(bool(remedy.overrides) for remedy in remedies) >= 8
    for remedy in remedies:
        load(remedy.overrides)
    assert load(remedies[list(Cause).index(Cause.corrupted_rank)].overrides).launch.slurm.options == ["--exclude=NODE"]


def test_cause_without_evidence_is_not_known(tmp_path: Path) -> None:
    change = stories.refused(loss=6.0, grad_norm=1.0)
    results = ranked(tmp_path, log_of({ONSET: change}, stories.skipped()))
    assert root_cause(results) is None
    assert all(result.score < KNOWN for result in results)


def test_fp32_run_has_no_fp16_overflow(tmp_path: Path) -> None:
    results = {result.cause: result for result in ranked(tmp_path, stories.overflow(), SETTINGS)}
    assert results[Cause.fp16_overflow].score == 0
    against = results[Cause.fp16_overflow].against
    assert against is not None
    assert "fp32" in against.text


def test_fp8_remedy_depends_on_the_layers(tmp_path: Path) -> None:
    evidence = evidence_of(write(tmp_path / "run", stories.unfit(), FP8))

    def advised(groups: list[str], recipe: str = "current") -> list[str]:
        evidence.incident.groups = groups
        evidence.run.settings["precision.fp8.recipe"] = recipe
        return remedy_of(Cause.fp8_range, evidence).overrides

    assert advised(["blocks.1"]) == ["precision.fp8.keep_first_blocks=2"]
    assert advised(["blocks.7", "blocks.6"]) == ["precision.fp8.keep_last_blocks=2"]
    assert advised(["blocks.3"]) == ["precision.fp8.recipe=block"]
    assert advised(["blocks.0", "blocks.7"]) == ["precision.fp8.recipe=block"]
    assert advised([]) == ["precision.fp8.recipe=block"]
    assert advised(["blocks.3"], recipe="block") == ["precision=bf16"]


@pytest.mark.parametrize(
    ("shrinks", "restored_at", "factor"),
    [(False, None, 1.5**10), (True, None, 1 / 1.5), (False, 170, 1.5**6), (True, 170, 1 / 1.5)],
)
def test_weights_that_shrink_did_not_grow(
    tmp_path: Path, shrinks: bool, restored_at: int | None, factor: float
) -> None:
    """The norm grows or shrinks by 1.5 every 10 steps; a restore at iteration 170 undoes 60 steps."""
    evidence = evidence_of(write(tmp_path / "run", stories.growing()))
    evidence.incident.last = stories.NUM_ROWS
    for row in evidence.records:
        undone = 60 if restored_at is not None and row.iteration >= restored_at else 0
        row.step -= undone
        if row.group_param_norms:
            row.group_param_norms = {"blocks.0": 9.0 * 1.5 ** ((1 - 2 * shrinks) * ((row.step - 110) // 10))}
    growth = weight_growth(evidence)
    assert growth is not None
    assert growth[0] == "blocks.0"
    assert growth[1] == pytest.approx(factor)
    results = {result.cause: result for result in rank_causes(evidence, measure(evidence))}
    assert (results[Cause.structural].score >= KNOWN) is not shrinks


def test_skips_in_a_row_are_no_failed_recoveries(tmp_path: Path) -> None:
    """Each skips another bad batch."""

    def num_failed(*kinds: str) -> int:
        actions: list[Event] = [stories.action(ActionKind(kind), ONSET + at) for at, kind in enumerate(kinds)]
        return num_failed_recoveries(evidence_of(write(tmp_path / "run", log_of({}, [*actions, stories.ended()]))))

    assert num_failed("skip", "skip", "check", "skip", "skip", "skip") == 0
    assert num_failed("skip", "skip", "rewind") == 1
    assert num_failed("rollback", "rollback", "halt") == 2
    assert num_failed("skip", "rewind", "skip", "rollback") == 3


def test_a_learning_rate_that_is_restored_is_no_failed_recovery(tmp_path: Path) -> None:
    def num_failed(*scales: float) -> int:
        actions: list[Event] = [
            stories.action(ActionKind.cool, ONSET + at, lr_scale=scale) for at, scale in enumerate(scales)
        ]
        return num_failed_recoveries(evidence_of(write(tmp_path / "run", log_of({}, [*actions, stories.ended()]))))

    assert num_failed(0.5, 1.0) == 0
    assert num_failed(0.5, 0.25, 0.5, 1.0) == 1


def test_one_non_finite_rank_is_not_an_fp8_problem(tmp_path: Path) -> None:
    first, *_ = ranked(tmp_path, stories.one_rank(), FP8)
    assert (first.cause, first.score) == (Cause.corrupted_rank, 0.95)


def test_cooled_learning_rate_is_no_discontinuity(tmp_path: Path) -> None:
    log = [event for event in stories.rate_jump() if not isinstance(event, Action)]
    log = [event for event in log if getattr(event, "kind", "") != "lr_jump"]
    cool = stories.action(ActionKind.cool, ONSET, lr_scale=50.0)
    results = {j.cause: j for j in ranked(tmp_path, sorted([*log, cool], key=lambda event: event.iteration))}
    assert results[Cause.lr_discontinuity].score == 0


def test_changing_outlier_rank_is_not_blamed(tmp_path: Path) -> None:
    """Two ranks with few tokens differ by chance; only a repeated outlier is evidence."""

    def loud(rank: int) -> stories.Change:
        spread = {"median": 6.0, "spread": 5.0, "worst": [[rank, 12.0], [1 - rank, 0.5]]}
        return lambda row: replace(row, ranks={"grad_norm": spread}, grad_norm=12.0)

    changes = {ONSET + at: loud(at % 2) for at in range(4)}
    results = {j.cause: j for j in ranked(tmp_path, log_of(changes, [stories.ended(last=ONSET + 3)]))}
    assert results[Cause.corrupted_rank].score < KNOWN
    same = {ONSET + at: loud(1) for at in range(4)}
    results = {j.cause: j for j in ranked(tmp_path, log_of(same, [stories.ended(last=ONSET + 3)]))}
    assert results[Cause.corrupted_rank].score >= KNOWN


def test_an_outlier_without_damage_is_not_known_to_be_a_corrupted_rank(tmp_path: Path) -> None:
    """The gradient of rank 0 is large because of its rows: the update is applied, and training goes on."""
    spread = {"median": 9.1, "spread": 8.7, "worst": [[0, 17.9], [1, 0.43]]}
    spike = stories.finding(FindingKind.grad_spike, ONSET, "gradient norm 17.9 against at most 4", ranks=[0])
    watch = stories.action(ActionKind.watch, ONSET)
    end = stories.ended(kinds=["grad_spike"], verdict="harmless", actions=["watch"], ranks=[0])
    change: stories.Change = lambda row: replace(row, grad_norm=17.9, ranks={"grad_norm": spread})  # noqa: E731
    results = {each.cause: each for each in ranked(tmp_path, log_of({ONSET: change}, [spike, watch, end]))}
    assert results[Cause.corrupted_rank].status is CauseStatus.possible


@pytest.mark.parametrize("story", [stories.bad_rank, stories.one_rank])
def test_a_step_that_a_replay_reproduces_is_no_corrupted_rank(tmp_path: Path, story: Callable[[], list[Event]]) -> None:
    run = write(tmp_path / "run", story())
    replayed = run.incidents / "001" / REPLAY_FILE
    replayed.parent.mkdir(parents=True)

    def status_after(nature: str, **seen: str) -> CauseStatus:
        tree = {"iteration": ONSET, "nature": nature, "seen": {"0": {"broken_weights": "", **seen}}}
        replayed.write_text(json.dumps(tree))
        evidence = evidence_of(run)
        return next(r for r in rank_causes(evidence, measure(evidence)) if r.cause is Cause.corrupted_rank).status

    assert status_after("deterministic") is CauseStatus.ruled_out
    assert status_after("transient") is CauseStatus.likely
    assert status_after("deterministic", broken_weights="head") is CauseStatus.likely


def test_missing_evidence_rules_nothing_out(tmp_path: Path) -> None:
    """A log with losses only, without probes, batches, ranks or settings."""

    def bare(row: StepRecord) -> StepRecord:
        loss = 6.0 if row.iteration == ONSET else row.loss
        return record(row.iteration, loss, math.nan, lr=math.nan)

    log = [bare(event) if isinstance(event, StepRecord) else event for event in log_of({}, stories.skipped())]
    start = next(event for event in log if isinstance(event, RunStarted))
    log = [replace(event, world_size=1) if event is start else event for event in log]
    results = {result.cause: result.status for result in ranked(tmp_path, log, "{}\n")}
    assert [cause for cause, status in results.items() if status is CauseStatus.ruled_out] == []
    assert {cause for cause, status in results.items() if status is CauseStatus.not_examined} >= {
        Cause.long_tail_token,
        Cause.scrambled_data,
        Cause.data_duplicate,
        Cause.other_data,
        Cause.fp16_overflow,
        Cause.fp8_range,
        Cause.beta2_stale,
        Cause.optimizer_reset,
        Cause.structural,
        Cause.numerical_cascade,
        Cause.corrupted_rank,
        Cause.planned_change,
    }


@pytest.mark.parametrize(("kind", "status"), [("adamw", CauseStatus.ruled_out), ("muon", CauseStatus.not_examined)])
def test_a_stale_second_moment_is_not_ruled_out_for_matrices_without_one(
    tmp_path: Path, kind: str, status: CauseStatus
) -> None:
    settings = SLOW.replace("optim: {", f"optim: {{kind: {kind}, ")
    results = {each.cause: each.status for each in ranked(tmp_path, stories.poisoned(), settings)}
    assert results[Cause.beta2_stale] is status


def test_too_high_rate_is_never_structural_nor_ruled_out(tmp_path: Path) -> None:
    results = {result.cause: result for result in ranked(tmp_path, stories.hot_start(), stories.HOT)}
    assert results[Cause.structural].score < KNOWN
    usual = {result.cause: result for result in ranked(tmp_path, stories.broken_update())}
    assert usual[Cause.lr_too_high].status is CauseStatus.possible, "with NaN it is never ruled out"


def test_moved_schedule_is_named(tmp_path: Path) -> None:
    evidence = evidence_of(write(tmp_path / "run", stories.longer_schedule()))
    sentence = remedy_of(Cause.lr_discontinuity, evidence).sentence
    assert "run.resume=changed changed train.num_steps from 160 to 400 at iteration 149" in sentence


@pytest.mark.parametrize("later", [ONSET + 10, ONSET + 30])
def test_a_later_resume_is_not_blamed(tmp_path: Path, later: int) -> None:
    """Neither one within the incident nor one right after its last iteration, whose iteration is the same."""
    cooled = [
        replace(event, lr=1e-6) if isinstance(event, StepRecord) and event.iteration > later else event
        for event in stories.hot_resume()
    ]
    log = [*cooled, stories.changed_config(later, train__num_steps=[400, 500])]
    log = sorted(log, key=lambda event: event.iteration)
    change = find_rate_change(evidence_of(write(tmp_path / "run", log, stories.RAISED)))
    assert change is not None
    assert change.text == "run.resume=changed changed optim.lr from 0.001 to 0.03 at iteration 145"
    assert change.factor == pytest.approx(30)


def test_onset_after_rejections_in_a_row_is_the_first_rejected_update(tmp_path: Path) -> None:
    evidence = evidence_of(write(tmp_path / "run", stories.rejected_in_a_row()))
    assert evidence.incident.onset == ONSET - 1
    assert (evidence.numbers.onset, evidence.numbers.onset_step, evidence.numbers.onset_cursor) == 3 * (ONSET,)
    assert evidence.batches[0].index == ONSET


def test_onset_that_a_finding_names_is_kept(tmp_path: Path) -> None:
    """The applied update before the rejections had a gradient spike: it is the onset."""
    spike = stories.finding(FindingKind.grad_spike, ONSET - 1, "gradient norm 9 against at most 4")
    log = sorted([*stories.rejected_in_a_row(), spike], key=lambda event: event.iteration)
    assert evidence_of(write(tmp_path / "run", log)).numbers.onset == ONSET - 1


def test_broken_run_is_restored_from_a_finite_checkpoint_or_restarted(tmp_path: Path) -> None:
    run = write(tmp_path / "run", stories.broken_update())
    evidence = evidence_of(run)
    evidence.run.overrides = ["model=50m", "optim.lr=0.001"]
    assert evidence.numbers.loss_after_50 is not None
    assert math.isnan(evidence.numbers.loss_after_50)
    text, (command,) = restore_commands(evidence)
    assert "start again with a lower learning rate" in text
    assert command == f"harness train model=50m optim.lr=0.0005 run.dir={tmp_path} run.name=run-lower-lr"
    evidence.run.overrides = None
    _, (unknown,) = restore_commands(evidence)
    assert unknown.startswith(f"# run the command of this run again with optim.lr=0.0005 run.dir={tmp_path} ")
    evidence.run.overrides = ["model=50m", "optim.lr=0.001"]
    start = next(event for event in evidence.others if isinstance(event, RunStarted))
    start.resumed_from = "step-00000000-gen-0"
    _, (first, again) = restore_commands(evidence)
    assert (first, again) == (f"harness checkpoint import MODEL {tmp_path}/run-lower-lr", command)
    evidence.checkpoint = "step-00000140-gen-0"
    _, (command,) = restore_commands(evidence)
    assert command == f"harness train model=50m optim.lr=0.001 run.dir={tmp_path} run.name=run"
    evidence.run.ended = ""
    _, (command,) = restore_commands(evidence)
    assert command.startswith(f"harness ctl {run.path} rollback --to 140 --reason")


def test_newest_checkpoint_before_the_onset(tmp_path: Path) -> None:
    def saved(at: int) -> CheckpointSaved:
        return CheckpointSaved(time=1.8e9, iteration=at, step=at, directory=name_of(at, 0), seconds=1.0)

    log = sorted([*stories.broken_update(), *map(saved, (100, 120, 130, 160))], key=lambda event: event.iteration)
    run = write(tmp_path / "run", log)
    for at in (100, 120, 160):
        (run.checkpoints / name_of(at, 0)).mkdir(parents=True)
    mark(run.checkpoints / name_of(120, 0), Health.tainted, "test")
    assert evidence_of(run).checkpoint == name_of(100, 0), "130 is gone, 120 is tainted, 160 is too late"
