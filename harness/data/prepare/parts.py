"""Finished portions of an unfinished corpus: one file each, good for as long as what it was made from is the same.

Why: tokenizing a corpus takes hours, and a run that is killed must go on where it was.
How: a part carries a hash of everything it depends on (its records, the tokenizer, the options). Whoever needs it
computes the hash and takes the part where the two agree, so an input that changed in between costs the parts from there
on, and never gives a wrong token. A part appears under its name whole or not at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from harness.data.prepare.documents import Shard

BROKEN = (OSError, ValueError, KeyError, BadZipFile, EOFError)
"""What reading a file that is no part raises."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusPart:
    """The documents of one shard, without those that hold no token."""

    tokens: NDArray[np.integer[Any]]
    """Of all documents, one behind the other."""
    lengths: NDArray[np.int64]
    """Tokens of each document."""
    hashes: NDArray[np.uint64]
    """Of the text of each document; equal texts have equal ones."""
    origins: NDArray[np.int64]
    """File and line of each document, side by side."""
    num_empty: int
    """Documents left out because they hold no token."""


def part_path(output: Path, number: int) -> Path:
    return output.with_name(f"{output.name}.part-{number:05d}.npz")


def part_paths(output: Path) -> list[Path]:
    """Every part there is, those of an older run and what a killed one left half-written included."""
    prefix = f"{output.name}.part-"
    return [path for path in output.parent.iterdir() if path.name.lstrip(".").startswith(prefix)]


def part_key(shard: Shard, settings: bytes) -> str:
    """What the part of a shard depends on."""
    digest = blake2b(settings, digest_size=16)
    for record in shard.records:
        digest.update(b"%d %d %d\n" % (record.file, record.line, len(record.payload)))
        digest.update(record.payload)
    return digest.hexdigest()


def has_part(path: Path, key: str) -> bool:
    """Whether a file is the part with that key."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return str(file["key"]) == key
    except BROKEN:
        return False


def write_part(path: Path, part: CorpusPart, key: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with scratch.open("wb") as file:
        np.savez(
            file,
            key=np.array(key),
            tokens=part.tokens,
            lengths=part.lengths,
            hashes=part.hashes,
            origins=part.origins,
            num_empty=np.array(part.num_empty),
        )
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def read_part(path: Path) -> CorpusPart:
    with np.load(path, allow_pickle=False) as file:
        return CorpusPart(
            tokens=file["tokens"],
            lengths=file["lengths"],
            hashes=file["hashes"],
            origins=file["origins"],
            num_empty=int(file["num_empty"]),
        )


def read_origins(path: Path) -> NDArray[np.int64]:
    """Only the origins of a part, for a second look."""
    with np.load(path, allow_pickle=False) as file:
        origins: NDArray[np.int64] = file["origins"]
        return origins
