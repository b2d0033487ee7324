"""The data record of a run (`corpus.json`): its files, files added later, and its batch sizes.

Why: batches are arithmetic over the windows of the corpus. One file more or less, or another batch size, would shift
every window: samples would be repeated, and held-out windows would be trained on.
How: the record contains the files of each source in the order in which the run reads them, with sizes and probes, the
files that were added later, and every batch size of the run. Each start compares it with the files that exist.
- Added files go behind the others, whatever their names. Existing windows keep their numbers, and the held-out windows
  stay the same; added files are only trained on. The source finishes its current epoch, then reads the added windows
  once, and from then on its epochs cover all windows (`later_stretches`).
- A batch keeps its index when the batch size changes; the new size holds from some batch on
  (`harness.data.order.mixture`).
- Anything else is rejected: a file that is missing, or has another size or other content.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, final

from harness.config.errors import ConfigError, StorageError
from harness.core.batch_sizes import BatchSize, BatchSizes
from harness.core.plural import pluralize
from harness.data.corpus.file_probe import ListedFile
from harness.data.order.order import Stretch

VERSION = 1
NUM_NAMED = 3
"""Most files that an error message lists; it counts the rest."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    path: str
    num_bytes: int
    index_bytes: int = 0
    """Size of the .idx beside it; 0: it has none."""
    probes: str = ""
    """Hash of a few blocks (`file_probe`); empty: not read."""

    @property
    def listed(self) -> ListedFile:
        return ListedFile(self.path, self.num_bytes, self.index_bytes)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Files that were added at a later start; they follow the others in `SourceRecord.files`."""

    num_files: int
    from_turn: int
    """The turn of the source from which they are read."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    files: tuple[FileRecord, ...] = ()
    additions: tuple[Addition, ...] = ()
    text: str = ""
    """Hash of the embedded text; empty for other kinds."""

    @property
    def num_first(self) -> int:
        """Number of files that the run began with."""
        return len(self.files) - sum(addition.num_files for addition in self.additions)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    sizes: tuple[BatchSize, ...]
    """The sizes of the batches of the run."""
    configured: tuple[BatchSize, ...] = ()
    """The sizes that `train` asked for when the run was last started; empty: an earlier version wrote the record. A new
    request is found here: a launcher may have replaced the configuration of the run already."""
    sources: dict[str, SourceRecord] = field(default_factory=dict)


def read_record(path: Path) -> DataRecord | None:
    """Read the record of a run; None if there is none, as in runs of earlier versions."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from None
    except ValueError as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ConfigError(str(path), f"has version {version}, allowed is {VERSION}")
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(str(path), f"is not a data record: {error!r}") from None


def render_record(record: DataRecord) -> str:
    """The text of `corpus.json`."""
    sources = {name: asdict(source) for name, source in record.sources.items()}
    sizes = {"batch_sizes": record.sizes, "configured_sizes": record.configured}
    return json.dumps({"version": VERSION, **sizes, "sources": sources}, indent=1) + "\n"


def _parse(content: dict[str, Any]) -> DataRecord:
    sources = {}
    for name, source in content["sources"].items():
        sources[name] = SourceRecord(
            files=tuple(FileRecord(**file) for file in source["files"]),
            additions=tuple(Addition(**addition) for addition in source["additions"]),
            text=source["text"],
        )
    sizes, configured = (
        tuple(BatchSize(int(from_batch), int(size)) for from_batch, size in stages)
        for stages in (content["batch_sizes"], content.get("configured_sizes", ()))
    )
    if not sizes or sizes[0].from_batch != 0:
        raise ValueError("batch_sizes must begin at batch 0")
    return DataRecord(sizes=sizes, configured=configured, sources=sources)


def as_record(file: ListedFile) -> FileRecord:
    return FileRecord(path=file.path, num_bytes=file.num_bytes, index_bytes=file.index_bytes)


class CorpusDiff(NamedTuple):
    """The difference between the recorded files of a source and those that exist now."""

    files: tuple[FileRecord, ...]
    """The recorded files in their order, under their current names, then the added ones."""
    num_added: int
    changed: str
    """All differences, as text; empty: none."""
    broken: str
    """The differences that are rejected, as text; empty: none."""
    before_after: list[str]
    """[before, after] as texts, for the record of interventions."""


def compare(recorded: SourceRecord, listed: Sequence[ListedFile], probe: Callable[[ListedFile], str]) -> CorpusDiff:
    """Find files that were added, moved, removed or resized. Contents are compared later (see `run_corpus`), except
    where they alone say which file was moved where: `probe` returns the hash of the content of a file."""
    there = {file.path: file for file in listed}
    known = {file.path for file in recorded.files}
    unrecorded = [file for file in listed if file.path not in known]
    places = find_moved([file for file in recorded.files if file.path not in there], unrecorded, probe)
    files: list[FileRecord] = []
    moved, broken = [], []
    for file in recorded.files:
        now = there.get(file.path) or places.get(file.path)
        if now is None:
            broken.append(f"{file.path} was removed")
            continue
        if file.path in places:
            moved.append(f"{file.path} is now {now.path}")
        if now[1:] != file.listed[1:]:
            broken.append(_describe_resize(file, now))
        files.append(replace(file, path=now.path))
    taken = set(places.values())
    added = [as_record(file) for file in unrecorded if file not in taken]
    named = [f"{file.path} was added" for file in added]
    return CorpusDiff(
        files=(*files, *added),
        num_added=len(added),
        changed=join_first([*broken, *moved, *named]),
        broken=join_first(broken),
        before_after=[
            pluralize(len(recorded.files), "file"),
            f"{pluralize(len(listed), 'file')}: {join_first([*broken, *moved, *named])}",
        ],
    )


def find_moved(
    missing: Sequence[FileRecord], unrecorded: Sequence[ListedFile], probe: Callable[[ListedFile], str]
) -> dict[str, ListedFile]:
    """Recorded path -> the file as it is listed now, for files that were moved or renamed.

    Such a file has the recorded sizes. The shards of a corpus are often of one size; then it is the only one with the
    same name, else one with the same content. Names come first because they need no reads.
    """
    places: dict[str, ListedFile] = {}
    files_named, num_named = defaultdict(list), Counter(map(_named, missing))
    for file in unrecorded:
        files_named[_named(file)].append(file)
    for record in missing:
        if num_named[_named(record)] == len(found := files_named[_named(record)]) == 1:
            places[record.path] = found[0]
    files_sized = defaultdict(list)
    for file in set(unrecorded).difference(places.values()):
        files_sized[file[1:]].append(file)
    renamed = [record for record in missing if record.path not in places]
    for sizes in {record.listed[1:] for record in renamed}:
        places |= _match_contents([each for each in renamed if each.listed[1:] == sizes], files_sized[sizes], probe)
    return places


def _named(file: FileRecord | ListedFile) -> tuple[str, int, int]:
    return Path(file.path).name, file.num_bytes, file.index_bytes


def _match_contents(
    missing: Sequence[FileRecord], candidates: Sequence[ListedFile], probe: Callable[[ListedFile], str]
) -> dict[str, ListedFile]:
    """`find_moved` among files of the same sizes. A single candidate is not read: every start compares it later."""
    in_order = sorted(candidates)
    if len(in_order) < 2 or not all(record.probes for record in missing):
        return {record.path: file for record, file in zip(missing, in_order, strict=False)}
    by_content = defaultdict(list)
    for file in reversed(in_order):
        by_content[probe(file)].append(file)
    return {record.path: by_content[record.probes].pop() for record in missing if by_content[record.probes]}


def _describe_resize(file: FileRecord, now: ListedFile) -> str:
    if now.num_bytes == file.num_bytes:
        return f"{Path(file.path).with_suffix('.idx')} had {file.index_bytes} bytes and has {now.index_bytes}"
    verb = "grew" if now.num_bytes > file.num_bytes else "shrank"
    return f"{file.path} {verb} from {file.num_bytes} to {now.num_bytes} bytes"


def join_first(messages: Sequence[str]) -> str:
    """The first `NUM_NAMED` messages, and how many more there are."""
    rest = [f"and {len(messages) - NUM_NAMED} more"] if len(messages) > NUM_NAMED else []
    return ", ".join([*messages[:NUM_NAMED], *rest])


def replace_batch_sizes(
    sizes: Sequence[BatchSize], now: Sequence[BatchSize], *, from_batch: int
) -> tuple[BatchSize, ...]:
    """The batch sizes of a run that has those of `now` from `from_batch` on."""
    here = BatchSize(from_batch, BatchSizes(now).at(from_batch))
    found: list[BatchSize] = []
    kept = [size for size in sizes if size.from_batch < from_batch]
    for size in (*kept, here, *(size for size in now if size.from_batch > from_batch)):
        if not found or found[-1].batch_size != size.batch_size:
            found.append(size)
    return tuple(found)


def next_pass(stretches: Sequence[Stretch], turn: int) -> int:
    """The first epoch boundary from `turn` on; the first epoch of the run is always finished."""
    last = stretches[-1]
    num_passes = -(-max(0, turn - last.from_turn) // last.num_samples)
    return last.from_turn + max(num_passes, 1 if last.number == 0 else 0) * last.num_samples


def later_stretches(first: range, added: Sequence[tuple[int, range]]) -> tuple[Stretch, ...]:
    """The stretches after the first: for each addition (turn, windows), the added windows once, then all windows."""
    stretches: list[Stretch] = []
    parts = [first]
    for number, (from_turn, windows) in enumerate(added):
        if len(windows) == 0:
            continue
        stretches = [stretch for stretch in stretches if stretch.from_turn < from_turn]
        parts.append(windows)
        stretches.append(Stretch(from_turn, 2 * number + 1, (windows,)))
        stretches.append(Stretch(from_turn + len(windows), 2 * number + 2, tuple(parts)))
    return tuple(stretches)
