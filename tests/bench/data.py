"""Time to open a corpus and to read batches: this harness compared with the usual loaders, over the same tokens.

    python -m tests.bench.data                  a corpus of 10 ** 9 tokens (2 GB on disk), about two minutes
    python -m tests.bench.data --tokens 1e8     a shorter run

Every contender runs in its own process, over the same documents, and returns batches of 8 x 4096 int64 inputs and
targets on one device. Columns: time to open the corpus (s, and growth of resident memory); a batch at a random index
(us, median, built on request); consecutive batches (million tokens a second); and how long a training step of
`--step-ms` waits for its batch (us, median), which is the figure that costs GPU time. The page cache is warm.
"harness" does what the others do; "with facts" also describes every batch (fingerprint, rarest tokens, entropy), as
rank 0 of a run does. Peers have their usual settings: shuffled, mapped files, workers as in their documentation.
megatron-core and mosaicml-streaming are measured if they can be imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.config.compose import load
from harness.data.batches import Batches, Share
from harness.data.corpus.token_files import IndexedWriter
from harness.data.order.ledger import Ledger
from harness.data.sources import open_sources, train_recipe
from tests.bench.peers import (
    BATCH_SIZE,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    Loader,
    Windows,
    import_streaming,
    open_megatron,
    open_streaming,
    wrap_in_data_loader,
    write_shards,
)

BATCH_TOKENS = BATCH_SIZE * SEQUENCE_LENGTH
MEAN_DOCUMENT_TOKENS = 1000
BLOCK_TOKENS = 1 << 22
NUM_RANDOM = 300
PAUSE_S = 0.005
"""Pause before each random access, so that prefetching after the last access is finished."""
NUM_WARMUP = 20
STREAM_S = 3.0
NUM_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    open_s: float
    open_mb: float
    random_us: float
    stream_mtokens_per_s: float
    wait_us: float


def write_corpus(prefix: Path, num_tokens: int) -> None:
    """Write documents of random lengths: slices of one block of random tokens, each from another offset."""
    rng = np.random.default_rng(0)
    block = rng.integers(0, VOCAB_SIZE, 2 * BLOCK_TOKENS, dtype=np.uint16)
    written = 0
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        while written < num_tokens:
            for length in rng.geometric(1 / MEAN_DOCUMENT_TOKENS, 4096).tolist():
                length = min(length, num_tokens - written)
                if length == 0:
                    break
                first = int(written * 7919 % BLOCK_TOKENS)
                writer.add(block[first : first + length])
                written += length


def harness_opener(directory: Path, device: torch.device, *, with_facts: bool) -> Callable[[], Loader]:
    overrides = [
        "data=files",
        f"data.sources.main.paths=[{directory / 'corpus'}]",
        f"train.batch_size={BATCH_SIZE}",
        f"train.sequence_length={SEQUENCE_LENGTH}",
        f"model.vocab_size={VOCAB_SIZE}",
    ]
    cfg = load(overrides)
    share = Share(rank=0, world_size=1, device=device)

    def open_loader() -> Loader:
        sources, _ = open_sources(cfg)
        batches = Batches(sources, recipe=train_recipe(cfg), share=share, ledger=Ledger(), with_facts=with_facts)
        num_batches = len(batches)
        return Loader(
            random_batch=lambda number: batches[number % num_batches], stream=lambda: map(batches.__getitem__, count())
        )

    return open_loader


def get_opener(name: str, directory: Path, device: torch.device) -> Callable[[], Loader]:
    """Return the function that opens the corpus; imports, whose cost does not depend on the corpus, happen here."""
    library, _, workers = name.partition(", workers ")
    match library:
        case "harness" | "harness, with facts":
            return harness_opener(directory, device, with_facts=library != "harness")
        case "torch DataLoader":
            dataset: Callable[[], Any] = partial(Windows, directory / "corpus.bin")
        case "megatron-core GPTDataset":
            import_module("megatron.core.datasets.helpers")
            import_module("megatron.core.datasets.gpt_dataset")
            dataset = partial(open_megatron, directory, cache=directory / name)
        case _:
            import_streaming()
            dataset = partial(open_streaming, directory)
    return lambda: wrap_in_data_loader(dataset(), num_workers=int(workers), device=device)


CONTENDERS = {
    "harness": "numpy",
    "harness, with facts": "numpy",
    "torch DataLoader, workers 0": "numpy",
    "torch DataLoader, workers 2": "numpy",
    "megatron-core GPTDataset, workers 0": "megatron.core",
    "megatron-core GPTDataset, workers 2": "megatron.core",
    "mosaicml-streaming, workers 0": "streaming",
    "mosaicml-streaming, workers 2": "streaming",
}
"""Name -> the package that it needs."""


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(name: str, directory: Path, *, device: torch.device, step_s: float) -> Row:
    """Measure one contender in this process."""
    open_loader = get_opener(name, directory, device)
    torch.zeros(1, device=device)
    before_mb, start_s = resident_mb(), time.perf_counter()
    loader = open_loader()
    open_s, open_mb = time.perf_counter() - start_s, resident_mb() - before_mb

    random_s = []
    for number in np.random.default_rng(0).integers(0, 2**31, NUM_WARMUP + NUM_RANDOM).tolist():
        time.sleep(PAUSE_S)
        start_s = time.perf_counter()
        loader.random_batch(number)
        wait_for(device)
        random_s.append(time.perf_counter() - start_s)

    stream = loader.stream()
    for _ in range(NUM_WARMUP):
        next(stream)
    wait_for(device)
    num_batches, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < STREAM_S:
        next(stream)
        num_batches += 1
    wait_for(device)
    rate = num_batches * BATCH_TOKENS / (time.perf_counter() - start_s)

    wait_s = []
    for _ in range(NUM_STEPS):
        start_s = time.perf_counter()
        next(stream)
        wait_s.append(time.perf_counter() - start_s)
        time.sleep(step_s)
    return Row(
        open_s=open_s,
        open_mb=open_mb,
        random_us=1e6 * statistics.median(random_s[NUM_WARMUP:]),
        stream_mtokens_per_s=rate / 1e6,
        wait_us=1e6 * statistics.median(wait_s),
    )


def measure_in_subprocess(name: str, directory: Path, arguments: list[str]) -> Row | str:
    """Measure one contender in a new process; returns the error message if it fails."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.data", *arguments]
    command += ["--contender", name, "--directory", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return done.stderr.strip().splitlines()[-1]
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def compare(directory: Path, num_tokens: int, arguments: list[str]) -> None:
    start_s = time.perf_counter()
    write_corpus(directory / "corpus", num_tokens)
    print(f"{num_tokens:,} tokens written in {time.perf_counter() - start_s:.1f} s")
    if is_installed("streaming"):
        write_shards(directory / "shards", np.memmap(directory / "corpus.bin", dtype=np.uint16, mode="r"))
    print(f"{'':38}{'open s':>10}{'open MB':>10}{'random us':>11}{'Mtokens/s':>11}{'wait us':>9}")
    for name, package in CONTENDERS.items():
        row = measure_in_subprocess(name, directory, arguments) if is_installed(package) else "not installed"
        if isinstance(row, str):
            print(f"{name:38}  {row}")
            continue
        figures = f"{row.open_s:10.4f}{row.open_mb:10.1f}{row.random_us:11.0f}"
        print(f"{name:38}{figures}{row.stream_mtokens_per_s:11.1f}{row.wait_us:9.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=float, default=1e9, help="size of the corpus")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--step-ms", type=float, default=20.0, help="length of the step that waits for a batch")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help="where the corpus is written; default: a temporary directory")
    options = parser.parse_args()
    if options.contender:
        device = torch.device(options.device)
        row = measure(options.contender, options.directory, device=device, step_s=options.step_ms / 1e3)
        print(json.dumps(asdict(row)))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(Path(directory), int(options.tokens), ["--device", options.device, "--step-ms", str(options.step_ms)])


if __name__ == "__main__":
    main()
