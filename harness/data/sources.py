"""From the configuration to the two streams of a run: what it trains on and what it is judged by.

Why: everything that can be wrong with the data is said here, in one line, before the first step.
How: each source is split by itself, its tail held out. Training mixes by the configured phases as the ledger amends
them; evaluation always mixes by the weights of the sources, in one order for all runs, so that losses can be compared.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

from harness.config.errors import require
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.data.batches import Batches, Share, Source
from harness.data.corpus.corpora import build_corpus, split
from harness.data.corpus.corpus import Corpus, SampleShape
from harness.data.corpus.corpus_record import DataRecord, SourceRecord, later_stretches, read_record
from harness.data.corpus.token_windows import FilesCorpus
from harness.data.order.ledger import Ledger
from harness.data.order.mixture import Change, MixtureRecipe
from harness.data.order.stratify import StratifiedOrder, make_index, rare_tokens

HELD_OUT_SEED = 2**63
"""The order of held-out data: one above every `run.seed`, and the same for all, so that runs are judged alike."""

NUM_PASSES_CHECKED = 64
"""Passes over the data for which the limit on rare tokens is tried out; few runs take more."""


class RecordedData(NamedTuple):
    """What the directory of a run says of its data."""

    record: DataRecord | None
    rare_index: Path | None
    """The counts that `data.stratify` needs; where there is no such file the data is scanned."""


def read_recorded_data(run: RunDir) -> RecordedData:
    """What a run has written down, for tools that only read it."""
    return RecordedData(read_record(run.corpus), run.rare_tokens)


def open_data(
    cfg: Config,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    ledger: Ledger,
    recorded: RecordedData | None = None,
) -> tuple[Batches, Batches]:
    """What this rank trains on and what it is judged by; without `recorded`, from the corpus as it is now."""
    record, rare_index = (None, None) if recorded is None else recorded
    train_sources, held_out_sources = open_sources(cfg, record)
    share = Share(rank, world_size, device, cfg.train.micro_batch_size, compare_every=cfg.sentinel.probe_every)
    mask, size = cfg.data.document_mask, cfg.train.batch_size
    train = Batches(
        train_sources,
        recipe=train_recipe(cfg, record),
        share=share,
        ledger=ledger,
        document_mask=mask,
        stratified=build_stratified_order(cfg, train_sources, rare_index),
        with_facts=True,
    )
    message = f"must be at most the {describe_capacity(train)} there are to train on, got {size}"
    require(len(train) > 0, "train.batch_size", message)
    held_out = Batches(held_out_sources, recipe=held_out_recipe(cfg), share=share, ledger=Ledger(), document_mask=mask)
    message = f"holds out {describe_capacity(held_out)}, less than one batch of {size} takes"
    require(len(held_out) > 0 or cfg.eval.every_steps == 0, "data.eval_fraction", message)
    return train, held_out


def open_sources(cfg: Config, record: DataRecord | None = None) -> tuple[list[Source], list[Source]]:
    """Each source's samples to train on, and those held out: a tail of the files that the run began with."""
    train, held_out = [], []
    for name in cfg.data.sources:
        seed = source_seed(cfg, name)
        recorded = None if record is None else record.sources.get(name)
        corpus = open_corpus(cfg, name, seed=seed, recorded=recorded)
        if cfg.data.document_mask:
            require_documents(corpus)
        windows = split_windows(corpus, recorded)
        train_samples, held_out_samples = split(windows.num_first, cfg.data.eval_fraction, source=name)
        train.append(Source(name, corpus, train_samples, seed, later_stretches(train_samples, windows.added)))
        held_out.append(Source(name, corpus, held_out_samples, HELD_OUT_SEED))
    return train, held_out


class SourceWindows(NamedTuple):
    num_first: int
    """Windows of the files that the run began with."""
    added: list[tuple[int, range]]
    """Those of each addition, with the turn from which they are read."""


def split_windows(corpus: Corpus, recorded: SourceRecord | None) -> SourceWindows:
    """Which windows were there when the run began, and which were added."""
    if recorded is None or not isinstance(corpus, FilesCorpus):
        return SourceWindows(corpus.num_samples, [])
    added, num_files = [], recorded.num_first
    for addition in recorded.additions:
        ends = [corpus.num_windows(count) for count in (num_files, num_files + addition.num_files)]
        added.append((addition.from_turn, range(*ends)))
        num_files += addition.num_files
    return SourceWindows(corpus.num_windows(recorded.num_first), added)


def open_corpus(cfg: Config, name: str, *, seed: int, recorded: SourceRecord | None = None) -> Corpus:
    shape = SampleShape(cfg.train.sequence_length, cfg.model.vocab_size)
    files = None if recorded is None or not recorded.files else recorded.files
    source = cfg.data.sources[name]
    return build_corpus(name, source, shape=shape, synthetic=cfg.data.synthetic, seed=seed, files=files)


def require_documents(corpus: Corpus) -> None:
    """Refuse a document mask for files without document boundaries: it would mask nothing."""
    flat = corpus.without_documents if isinstance(corpus, FilesCorpus) else None
    message = (
        f"{flat} has no document boundaries; only a .bin with its .idx has them (harness data prepare writes both)"
    )
    require(flat is None, "data.document_mask", f"{message}; prepare the data again, or set it to false")


def source_seed(cfg: Config, name: str) -> int:
    """The source's own seed, or one that depends on the run's and the name alone."""
    given = cfg.data.sources[name].seed
    if given is not None:
        return given
    word = blake2b(f"{cfg.run.seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(word, "little") >> 1


def train_recipe(cfg: Config, record: DataRecord | None = None) -> MixtureRecipe:
    """What the run is to train on, batch by batch."""
    changes = [Change(phase.from_batch, phase.weights) for phase in cfg.data.phases]
    sizes = () if record is None else record.sizes
    return MixtureRecipe(
        weights=source_weights(cfg), changes=changes, batch_size=cfg.train.batch_size, seed=cfg.run.seed, sizes=sizes
    )


def held_out_recipe(cfg: Config, *, batch_size: int | None = None) -> MixtureRecipe:
    size = cfg.train.batch_size if batch_size is None else batch_size
    return MixtureRecipe(weights=source_weights(cfg), changes=(), batch_size=size, seed=HELD_OUT_SEED)


def source_weights(cfg: Config) -> dict[str, float]:
    return {name: source.weight for name, source in cfg.data.sources.items()}


def make_rare_index(cfg: Config, recorded: RecordedData) -> None:
    """Scan the data for rare tokens where that is needed and was not done before."""
    if cfg.data.stratify.rare_below and recorded.rare_index is not None and recorded.rare_index.parent.is_dir():
        (source,), _ = open_sources(cfg, recorded.record)
        make_index(recorded.rare_index, source.corpus, source.samples, below=cfg.data.stratify.rare_below)


def build_stratified_order(
    cfg: Config, sources: list[Source], rare_index: Path | None = None
) -> StratifiedOrder | None:
    """The limit on rare tokens, where it is asked for; that it can be kept is tried out before the first step."""
    limits = cfg.data.stratify
    if limits.rare_below == 0:
        return None
    (source,) = sources
    stratified = StratifiedOrder(
        rare_tokens(source.corpus, source.samples, below=limits.rare_below, index=rare_index),
        num_samples=len(source.samples),
        batch_size=cfg.train.batch_size,
        seed=source.seed,
        max_per_batch=limits.max_per_batch,
    )
    num_passes = -(-cfg.train.num_steps * cfg.train.batch_size // len(source.samples))
    for epoch in reversed(range(min(num_passes, NUM_PASSES_CHECKED))):
        stratified.swaps(epoch)
    return stratified


def describe_capacity(batches: Batches) -> str:
    """How many sequences there are, of the source that runs out first."""
    _, source = batches.first_repeat()
    named = f" of {source.name}" if len(batches.sources) > 1 else ""
    return f"{len(source.samples)} sequences{named}"
