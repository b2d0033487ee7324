"""Reads documents from plain text, JSON lines (also compressed), Parquet and Arrow files, and Hugging Face datasets.

Why: tokenizing must not depend on the input format, and an error about one document must name its file and line.
How: reading is split in two. `Reader` splits the files into records; this is cheap and done by one process in the order
of the input. `text_of` parses a record; this is expensive and done in the worker that tokenizes it. The only module
that imports zstandard and pyarrow. A directory of `Dataset.save_to_disk` is a list of Arrow files, read without the
package `datasets`; a dataset that is streamed is a small file that describes it (`harness.data.prepare.streamed`).
Left out: several documents in one .txt file. A .txt file is one document; use JSON lines for many small ones.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

from harness.config.errors import ConfigError, require
from harness.data.prepare.streamed import STREAMED, streamed_texts

COMPRESSED = (".gz", ".zst")
JSON_LINES = (".jsonl", ".json", ".ndjson")
"""Most published .json.gz files contain one object per line."""
ENDINGS = (".txt", *JSON_LINES, ".parquet", ".arrow")
TABLES = (".parquet", ".arrow")
"""Not compressed as a whole."""
OURS = (".meta.json", ".parts.json", ".tokenizer.json", STREAMED)
"""Endings of the files that `harness data prepare` writes, possibly into its input directory."""
ARROW_MAGIC = b"ARROW1"
CHUNK_BYTES = 1 << 20
ZSTD_WINDOW_BYTES = 1 << 31
"""Largest window of `zstd --long=31`, with which large dumps are published; memory is used by such files only."""
PARQUET_ROWS = 1024
"""Rows in memory at once."""


class Record(NamedTuple):
    """One document as it was read."""

    file: int
    """Number of the input file."""
    line: int
    """From 1; the row in Parquet, and 1 in plain text."""
    payload: bytes
    """The text in UTF-8, or the JSON line that contains it."""


class Shard(NamedTuple):
    """Consecutive records: the unit of work of a worker."""

    number: int
    records: list[Record]
    position_bytes: int
    """Bytes of all input that had been read when the shard was complete."""


def find_inputs(arguments: Sequence[str]) -> list[Path]:
    """The named files, and all supported files in the named directories, in the order of the arguments."""
    paths: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        require(path.exists(), argument, "no such file")
        if (saved := saved_dataset_files(path)) is not None:
            paths += saved
        elif path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and _is_input(file.relative_to(path)))
            require(bool(found), argument, f"contains no file that ends in {_endings()}")
            paths += found
        else:
            require(kind_of(path) in ENDINGS, argument, f"has an unknown ending; allowed are {_endings()}")
            paths.append(path)
    return paths


def saved_dataset_files(path: Path) -> list[Path] | None:
    """The Arrow files of a directory of `Dataset.save_to_disk`, in their order; None if it is no such directory."""
    state, splits = path / "state.json", path / "dataset_dict.json"
    if splits.is_file():
        listed = [f"{path}/{name}" for name in _read_json(splits).get("splits", [])]
        raise ConfigError(str(path), f"is a dataset with several splits; name one: {', '.join(listed)}")
    if not (state.is_file() and (path / "dataset_info.json").is_file()):
        return None
    content = _read_json(state)
    if content.get("_indices_files"):
        raise ConfigError(str(path), "has rows selected by indices; load it and call flatten_indices().save_to_disk()")
    try:
        files = [path / entry["filename"] for entry in content["_data_files"]]
    except (KeyError, TypeError):
        raise ConfigError(str(state), "does not list the files of a dataset") from None
    for file in files:
        require(file.is_file(), str(file), "is missing from the dataset")
    require(bool(files), str(path), "is a dataset without rows")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def kind_of(path: Path) -> str:
    """The ending that determines how a file is read, without the ending of the compression."""
    name = path.name.lower()
    if name.endswith(STREAMED):
        return STREAMED
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    kind = Path(name).suffix
    return "" if kind in TABLES and name != path.name.lower() else kind


def _is_input(path: Path) -> bool:
    """Whether a file found in a directory is an input: not hidden, and not written by `harness data prepare`."""
    hidden = any(name.startswith(".") for name in path.parts)
    return kind_of(path) in ENDINGS and not hidden and not path.name.endswith(OURS)


def text_of(record: Record, path: Path, text_key: str) -> str:
    """The text of a record; a lone surrogate, which JSON allows and UTF-8 does not, becomes U+FFFD."""
    if kind_of(path) not in JSON_LINES:
        try:
            return record.payload.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise input_error(path, record.line, f"is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        document = json.loads(record.payload)
    except (ValueError, RecursionError) as error:
        raise input_error(path, record.line, f"is not JSON: {error}") from None
    match document:
        case {**entries} if text_key in entries:
            text = entries[text_key]
        case {**entries}:
            listed = ", ".join(map(str, entries)) or "no keys"
            raise input_error(path, record.line, f"has no key {text_key!r} but {listed}; choose with --text-key")
        case _:
            raise input_error(path, record.line, f"must be a JSON object, got {type(document).__name__}")
    if not isinstance(text, str):
        raise input_error(path, record.line, f"key {text_key!r} must be a string, got {type(text).__name__}")
    return text if is_unicode(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_utf8(record: Record) -> bool:
    """Whether the bytes of a record, before JSON is parsed, are UTF-8."""
    try:
        record.payload.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@final
class Reader:
    """Iterates over all records of the files, in order, and tracks its position."""

    def __init__(self, paths: Sequence[Path], *, text_key: str) -> None:
        self._paths = paths
        self._text_key = text_key
        self._sizes = [path.stat().st_size for path in paths]
        self.num_bytes = sum(self._sizes)
        self.position_bytes = 0

    def __iter__(self) -> Iterator[Record]:
        for number, path in enumerate(self._paths):
            before = sum(self._sizes[:number])
            match kind_of(path):
                case ".parquet" | ".arrow":
                    payloads = self._rows(path, before)
                case kind if kind == STREAMED:
                    payloads = streamed_texts(path, self._text_key)
                case _:
                    payloads = self._lines(path, before)
            for line, payload in payloads:
                yield Record(number, line, payload)
            self.position_bytes = before + self._sizes[number]

    def shards(self, num_bytes: int) -> Iterator[Shard]:
        """Yield the records in shards of at least `num_bytes` of text; only the last may be smaller."""
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
        """Number and content of all lines that are not blank; a plain text file is one line."""
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
            raise ConfigError(str(path), f"is damaged or truncated gzip data: {error}") from None
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None

    def _follow(self, chunks: Iterable[bytes], file: BinaryIO, before: int) -> Iterator[bytes]:
        for chunk in chunks:
            self.position_bytes = before + file.tell()
            yield chunk

    def _rows(self, path: Path, before: int) -> Iterator[tuple[int, bytes]]:
        """Number and content of all rows of a Parquet or Arrow file; a null is an empty document."""
        import pyarrow  # type: ignore[import-untyped]

        is_parquet, row = kind_of(path) == ".parquet", 0
        try:
            for column, share in self._parquet_columns(path) if is_parquet else self._arrow_columns(path):
                plain = column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
                self.position_bytes = before + int(path.stat().st_size * share)
                for text in plain.cast(pyarrow.large_binary()).to_pylist():  # bytes: `text_of` checks the UTF-8
                    row += 1
                    yield row, text or b""
        except (pyarrow.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                str(path), f"cannot be read as {'Parquet' if is_parquet else 'Arrow'}: {reason}"
            ) from None

    def _parquet_columns(self, path: Path) -> Iterator[tuple[Any, float]]:
        """Pieces of the text column, and the share of the rows read by then."""
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            self._require_text(path, file.schema_arrow)
            num_rows, num_read = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=[self._text_key]):
                num_read += batch.num_rows
                yield batch.column(0), num_read / num_rows

    def _arrow_columns(self, path: Path) -> Iterator[tuple[Any, float]]:
        """Like `_parquet_columns`; `datasets` writes the streaming format, other programs also the file format.

        pyarrow also accepts a stream that was cut between two batches; the reader has then not moved at its end.
        """
        import pyarrow
        from pyarrow import ipc

        with pyarrow.memory_map(str(path)) as source:
            is_file = source.read(len(ARROW_MAGIC)) == ARROW_MAGIC
            source.seek(0)
            opened = ipc.open_file(source) if is_file else ipc.open_stream(source)
            self._require_text(path, opened.schema)
            number = opened.schema.get_field_index(self._text_key)
            batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
            position = source.tell()
            for batch in batches:
                position = source.tell()
                for start in range(0, batch.num_rows, PARQUET_ROWS):
                    yield batch.column(number)[start : start + PARQUET_ROWS], position / max(1, source.size())
            has_end = is_file or source.tell() > position
            require(has_end, str(path), "is truncated Arrow data: the stream has no end marker")

    def _require_text(self, path: Path, schema: Any) -> None:
        import pyarrow

        if self._text_key not in schema.names:
            listed = ", ".join(schema.names)
            raise ConfigError(str(path), f"has no column {self._text_key!r} but {listed}; see --text-key")
        num_columns = schema.names.count(self._text_key)
        require(num_columns == 1, str(path), f"has {num_columns} columns {self._text_key!r}; it needs one")
        kind = schema.field(self._text_key).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
        require(is_text, str(path), f"column {self._text_key!r} must be a string column, got {kind}")


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
    """Decompress frame by frame: the library's own stream reader does not notice a truncated file."""
    from zstandard import ZstdDecompressor, ZstdError

    frame = None
    try:
        while packed := file.read(CHUNK_BYTES // 8):
            while packed:
                frame = frame or ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()
                yield frame.decompress(packed)
                packed = frame.unused_data
                frame = None if frame.eof else frame
    except ZstdError as error:
        raise ConfigError(str(path), f"is not zstandard data: {error}") from None
    require(frame is None, str(path), "is truncated zstandard data: it ends within a frame")


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


def input_error(path: Path, line: int, message: str) -> ConfigError:
    """An error about one document; of a file that is one document, the line is left out."""
    return ConfigError(f"{path}, line {line}" if line > 1 or kind_of(path) in JSON_LINES else str(path), message)


def _endings() -> str:
    compressed = ", ".join(COMPRESSED)
    return f"{', '.join(ENDINGS)} (all but .parquet and .arrow also with {compressed})"
