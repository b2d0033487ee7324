"""What may have caused an incident: a table of rules, each a small function from evidence to a judgement.

Why: whoever is woken up at night must see why the machine blames what it blames, and be able to disagree. So every rule
is a few lines of arithmetic over numbers that stand in `evidence.json`, and every judgement cites a picture.
How: a rule gives a score from 0 (ruled out) to 1 (seen with its own eyes), a sentence for it and one against it. The
ranking is by score; the order of `RULES` decides between equals. Below `KNOWN` the cause is not known yet, and the
post-mortem says so. What to do about a cause is in `harness.analysis.postmortem.rules.remedies`.
Left out: learning the weights from past incidents. There are too few, and nobody could argue with the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rules.causes import Judgement
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
"""Score from which the first hypothesis is called the root cause."""

Rule = Callable[[Evidence, Measures], Judgement]

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


def judge(evidence: Evidence, measures: Measures) -> list[Judgement]:
    """All hypotheses, the likeliest first."""
    judged = [rule(evidence, measures) for rule in RULES]
    return sorted(judged, key=lambda judgement: -judgement.score)


def root_cause(ranked: Sequence[Judgement]) -> Judgement | None:
    """The first, where it is likely enough to act upon."""
    return ranked[0] if ranked and ranked[0].score >= KNOWN else None
