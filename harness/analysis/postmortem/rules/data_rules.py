"""Rules for causes that lie in the data: what a batch held, and whether the loader is to blame."""

from __future__ import annotations

import math

from harness.analysis.postmortem import measures as m
from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rules.causes import Cause, Judgement, Panel, Reason, ruled
from harness.core.events import ABOUT_SPEED, ActionKind, FindingKind, StepRecord

GRAD_SPIKE = 5.0
"""Times the usual gradient norm from which a batch was loud."""
ENTROPY_SPREADS = 6.0
RARE_FACTOR = 3.0
"""Times the usual number of rare tokens from which they crowd a batch."""


def long_tail_token(_evidence: Evidence, measures: Measures) -> Judgement:
    """Tokens that are rare in the corpus crowd one batch, and their gradient dominates."""
    cause, surplus = Cause.long_tail_token, m.rare_surplus(measures)
    factor = measures.grad_factor
    if surplus is None:
        return ruled(cause, 0.1, None, Reason("the rarest tokens of the batches are not in the log", Panel.tokens))
    count, usual, record = surplus
    words = f"batch {record.cursor} holds its 8 rarest tokens {count} times, a usual batch {usual:g} times"
    spiked = factor is not None and math.isfinite(factor) and factor > GRAD_SPIKE
    if count < RARE_FACTOR * usual:
        return ruled(cause, 0.25 if spiked else 0.1, None, Reason(words, Panel.tokens))
    loud = f"; gradient norm {measures.peak_grad:.3g}, usually {measures.usual_grad:.3g}" if spiked else ""
    shift = m.entropy_shift(measures)
    if shift is not None and shift[2] > ENTROPY_SPREADS and shift[0] > shift[1]:
        against = Reason(
            f"entropy {shift[0]:.2f} nats, usually {shift[1]:.2f}: tokens of all kinds, no crowd", Panel.tokens
        )
        return ruled(cause, 0.45, Reason(words, Panel.tokens), against)
    share = _embedding_share(record)
    where = f", {share:.0%} of it in the embedding" if spiked and share is not None and share > 0.5 else ""
    return ruled(cause, 0.5 + 0.3 * spiked + 0.05 * bool(where), Reason(f"{words}{loud}{where}", Panel.tokens))


def _embedding_share(record: StepRecord) -> float | None:
    norms = record.group_grad_norms
    total = math.sqrt(sum(value**2 for value in norms.values() if math.isfinite(value)))
    return norms["embedding"] / total if "embedding" in norms and 0 < total < math.inf else None


def scrambled_data(evidence: Evidence, measures: Measures) -> Judgement:
    """Tokens that are no text: their entropy is not that of the corpus, or they are not what lies on disk."""
    cause, shift = Cause.scrambled_data, m.entropy_shift(measures)
    parted = next((each for each in evidence.findings if each.kind is FindingKind.data_mismatch), None)
    if parted is not None:
        return ruled(cause, 1.0, Reason(parted.message, Panel.ranks))
    changed = [batch.index for batch in evidence.batches if batch.is_changed]
    disk = f"batch {changed[0]} is not what lies on disk: its fingerprint differs" if changed else ""
    if shift is None:
        return ruled(cause, 0.55 if changed else 0.1, Reason(disk, Panel.tokens) if changed else None)
    seen, usual, spreads = shift
    words = f"entropy of the batch {seen:.2f} nats, usually {usual:.2f}, {spreads:.1f} spreads"
    if spreads < ENTROPY_SPREADS:
        against = Reason(f"{words} away", Panel.tokens)
        return ruled(cause, 0.45 if changed else 0.1, Reason(disk, Panel.tokens) if changed else None, against)
    risen = measures.rise is not None and measures.rise > 3
    joined = f"{words} away{'; ' if disk else ''}{disk}"
    if seen < usual:
        against = Reason(f"entropy {seen:.2f} nats, usually {usual:.2f}: few kinds of tokens, not noise", Panel.tokens)
        return ruled(cause, 0.45, Reason(joined, Panel.tokens), against)
    return ruled(cause, 0.65 + 0.2 * risen + 0.1 * bool(changed), Reason(joined, Panel.tokens))


def other_data(evidence: Evidence, measures: Measures) -> Judgement:
    """The held-out loss was at its level while the training loss was not: the state is healthy, the data changed."""
    cause = Cause.other_data
    checked = m.held_out_check(evidence)
    if checked is None:
        return ruled(cause, 0.0, None, Reason("nothing called for a held-out check", Panel.loss))
    loss, expected = checked
    words = f"held-out loss {loss:.4f}, a healthy state has {expected:.4f}"
    if any(action.kind is ActionKind.accept for action in evidence.actions):
        level = "" if measures.level is None else f", while the training loss left its level of {measures.level:.4g}"
        return ruled(cause, 1.0, Reason(f"{words}{level}", Panel.loss))
    return ruled(cause, 0.0, None, Reason(words, Panel.loss))


def data_duplicate(evidence: Evidence, measures: Measures) -> Judgement:
    """The loader gave the same tokens under two indices."""
    cause = Cause.data_duplicate
    found = [finding for finding in evidence.findings if finding.kind is FindingKind.duplicate_batch]
    if not found:
        known = any(record.batch.get("fingerprint") for record in measures.during)
        words = "all fingerprints of the window differ" if known else "the log has no fingerprints of batches"
        return ruled(cause, 0.0 if known else 0.1, None, Reason(words, Panel.tokens))
    others = {kind for kind in evidence.kinds() if kind not in ABOUT_SPEED | {FindingKind.duplicate_batch}}
    more = f", {len(found)} times in all" if len(found) > 1 else ""
    early = found[0].iteration <= evidence.onset
    score = 0.95 if not others else 0.85 if early else 0.4
    return ruled(cause, score, Reason(f"{found[0].message}{more}", Panel.tokens))
