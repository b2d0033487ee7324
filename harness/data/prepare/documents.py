"""Documents out of the files people have: plain text, JSON lines (also compressed) and Parquet.

Why: tokenizing must not care where a text came from, and a complaint about one document must name its file and line.
How: reading is split in two. `Reader` takes the files apart into records, which is cheap and done by one process in the
order of the input; `text_of` parses a record, which is not, and is done by whoever tokenizes it. The only door to
zstandard and pyarrow.
Left out: texts of several documents. A .txt file is one document; whoever has many small ones writes JSON lines.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, final

from harness.config.errors import ConfigError, require

COMPRESSED = (".gz", ".zst")
JSON_LINES = (".jsonl", ".json", ".ndjson")
"""Much of what is published as .json.gz holds one object a line."""
ENDINGS = (".txt", *JSON_LINES, ".parquet")
OURS = (".meta.json", ".parts.json", ".tokenizer.json")
"""Endings of what `harness data prepare` writes, perhaps into the directory that it reads."""
CHUNK_BYTES = 1 << 20
PARQUET_ROWS = 1024
"""Rows that are in memory at once."""


class Record(NamedTuple):
    """One document as it was read."""

    file: int
    """Which of the input files."""
    line: int
    """From 1; the row in Parquet, and 1 in plain text."""
    payload: bytes
    """The text in UTF-8, or the line of JSON that holds it."""


class Shard(NamedTuple):
    """Consecutive records: what one worker takes at a time."""

    number: int
    records: list[Record]
    position_bytes: int
    """How much of all input had been read when it was complete."""


def find_inputs(words: Sequence[str]) -> list[Path]:
    """The files that are named, and all that can be read in the directories that are named, in that order."""
    paths: list[Path] = []
    for word in words:
        path = Path(word)
        require(path.exists(), word, "no such file")
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and _is_input(file.relative_to(path)))
            require(bool(found), word, f"holds no file that ends in {_endings()}")
            paths += found
        else:
            require(kind_of(path) in ENDINGS, word, f"is not known by its ending; allowed are {_endings()}")
            paths.append(path)
    return paths


def kind_of(path: Path) -> str:
    """The ending that says how a file is read, without the one that says how it is compressed."""
    name = path.name.lower()
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    kind = Path(name).suffix
    return "" if kind == ".parquet" and name != path.name.lower() else kind


def _is_input(path: Path) -> bool:
    """Whether a file found in a directory is meant: none that is hidden, and none that we wrote ourselves."""
    hidden = any(name.startswith(".") for name in path.parts)
    return kind_of(path) in ENDINGS and not hidden and not path.name.endswith(OURS)


def text_of(record: Record, path: Path, text_key: str) -> str:
    """The text of a record; half a surrogate pair, which JSON may spell but UTF-8 may not, becomes U+FFFD."""
    if kind_of(path) not in JSON_LINES:
        try:
            return record.payload.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _input_error(path, record.line, f"is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        document = json.loads(record.payload)
    except (ValueError, RecursionError) as error:
        raise _input_error(path, record.line, f"is not JSON: {error}") from None
    match document:
        case {**entries} if text_key in entries:
            text = entries[text_key]
        case {**entries}:
            listed = ", ".join(map(str, entries)) or "no keys"
            raise _input_error(path, record.line, f"has no key {text_key!r} but {listed}; choose with --text-key")
        case _:
            raise _input_error(path, record.line, f"must be a JSON object, got {type(document).__name__}")
    if not isinstance(text, str):
        raise _input_error(path, record.line, f"key {text_key!r} must hold a text, got {type(text).__name__}")
    return text if is_unicode(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@final
class Reader:
    """All records of the files, in their order; says how far it is."""

    def __init__(self, paths: Sequence[Path], *, text_key: str) -> None:
        self._paths = paths
        self._text_key = text_key
        self._sizes = [path.stat().st_size for path in paths]
        self.num_bytes = sum(self._sizes)
        self.position_bytes = 0

    def __iter__(self) -> Iterator[Record]:
        for number, path in enumerate(self._paths):
            before = sum(self._sizes[:number])
            payloads = self._rows(path, before) if kind_of(path) == ".parquet" else self._lines(path, before)
            for line, payload in payloads:
                yield Record(number, line, payload)
            self.position_bytes = before + self._sizes[number]

    def shards(self, num_bytes: int) -> Iterator[Shard]:
        """The records in portions of at least `num_bytes` of text; only the last may be smaller."""
        number, size, records = 0, 0, list[Record]()
        for record in self:
            records.append(record)
            size += len(record.payload)
            if size >= num_bytes:
                yield Shard(number, records, self.position_bytes)
                number, size, records = number + 1, 0, []
        if records:
            yield Shard(number, records, self.position_bytes)

    def _lines(self, path: Path, before: int) -> Iterator[tuple[int, bytes]]:
        """Line number and content of all lines but blank ones; a plain text is one line."""
        try:
            with path.open("rb") as file:
                chunks = self._follow(_decompress(path, file), file, before)
                if kind_of(path) not in JSON_LINES:
                    yield 1, b"".join(chunks)
                    return
                for number, line in enumerate(_split_lines(chunks), start=1):
                    if not line.isspace() and line:
                        yield number, line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ConfigError(str(path), f"is not whole gzip data: {error}") from None
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None

    def _follow(self, chunks: Iterable[bytes], file: BinaryIO, before: int) -> Iterator[bytes]:
        for chunk in chunks:
            self.position_bytes = before + file.tell()
            yield chunk

    def _rows(self, path: Path, before: int) -> Iterator[tuple[int, bytes]]:
        """Number and content of all rows of a Parquet file; a row without a text is an empty document."""
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path) as file:
                schema, num_rows, row = file.schema_arrow, max(1, file.metadata.num_rows), 0
                if self._text_key not in schema.names:
                    listed = ", ".join(schema.names)
                    raise ConfigError(str(path), f"has no column {self._text_key!r} but {listed}; see --text-key")
                kind = schema.field(self._text_key).type
                kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
                is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
                require(is_text, str(path), f"column {self._text_key!r} must hold texts, got {kind}")
                for batch in file.iter_batches(PARQUET_ROWS, columns=[self._text_key]):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        self.position_bytes = before + path.stat().st_size * row // num_rows
                        yield row, (text or "").encode()
        except (pyarrow.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(str(path), f"cannot be read as Parquet: {reason}") from None


def _decompress(path: Path, file: BinaryIO) -> Iterator[bytes]:
    match path.suffix.lower():
        case ".gz":
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield from iter(lambda: unpacked.read(CHUNK_BYTES), b"")
        case ".zst":
            yield from _unzstd(path, file)
        case _:
            yield from iter(lambda: file.read(CHUNK_BYTES), b"")


def _unzstd(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Frame by frame: the library's own stream reader takes a file that was cut short for a whole one."""
    from zstandard import ZstdDecompressor, ZstdError

    frame = None
    try:
        while packed := file.read(CHUNK_BYTES // 8):
            while packed:
                frame = frame or ZstdDecompressor().decompressobj()
                yield frame.decompress(packed)
                packed = frame.unused_data
                frame = None if frame.eof else frame
    except ZstdError as error:
        raise ConfigError(str(path), f"is not zstandard data: {error}") from None
    require(frame is None, str(path), "is not whole zstandard data: it ends within a frame")


def _split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest = [others[-1]]
    yield b"".join(rest)


def _input_error(path: Path, line: int, message: str) -> ConfigError:
    return ConfigError(f"{path}, line {line}" if line > 1 or kind_of(path) in JSON_LINES else str(path), message)


def _endings() -> str:
    compressed = ", ".join(COMPRESSED)
    return f"{', '.join(ENDINGS)} (all but .parquet also with {compressed})"
