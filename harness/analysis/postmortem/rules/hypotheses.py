"""Ranks the possible causes of an incident with a table of rules, each a small function of the evidence.

Why: the engineer on call must see why a cause is named, and be able to disagree. So every rule is a few lines of
arithmetic over numbers in `evidence.json`, and every result cites a panel.
How: a rule returns a score from 0 (ruled out) to 1 (observed directly), a sentence for the cause and one against it. A
rule whose evidence is not in the log says what is missing: the cause is then not examined, and not ruled out.
Causes are sorted by score; the order of `RULES` breaks ties. With a score below `KNOWN` the post-mortem says that the
cause is not known yet. Remedies are in `harness.analysis.postmortem.rules.remedies`.
Left out: fitting the scores to past incidents. There are too few, and the result could not be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rules.causes import KNOWN, Cause, RuleResult
from harness.analysis.postmortem.rules.data_rules import (
    data_duplicate,
    long_tail_token,
    other_data,
    planned_change,
    scrambled_data,
)
from harness.analysis.postmortem.rules.rate_rules import FAR_ABOVE, lr_discontinuity, lr_too_high, rate_excess
from harness.analysis.postmortem.rules.state_rules import (
    beta2_stale,
    corrupted_rank,
    fp8_range,
    fp16_overflow,
    optimizer_reset,
    structural,
)
from harness.analysis.postmortem.rules.update_rules import destructive_update, numerical_cascade

EXPLAINED_BY_RATE = frozenset(
    {
        Cause.structural,
        Cause.beta2_stale,
        Cause.destructive_update,
        Cause.numerical_cascade,
        Cause.long_tail_token,
        Cause.lr_discontinuity,
        Cause.corrupted_rank,
    }
)
"""Causes whose signs a learning rate far above its range produces by itself."""
EXPLAINED_SCORE = 0.45

Rule = Callable[[Evidence, Measures], RuleResult]

RULES: tuple[Rule, ...] = (
    planned_change,
    corrupted_rank,
    destructive_update,
    fp16_overflow,
    fp8_range,
    numerical_cascade,
    optimizer_reset,
    lr_discontinuity,
    beta2_stale,
    long_tail_token,
    scrambled_data,
    data_duplicate,
    other_data,
    structural,
    lr_too_high,
)


def rank_causes(evidence: Evidence, measures: Measures) -> list[RuleResult]:
    """The result of every rule, the likeliest cause first."""
    results = [rule(evidence, measures) for rule in RULES]
    if (rate_excess(evidence) or 0.0) >= FAR_ABOVE:
        results = [_discount_by_rate(result) for result in results]
    return sorted(results, key=lambda result: -result.score)


def _discount_by_rate(result: RuleResult) -> RuleResult:
    """Lower the score of a cause whose signs the learning rate explains; one that was observed directly keeps it."""
    is_explained = result.cause in EXPLAINED_BY_RATE and result.score < 1
    return replace(result, score=min(result.score, EXPLAINED_SCORE)) if is_explained else result


def root_cause(ranked: Sequence[RuleResult]) -> RuleResult | None:
    """The likeliest cause, if its score is high enough to act on."""
    return ranked[0] if ranked and ranked[0].score >= KNOWN else None
