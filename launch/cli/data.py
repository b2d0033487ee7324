"""`harness data`: tokenizes texts to an indexed corpus, and shows a batch.

Both are used before a run and beside one, so they answer at once and never disturb it. Torch is imported only to show a
batch. An error is one line on stderr and exit code 2; 75 if storage failed or the command was stopped.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from harness.config import compose
from harness.config.command_line import override, shell_command
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.config.schema import Config
from harness.core.rundir import RunDir, locate
from harness.data.prepare.document_filter import DocumentFilter
from harness.data.prepare.prepared_files import Options
from harness.data.prepare.streamed import StreamedDataset, describe_dataset
from harness.data.prepare.tokenizer import EOD_TOKEN, end_token_of, find_tokenizer_file
from launch.cli.parser import CommandParser
from launch.cli.write_error import write_error

HELP = """\
usage: harness data COMMAND [ARGUMENTS]

commands:
  prepare  tokenize texts to an indexed corpus: harness data prepare INPUT... --output PREFIX
  inspect  show a batch of a run: harness data inspect [group=option] [key=value] ... --batch N

See `harness data COMMAND --help` for its arguments.
"""

PREPARE = """\
Tokenize texts to PREFIX.bin and PREFIX.idx, which `harness train data=files data.sources.main.paths=[PREFIX]` and
Megatron read. Also writes PREFIX.meta.json (report, inputs), PREFIX.counts.npy and PREFIX.tokenizer.json.

INPUT is a file or a directory of files: .txt (one document a file), .jsonl, .json or .ndjson (one JSON object a line),
each also as .gz or .zst, .parquet and .arrow; or a directory of Hugging Face's `Dataset.save_to_disk`. --dataset reads
a Hugging Face dataset row by row instead, from a local directory or from a hub. The same input gives the same output
for any number of workers. Rerun the same command to continue after it was stopped or killed.
"""

BATCHES_END = 2**40
"""Batches that `inspect` shows have a lower index; the positions of their samples fit into 63 bits."""

INSPECT = """\
Show a batch as training reads it: source, file and documents of each row, its text, the rarest tokens, entropy and
fingerprints. The overrides are those of `harness train`. With run.name=NAME the batch is the one of that run: its
config and its ledger apply, and of the overrides only data.remote may differ from it.
"""

DATA_KEYS = ("data.", "model.vocab_size", "run.seed", "train.batch_size", "train.sequence_length")
"""Beginnings of the config keys that determine a batch, ..."""
REMOTE = "data.remote."
"""... except these, which may differ from machine to machine."""


def main(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    try:
        match list(argv):
            case ["-h" | "--help" | "help", *_]:
                print(HELP, end="")
                return EXIT_DONE
            case ["prepare", *arguments]:
                return prepare_command(arguments)
            case ["inspect", *arguments]:
                return inspect_batch(arguments)
            case [unknown, *_]:
                raise ConfigError("data", f"unknown command {unknown!r}; choose prepare, inspect, or --help")
            case _:
                raise ConfigError("data", "missing command; choose prepare, inspect, or --help")
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except StorageError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        print("harness: stopped; rerun the same command to continue", file=sys.stderr)
        return EXIT_INTERRUPTED


def prepare_command(arguments: Sequence[str]) -> int:
    """`harness data prepare`."""
    args = prepare_parser().parse_args(arguments)
    from concurrent.futures.process import BrokenProcessPool

    from harness.data.prepare import corpus_report
    from harness.data.prepare.documents import find_inputs
    from harness.data.prepare.prepare import SHARD_BYTES
    from harness.data.prepare.prepare import prepare_corpus as prepare_corpus
    from launch.cli.progress_bar import ProgressBar

    require(bool(args.input) or args.dataset is not None, "prepare", "needs INPUT... or --dataset PATH")
    for name in ("workers", "shard_bytes"):
        value = getattr(args, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')}", f"must be at least 1, got {value}")
    output = output_prefix(args.output)
    inputs = find_inputs(args.input) if args.dataset is None else streamed_input(args, output)
    shard_bytes = args.shard_bytes or SHARD_BYTES
    try:
        with ProgressBar() as bar:
            meta = prepare_corpus(
                inputs,
                output,
                parse_options(args),
                num_workers=args.workers or os.cpu_count() or 1,
                shard_bytes=shard_bytes,
                progress=bar.show,
            )
    except BrokenProcessPool:
        message = "a worker was killed, perhaps out of memory; rerun the same command to continue, with fewer --workers"
        print(f"harness: {message} or smaller --shard-bytes", file=sys.stderr)
        return EXIT_INTERRUPTED
    except StorageError:
        raise
    except OSError as error:
        raise write_error(Path(error.filename or output), error) from None
    timing = meta["timing"]
    facts = {"speed": f"{timing['tokens_per_s']:,.0f} tokens/s, {timing['seconds']:.1f} s", "output": str(output)}
    facts["next"] = next_command(output, meta["vocab_size"])
    print(corpus_report.render(corpus_report.parse_report(meta["report"]), facts))
    return EXIT_DONE


def streamed_input(args: Namespace, output: Path) -> StreamedDataset:
    """The dataset that is read in streaming form."""
    require(not args.input, "--dataset", f"replaces INPUT, got {' '.join(args.input)} too")
    options = {"split": args.split, "config": args.config, "revision": args.revision}
    return describe_dataset(args.dataset, **options, output=output)


def next_command(output: Path, vocab_size: int) -> str:
    """The command that trains on a prepared corpus."""
    paths = override("data.sources.main.paths", [str(output)])
    return shell_command("harness", "train", "data=files", paths, override("model.vocab_size", vocab_size))


def inspect_batch(arguments: Sequence[str]) -> int:
    """`harness data inspect`."""
    args = inspect_parser().parse_intermixed_args(arguments)
    require(args.batch >= 0, "--batch", f"must be 0 or more, got {args.batch}")
    require(args.batch < BATCHES_END, "--batch", f"must be below {BATCHES_END}, got {args.batch}")
    require(args.chars >= 0, "--chars", f"must be 0 (all) or more, got {args.chars}")
    cfg = compose.load(args.overrides)
    run = None if cfg.run.name is None else locate(cfg)
    if run is not None:
        message = (
            f"is not a run directory: it has no {run.config.name}; leave out run.name to show a batch of a new run"
        )
        require(run.config.is_file(), str(run.path), message)
        cfg = config_of_run(run, cfg, args.overrides)
    import torch

    from harness.data.batch_view import render, view_batch
    from harness.data.order.ledger import Ledger
    from harness.data.sources import open_data, read_recorded_data

    ledger = Ledger() if run is None else Ledger.load(run.ledger, writer=False)
    recorded = None if run is None else read_recorded_data(run)
    batches, held_out = open_data(
        cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=ledger, recorded=recorded
    )
    try:
        chosen = held_out if args.held_out else batches
        excluded = not args.held_out and ledger.is_excluded(args.batch)
        view = view_batch(chosen, args.batch, excluded=excluded)
    finally:
        batches.close()
        held_out.close()
    print(json.dumps(asdict(view)) if args.json else render(view, num_characters=args.chars))
    return EXIT_DONE


def config_of_run(run: RunDir, given: Config, overrides: Sequence[str]) -> Config:
    """The config that a run has stored, with the given settings of `data.remote`. `given` is composed from the
    overrides; one that names another batch than that of the run is rejected."""
    stored, default = compose.read(run.config), compose.load()
    keys = [item.partition("=")[0].lstrip("+~") for item in overrides]
    then, now, unset = (compose.flat_values(cfg) for cfg in (stored, given, default))
    for key in sorted(then | now | unset):
        is_given = now.get(key) != unset.get(key) or any(key == each or key.startswith(f"{each}.") for each in keys)
        if is_given and key.startswith(DATA_KEYS) and not key.startswith(REMOTE):
            message = f"is {then.get(key)} in {run.path}, got {now.get(key)}; leave it out to show the batch of the run"
            require(then.get(key) == now.get(key), key, f"{message}, or leave out run.name to show one of a new run")
    names = [key.removeprefix(REMOTE) for key in keys if key.startswith(REMOTE)]
    remote = replace(stored.data.remote, **{name: getattr(given.data.remote, name) for name in names})
    return replace(stored, data=replace(stored.data, remote=remote))


def prepare_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness data prepare", description=PREPARE, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("input", nargs="*", metavar="INPUT", help="file, or directory of files")
    add_dataset_options(parser)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="path prefix of the output files")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--tokenizer", metavar="FILE", help="a Hugging Face tokenizer.json, or a model directory that has one"
    )
    choice.add_argument(
        "--train-bpe", metavar="SIZE", type=int, help="train a byte-level BPE of SIZE tokens on the input"
    )
    choice.add_argument("--bytes", action="store_true", help="one token per byte (the default)")
    parser.add_argument(
        "--train-fraction",
        metavar="FRACTION",
        type=float,
        default=1.0,
        help="fraction of the documents to train the BPE on; default: 1",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of these documents; default: 0")
    parser.add_argument("--text-key", metavar="KEY", default="text", help="JSON key or Parquet column; default: text")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--eod-token",
        metavar="TOKEN",
        help=f"name of that token; default: the eos_token of the model directory, else {EOD_TOKEN}",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="parse names of special tokens in the text as these tokens; by default they are plain text",
    )
    add_filter_options(parser)
    parser.add_argument("--workers", metavar="N", type=int, help="number of tokenizer processes; default: one per core")
    parser.add_argument("--shard-bytes", metavar="N", type=int, help="bytes of text per work unit; default: 32 MiB")
    return parser


def add_dataset_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("dataset", "A Hugging Face dataset in streaming form, instead of INPUT.")
    group.add_argument("--dataset", metavar="PATH", help="directory of data files, or name of a dataset on a hub")
    group.add_argument("--split", default="train", help="its split; default: train")
    group.add_argument("--config", metavar="NAME", help="its configuration, if it has several")
    group.add_argument("--revision", metavar="COMMIT", help="its commit on the hub; required there")


FILTER_HELP = {
    "max_chars": "most characters of a document",
    "max_bad_chars": "largest share of control characters and U+FFFD",
    "max_repeated_chars": "largest share of characters in runs of 10 or more equal ones",
    "max_repeated_lines": "largest share of characters in lines that equal an earlier one",
    "max_repeated_phrases": "largest share of characters in phrases of 5 words that occurred before",
    "max_boilerplate": "largest share of characters in lines of navigation, cookie notices or error pages",
}
"""Threshold -> its help text; the defaults are those of `DocumentFilter`."""


def add_filter_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "filter", "Thresholds need --filter. Texts below 200 characters are checked for their encoding only."
    )
    group.add_argument(
        "--filter", action="store_true", help="drop documents that are too long, degenerate or badly encoded"
    )
    for field in fields(DocumentFilter):
        is_count = field.name == "max_chars"
        default = f"{field.default:,}" if is_count else f"{field.default:g}"
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            metavar="N" if is_count else "SHARE",
            type=int if is_count else float,
            help=f"{FILTER_HELP[field.name]}; default: {default}",
        )


def parse_filter(args: Namespace) -> DocumentFilter | None:
    given = {name: getattr(args, name) for name in FILTER_HELP if getattr(args, name) is not None}
    for name in given:
        require(args.filter, f"--{name.replace('_', '-')}", "needs --filter")
    return DocumentFilter(**given) if args.filter else None


def inspect_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness data inspect", description=INSPECT, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="group=option or key=value, as for harness train"
    )
    parser.add_argument("--batch", metavar="N", type=int, required=True, help="batch index")
    parser.add_argument("--held-out", action="store_true", help="show a batch of the held-out data")
    parser.add_argument(
        "--chars", metavar="N", type=int, default=400, help="characters to print of each document; 0: all; default: 400"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one line of JSON")
    return parser


def parse_options(args: Namespace) -> Options:
    given = None if args.tokenizer is None else Path(args.tokenizer)
    return Options(
        tokenizer=None if given is None else find_tokenizer_file(given),
        bpe_size=args.train_bpe,
        train_fraction=args.train_fraction,
        seed=args.seed,
        text_key=args.text_key,
        eod_token=args.eod_token or (given and end_token_of(given)) or EOD_TOKEN,
        append_eod=args.append_eod,
        special_tokens=args.special_tokens,
        document_filter=parse_filter(args),
    )


def output_prefix(text: str) -> Path:
    """The output prefix, also if one of its files is named."""
    require(
        bool(Path(text).name) and not text.endswith("/"),
        "--output",
        f"must be the beginning of a file name, got {text!r}",
    )
    return Path(text.removesuffix(".bin").removesuffix(".idx"))
