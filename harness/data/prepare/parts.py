"""Tokenized parts of an unfinished corpus: one file per shard, reused as long as its inputs are unchanged.

Why: tokenizing a corpus takes hours, and a killed run must continue where it was.
How: a part stores a hash of everything it depends on (its records, the tokenizer, the options). A part is reused only
if its hash matches. So an input that changed in between costs the parts from there on, and never gives a wrong token. A
part is renamed into place, so it exists complete or not at all.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from harness.config.errors import ConfigError
from harness.data.prepare.documents import Shard

DAMAGE = (ValueError, KeyError, BadZipFile, EOFError, RuntimeError)
"""Errors of reading a file that is not a part; RuntimeError comes from a damaged zip header."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusPart:
    """The documents of one shard, without empty ones."""

    tokens: NDArray[np.integer[Any]]
    """Tokens of all documents, concatenated."""
    lengths: NDArray[np.int64]
    """Tokens of each document."""
    hashes: NDArray[np.uint64]
    """Hash of the text of each document."""
    origins: NDArray[np.int64]
    """(file, line) of each document, documents x 2."""
    num_empty: int
    """Documents left out because they contain no token."""
    num_read: int
    """Documents of the shard, before any was left out."""
    dropped: NDArray[np.int64]
    """(reason, number in the shard, file, line, bytes) of each document that the filter dropped, dropped x 5."""


def part_path(output: Path, number: int) -> Path:
    return output.with_name(f"{output.name}.part-{number:05d}.npz")


def part_paths(output: Path) -> list[Path]:
    """All parts on disk, including those of an older run and temporary files of a killed one.

    The whole name must match: these files are deleted, and an input may be named PREFIX.part-00001.jsonl.
    """
    part = rf"{re.escape(output.name)}\.part-\d{{5,}}\.npz"
    written = re.compile(rf"{part}|\.{part}\.\d+\.tmp")
    return [path for path in output.parent.iterdir() if written.fullmatch(path.name)]


def part_key(shard: Shard, settings: bytes) -> str:
    """Hash of everything that the part of a shard depends on."""
    digest = blake2b(settings, digest_size=16)
    for record in shard.records:
        digest.update(b"%d %d %d\n" % (record.file, record.line, len(record.payload)))
        digest.update(record.payload)
    return digest.hexdigest()


def has_part(path: Path, key: str) -> bool:
    """Whether the file is a part with that key."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return str(file["key"]) == key
    except (OSError, *DAMAGE):
        return False


def write_part(path: Path, part: CorpusPart, key: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            np.savez(
                file,
                key=np.array(key),
                tokens=part.tokens,
                lengths=part.lengths,
                hashes=part.hashes,
                origins=part.origins,
                num_empty=np.array(part.num_empty),
                num_read=np.array(part.num_read),
                dropped=part.dropped,
            )
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:  # a full disk: what is there would take room from the next attempt
        scratch.unlink(missing_ok=True)
        raise


def read_part(path: Path) -> CorpusPart:
    """Read a part, also one of an earlier version, which had no filter. A damaged one is removed and reported."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return CorpusPart(
                tokens=file["tokens"],
                lengths=file["lengths"],
                hashes=file["hashes"],
                origins=file["origins"],
                num_empty=int(file["num_empty"]),
                num_read=int(file["num_read"]) if "num_read" in file else 0,
                dropped=file["dropped"] if "dropped" in file else np.empty((0, 5), dtype=np.int64),
            )
    except DAMAGE:
        path.unlink(missing_ok=True)
        message = "was damaged and is removed; rerun the same command to make it again"
        raise ConfigError(str(path), message) from None


def read_origins(path: Path) -> NDArray[np.int64]:
    """Read only the origins of a part."""
    with np.load(path, allow_pickle=False) as file:
        origins: NDArray[np.int64] = file["origins"]
        return origins
