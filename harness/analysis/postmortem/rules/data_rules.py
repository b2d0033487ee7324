"""Rules for causes in the data: contents of a batch, and errors of the data loader."""

from __future__ import annotations

import math

from harness.analysis.postmortem import measures as m
from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rules.causes import Cause, Panel, Reason, RuleResult, rate_cause
from harness.core.events import ABOUT_SPEED, ActionKind, FindingKind, StepRecord

GRAD_SPIKE = 5.0
"""A gradient norm above this many times the usual one is a spike."""
ENTROPY_SPREADS = 6.0
"""Token entropy this many spreads from usual is abnormal."""
RARE_FACTOR = 3.0
"""A batch with this many times the usual number of rare tokens counts as crowded."""


def long_tail_token(_evidence: Evidence, measures: Measures) -> RuleResult:
    """One batch holds many tokens that are rare in the corpus, and their gradient dominates."""
    cause, surplus = Cause.long_tail_token, m.rare_surplus(measures)
    factor = measures.grad_factor
    if surplus is None:
        return rate_cause(
            cause, 0.1, None, Reason("the log does not record the rarest tokens of batches", Panel.tokens)
        )
    count, usual, record = surplus
    text = f"batch {record.cursor} holds its 8 rarest tokens {count} times (usually {usual:g} times)"
    spiked = factor is not None and math.isfinite(factor) and factor > GRAD_SPIKE
    if count < RARE_FACTOR * usual:
        return rate_cause(cause, 0.25 if spiked else 0.1, None, Reason(text, Panel.tokens))
    spike = f"; gradient norm {measures.peak_grad:.3g} (usually {measures.usual_grad:.3g})" if spiked else ""
    shift = m.entropy_shift(measures)
    if shift is not None and shift[2] > ENTROPY_SPREADS and shift[0] > shift[1]:
        against = Reason(
            f"token entropy {shift[0]:.2f} nats (usually {shift[1]:.2f}): many different tokens, not a few rare ones",
            Panel.tokens,
        )
        return rate_cause(cause, 0.45, Reason(text, Panel.tokens), against)
    share = _embedding_share(record)
    where = f", {share:.0%} of it in the embedding" if spiked and share is not None and share > 0.5 else ""
    return rate_cause(cause, 0.5 + 0.3 * spiked + 0.05 * bool(where), Reason(f"{text}{spike}{where}", Panel.tokens))


def _embedding_share(record: StepRecord) -> float | None:
    norms = record.group_grad_norms
    total = math.sqrt(sum(value**2 for value in norms.values() if math.isfinite(value)))
    return norms["embedding"] / total if "embedding" in norms and 0 < total < math.inf else None


def scrambled_data(evidence: Evidence, measures: Measures) -> RuleResult:
    """Tokens that are not text: their entropy differs from the corpus, or their fingerprint differs from the disk."""
    cause, shift = Cause.scrambled_data, m.entropy_shift(measures)
    mismatch = next((finding for finding in evidence.findings if finding.kind is FindingKind.data_mismatch), None)
    if mismatch is not None:
        return rate_cause(cause, 1.0, Reason(mismatch.message, Panel.ranks))
    changed = [batch.index for batch in evidence.batches if batch.is_changed]
    disk = f"batch {changed[0]} does not match the data on disk: its fingerprint differs" if changed else ""
    if shift is None:
        return rate_cause(cause, 0.55 if changed else 0.1, Reason(disk, Panel.tokens) if changed else None)
    seen, usual, spreads = shift
    text = f"token entropy of the batch {seen:.2f} nats (usually {usual:.2f}; distance {spreads:.1f} spreads)"
    if spreads < ENTROPY_SPREADS:
        against = Reason(text, Panel.tokens)
        return rate_cause(cause, 0.45 if changed else 0.1, Reason(disk, Panel.tokens) if changed else None, against)
    risen = measures.rise is not None and measures.rise > 3
    joined = f"{text}{'; ' if disk else ''}{disk}"
    if seen < usual:
        against = Reason(
            f"token entropy {seen:.2f} nats (usually {usual:.2f}): few different tokens, not noise", Panel.tokens
        )
        return rate_cause(cause, 0.45, Reason(joined, Panel.tokens), against)
    return rate_cause(cause, 0.65 + 0.2 * risen + 0.1 * bool(changed), Reason(joined, Panel.tokens))


def other_data(evidence: Evidence, measures: Measures) -> RuleResult:
    """The training loss rose and the held-out loss did not: the model is healthy and the data changed."""
    cause = Cause.other_data
    checked = m.held_out_check(evidence)
    if checked is None:
        return rate_cause(cause, 0.0, None, Reason("the held-out loss was not checked", Panel.loss))
    loss, expected = checked
    text = f"held-out loss {loss:.4f} (expected {expected:.4f})"
    if any(action.kind is ActionKind.accept for action in evidence.actions):
        level = "" if measures.level is None else f", while the training loss left its level of {measures.level:.4g}"
        return rate_cause(cause, 1.0, Reason(f"{text}{level}", Panel.loss))
    return rate_cause(cause, 0.0, None, Reason(text, Panel.loss))


def data_duplicate(evidence: Evidence, measures: Measures) -> RuleResult:
    """The data loader returned the same tokens for two batch indices."""
    cause = Cause.data_duplicate
    found = [finding for finding in evidence.findings if finding.kind is FindingKind.duplicate_batch]
    if not found:
        known = any(record.batch.get("fingerprint") for record in measures.during)
        text = "all batch fingerprints in the window differ" if known else "the log has no batch fingerprints"
        return rate_cause(cause, 0.0 if known else 0.1, None, Reason(text, Panel.tokens))
    others = {kind for kind in evidence.kinds() if kind not in ABOUT_SPEED | {FindingKind.duplicate_batch}}
    more = f", {len(found)} times in all" if len(found) > 1 else ""
    early = found[0].iteration <= evidence.onset
    score = 0.95 if not others else 0.85 if early else 0.4
    return rate_cause(cause, score, Reason(f"{found[0].message}{more}", Panel.tokens))
