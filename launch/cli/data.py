"""`harness data`: makes an indexed corpus of texts, and looks inside a batch.

Why: both are used before a run and beside one, so they must answer at once and never disturb it.
How: words are parsed here and handed to `harness.data`; torch is only loaded where a batch is asked for. A complaint is
one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, require
from harness.core.rundir import locate
from harness.data.prepare.prepared_files import Options
from harness.data.prepare.tokenizer import EOD_TOKEN
from launch.cli.parser import Parser

HELP = """\
usage: harness data COMMAND [ARGUMENTS]

commands:
  prepare  texts to an indexed corpus: harness data prepare INPUT... --output PREFIX
  inspect  look at a batch of a run: harness data inspect [group=option] [key=value] ... --batch N

`harness data COMMAND --help` says more.
"""

PREPARE = """\
Turn texts into PREFIX.bin and PREFIX.idx, which `harness train data=files data.sources.main.paths=[PREFIX]` and
Megatron read, with PREFIX.meta.json (report, inputs), PREFIX.counts.npy and PREFIX.tokenizer.json beside them.

INPUT is a file or a directory of files: .txt (one document a file), .jsonl, .json or .ndjson (one JSON object a line),
each also as .gz or .zst, and .parquet. The same input gives the same output, whatever the number of workers. A run that
was stopped or killed goes on when it is started again with the same words.
"""

INSPECT = """\
Show a batch as training sees it: the source, file and documents of each row, its text, the rarest tokens, entropy and
fingerprints. The overrides are those of `harness train`; with run.name=NAME the ledger of that run counts.
"""


def main(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    try:
        match list(argv):
            case ["-h" | "--help" | "help", *_]:
                print(HELP, end="")
                return EXIT_DONE
            case ["prepare", *arguments]:
                return prepare(arguments)
            case ["inspect", *arguments]:
                return inspect(arguments)
            case [unknown, *_]:
                raise ConfigError("data", f"no command {unknown!r}; choose prepare, inspect, or --help")
            case _:
                raise ConfigError("data", "which command? choose prepare, inspect, or --help")
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        print("harness: stopped; the same words go on from here", file=sys.stderr)
        return EXIT_INTERRUPTED


def prepare(arguments: Sequence[str]) -> int:
    """`harness data prepare`."""
    words = prepare_parser().parse_args(arguments)
    from concurrent.futures.process import BrokenProcessPool

    from harness.data.prepare import corpus_report
    from harness.data.prepare.documents import find_inputs
    from harness.data.prepare.prepare import SHARD_BYTES
    from harness.data.prepare.prepare import prepare as make
    from launch.cli.progress_bar import Bar

    for name in ("workers", "shard_bytes"):
        value = getattr(words, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')}", f"must be at least 1, got {value}")
    inputs, output = find_inputs(words.input), output_prefix(words.output)
    shard_bytes = words.shard_bytes or SHARD_BYTES
    try:
        with Bar() as bar:
            meta = make(
                inputs,
                output,
                options_of(words),
                num_workers=words.workers or os.cpu_count() or 1,
                shard_bytes=shard_bytes,
                progress=bar.show,
            )
    except BrokenProcessPool:
        message = (
            "a worker was killed, perhaps for lack of memory; the same words go on from here, with fewer --workers"
        )
        print(f"harness: {message} or smaller --shard-bytes", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        raise ConfigError(str(error.filename or output), error.strerror or str(error)) from None
    timing = meta["timing"]
    facts = {"speed": f"{timing['tokens_per_s']:,.0f} tokens/s, {timing['seconds']:.1f} s", "output": str(output)}
    print(corpus_report.render(corpus_report.parse_report(meta["report"]), facts))
    return EXIT_DONE


def inspect(arguments: Sequence[str]) -> int:
    """`harness data inspect`."""
    words = inspect_parser().parse_intermixed_args(arguments)
    require(words.batch >= 0, "--batch", f"must be 0 or more, got {words.batch}")
    require(words.chars >= 0, "--chars", f"must be 0 (all) or more, got {words.chars}")
    from harness.config import compose

    cfg = compose.load(words.override)
    import torch

    from harness.data.batch_view import render, view_batch
    from harness.data.order.ledger import Ledger
    from harness.data.sources import open_data, read_recorded_data

    ledger = Ledger() if cfg.run.name is None else Ledger.load(locate(cfg).ledger, writer=False)
    known = None if cfg.run.name is None else read_recorded_data(locate(cfg))
    batches, held_out = open_data(cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=ledger, recorded=known)
    try:
        chosen = held_out if words.held_out else batches
        excluded = not words.held_out and ledger.is_excluded(words.batch)
        view = view_batch(chosen, words.batch, excluded=excluded)
    finally:
        batches.close()
        held_out.close()
    print(json.dumps(asdict(view)) if words.json else render(view, num_characters=words.chars))
    return EXIT_DONE


def prepare_parser() -> ArgumentParser:
    parser = Parser(prog="harness data prepare", description=PREPARE, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="+", metavar="INPUT", help="file, or directory of files")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="where the corpus goes")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--tokenizer", metavar="FILE", help="a Hugging Face tokenizer.json")
    choice.add_argument(
        "--train-bpe", metavar="SIZE", type=int, help="train a byte-level BPE of SIZE tokens on the input"
    )
    choice.add_argument("--bytes", action="store_true", help="one token a byte (the default)")
    parser.add_argument(
        "--train-fraction",
        metavar="SHARE",
        type=float,
        default=1.0,
        help="of the documents to train the BPE on; all: 1",
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses these documents")
    parser.add_argument("--text-key", metavar="KEY", default="text", help="JSON key or Parquet column; default: text")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--eod-token", metavar="TOKEN", default=EOD_TOKEN, help=f"its name; default: {EOD_TOKEN}")
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="read the name of a special token within a text as that token; else it is text like any other",
    )
    parser.add_argument("--workers", metavar="N", type=int, help="processes that tokenize; default: one a core")
    parser.add_argument("--shard-bytes", metavar="N", type=int, help="text a worker takes at a time; default: 32 MiB")
    return parser


def inspect_parser() -> ArgumentParser:
    parser = Parser(prog="harness data inspect", description=INSPECT, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "override", nargs="*", metavar="OVERRIDE", help="group=option or key=value, as of harness train"
    )
    parser.add_argument("--batch", metavar="N", type=int, required=True, help="batch index")
    parser.add_argument("--held-out", action="store_true", help="of the held-out data")
    parser.add_argument("--chars", metavar="N", type=int, default=400, help="of each document; 0: all; default: 400")
    parser.add_argument("--json", action="store_true", help="everything, as one line of JSON")
    return parser


def options_of(words: Namespace) -> Options:
    return Options(
        tokenizer=None if words.tokenizer is None else Path(words.tokenizer),
        bpe_size=words.train_bpe,
        train_fraction=words.train_fraction,
        seed=words.seed,
        text_key=words.text_key,
        eod_token=words.eod_token,
        append_eod=words.append_eod,
        special_tokens=words.special_tokens,
    )


def output_prefix(word: str) -> Path:
    """The prefix that is meant, also where one of its files is named."""
    require(
        bool(Path(word).name) and not word.endswith("/"),
        "--output",
        f"must be the beginning of a file name, got {word!r}",
    )
    return Path(word.removesuffix(".bin").removesuffix(".idx"))
