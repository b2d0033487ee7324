"""Hugging Face datasets in streaming form: read row by row through the package `datasets`, without a copy on disk.

How: `harness data prepare --dataset PATH` writes PREFIX.dataset.json, a small description of the dataset, which is
then an input like any other file: its hash is recorded, and a rerun of the same command continues. The description of
a local directory has size and time of its files, so that a changed dataset is noticed; one from a hub has its revision.
The only module that imports `datasets`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from harness.config.errors import ConfigError, require

STREAMED = ".dataset.json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedDataset:
    """Arguments of `datasets.load_dataset`."""

    path: str
    """A local directory of data files, or the name of a dataset on a hub."""
    split: str
    config: str | None = None
    revision: str | None = None
    files: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, bytes and modification time in ns of the files of a local directory."""


def describe_dataset(
    path: str, *, split: str, config: str | None, revision: str | None, output: Path
) -> StreamedDataset:
    """`output` must not be within a local directory: the package reads all files there, and would read the corpus."""
    local = Path(path)
    if not local.is_dir():
        message = (
            "names a dataset on a hub, which needs --revision: a commit, so that the same command reads the same rows"
        )
        require(revision is not None, path, message)
        return StreamedDataset(path=path, split=split, config=config, revision=revision)
    is_outside = not output.resolve().is_relative_to(local.resolve())
    require(is_outside, "--output", f"must be outside of the dataset {path}, all files of which are read; got {output}")
    found = sorted(file for file in local.rglob("*") if file.is_file() and not file.name.startswith("."))
    require(bool(found), path, "is an empty directory")
    stats = [(str(file.relative_to(local)), file.stat()) for file in found]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return StreamedDataset(path=str(local.absolute()), split=split, config=config, files=files)


def render_description(dataset: StreamedDataset) -> str:
    """The text of PREFIX.dataset.json; equal for the same dataset."""
    return json.dumps(asdict(dataset), indent=1) + "\n"


def streamed_texts(path: Path, text_key: str) -> Iterator[tuple[int, bytes]]:
    """Number and text of all rows of the dataset that a description names; a null is an empty document."""
    try:
        dataset = StreamedDataset(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(str(path), f"is not the description of a dataset: {error}") from None
    for number, row in enumerate(_rows(dataset), start=1):
        if text_key not in row:
            raise ConfigError(dataset.path, f"has no column {text_key!r} but {', '.join(row)}; see --text-key")
        text = row[text_key]
        valid = text is None or isinstance(text, str)
        message = f"row {number}: column {text_key!r} must hold strings, got {type(text).__name__}"
        require(valid, dataset.path, message)
        yield number, (text or "").encode("utf-8", "surrogatepass")


def _rows(dataset: StreamedDataset) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        message = "needs the package datasets: pip install 'pretraining-harness[datasets]'"
        raise ConfigError("--dataset", message) from None
    try:
        yield from datasets.load_dataset(
            dataset.path, dataset.config, split=dataset.split, revision=dataset.revision, streaming=True
        )
    except Exception as error:  # files, network, hub: the library raises many types
        reason = " ".join(str(error).split())[:300]
        message = f"cannot be read ({type(error).__name__}: {reason}); rerun the same command to continue"
        raise ConfigError(dataset.path, message) from None
