"""Rules for causes in the data: contents of a batch, and errors of the data loader."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.analysis.postmortem import measures as m
from harness.analysis.postmortem.evidence import Evidence, GuiltyBatch, Token
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rare_tokens import RARE_FACTOR as RARE_FACTOR
from harness.analysis.postmortem.rare_tokens import embedding_activation, embedding_share, flag_tokens, heavy_tail
from harness.analysis.postmortem.rules.causes import Cause, Panel, Reason, RuleResult, leave_unexamined, rate_cause
from harness.config.data import may_change_next_batch
from harness.core.events import ABOUT_SPEED, ActionKind, ChangePlanned, FindingKind, Intervention, StepRecord

GRAD_SPIKE, LONG_TAIL_GRAD = 5.0, 30.0
"""A gradient norm above this many times the usual one is a spike; above the second, one that rare tokens cause."""
EMBEDDING_SHARE, LEAST_EMBEDDING_SHARE = 0.5, 0.1
"""Shares of the gradient norm in the embedding that speak for and against rare tokens."""
EMBEDDING_ACTIVATION = 2.0
ENTROPY_SPREADS = 6.0
"""Token entropy this many spreads from usual is abnormal."""
MOST_NAMED = 3
PLANNED_BEFORE = 50
"""Batches before the onset within which a planned change explains an incident."""


def planned_change(evidence: Evidence, measures: Measures) -> RuleResult:
    """The configuration, the policy or a person changed the data, and the loss changed with it."""
    cause, change = Cause.planned_change, find_planned_change(evidence)
    if change is None:
        known = bool(evidence.run.settings)
        if not known:
            return leave_unexamined(cause, "the configuration is not known", None)
        text = "no phase of data.phases, swap or resume with other data precedes the onset"
        return rate_cause(cause, 0.0, None, Reason(text, None))
    if not measures.is_finite:
        against = Reason("the loss or gradient was not finite: other data raises it, and does no more", Panel.loss)
        return rate_cause(cause, 0.3, Reason(change, Panel.loss), against)
    return rate_cause(cause, 0.95, Reason(change, Panel.loss))


def find_planned_change(evidence: Evidence) -> str | None:
    """The planned change of the data shortly before the onset, in words; None: there is none."""
    cursors = [record.cursor for record in evidence.records if record.iteration == evidence.onset]
    first = cursors[0] if cursors else None
    for phase in evidence.run.settings.get("data.phases") or []:
        start = phase.get("from_batch") if isinstance(phase, dict) else None
        if isinstance(start, int) and first is not None and 0 < start <= first < start + PLANNED_BEFORE:
            return f"data.phases changes the weights of the sources from batch {start} on; the onset is batch {first}"
    for event in evidence.of(ChangePlanned):
        is_before = first is not None and event.cursor <= first < event.cursor + PLANNED_BEFORE
        if is_before and any(word in event.reason for word in ("weights", "phase", "different data", "files")):
            return f"{event.reason} at batch {event.cursor}; the onset is batch {first}"
    for event in evidence.of(Intervention):
        keys = [key for key in event.changes if may_change_next_batch(key)]
        if keys and evidence.onset - PLANNED_BEFORE <= event.iteration <= evidence.onset:
            return f"{event.reason} changed {', '.join(keys[:MOST_NAMED])} at iteration {event.iteration}"
    return None


def long_tail_token(evidence: Evidence, measures: Measures) -> RuleResult:
    """A batch holds a rare token several times, and the gradient of its embedding dominates."""
    cause, factor = Cause.long_tail_token, measures.grad_factor
    suspects = {record.cursor: record for record in measures.suspects}
    batches = [batch for batch in evidence.batches if batch.index in suspects and batch.rarest]
    if factor is None:
        return leave_unexamined(cause, "the usual gradient norm is not in the log", Panel.gradient)
    size = f"gradient norm {measures.peak_grad:.3g}, {factor:.3g} times the usual {measures.usual_grad:.3g}"
    if not math.isfinite(factor):
        text = f"gradient norm {measures.peak_grad}: a rare token makes it large, not non-finite"
        return rate_cause(cause, 0.1, None, Reason(text, Panel.gradient))
    judged = [(batch, flag_tokens(batch, evidence, measures.before)) for batch in batches]
    known = [(batch, flagged) for batch, flagged in judged if flagged is not None]
    crowded = next(((batch, flagged) for batch, flagged in known if flagged), None)
    if factor <= GRAD_SPIKE:
        support = Reason(describe_tokens(*crowded), Panel.tokens) if crowded else None
        return rate_cause(cause, 0.2 if crowded else 0.05, support, Reason(f"only {size}", Panel.gradient))
    if not known:
        return leave_unexamined(cause, "the log does not record the rarest tokens of the batches", Panel.tokens)
    if crowded is None:
        whole = evidence.run.num_shares == 1 or all(batch.is_whole for batch, _ in known)
        if not whole:
            return leave_unexamined(
                cause, "the rarest tokens are ordinary in the rows of rank 0; other rows were not read", Panel.tokens
            )
        text = f"none flagged: the rarest tokens of batch {known[0][0].index} occur as often as in usual batches"
        return rate_cause(cause, 0.15, None, Reason(text, Panel.tokens))
    return _rate_long_tail(measures, suspects[crowded[0].index], *crowded, size)


def _rate_long_tail(
    measures: Measures, record: StepRecord, batch: GuiltyBatch, flagged: list[Token], size: str
) -> RuleResult:
    """The score of a flagged batch with a gradient spike; each further sign adds to it."""
    cause, tokens = Cause.long_tail_token, Reason(describe_tokens(batch, flagged), Panel.tokens)
    shift = m.entropy_shift(measures)
    if shift is not None and shift[2] > ENTROPY_SPREADS and shift[0] > shift[1]:
        many = f"token entropy {shift[0]:.2f} nats (usually {shift[1]:.2f}): many different tokens, not a few rare ones"
        return rate_cause(cause, 0.45, tokens, Reason(many, Panel.tokens))
    score = 0.8 if (measures.grad_factor or 0.0) > LONG_TAIL_GRAD else 0.7
    share, activation = embedding_share(record), embedding_activation(record, measures.before)
    tail = heavy_tail(batch.token_loss_counts, measures.before)
    if share is not None and share < LEAST_EMBEDDING_SHARE:
        small = Reason(f"only {share:.0%} of the gradient norm is in the embedding", Panel.gradient)
        return rate_cause(cause, 0.45, tokens, small)
    details = [Reason(size, Panel.gradient)]
    if share is not None and share > EMBEDDING_SHARE:
        score, details = score + 0.05, [Reason(f"{size}, {share:.0%} of it in the embedding", Panel.gradient)]
    if activation is not None and activation > EMBEDDING_ACTIVATION:
        score += 0.05
        details.append(Reason(f"activation of the embedding {activation:.2g} times usual", Panel.activations))
    if tail is not None:
        score += 0.05
        text = f"{tail[1]:.1%} of the token losses lie in a mode near {tail[0]:g} nats (usually {tail[2]:.1%})"
        details.append(Reason(text, Panel.token_losses))
    return rate_cause(cause, score, tokens, details=details)


def describe_tokens(batch: GuiltyBatch, flagged: Sequence[Token]) -> str:
    """The flagged tokens of a batch with their counts."""
    named = [
        f"{token.text or token.token} x{token.num_in_batch}"
        + ("" if token.num_in_corpus is None else f" of {token.num_in_corpus} in the corpus")
        for token in flagged[:MOST_NAMED]
    ]
    more = f" and {len(flagged) - MOST_NAMED} more" if len(flagged) > MOST_NAMED else ""
    return f"batch {batch.index} holds too many of the rare tokens {', '.join(named)}{more}"


def scrambled_data(evidence: Evidence, measures: Measures) -> RuleResult:
    """Tokens that are not text: their entropy differs from the corpus, or their fingerprint differs from the disk."""
    cause, shift = Cause.scrambled_data, m.entropy_shift(measures)
    mismatch = next((finding for finding in evidence.findings if finding.kind is FindingKind.data_mismatch), None)
    if mismatch is not None:
        return rate_cause(cause, 1.0, Reason(mismatch.message, Panel.ranks))
    changed = [batch.index for batch in evidence.batches if batch.is_changed]
    disk = f"batch {changed[0]} does not match the data on disk: its fingerprint differs" if changed else ""
    if shift is None and not changed:
        return leave_unexamined(cause, "the token entropy of the batches is not in the log", Panel.tokens)
    if shift is None:
        return rate_cause(cause, 0.55, Reason(disk, Panel.tokens))
    seen, usual, spreads = shift
    text = f"token entropy of the batch {seen:.2f} nats (usually {usual:.2f}; {spreads:.1f} sigma from normal)"
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
    planned = find_planned_change(evidence)
    if planned is not None:
        return rate_cause(cause, 0.4, Reason(joined, Panel.tokens), Reason(f"planned: {planned}", Panel.loss))
    return rate_cause(cause, 0.65 + 0.2 * risen + 0.1 * bool(changed), Reason(joined, Panel.tokens))


def other_data(evidence: Evidence, measures: Measures) -> RuleResult:
    """The training loss rose and the held-out loss did not: the model is healthy and the data changed."""
    cause = Cause.other_data
    checked = m.held_out_check(evidence)
    if checked is None:
        return leave_unexamined(cause, "the held-out loss was not checked", Panel.loss)
    loss, expected = checked
    text = f"held-out loss {loss:.4f} (expected {expected:.4f})"
    if any(action.kind is ActionKind.accept for action in evidence.actions):
        level = "" if measures.level is None else f", while the training loss left its level of {measures.level:.4g}"
        planned = find_planned_change(evidence)
        against = None if planned is None else Reason(f"planned: {planned}", Panel.loss)
        return rate_cause(cause, 1.0 if planned is None else 0.45, Reason(f"{text}{level}", Panel.loss), against)
    return rate_cause(cause, 0.0, None, Reason(text, Panel.loss))


def data_duplicate(evidence: Evidence, measures: Measures) -> RuleResult:
    """The data loader returned the same tokens for two batch indices."""
    cause = Cause.data_duplicate
    found = [finding for finding in evidence.findings if finding.kind is FindingKind.duplicate_batch]
    if not found:
        return _compare_fingerprints(evidence, measures)
    others = {kind for kind in evidence.kinds() if kind not in ABOUT_SPEED | {FindingKind.duplicate_batch}}
    more = f", {len(found)} times in all" if len(found) > 1 else ""
    early = found[0].iteration <= evidence.onset
    score = 0.95 if not others else 0.85 if early else 0.4
    return rate_cause(cause, score, Reason(f"{found[0].message}{more}", Panel.tokens))


def _compare_fingerprints(evidence: Evidence, measures: Measures) -> RuleResult:
    """Compare the fingerprints of the suspected batches with those of all other batches of the window."""
    cause = Cause.data_duplicate
    known: dict[str, set[int]] = {}
    for record in evidence.records:
        if fingerprint := str(record.batch.get("fingerprint") or record.fingerprint):
            known.setdefault(fingerprint, set()).add(record.cursor)
    suspects = {record.cursor for record in measures.suspects}
    seen = {cursor for cursors in known.values() for cursor in cursors}
    if not suspects & seen:
        return leave_unexamined(cause, "the log has no fingerprint of the batch", Panel.tokens)
    same = next((sorted(cursors) for cursors in known.values() if len(cursors) > 1 and cursors & suspects), None)
    if same is not None:
        text = f"batches {', '.join(map(str, same[:MOST_NAMED]))} have the same fingerprint"
        return rate_cause(cause, 0.85, Reason(text, Panel.tokens))
    guilty = min(suspects & seen)
    neighbours = [str(cursor) for cursor in (guilty - 1, guilty + 1) if cursor in seen]
    text = f"the fingerprint of batch {guilty} differs from those of all other batches of the window"
    named = f", batches {' and '.join(neighbours)} among them" if neighbours else ""
    return rate_cause(cause, 0.0, None, Reason(f"{text}{named}", Panel.tokens))
