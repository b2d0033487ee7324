"""Text to an indexed corpus: read, tokenize in parallel, and join the parts in the order of the input.

Why: the same input must give the same bytes, whatever the number of workers and however often it was interrupted.
How: one process reads the input and cuts it into shards; workers turn shards into parts (`harness.data.prepare.parts`),
of which a killed run keeps every finished one; at the end the parts are joined and removed. Nothing is written before
the input is known to exist, and nothing that this command did not write is ever replaced
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
from harness.data.corpus.token_files import IndexedWriter
from harness.data.prepare.corpus_report import CorpusCounter
from harness.data.prepare.documents import Reader, Shard, text_of
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
from harness.data.prepare.tokenizer import Tokenizer, open_tokenizer, train_bpe

SHARD_BYTES = 32 << 20
"""Text that one worker takes at a time: seconds of work, and all that it loses when it is killed."""
SHARDS_PER_WORKER = 2
"""One in work and one waiting: what bounds the memory."""
UINT16_IDS = 1 << 16

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many bytes of how many are done."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeJob:
    """What a worker must know."""

    output: Path
    inputs: tuple[Path, ...]
    text_key: str
    tokenizer: Path | None
    special_tokens: bool
    eod: int | None
    """The token to end documents with."""
    vocab_size: int
    identity: bytes
    """Stands for all of the above that decides which tokens a text becomes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.vocab_size <= UINT16_IDS else np.int32)

    def open_tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.tokenizer, special_tokens=self.special_tokens)


@final
@dataclass(slots=True)
class TokenizeResult:
    """What the workers gave."""

    parts: list[Path]
    digests: list[str]
    """SHA-256 of each input."""
    num_tokens: int = 0
    """Of the parts that were not there before."""


def prepare(
    inputs: Sequence[Path], output: Path, options: Options, *, num_workers: int, shard_bytes: int, progress: Progress
) -> dict[str, Any]:
    """Make the corpus, or go on making it, or find it made; returns its metadata."""
    begin_s = time.perf_counter()
    files = CorpusFiles(output)
    check_tokenizer(options, files)
    with files.lock():
        described = [stat_input(path) for path in inputs]
        meta = files.find_finished(options.identity(), described)
        if meta is None:
            files.require_own_files()
            try:
                job = start_job(files, inputs, options, progress)
                result = tokenize(job, num_workers=num_workers, shard_bytes=shard_bytes, progress=progress)
            except ConfigError:
                clean_up_after_error(files)
                raise
            facts = join_parts(job, result, files)
            elapsed_s = time.perf_counter() - begin_s
            meta = {"version": VERSION, "options": options.identity(), **facts}
            meta["inputs"] = [known | {"sha256": sha} for known, sha in zip(described, result.digests, strict=True)]
            meta["timing"] = {"seconds": elapsed_s, "tokens_per_s": result.num_tokens / elapsed_s}
            write_atomically(files.meta, json.dumps(meta, indent=2, ensure_ascii=False))
        files.clean()
        return meta


def check_tokenizer(options: Options, files: CorpusFiles) -> None:
    """Refuse what can be known to fail before anything is written."""
    if options.tokenizer is not None:
        own = options.tokenizer.resolve() == files.tokenizer.resolve()
        require(not own, "--tokenizer", f"{options.tokenizer} is where --output puts its copy; choose another --output")
    if options.tokenizer is not None or options.bpe_size is None:
        tokenizer = open_tokenizer(options.tokenizer)
        if options.append_eod:
            tokenizer.eod(options.eod_token)
    else:
        train_bpe([], vocab_size=options.bpe_size, eod_token=options.eod_token)


def start_job(files: CorpusFiles, inputs: Sequence[Path], options: Options, progress: Progress) -> TokenizeJob:
    """Put the tokenizer in its place, and write down what this run is made from."""
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
    return TokenizeJob(
        output=files.prefix,
        inputs=tuple(inputs),
        text_key=options.text_key,
        tokenizer=path,
        special_tokens=options.special_tokens,
        eod=eod,
        vocab_size=max(tokenizer.vocab_size, 0 if eod is None else eod + 1),
        identity=identity.encode(),
    )


def clean_up_after_error(files: CorpusFiles) -> None:
    """After a refusal: keep what the next run can use, and nothing where that is nothing."""
    if not part_paths(files.prefix):
        files.tokenizer.unlink(missing_ok=True)
        files.clean()


def sample_texts(inputs: Sequence[Path], options: Options, progress: Progress) -> Iterator[str]:
    """The documents to train a tokenizer on; which ones depends on the seed and their numbers alone."""
    reader = Reader(inputs, text_key=options.text_key)
    for number, record in enumerate(reader):
        drawn = blake2b(b"%d %d" % (options.seed, number), digest_size=8).digest()
        if int.from_bytes(drawn, "big") < options.train_fraction * 2**64:
            yield text_of(record, inputs[record.file], options.text_key)
        progress("training BPE", reader.position_bytes, reader.num_bytes)


def tokenize(job: TokenizeJob, *, num_workers: int, shard_bytes: int, progress: Progress) -> TokenizeResult:
    """Every shard of the input as a part on disk, but for those that are there already."""
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

    with worker_pool(num_workers) as pool:
        for shard in reader.shards(shard_bytes):
            path, key = part_path(job.output, shard.number), part_key(shard, job.identity)
            result.parts.append(path)
            while len(digests) < shard.records[-1].file:  # files that were just read, and so are still in memory
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
    """In a worker: the part of a shard; returns its tokens, or what is wrong with the input."""
    try:
        texts = [text_of(record, job.inputs[record.file], job.text_key) for record in shard.records]
    except ConfigError as error:
        return str(error)
    encoded = worker_tokenizer(job).encode(texts)
    kept = [place for place, tokens in enumerate(encoded) if len(tokens)]
    end = np.array([] if job.eod is None else [job.eod], dtype=job.dtype)
    documents = [np.concatenate([encoded[place].astype(job.dtype), end]) for place in kept]
    hashes = b"".join(blake2b(texts[place].encode(), digest_size=8).digest() for place in kept)
    origins = [(shard.records[place].file, shard.records[place].line) for place in kept]
    tokens = np.concatenate([np.array([], dtype=job.dtype), *documents])
    part = CorpusPart(
        tokens=tokens,
        lengths=np.array([len(document) for document in documents], dtype=np.int64),
        hashes=np.frombuffer(hashes, dtype="<u8"),
        origins=np.array(origins, dtype=np.int64).reshape(-1, 2),
        num_empty=len(texts) - len(kept),
    )
    write_part(part_path(job.output, shard.number), part, key)
    return len(tokens)


@cache
def worker_tokenizer(job: TokenizeJob) -> Tokenizer:
    return job.open_tokenizer()


def join_parts(job: TokenizeJob, result: TokenizeResult, files: CorpusFiles) -> dict[str, Any]:
    """All parts as one corpus, and what is to be known of it."""
    counter = CorpusCounter(job.vocab_size)
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
            require(False, named, f"no document with a token in it, {counter.num_empty} empty ones")
    firsts = list(accumulate(num_documents, initial=0))[:-1]

    def origin(document: int) -> str:
        place = bisect_right(firsts, document) - 1
        file, line = read_origins(result.parts[place])[document - firsts[place]]
        return f"{job.inputs[file]}:{line}"

    tokenizer = job.open_tokenizer()
    report = counter.report(tokenizer.spell, origin)
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
def worker_pool(num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that take shards; when something is wrong, those in work are finished and kept, the others dropped."""
    pool = ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"), initializer=init_worker)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def init_worker() -> None:
    """A worker leaves interrupts to the process that started it, and ends when that one does, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def follow() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
