"""Builds the two data streams of a run from the configuration: training batches and held-out batches.

Why: every error in the data is reported here, in one line, before the first step.
How: each source is split by itself, its tail held out. Training mixes by the configured phases and the ledger's
amendments. Evaluation always mixes by the weights of the sources, in one order for all runs, so that losses can be
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

from harness.config.errors import ConfigError, require
from harness.config.schema import Config
from harness.core.batch_sizes import BatchSize
from harness.core.rundir import RunDir
from harness.data.batch_plan import Source
from harness.data.batches import Batches, Share
from harness.data.corpus.corpora import build_corpus, split
from harness.data.corpus.corpus import Corpus, SampleShape
from harness.data.corpus.corpus_record import DataRecord, SourceRecord, later_stretches, read_record
from harness.data.corpus.document_ends import contains_token, num_searched
from harness.data.corpus.remote_cache import use_cache
from harness.data.corpus.token_windows import FilesCorpus
from harness.data.order.ledger import Ledger
from harness.data.order.mixture import Change, MixtureRecipe
from harness.data.order.rare_token_rows import ScannedSource, rare_tokens, write_rare_index
from harness.data.order.stratify import OrderStage, StratifiedOrder, StratifiedSource

HELD_OUT_SEED = 2**63
"""Seed of the held-out order: above every `run.seed`, and the same for all runs, so that their losses compare."""

NUM_PASSES_CHECKED = 64
"""Epochs for which the limit on rare tokens is checked before the first step; few runs take more."""


class RecordedData(NamedTuple):
    """What a run directory records about its data."""

    record: DataRecord | None
    rare_index: Path | None
    """Index file of rare tokens for `data.stratify`; without the file the data is scanned."""


def read_recorded_data(run: RunDir) -> RecordedData:
    """The data record of a run, for tools that only read it."""
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
    """Training and held-out batches of this rank; without `recorded`, from the corpus as it is now."""
    record, rare_index = (None, None) if recorded is None else recorded
    train_sources, held_out_sources = open_sources(cfg, record)
    share = Share(rank, world_size, device, cfg.train.micro_batch_size, compare_every=cfg.sentinel.probe_every)
    mask, size, recipe = cfg.data.document_mask, cfg.train.batch_size, train_recipe(cfg, record)
    train = Batches(
        train_sources,
        recipe=recipe,
        share=share,
        ledger=ledger,
        document_mask=mask,
        stratified=build_stratified_order(cfg, train_sources, recipe, rare_index),
        with_facts=True,
        fetch_ahead=cfg.data.remote.ahead_batches,
    )
    for stage in recipe.sizes:
        require_rows(train, stage)
    held_out = Batches(held_out_sources, recipe=held_out_recipe(cfg), share=share, ledger=Ledger(), document_mask=mask)
    message = f"holds out {describe_capacity(held_out)}, fewer than one batch of {size}"
    require(len(held_out) > 0 or cfg.eval.every_steps == 0, "data.eval_fraction", message)
    return train, held_out


def require_rows(batches: Batches, stage: BatchSize) -> None:
    """Reject a batch size for which a source has too few sequences: a batch would hold one twice."""
    rows, _ = batches.mixture.batch(stage.from_batch)
    for number, source in enumerate(batches.sources):
        num_samples = max(stretch.num_samples for stretch in source.stretches)
        named = f" of {source.name}" if len(batches.sources) > 1 else ""
        message = f"must be at most the {num_samples} sequences{named} of training data, got {stage.batch_size}"
        require(int((rows == number).sum()) <= num_samples, "train.batch_size", message)


def open_sources(cfg: Config, record: DataRecord | None = None) -> tuple[list[Source], list[Source]]:
    """Each source's training samples and held-out samples; the latter are the tail of the files that the run began
    with."""
    use_cache(cfg.data.remote)
    train, held_out = [], []
    for name in cfg.data.sources:
        seed = source_seed(cfg, name)
        recorded = None if record is None else record.sources.get(name)
        corpus = open_corpus(cfg, name, seed=seed, recorded=recorded)
        if cfg.data.document_mask:
            require_documents(name, corpus, cfg.data.eod_token)
        windows = split_windows(corpus, recorded)
        train_samples, held_out_samples = split(windows.num_first, cfg.data.eval_fraction, source=name)
        train.append(Source(name, corpus, train_samples, seed, later_stretches(train_samples, windows.added)))
        held_out.append(Source(name, corpus, held_out_samples, HELD_OUT_SEED))
    return train, held_out


class SourceWindows(NamedTuple):
    num_first: int
    """Windows of the files that the run began with."""
    added: list[tuple[int, range]]
    """(turn from which they are read, windows) of each later addition of files."""


def split_windows(corpus: Corpus, recorded: SourceRecord | None) -> SourceWindows:
    """Split the windows of a corpus into those of the first files and those of files added later."""
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
    return build_corpus(
        name,
        source,
        shape=shape,
        synthetic=cfg.data.synthetic,
        seed=seed,
        files=files,
        eod_token=cfg.data.eod_token,
    )


def require_documents(name: str, corpus: Corpus, eod_token: int | None) -> None:
    """Reject a document mask for a source without document boundaries: it would mask nothing."""
    flat = corpus.flat_files if isinstance(corpus, FilesCorpus) else []
    if not flat:
        return
    if eod_token is None:
        advice = "set data.eod_token to the id that ends its documents, prepare it with an .idx (harness data prepare)"
        message = f"{flat[0].name} has no document boundaries; {advice}, or set this to false"
        raise ConfigError("data.document_mask", message)
    files = flat[0].name if len(flat) == 1 else f"{flat[0].name} and {len(flat) - 1} more files"
    searched = f"the first {num_searched(flat)} tokens of source {name} ({files})"
    message = f"id {eod_token} does not occur in {searched}, so data.document_mask would keep no documents apart"
    require(contains_token(flat, eod_token), "data.eod_token", f"{message}; set the id that ends documents there")


def describe_eod_token(cfg: Config, sources: Sequence[Source]) -> str:
    """In which sources `data.eod_token` ends documents, as one line; empty if it is not used."""
    if cfg.data.eod_token is None or not cfg.data.document_mask:
        return ""
    is_used = {
        source.name: isinstance(source.corpus, FilesCorpus) and bool(source.corpus.flat_files) for source in sources
    }
    ended = [name for name, used in is_used.items() if used]
    ignored = [name for name, used in is_used.items() if not used]
    parts = [f"{cfg.data.eod_token} ends the documents of {', '.join(ended)}"] if ended else []
    parts += [f"ignored in {', '.join(ignored)}, with document boundaries of its own"] if ignored else []
    return "; ".join(parts)


def source_seed(cfg: Config, name: str) -> int:
    """The source's own seed, or one derived from the run's seed and the source's name."""
    given = cfg.data.sources[name].seed
    if given is not None:
        return given
    hashed = blake2b(f"{cfg.run.seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") >> 1


def train_recipe(cfg: Config, record: DataRecord | None = None) -> MixtureRecipe:
    """The mixture that the run trains on."""
    changes = [Change(phase.from_batch, phase.weights) for phase in cfg.data.phases]
    sizes = configured_sizes(cfg) if record is None else record.sizes
    return MixtureRecipe(
        weights=source_weights(cfg), changes=changes, batch_size=cfg.train.batch_size, seed=cfg.run.seed, sizes=sizes
    )


def configured_sizes(cfg: Config) -> tuple[BatchSize, ...]:
    """The batch sizes of a run that keeps its configuration."""
    return tuple(BatchSize(*stage) for stage in cfg.train.size_stages())


def held_out_recipe(cfg: Config, *, batch_size: int | None = None) -> MixtureRecipe:
    size = cfg.train.batch_size if batch_size is None else batch_size
    return MixtureRecipe(weights=source_weights(cfg), changes=(), batch_size=size, seed=HELD_OUT_SEED)


def source_weights(cfg: Config) -> dict[str, float]:
    return {name: source.weight for name, source in cfg.data.sources.items()}


def make_rare_index(cfg: Config, recorded: RecordedData) -> None:
    """Scan the data for rare tokens and write the index, if `data.stratify` needs it and it is not up to date."""
    if cfg.data.stratify.rare_below and recorded.rare_index is not None and recorded.rare_index.parent.is_dir():
        sources, _ = open_sources(cfg, recorded.record)
        write_rare_index(recorded.rare_index, scanned_sources(sources), below=cfg.data.stratify.rare_below)


def scanned_sources(sources: list[Source]) -> list[ScannedSource]:
    return [ScannedSource(source.corpus, source.samples) for source in sources]


def build_stratified_order(
    cfg: Config, sources: list[Source], recipe: MixtureRecipe, rare_index: Path | None = None
) -> StratifiedOrder | None:
    """The order that limits rare tokens, or None if it is off. Checks that the limit can be kept in every epoch."""
    limits = cfg.data.stratify
    if limits.rare_below == 0:
        return None
    found = rare_tokens(scanned_sources(sources), below=limits.rare_below, index=rare_index)
    mixture = recipe.mixture()
    stratified = StratifiedOrder(
        [StratifiedSource(rare, len(source.samples), source.seed) for rare, source in zip(found, sources, strict=True)],
        [OrderStage(mixture)],
        max_per_batch=limits.max_per_batch,
    )
    for number, num_turns in enumerate(mixture.turns_before(cfg.train.num_steps)):
        num_passes = -(-num_turns // len(sources[number].samples))
        for epoch in reversed(range(min(num_passes, NUM_PASSES_CHECKED))):
            stratified.check_limit(number, epoch)
    return stratified


def describe_capacity(batches: Batches) -> str:
    """How many sequences there are, of the source that runs out first, for an error message."""
    _, source = batches.first_repeat()
    named = f" of {source.name}" if len(batches.sources) > 1 else ""
    return f"{len(source.samples)} sequences{named}"
