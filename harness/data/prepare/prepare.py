"""Tokenizes text into an indexed corpus: reads, tokenizes in parallel, and joins the parts in the order of the input.

Why: the same input must give the same bytes, whatever the number of workers and however often it was interrupted.
How: one process reads the input and splits it into shards; workers turn shards into parts
(`harness.data.prepare.parts`). A killed run keeps every finished part. At the end the parts are joined and removed.
Nothing is written before the input is known to exist, and files that this command did not write are never replaced
(`harness.data.prepare.prepared_files`).
Left out: joining while tokenizing. Until the end the parts need as much disk as the output.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from itertools import accumulate
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, final

import numpy as np

from harness.config.errors import ConfigError, require
from harness.core.rundir import write_atomically
from harness.data.corpus.token_files import LONGEST_DOCUMENT, IndexedWriter
from harness.data.prepare.corpus_report import CorpusCounter
from harness.data.prepare.document_filter import DocumentFilter, DropReason
from harness.data.prepare.documents import Reader, Record, Shard, input_error, is_utf8, text_of
from harness.data.prepare.parts import (
    CorpusPart,
    has_part,
    part_key,
    part_path,
    part_paths,
    read_origins,
    read_part,
    write_part,
)
from harness.data.prepare.prepared_files import VERSION, CorpusFiles, Options, sha256_of, stat_input
from harness.data.prepare.streamed import StreamedDataset
from harness.data.prepare.tokenizer import Tokenizer, open_tokenizer, train_bpe

SHARD_BYTES = 32 << 20
"""Bytes of text per shard: seconds of work, which is all that a killed worker loses."""
SHARDS_PER_WORKER = 2
"""One in progress and one queued; this bounds the memory."""
UINT16_IDS = 1 << 16

Progress = Callable[[str, int, int], None]
"""Called with (activity, bytes done, bytes in total)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeJob:
    """Everything a worker needs to tokenize a shard."""

    output: Path
    inputs: tuple[Path, ...]
    text_key: str
    tokenizer: Path | None
    special_tokens: bool
    eod: int | None
    """End-of-document token to append; None: none."""
    vocab_size: int
    document_filter: DocumentFilter | None
    identity: bytes
    """Identifies tokenizer and options, as far as they determine the tokens of a text."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.vocab_size <= UINT16_IDS else np.int32)

    def open_tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.tokenizer, special_tokens=self.special_tokens)


@final
@dataclass(slots=True)
class TokenizeResult:
    """What the workers produced."""

    parts: list[Path]
    digests: list[str]
    """SHA-256 of each input."""
    num_tokens: int = 0
    """Tokens of the parts that were not on disk before."""


def prepare_corpus(
    inputs: Sequence[Path] | StreamedDataset,
    output: Path,
    options: Options,
    *,
    num_workers: int,
    shard_bytes: int,
    progress: Progress,
) -> dict[str, Any]:
    """Make the corpus, or resume making it; returns its metadata. A finished corpus is returned as it is."""
    begin_s = time.perf_counter()
    files = CorpusFiles(output)
    check_tokenizer(options, files)
    with files.lock():
        if isinstance(inputs, StreamedDataset):
            inputs = [files.write_description(inputs)]
        input_stats = [stat_input(path) for path in inputs]
        meta = files.find_finished(options.identity(), input_stats)
        if meta is None:
            files.require_own_files()
            try:
                job = start_tokenizing(files, inputs, options, progress)
                result = tokenize(job, num_workers=num_workers, shard_bytes=shard_bytes, progress=progress)
            except ConfigError:
                clean_up_after_error(files)
                raise
            facts = join_parts(job, result, files)
            elapsed_s = time.perf_counter() - begin_s
            meta = {"version": VERSION, "options": options.identity(), **facts}
            meta["inputs"] = [stat | {"sha256": sha} for stat, sha in zip(input_stats, result.digests, strict=True)]
            meta["timing"] = {"seconds": elapsed_s, "tokens_per_s": result.num_tokens / elapsed_s}
            write_atomically(files.meta, json.dumps(meta, indent=2, ensure_ascii=False))
        files.clean()
        return meta


def check_tokenizer(options: Options, files: CorpusFiles) -> None:
    """Raise tokenizer errors before anything is written."""
    if options.tokenizer is not None:
        own = options.tokenizer.resolve() == files.tokenizer.resolve()
        message = f"{options.tokenizer} is where --output writes its copy; choose another --output"
        require(not own, "--tokenizer", message)
    if options.tokenizer is not None or options.bpe_size is None:
        tokenizer = open_tokenizer(options.tokenizer)
        if options.append_eod:
            tokenizer.eod(options.eod_token)
    else:
        train_bpe([], vocab_size=options.bpe_size, eod_token=options.eod_token)


def start_tokenizing(files: CorpusFiles, inputs: Sequence[Path], options: Options, progress: Progress) -> TokenizeJob:
    """Copy or train the tokenizer, and record options and inputs, so that a killed job can be resumed."""
    begun = {"options": options.identity(), "inputs": [stat_input(path) for path in inputs]}
    before = files.read_begun()
    kept = files.tokenizer.exists() and before == begun | {"tokenizer_sha256": sha256_of(files.tokenizer)}
    if not kept:
        write_atomically(files.begun, json.dumps(begun))
        files.tokenizer.unlink(missing_ok=True)
        if options.tokenizer is not None:
            write_atomically(files.tokenizer, options.tokenizer.read_text(encoding="utf-8"))
        elif options.bpe_size is not None:
            texts = sample_texts(inputs, options, progress)
            trained = train_bpe(texts, vocab_size=options.bpe_size, eod_token=options.eod_token)
            write_atomically(files.tokenizer, trained)
    path = files.tokenizer if files.tokenizer.exists() else None
    sha256 = sha256_of(path) if path else ""
    write_atomically(files.begun, json.dumps(begun | {"tokenizer_sha256": sha256}))
    tokenizer = open_tokenizer(path)
    eod = tokenizer.eod(options.eod_token) if options.append_eod else None
    identity = repr((VERSION, sha256, eod, options.special_tokens, options.text_key))
    identity += "" if options.document_filter is None else repr(options.document_filter)
    return TokenizeJob(
        output=files.prefix,
        inputs=tuple(inputs),
        text_key=options.text_key,
        tokenizer=path,
        special_tokens=options.special_tokens,
        eod=eod,
        vocab_size=max(tokenizer.vocab_size, 0 if eod is None else eod + 1),
        document_filter=options.document_filter,
        identity=identity.encode(),
    )


def clean_up_after_error(files: CorpusFiles) -> None:
    """Remove the tokenizer and the record, unless there are parts that the next attempt can reuse."""
    if not part_paths(files.prefix):
        files.tokenizer.unlink(missing_ok=True)
        files.clean()


def sample_texts(inputs: Sequence[Path], options: Options, progress: Progress) -> Iterator[str]:
    """Yield the documents to train a tokenizer on, without dropped ones; the choice depends only on the seed and their
    numbers."""
    reader = Reader(inputs, text_key=options.text_key)
    for number, record in enumerate(reader):
        drawn = blake2b(b"%d %d" % (options.seed, number), digest_size=8).digest()
        if int.from_bytes(drawn, "big") < options.train_fraction * 2**64:
            text = filtered_text(record, inputs[record.file], options.text_key, options.document_filter)
            if isinstance(text, str):
                yield text
        progress("training BPE", reader.position_bytes, reader.num_bytes)


def tokenize(job: TokenizeJob, *, num_workers: int, shard_bytes: int, progress: Progress) -> TokenizeResult:
    """Tokenize every shard of the input into a part on disk; existing parts are reused."""
    reader = Reader(job.inputs, text_key=job.text_key)
    result = TokenizeResult([], [])
    digests: list[Future[str]] = []
    waiting: deque[tuple[int, Future[int | str] | None]] = deque()

    def take_first() -> None:
        position_bytes, future = waiting.popleft()
        outcome = 0 if future is None else future.result()
        if isinstance(outcome, str):
            raise ConfigError("", outcome)
        result.num_tokens += outcome
        progress("tokenizing", position_bytes, reader.num_bytes)
        check_interrupt()

    with deferred_interrupt() as check_interrupt, worker_pool(num_workers) as pool:
        for shard in reader.shards(shard_bytes):
            check_interrupt()
            path, key = part_path(job.output, shard.number), part_key(shard, job.identity)
            result.parts.append(path)
            while len(digests) < shard.records[-1].file:  # hash files that were just read and are still in page cache
                digests.append(pool.submit(sha256_of, job.inputs[len(digests)]))
            future = None if has_part(path, key) else pool.submit(make_part, shard, job, key)
            waiting.append((shard.position_bytes, future))
            while len(waiting) > SHARDS_PER_WORKER * num_workers:
                take_first()
        digests += [pool.submit(sha256_of, path) for path in job.inputs[len(digests) :]]
        while waiting:
            take_first()
        result.digests = [future.result() for future in digests]
    return result


def make_part(shard: Shard, job: TokenizeJob, key: str) -> int | str:
    """In a worker: tokenize a shard and write its part; returns its number of tokens, or an error message."""
    try:
        checked = [
            filtered_text(record, job.inputs[record.file], job.text_key, job.document_filter)
            for record in shard.records
        ]
    except ConfigError as error:
        return str(error)
    records = [record for record, text in zip(shard.records, checked, strict=True) if isinstance(text, str)]
    texts = [text for text in checked if isinstance(text, str)]
    encoded = worker_tokenizer(job).encode(texts)
    kept = [place for place, tokens in enumerate(encoded) if len(tokens)]
    end = np.array([] if job.eod is None else [job.eod], dtype=job.dtype)
    documents = [np.concatenate([encoded[place].astype(job.dtype), end]) for place in kept]
    for place, document in zip(kept, documents, strict=True):
        if len(document) > LONGEST_DOCUMENT:
            message = f"has {len(document)} tokens; an index holds documents of at most {LONGEST_DOCUMENT}, so split it"
            return str(input_error(job.inputs[records[place].file], records[place].line, message))
    hashes = b"".join(blake2b(texts[place].encode(), digest_size=8).digest() for place in kept)
    origins = [(records[place].file, records[place].line) for place in kept]
    dropped = [
        (reason, place, record.file, record.line, len(record.payload))
        for place, (record, reason) in enumerate(zip(shard.records, checked, strict=True))
        if isinstance(reason, DropReason)
    ]
    tokens = np.concatenate([np.array([], dtype=job.dtype), *documents])
    part = CorpusPart(
        tokens=tokens,
        lengths=np.array([len(document) for document in documents], dtype=np.int64),
        hashes=np.frombuffer(hashes, dtype="<u8"),
        origins=np.array(origins, dtype=np.int64).reshape(-1, 2),
        num_empty=len(texts) - len(kept),
        num_read=len(shard.records),
        dropped=np.array(dropped, dtype=np.int64).reshape(-1, 5),
    )
    write_part(part_path(job.output, shard.number), part, key)
    return len(tokens)


def filtered_text(
    record: Record, path: Path, text_key: str, document_filter: DocumentFilter | None
) -> str | DropReason:
    """The text of a record, or why the filter drops it."""
    if document_filter is None:
        return text_of(record, path, text_key)
    if not is_utf8(record):
        return DropReason.invalid_utf8
    text = text_of(record, path, text_key)
    reason = document_filter.check(text)
    return text if reason is None else reason


@cache
def worker_tokenizer(job: TokenizeJob) -> Tokenizer:
    return job.open_tokenizer()


def join_parts(job: TokenizeJob, result: TokenizeResult, files: CorpusFiles) -> dict[str, Any]:
    """Join all parts into one corpus; returns its metadata."""
    counter = CorpusCounter(job.vocab_size, drops=None if job.document_filter is None else {})
    num_documents: list[int] = []
    with IndexedWriter(files.prefix, job.dtype) as writer:
        for path in result.parts:
            part = read_part(path)
            for document in np.split(part.tokens, np.cumsum(part.lengths)[:-1]) if len(part.lengths) else ():
                writer.add(document)
            counter.add(part)
            num_documents.append(len(part.lengths))
        if counter.num_documents == 0:
            files.clean()
            files.tokenizer.unlink(missing_ok=True)
            named = ", ".join(map(str, job.inputs[:3])) + (", ..." if len(job.inputs) > 3 else "")
            drops = sum(drop.documents for drop in (counter.drops or {}).values())
            dropped = f" and {drops} were dropped by the filter" if drops else ""
            require(False, named, f"no document contains a token, {counter.num_empty} are empty{dropped}")
    firsts = list(accumulate(num_documents, initial=0))[:-1]

    def origin(document: int) -> str:
        place = bisect_right(firsts, document) - 1
        file, line = read_origins(result.parts[place])[document - firsts[place]]
        return f"{job.inputs[file]}:{line}"

    tokenizer = job.open_tokenizer()
    report = counter.report(tokenizer.spell, origin, input_place=lambda file, line: f"{job.inputs[file]}:{line}")
    with files.counts.open("wb") as file:
        np.save(file, counter.counts)
    return {
        "dtype": job.dtype.name,
        "vocab_size": report.vocab_size,
        "max_token": report.max_token,
        "documents": report.documents,
        "tokens": report.tokens,
        "eod": job.eod,
        "tokenizer_sha256": sha256_of(job.tokenizer) if job.tokenizer else None,
        "counts": files.counts.name,
        "report": asdict(report),
    }


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Yield a function that raises `KeyboardInterrupt` if Ctrl-C was pressed. Pressed again, it is raised at once.

    An exception while the pool holds one of its locks would leave a pool that never shuts down.
    """
    pressed = threading.Event()

    def on_interrupt(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # which alone can handle signals
        yield check
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def worker_pool(num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes; after an error the shards in progress are finished and kept, queued ones are cancelled."""
    pool = ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"), initializer=init_worker)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def init_worker() -> None:
    """Ignore SIGINT in a worker, which its parent handles, and exit when the parent ends, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def follow() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
