"""Each cause is identified from a log that holds only its signs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.postmortem.measures import measure
from harness.analysis.postmortem.rules.causes import Cause, RuleResult
from harness.analysis.postmortem.rules.hypotheses import KNOWN, RULES, rank_causes, root_cause
from harness.analysis.postmortem.rules.remedies import REMEDIES, remedy_of
from harness.core.events import Action, ActionKind, Event
from tests.analysis.postmortem import stories
from tests.analysis.postmortem.stories import FP8, FP16, ONSET, SETTINGS, evidence_of, log_of, write

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
]


def ranked(tmp_path: Path, log: list[Event], settings: str = SETTINGS) -> list[RuleResult]:
    evidence = evidence_of(write(tmp_path / "run", log, settings))
    return rank_causes(evidence, measure(evidence))


@pytest.mark.parametrize(("story", "settings", "cause"), STORIES, ids=[str(cause) for _, _, cause in STORIES])
def test_only_the_true_cause_is_known(
    tmp_path: Path, story: Callable[[], list[Event]], settings: str, cause: Cause
) -> None:
    first, *others = ranked(tmp_path, story(), settings)
    assert first.cause is cause
    assert first.score >= 0.8
    assert first.support is not None
    assert [other.cause for other in others if other.score >= KNOWN] == []
    unsure = [other for other in others if other.support is None and other.against is None]
    assert unsure == [], "what is not the cause says why"


def test_every_cause_has_a_rule_and_a_remedy(tmp_path: Path) -> None:
    assert len(RULES) == len(Cause)
    assert {result.cause for result in ranked(tmp_path, stories.poisoned())} == set(Cause) == set(REMEDIES)


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
