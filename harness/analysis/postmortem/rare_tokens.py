"""Finds tokens that a batch holds far more often than their count in the corpus explains.

Why: a batch always has some rarest tokens. Only a rare token that occurs several times in one batch is unusual.
How: of a token that is present once, the other occurrences are spread over the corpus. Usual batches show which share
of them falls into the same batch; that share also holds the usual clustering of words in documents. From it follows how
many further occurrences are expected. The surprise is the Poisson log-likelihood ratio of what was counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.analysis.postmortem.evidence import Evidence, GuiltyBatch, Token
from harness.analysis.postmortem.recorded_batch import rare_count, rarest
from harness.core.events import TOKEN_LOSS_EDGES, StepRecord

LEAST_SURPRISE = 3.0
"""In nats: a chance of about 5 % for one token."""
USUAL_QUANTILE = 0.95
"""A token must also be more surprising than the most surprising token of this share of the usual batches."""
USUAL_SHARE, USUAL_WEIGHT = 0.02, 50.0
"""The share that is assumed without usual batches to learn it from, and the occurrences that the assumption weighs."""
LEAST_EXPECTED = 0.02
RARE_FACTOR = 3.0
"""Where corpus counts are not known: a batch with this many times the usual occurrences of its rarest tokens."""
HIGH_LOSS_NATS, HIGH_SHARE, HIGH_FACTOR = 8.0, 0.001, 4.0
"""Token losses from here on form a tail; it is heavy above this share and this many times the usual share."""


def counts_of(record: StepRecord) -> list[Token]:
    """The rarest tokens of a record."""
    found = []
    for token, in_batch, in_corpus in rarest(record):
        if isinstance(token, int) and isinstance(in_batch, int) and isinstance(in_corpus, int | None):
            found.append(Token(token=token, text="", num_in_batch=in_batch, num_in_corpus=in_corpus))
    return found


def flag_tokens(batch: GuiltyBatch, evidence: Evidence, before: Sequence[StepRecord]) -> list[Token] | None:
    """Tokens of a batch that occur too often, the most surprising first; None: the log cannot tell."""
    if not batch.rarest:
        return None
    if any(token.num_in_corpus is None for token in batch.rarest):
        return _flag_crowd(batch, before)
    usual = [counts_of(record) for record in before]
    share = _clustered_share(token for tokens in usual for token in tokens)
    highest = sorted(max((_surprise(token, share) for token in tokens), default=0.0) for tokens in usual)
    bound = max(LEAST_SURPRISE, highest[int(USUAL_QUANTILE * (len(highest) - 1))] if highest else 0.0)
    scale = evidence.run.num_shares if batch.is_whole else 1
    surprises = [(_surprise(token, share * scale), token) for token in batch.rarest]
    flagged = [(surprise, token) for surprise, token in surprises if surprise > bound]
    return [token for _, token in sorted(flagged, key=lambda pair: -pair[0])]


def _flag_crowd(batch: GuiltyBatch, before: Sequence[StepRecord]) -> list[Token] | None:
    """Without corpus counts: all rarest tokens, if they occur far more often than those of usual batches."""
    usual = sorted(count for record in before if (count := rare_count(record)) is not None)
    if not usual:
        return None
    count = sum(token.num_in_batch for token in batch.rarest)
    return list(batch.rarest) if count >= RARE_FACTOR * max(usual[len(usual) // 2], 1) else []


def _clustered_share(tokens: Iterable[Token]) -> float:
    """Of the occurrences of a token besides one in a batch, the share that is usually in the same batch."""
    inside, outside = USUAL_SHARE * USUAL_WEIGHT, USUAL_WEIGHT
    for token in tokens:
        if token.num_in_corpus is not None and token.num_in_corpus > 1:
            inside += token.num_in_batch - 1
            outside += token.num_in_corpus - 1
    return min(inside / outside, 1.0)


def _surprise(token: Token, share: float) -> float:
    """Log-likelihood ratio of the further occurrences in the batch against those expected; 0 if they are not more."""
    expected = max(max((token.num_in_corpus or 0) - 1, 0) * share, LEAST_EXPECTED)
    further = token.num_in_batch - 1
    return further * math.log(further / expected) - (further - expected) if further > expected else 0.0


def embedding_share(record: StepRecord) -> float | None:
    """Share of the gradient norm that lies in the embedding; None: not recorded."""
    norms = record.group_grad_norms
    total = math.sqrt(sum(value**2 for value in norms.values() if math.isfinite(value)))
    return norms["embedding"] / total if "embedding" in norms and 0 < total < math.inf else None


def embedding_activation(record: StepRecord, before: Sequence[StepRecord]) -> float | None:
    """Activation RMS of the embedding relative to its usual value; None: not probed."""
    name = next((name for name in record.activation_rms if name.startswith("embed")), None)
    usual = sorted(r.activation_rms[name] for r in before if name is not None and r.activation_rms.get(name, 0.0) > 0)
    if name is None or not usual or not math.isfinite(record.activation_rms[name]):
        return None
    return record.activation_rms[name] / usual[len(usual) // 2]


def heavy_tail(counts: Sequence[int], before: Sequence[StepRecord]) -> tuple[float, float, float] | None:
    """Lower edge of the most frequent bin of high token losses, the share of high losses, and its usual value.

    None: token losses were not probed, or their tail is as usual.
    """
    share = _high_share(counts)
    usual = sorted(known for r in before if (known := _high_share(r.token_loss_counts)) is not None)
    if share is None or share < HIGH_SHARE or (usual and share < HIGH_FACTOR * usual[len(usual) // 2]):
        return None
    first = _first_high_bin()
    mode = max(range(first, len(counts)), key=lambda place: counts[place])
    return TOKEN_LOSS_EDGES[mode - 1], share, usual[len(usual) // 2] if usual else math.nan


def _high_share(counts: Sequence[int]) -> float | None:
    return sum(counts[_first_high_bin() :]) / sum(counts) if sum(counts) else None


def _first_high_bin() -> int:
    """Bin `n` begins at edge `n - 1`."""
    return TOKEN_LOSS_EDGES.index(HIGH_LOSS_NATS) + 1
