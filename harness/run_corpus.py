"""The corpus of a run at its start: compared with what the run recorded, and across hosts.

A corpus that changed must stop the run before anything is written or trained. Rank 0 lists the files and decides what
this start reads. All hosts probe the files (`harness.data.corpus.host_agreement`). The record
(`harness.data.corpus.corpus_record`) is written when the run directory is opened. A change is rejected with one line,
unless `run.resume=changed` asks for it and the batch order can stay the same for what was seen: files appended, files
moved, another batch size, other weights from the resumed batch on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from harness.checkpoint import catalog
from harness.checkpoint.io_retry import StopCheck
from harness.config import compose
from harness.config.command_line import shell_command
from harness.config.conf_files import read_tree
from harness.config.data import DataKind
from harness.config.errors import require
from harness.config.run import ResumePolicy
from harness.config.schema import Config
from harness.core import rundir
from harness.core.batch_sizes import BatchSize, BatchSizes
from harness.core.object_store import is_url
from harness.core.rundir import RunDir
from harness.data.corpus.corpora import EmbeddedCorpus
from harness.data.corpus.corpus_record import (
    Addition,
    CorpusDiff,
    DataRecord,
    SourceRecord,
    as_record,
    compare,
    join_first,
    next_pass,
    read_record,
    replace_batch_sizes,
)
from harness.data.corpus.file_probe import list_files, probe
from harness.data.corpus.host_agreement import KeyedFile, agree_on_files
from harness.data.corpus.remote_cache import stopping_by, use_cache
from harness.data.order.ledger import Ledger
from harness.data.order.mixture import Change
from harness.data.sources import configured_sizes, open_sources, source_seed, train_recipe
from harness.distributed.collectives import run_on_rank_zero
from harness.distributed.world import World

FIXED = (
    "run.seed",
    "train.sequence_length",
    "data.eval_fraction",
    "data.synthetic.num_samples",
    "data.stratify.rare_below",
    "data.stratify.max_per_batch",
)
FIXED_IN_SOURCES = (".kind", ".dtype")
"""Config keys that decide which windows exist, which are held out, and in which order they are read."""

NEW_RUN = "or choose another run.name"
UNDO = f"undo that, {NEW_RUN}"
WOULD_CHANGE = "what was seen and what is held out would not stay the same"


class RunData(NamedTuple):
    record: DataRecord
    changes: dict[str, Any]
    """Admitted changes since the last start: config key -> [old, new]."""
    kept_batches: int | None = None
    """The order of this many batches stays, that of later ones changes with this start; None: nothing changes."""


class Progress(NamedTuple):
    """How far the run has come, in batches."""

    consumed: int
    """The first batch that no checkpoint has consumed; 0 if there is no checkpoint. It is not the newest checkpoint
    that decides: the load falls back to an older one if that is damaged."""
    excluded: int
    """The first batch after all exclusions, without those given back."""

    @property
    def kept(self) -> int:
        """The first batch that no checkpoint has consumed and no exclusion contains."""
        return max(self.consumed, self.excluded)


def resolve_run_data(cfg: Config, *, world: World, is_stopping: StopCheck = lambda: False) -> RunData:
    """Decide which data this start reads; every rank gets the same answer or the same error.

    `is_stopping` is about this rank alone: if it waits for an object store then, it fails, and all ranks with it.
    """
    use_cache(cfg.data.remote)
    with stopping_by(is_stopping):
        return agree_on_data(cfg, world=world)


def agree_on_data(cfg: Config, *, world: World) -> RunData:
    """Decide on rank 0 which data this start reads, and compare the files of all hosts. Collective."""

    def plan() -> RunData:
        planned = plan_data(cfg)
        require_enough_rows(cfg, planned.record, num_data_ranks=world.num_data_ranks)
        return planned

    planned = run_on_rank_zero(plan)
    files = [
        KeyedFile(key_of(name), file.listed) for name, source in planned.record.sources.items() for file in source.files
    ]
    probes = iter(agree_on_files(files, world=world))
    sources = {
        name: with_probes(name, source, [next(probes) for _ in source.files])
        for name, source in planned.record.sources.items()
    }
    return planned._replace(record=replace(planned.record, sources=sources))


def recorded_data(cfg: Config, run: RunDir) -> DataRecord:
    """Return the recorded data of a run; sources without a record are listed as they are now."""
    record = read_record(run.corpus)
    if record is not None and record.sources.keys() >= cfg.data.sources.keys():
        return record
    now = first_record(cfg)
    return now if record is None else replace(record, sources=now.sources | record.sources)


def plan_data(cfg: Config) -> RunData:
    """Decide which data this start reads; writes nothing. It reads files only to tell moved ones of one size apart."""
    rundir.name_run(cfg)
    run = rundir.locate(cfg)
    rundir.check_resume(cfg, run)
    now = first_record(cfg)
    if not rundir.has_begun(run):
        return RunData(now, {})
    settings = rundir.differences(cfg, run)
    recorded = read_record(run.corpus)
    if recorded is None:  # an older version without records wrote this run: trust the corpus as it is now
        batch_size, _ = settings.get("train.batch_size", (cfg.train.batch_size, None))
        recorded = replace(now, sizes=(BatchSize(0, batch_size),), configured=())
    compared = compare_files(recorded, now)
    changes = {f"data.sources.{name}.files": each.before_after for name, each in compared.items() if each.changed}
    progress = Progress(0, 0)
    if cfg.run.resume is not ResumePolicy.changed:
        refuse_unasked(compared)
    else:
        progress = progress_of(run)
        if progress.kept == 0:  # no checkpoint: the run starts again, so nothing was seen yet
            return RunData(now, changes, kept_batches=0)
    refuse_other_windows(cfg, run, settings, progress)
    refuse_other_text(recorded, now)
    refuse_broken(compared)
    kept = {name: recorded.sources.get(name, source) for name, source in now.sources.items()}
    kept |= {name: replace(kept[name], files=each.files[: -each.num_added or None]) for name, each in compared.items()}
    sizes = admit_sizes(cfg, settings, recorded, progress)
    record = DataRecord(sizes=sizes, configured=configured_sizes(cfg), sources=kept)
    for name, each in compared.items():
        if each.num_added:
            record = add_files(cfg, run, record, name, each, from_batch=progress.kept)
    changes_order = record.sizes != recorded.sizes or any(key.startswith("data.") for key in (*changes, *settings))
    return RunData(record, changes, progress.kept if changes_order else None)


def require_planned(data: RunData, cursor: int) -> None:
    """Reject a state that has consumed batches whose order changes with this start. No checkpoint was that far when
    the start was planned: another process that was about to end has saved one since."""
    kept = cursor if data.kept_batches is None else data.kept_batches
    message = f"the run resumes at batch {cursor}, but the order of the batches from {kept} on changes with this start"
    require(cursor <= kept, "run.resume", f"{message}, which found no checkpoint beyond; rerun the same command")


def check_local_data(cfg: Config) -> None:
    """Reject what `plan_data` rejects. For a launcher on a machine that has the corpus, before it prints or starts
    anything. Data in an object store is left to the ranks, which retry if the store does not answer."""
    if not any(is_url(path) for source in cfg.data.sources.values() for path in source.paths):
        plan_data(cfg)


def require_same_windows(cfg: Config, run: RunDir) -> None:
    """Reject what `plan_data` rejects by the config and the run directory alone. For a launcher that accepts a changed
    config before the ranks compare it, on a machine that need not have the corpus."""
    progress = progress_of(run)
    if progress.kept and read_record(run.corpus) is not None:
        refuse_other_windows(cfg, run, rundir.differences(cfg, run), progress)


def require_enough_rows(cfg: Config, record: DataRecord, *, num_data_ranks: int) -> None:
    """Reject a start whose next batches, as recorded by an earlier start, have fewer sequences than there are ranks.

    `check_world` has checked the configured sizes. An older record can have smaller ones: the run was resumed with
    larger batches, and now resumes from an earlier checkpoint.
    """
    run = rundir.locate(cfg)
    if len(record.sizes) == 1 or min(size.batch_size for size in record.sizes) >= num_data_ranks:
        return
    cursor = progress_of(run).consumed if rundir.has_begun(run) else 0
    size = BatchSizes(record.sizes).smallest_from(cursor)
    message = f"batches from {cursor} on have the size of an earlier start, {size} sequences for {num_data_ranks}"
    require(size >= num_data_ranks, "train.batch_size", f"{message} ranks; use fewer ranks until they are consumed")


def compare_files(recorded: DataRecord, now: DataRecord) -> dict[str, CorpusDiff]:
    """Compare the files of every source that had files and still has join_first."""
    return {
        name: compare(then, [file.listed for file in now.sources[name].files], partial(probe, key=key_of(name)))
        for name, then in recorded.sources.items()
        if then.files and name in now.sources and now.sources[name].files
    }


def add_files(
    cfg: Config, run: RunDir, record: DataRecord, name: str, compared: CorpusDiff, *, from_batch: int
) -> DataRecord:
    """Return the record with added files. The source reads them after the pass that it is in at `from_batch`."""
    message = f"{compared.changed}, but the limits of data.stratify hold for the files that a run began with"
    require(cfg.data.stratify.rare_below == 0, key_of(name), f"{message}; {UNDO}")
    amendments = [
        Change(entry.from_batch, entry.weights) for entry in Ledger.load(run.ledger, writer=False).reweightings
    ]
    number = list(cfg.data.sources).index(name)
    turn = train_recipe(cfg, record).mixture(amendments).turns_before(from_batch)[number]
    sources, _ = open_sources(cfg, record)
    addition = Addition(num_files=compared.num_added, from_turn=next_pass(sources[number].stretches, turn))
    source = record.sources[name]
    grown = replace(source, files=compared.files, additions=(*source.additions, addition))
    return replace(record, sources=record.sources | {name: grown})


def first_record(cfg: Config) -> DataRecord:
    """Record the data as it is now, as at the first start of a run."""
    use_cache(cfg.data.remote)
    listed = list_files(cfg.data.sources)
    sources = {}
    for name, source in cfg.data.sources.items():
        is_text = source.kind is DataKind.embedded
        text = EmbeddedCorpus(cfg.train.sequence_length).fingerprint() if is_text else ""
        sources[name] = SourceRecord(files=tuple(map(as_record, listed.get(name, []))), text=text)
    sizes = configured_sizes(cfg)
    return DataRecord(sizes=sizes, configured=sizes, sources=sources)


def key_of(name: str) -> str:
    return f"data.sources.{name}.paths"


def refuse_unasked(compared: dict[str, CorpusDiff]) -> None:
    """Reject any difference from the last start, if `run.resume` does not allow it."""
    for name, each in compared.items():
        advice = UNDO if each.broken else f"undo that, set run.resume=changed, {NEW_RUN}"
        require(not each.changed, key_of(name), f"the corpus of the run changed: {each.changed}; {advice}")


def refuse_broken(compared: dict[str, CorpusDiff]) -> None:
    """Reject changes that would renumber the windows."""
    for name, each in compared.items():
        message = f"the corpus of the run changed: {each.broken}: {WOULD_CHANGE}"
        require(not each.broken, key_of(name), f"{message}; {UNDO}")


def refuse_other_windows(cfg: Config, run: RunDir, settings: dict[str, tuple[Any, Any]], progress: Progress) -> None:
    """Reject changes of the config with which other samples would lie in the batches that were seen or held out."""
    refuse_fixed(settings)
    if cfg.data.stratify.rare_below > 0:
        refuse_other_limits(run, settings)
    refuse_other_sequence(cfg, run)
    refuse_other_order(cfg, run, settings, before_batch=progress.kept)


def refuse_fixed(settings: dict[str, tuple[Any, Any]]) -> None:
    """Reject changed config keys that decide which windows exist and which are held out."""
    for key, (then, value) in settings.items():
        is_of_source = key.startswith("data.sources.") and key.endswith(FIXED_IN_SOURCES)
        is_fixed = (key in FIXED or is_of_source) and then is not None and value is not None
        require(not is_fixed, key, f"must stay {then} in this run, got {value}: {WOULD_CHANGE}; keep it, {NEW_RUN}")


def refuse_other_limits(run: RunDir, settings: dict[str, tuple[Any, Any]]) -> None:
    """Reject changes of the config with which `data.stratify` would spread the rare tokens in another way.

    It follows the weights of all phases, also of later ones, and the tokens of all sources, also of those with weight
    0. The ledger's weights are stages of the order, which leave what was read as it was.
    """
    for key in settings:
        is_weight = key == "data.phases" or (key.startswith("data.sources.") and key.endswith(".weight"))
        message = f"must stay, because data.stratify spreads rare tokens over all batches of the run: {WOULD_CHANGE}"
        reweight = shell_command("harness", "ctl", run.path, "reweight")
        advice = f"keep it and change weights with {reweight}" if is_weight else "keep it"
        require(not (is_weight or key.startswith("data.synthetic.")), key, f"{message}; {advice}, {NEW_RUN}")


def refuse_other_text(recorded: DataRecord, now: DataRecord) -> None:
    """Reject an embedded text that is not that of the first start."""
    for name, source in now.sources.items():
        then_text = recorded.sources[name].text if name in recorded.sources else source.text
        message = f"the embedded text comes with Python and differs from that of the first start: {WOULD_CHANGE}"
        is_same = not (then_text and source.text) or then_text == source.text
        require(is_same, f"data.sources.{name}.kind", f"{message}; use that Python, {NEW_RUN}")


def refuse_other_sequence(cfg: Config, run: RunDir) -> None:
    """Reject sources in another sequence: the mixture follows it, and a comparison of config keys does not see it."""
    stored = read_tree(run.config).get("data", {}).get("sources", {})
    then = [name for name in stored if name in cfg.data.sources]
    now = [name for name in cfg.data.sources if name in stored]
    message = f"must be in the sequence of this run, {', '.join(then)}, got {', '.join(now)}: {WOULD_CHANGE}"
    require(then == now, "data.sources", f"{message}; {UNDO}")


def refuse_other_order(cfg: Config, run: RunDir, settings: dict[str, tuple[Any, Any]], *, before_batch: int) -> None:
    """Reject seeds and weights that would put other samples into batches that were consumed or excluded.

    A turn is counted over all batches before it. With other weights there, the next batch would repeat samples of one
    source and skip some of another.
    """
    changed = [key for key in settings if key == "data.phases" or key.startswith("data.sources.")]
    if not changed:
        return
    then = compose.read(run.config)
    for name in cfg.data.sources.keys() & then.data.sources.keys():
        old, new = source_seed(then, name), source_seed(cfg, name)
        message = f"must keep the order that the source has in this run: {WOULD_CHANGE}; keep it, {NEW_RUN}"
        require(old == new, f"data.sources.{name}.seed", message)
    ledger = Ledger.load(run.ledger, writer=False)
    amendments = [Change(entry.from_batch, entry.weights) for entry in ledger.reweightings]
    old_shares, new_shares = (shares_before(each, amendments, before_batch) for each in (then, cfg))
    key = next((key for key in changed if key.endswith((".weight", "data.phases"))), changed[0])
    message = f"the weights before batch {before_batch}, where the run goes on, must stay: {WOULD_CHANGE}"
    reweight = shell_command("harness", "ctl", run.path, "reweight")
    advice = f"keep them and change later ones with data.phases or {reweight}, {NEW_RUN}"
    require(old_shares == new_shares, key, f"{message}; {advice}")


def shares_before(cfg: Config, amendments: Sequence[Change], batch: int) -> list[tuple[int, list[tuple[str, float]]]]:
    """First batch and shares of the sources, of every phase that begins before a batch; equal for equal data orders."""
    found = []
    for phase in train_recipe(cfg).mixture(amendments).phases:
        named = [(name, weight) for name, weight in zip(cfg.data.sources, phase.weights, strict=True) if weight > 0]
        total = sum(weight for _, weight in named)
        if phase.from_batch < batch:
            found.append((phase.from_batch, [(name, round(weight / total, 12)) for name, weight in named]))
    return found


def admit_sizes(
    cfg: Config, settings: dict[str, tuple[Any, Any]], recorded: DataRecord, progress: Progress
) -> tuple[BatchSize, ...]:
    """Add new batch sizes to those of the run; they apply from the first batch that no checkpoint has consumed.

    If later batches are excluded, they apply after them, so that those stay excluded sample for sample. A stage of a
    new warm-up keeps its batch indices: what lies before that batch stays as it was.
    """
    then, now = recorded.configured, configured_sizes(cfg)
    if not then:  # an earlier version wrote the record, with nothing but the sizes of the run
        is_other_warmup = any(key.startswith("train.batch_size_warmup") for key in settings)
        then = recorded.sizes[-1:] if is_other_warmup or recorded.sizes[-1].batch_size != now[-1].batch_size else now
    if then == now:
        return recorded.sizes
    message = f"was {describe_sizes(then)} when the run was last started, is {describe_sizes(now)}"
    require(cfg.run.resume is ResumePolicy.changed, "train.batch_size", f"{message}; run.resume=changed admits it")
    limited = f"{message}, but the limits of data.stratify hold for batches of one size; keep it, {NEW_RUN}"
    require(cfg.data.stratify.rare_below == 0, "train.batch_size", limited)
    return replace_batch_sizes(recorded.sizes, now, from_batch=progress.kept)


def describe_sizes(sizes: Sequence[BatchSize]) -> str:
    return ", ".join(f"{size} from batch {first}" if first else str(size) for first, size in sizes)


def with_probes(name: str, source: SourceRecord, probes: Sequence[str]) -> SourceRecord:
    """Return the record with the probes of its files; rejected if a probe differs from an earlier start."""
    differ = [file.path for file, now in zip(source.files, probes, strict=True) if file.probes not in ("", now)]
    message = f"the corpus of the run changed: the content of {join_first(differ)} is not what it was: {WOULD_CHANGE}"
    require(not differ, key_of(name), f"{message}; {UNDO}")
    files = tuple(replace(file, probes=now) for file, now in zip(source.files, probes, strict=True))
    first = {file.probes: file.path for file in reversed(files[: source.num_first])}
    for file in files[source.num_first :]:
        message = f"{file.path} was added but holds the same as {first.get(file.probes)}, which is partly held out"
        require(file.probes not in first, key_of(name), f"{message}; {UNDO}")
    return replace(source, files=files)


def progress_of(run: RunDir) -> Progress:
    """Read from checkpoints and ledger how far the run has come. Damaged and tainted checkpoints are never loaded."""
    saved = [each for each in catalog.list_checkpoints(run.checkpoints) if each.health is not catalog.Health.tainted]
    cursors = [cursor for each in saved if (cursor := catalog.cursor_of(each.path)) is not None]
    excluded = Ledger.load(run.ledger, writer=False).excluded_ranges(0, sys.maxsize)
    return Progress(max(cursors, default=0), max((last + 1 for _, last in excluded), default=0))
