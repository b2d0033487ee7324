"""Each cause is told from all others, where the log holds its signs and nothing else."""

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
def test_the_cause_is_ranked_first_and_others_are_not_called_known(
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
    assert {judgement.cause for judgement in ranked(tmp_path, stories.poisoned())} == set(Cause) == set(REMEDIES)


def test_without_a_sign_the_cause_is_not_known(tmp_path: Path) -> None:
    change = stories.refused(loss=6.0, grad_norm=1.0)
    judged = ranked(tmp_path, log_of({ONSET: change}, stories.skipped()))
    assert root_cause(judged) is None
    assert all(judgement.score < KNOWN for judgement in judged)


def test_the_same_numbers_in_fp32_are_no_overflow(tmp_path: Path) -> None:
    judged = {judgement.cause: judgement for judgement in ranked(tmp_path, stories.overflow(), SETTINGS)}
    assert judged[Cause.fp16_overflow].score == 0
    against = judged[Cause.fp16_overflow].against
    assert against is not None
    assert "fp32" in against.text


def test_the_smallest_way_out_of_fp8_depends_on_where_it_does_not_do(tmp_path: Path) -> None:
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


def test_one_rank_that_is_not_finite_is_no_matter_of_fp8(tmp_path: Path) -> None:
    first, *_ = ranked(tmp_path, stories.one_rank(), FP8)
    assert (first.cause, first.score) == (Cause.corrupted_rank, 0.95)


def test_a_rate_that_was_cooled_on_purpose_is_no_discontinuity(tmp_path: Path) -> None:
    log = [event for event in stories.rate_jump() if not isinstance(event, Action)]
    log = [event for event in log if getattr(event, "kind", "") != "lr_jump"]
    cool = stories.action(ActionKind.cool, ONSET, lr_scale=50.0)
    judged = {j.cause: j for j in ranked(tmp_path, sorted([*log, cool], key=lambda event: event.iteration))}
    assert judged[Cause.lr_discontinuity].score == 0


def test_a_rank_that_is_another_each_time_is_not_blamed(tmp_path: Path) -> None:
    """Two ranks with few tokens differ by chance; only the same one again is a sign."""

    def loud(rank: int) -> stories.Change:
        spread = {"median": 6.0, "spread": 5.0, "worst": [[rank, 12.0], [1 - rank, 0.5]]}
        return lambda row: replace(row, ranks={"grad_norm": spread}, grad_norm=12.0)

    changes = {ONSET + at: loud(at % 2) for at in range(4)}
    judged = {j.cause: j for j in ranked(tmp_path, log_of(changes, [stories.ended(last=ONSET + 3)]))}
    assert judged[Cause.corrupted_rank].score < KNOWN
    same = {ONSET + at: loud(1) for at in range(4)}
    judged = {j.cause: j for j in ranked(tmp_path, log_of(same, [stories.ended(last=ONSET + 3)]))}
    assert judged[Cause.corrupted_rank].score >= KNOWN
