"""Reads the tokens of guilty batches again, with the run's own configuration and ledger.

Why: a step record holds only a fingerprint and the rarest tokens of its batch. The report also shows sample text, and
whether the batch that was trained on still matches the data on disk.
How: the batch is read by its index, as in training. This needs torch, which is imported only here, and the data. If
the data is gone, the batch keeps what its record says and no error is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.analysis.postmortem.evidence import GuiltyBatch, Token
from harness.config import compose
from harness.config.errors import ConfigError
from harness.core.rundir import RunDir

NUM_COMMON, NUM_COUNTS = 12, 2000
NUM_SAMPLES, SAMPLE_CHARACTERS = 3, 160
MOST_SCANNED_SAMPLES, SCAN_SAMPLES = 50_000, 256
"""A corpus with more samples is not scanned for token counts."""


def reread_batches(run: RunDir, guilty: Sequence[GuiltyBatch]) -> None:
    """Fill in fingerprint, tokens and sample text of each batch, as far as they can be read."""
    try:
        batches = _open_batches(run)
    except (ConfigError, OSError, ValueError):
        return
    try:
        corpus_counts = _count_tokens(batches)
        for batch in guilty:
            if batch.index >= 0:
                _fill_batch(batch, batches, corpus_counts)
    except (ConfigError, OSError, ValueError):
        return
    finally:
        batches.close()


def _open_batches(run: RunDir) -> Any:
    cfg = compose.read(run.config)
    import torch

    from harness.data.order.ledger import Ledger
    from harness.data.sources import open_data, read_recorded_data

    ledger = Ledger.load(run.ledger, writer=False) if run.ledger.exists() else Ledger()
    train, held_out = open_data(
        cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=ledger, recorded=read_recorded_data(run)
    )
    held_out.close()
    return train


def _fill_batch(batch: GuiltyBatch, batches: Any, corpus_counts: Any) -> None:
    import numpy as np

    from harness.data.batch_view import row_tokenizer, truncate, view_batch

    view = view_batch(batches, batch.index, excluded=False)
    sources, _ = batches.samples(batch.index)
    origins = batches.origins(batch.index)
    tokenizer = row_tokenizer(batches.sources[int(sources[0])].corpus, origins[0])
    batch.reread = view.fingerprint
    tokens, counts = np.unique(batches.rows(batch.index), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    batch.num_counts = counts[order][:NUM_COUNTS].tolist()
    batch.common = [
        Token(token=int(tokens[at]), text=_spell(tokenizer, int(tokens[at])), num_in_batch=int(counts[at]))
        for at in order[:NUM_COMMON].tolist()
    ]
    if not batch.is_changed and corpus_counts is not None:
        batch.rarest, batch.is_whole = _rarest_tokens(batches, batch.index, corpus_counts), True
    for rare in batch.rarest:
        rare.text = _spell(tokenizer, rare.token)
    batch.samples = [truncate(" ".join(row.texts), SAMPLE_CHARACTERS) for row in view.rows[:NUM_SAMPLES]]


def _rarest_tokens(batches: Any, index: int, corpus_counts: Any) -> list[Token]:
    """The rarest tokens of a whole batch."""
    from harness.data.batch_facts import global_facts

    sources, _ = batches.samples(index)
    num_sources = len(batches.sources)
    facts = global_facts(batches.rows(index), sources, num_sources=num_sources, frequencies=corpus_counts)
    return [
        Token(token=rare.token, text="", num_in_batch=rare.num_in_batch, num_in_corpus=rare.num_in_corpus)
        for rare in facts.rarest
    ]


def _count_tokens(batches: Any) -> Any:
    """How often each token occurs in the corpus: as counted when it was prepared, or by a scan if it is small.

    None: a corpus was not counted, and is large or one of several.
    """
    import numpy as np

    known = [source.corpus.token_counts() for source in batches.sources]
    if all(counts is not None for counts in known):
        total = np.zeros(max(len(counts) for counts in known), dtype=np.int64)
        for counts in known:
            total[: len(counts)] += counts
        return total
    corpus = batches.sources[0].corpus
    if len(known) > 1 or corpus.num_samples > MOST_SCANNED_SAMPLES:
        return None
    counts = np.zeros(corpus.vocab_size, dtype=np.int64)
    for first in range(0, corpus.num_samples, SCAN_SAMPLES):
        rows = corpus.rows(np.arange(first, min(first + SCAN_SAMPLES, corpus.num_samples)))
        counts += np.bincount(rows[:, :-1].ravel(), minlength=corpus.vocab_size)
    return counts


def _spell(tokenizer: Any, token: int) -> str:
    return "" if tokenizer is None else str(tokenizer.spell(token))
