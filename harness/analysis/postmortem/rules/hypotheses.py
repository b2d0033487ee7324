"""Ranks the possible causes of an incident with a table of rules, each a small function of the evidence.

Why: the engineer on call must see why a cause is named, and be able to disagree. So every rule is a few lines of
arithmetic over numbers in `evidence.json`, and every result cites a panel.
How: a rule returns a score from 0 (ruled out) to 1 (observed directly), a sentence for the cause and one against it.
Causes are sorted by score; the order of `RULES` breaks ties. With a score below `KNOWN` the post-mortem says that the
cause is not known yet. Remedies are in `harness.analysis.postmortem.rules.remedies`.
Left out: fitting the scores to past incidents. There are too few, and the result could not be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rules.causes import RuleResult
from harness.analysis.postmortem.rules.data_rules import data_duplicate, long_tail_token, other_data, scrambled_data
from harness.analysis.postmortem.rules.state_rules import (
    beta2_stale,
    corrupted_rank,
    fp8_range,
    fp16_overflow,
    lr_discontinuity,
    lr_too_high,
    optimizer_reset,
    structural,
)

KNOWN = 0.5
"""Score from which the first hypothesis is reported as the root cause."""

Rule = Callable[[Evidence, Measures], RuleResult]

RULES: tuple[Rule, ...] = (
    corrupted_rank,
    fp16_overflow,
    fp8_range,
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
    return sorted(results, key=lambda result: -result.score)


def root_cause(ranked: Sequence[RuleResult]) -> RuleResult | None:
    """The likeliest cause, if its score is high enough to act on."""
    return ranked[0] if ranked and ranked[0].score >= KNOWN else None
