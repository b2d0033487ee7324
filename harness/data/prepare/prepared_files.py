"""The files of a prepared corpus, and the files that exist while it is made.

    PREFIX.bin  PREFIX.idx   tokens and document boundaries, in Megatron's layout
    PREFIX.tokenizer.json    the tokenizer; none if tokens are bytes
    PREFIX.counts.npy        how often each token occurs, int64
    PREFIX.meta.json         version, options, inputs, report; written last, so it marks a complete corpus
    PREFIX.dataset.json      the dataset that was read, with --dataset
    PREFIX.parts.json        only while it is made: options and inputs of the job, so that it can be resumed

Why: the same command again must find its work done, and a command with other options must not destroy it.
How: everything that determines the output is stored as plain values and compared. Inputs are the same if size and
modification time are, or else if their SHA-256 is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from harness.config.errors import ConfigError, require
from harness.core.locking.run_lease import io_error
from harness.core.rundir import write_atomically
from harness.data.prepare.document_filter import DocumentFilter
from harness.data.prepare.parts import part_paths
from harness.data.prepare.streamed import STREAMED, StreamedDataset, render_description

VERSION = 1
OUTPUTS = (".bin", ".idx", ".counts.npy", ".tokenizer.json", ".meta.json")
DIFFERS = f"exists and differs in {{}}; choose another --output, or remove this corpus ({', '.join(OUTPUTS)})"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stat_input(path: Path) -> dict[str, Any]:
    """Path, size and modification time of an input."""
    stat = path.stat()
    return {"path": str(path), "size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options that determine the output, besides the input."""

    tokenizer: Path | None = None
    """A tokenizer.json; None: train one if `bpe_size` is set, else bytes."""
    bpe_size: int | None = None
    """Vocabulary size of a byte-level BPE to train on the input."""
    train_fraction: float = 1.0
    """Fraction of the documents that it is trained on."""
    seed: int = 0
    """Selects those documents."""
    text_key: str = "text"
    """JSON key or Parquet column of the text."""
    eod_token: str
    """Name of the end-of-document token."""
    append_eod: bool = False
    """Append it to each document."""
    special_tokens: bool = False
    """Encode the name of a special token within a text as that token."""
    document_filter: DocumentFilter | None = None
    """Which documents are dropped; None: none."""

    def __post_init__(self) -> None:
        message = f"must be above 0 and at most 1, got {self.train_fraction}"
        require(0 < self.train_fraction <= 1, "--train-fraction", message)

    def identity(self) -> dict[str, Any]:
        """The options as plain values; equal if the same input gives the same output."""
        tokenizer: dict[str, Any] = {"kind": "bytes"}
        if self.tokenizer is not None:
            tokenizer = {"kind": "file", "sha256": sha256_of(self.tokenizer)}
        elif self.bpe_size is not None:
            tokenizer = {"kind": "bpe", "vocab_size": self.bpe_size, "eod_token": self.eod_token}
            tokenizer |= {"train_fraction": self.train_fraction, "seed": self.seed if self.train_fraction < 1 else None}
        return {
            "tokenizer": tokenizer,
            "text_key": self.text_key,
            "append_eod": self.eod_token if self.append_eod else None,
            "special_tokens": self.special_tokens,
            **({} if self.document_filter is None else {"filter": asdict(self.document_filter)}),
        }


@final
@dataclass(frozen=True, slots=True)
class CorpusFiles:
    prefix: Path

    @property
    def data(self) -> Path:
        return self._named(".bin")

    @property
    def index(self) -> Path:
        return self._named(".idx")

    @property
    def tokenizer(self) -> Path:
        return self._named(".tokenizer.json")

    @property
    def counts(self) -> Path:
        return self._named(".counts.npy")

    @property
    def meta(self) -> Path:
        return self._named(".meta.json")

    @property
    def begun(self) -> Path:
        return self._named(".parts.json")

    @property
    def description(self) -> Path:
        return self._named(STREAMED)

    def read_meta(self) -> dict[str, Any] | None:
        """The metadata of a finished corpus; None if there is none."""
        if not self.meta.exists():
            return None
        try:
            meta = json.loads(self.meta.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(str(self.meta), f"cannot be read: {error}") from None
        match meta:
            case {"version": 1, "options": dict(), "inputs": list(), "report": dict(), "max_token": int()}:
                assert isinstance(meta, dict)
                return meta
        raise ConfigError(str(self.meta), f"is not the metadata of a corpus of version {VERSION}")

    def find_finished(self, identity: dict[str, Any], inputs: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The metadata if the corpus is finished; raises if it was made from other inputs or with other options."""
        meta = self.read_meta()
        if meta is None:
            return None
        before = meta["options"]
        changes = [name for name in before | identity if before.get(name) != identity.get(name)]
        changes += [] if _same_inputs(meta["inputs"], inputs) else ["inputs"]
        require(not changes, str(self.meta), DIFFERS.format(", ".join(changes)))
        return meta if self.data.exists() and self.index.exists() else None

    def read_begun(self) -> dict[str, Any]:
        """Options and inputs of an unfinished job; empty if there is none."""
        try:
            begun = json.loads(self.begun.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return begun if isinstance(begun, dict) else {}

    def require_own_files(self) -> None:
        """Raise if an output file exists that no earlier job of this command wrote."""
        if not self.begun.exists() and not self.meta.exists():
            for path in (self.data, self.index, self.counts, self.tokenizer):
                message = f"exists, and no {self.meta.name} says that harness data prepare wrote it"
                message = f"{message}; choose another --output, or remove it"
                require(not path.exists(), str(path), message)

    def write_description(self, dataset: StreamedDataset) -> Path:
        """Write which dataset is read; an equal description stays as it is, so that a rerun continues. That of a
        finished corpus is never replaced."""
        path, text = self.description, render_description(dataset)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            require(self.read_meta() is None, str(self.meta), DIFFERS.format("inputs"))
            self.require_own_files()
            write_atomically(path, text)
        return path

    def clean(self) -> None:
        """Remove the files that exist only while the corpus is made."""
        for path in part_paths(self.prefix):
            path.unlink(missing_ok=True)
        self.begun.unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Allow one process at a time; no protection on a file system without locks."""
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise io_error(self.prefix.parent, "cannot create", error, key="--output") from None
        path = self.prefix.with_name(f".{self.prefix.name}.lock")
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):  # its former holder has removed it
                    raise BlockingIOError
            except (BlockingIOError, FileNotFoundError):
                raise ConfigError("--output", f"{self.prefix} is being written by another process") from None
            except OSError:
                pass
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def _named(self, ending: str) -> Path:
        return self.prefix.with_name(self.prefix.name + ending)


def _same_inputs(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Whether the inputs have the same content and order, whatever their paths."""

    def same(old: dict[str, Any], new: dict[str, Any]) -> bool:
        if old["size_bytes"] != new["size_bytes"]:
            return False
        untouched = old["path"] == new["path"] and old["mtime_ns"] == new["mtime_ns"]
        return bool(untouched or old["sha256"] == sha256_of(Path(new["path"])))

    return len(then) == len(now) and all(map(same, then, now))
