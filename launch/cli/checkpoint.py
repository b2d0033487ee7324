"""`harness checkpoint`: what a run has saved, whether it is whole, and what may go.

Why: an operator looks at checkpoints while the run trains, so nothing here may disturb it; and it answers at once,
without torch.
How: the run directory is all that is read. `list` and `verify` change nothing. `prune` applies the run's own rule of
retention, asks it again before every deletion, and lets what the run removed meanwhile be gone; what is still being
written has a hidden name and is never touched. A complaint is one line on stderr and exit code 2; `verify` exits with 1
when a checkpoint is damaged.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

import yaml

from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import Checkpoint, Health
from harness.checkpoint.integrity import Damaged, OtherVersion
from harness.checkpoint.listing import QUARANTINED, bytes_of, render, rows_of, size_text
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.core.rundir import RunDir
from launch.cli.parser import CommandParser
from launch.cli.progress_bar import ProgressBar

EXIT_DAMAGED = 1
KEEP, KEEP_EVERY_STEPS = 2, 0
"""Retention where the run does not say."""
COMMANDS = "list, verify, prune, export, import, or --help"

HELP = """\
usage: harness checkpoint COMMAND [ARGUMENTS]

commands:
  list     what a run has saved: harness checkpoint list RUN
  verify   whether every file is what was saved: harness checkpoint verify RUN [NAME...]
  prune    delete what retention does not keep: harness checkpoint prune RUN
  export   to Hugging Face's layout: harness checkpoint export RUN --output DIR
  import   from Hugging Face's layout: harness checkpoint import DIR RUN

RUN is a run directory, such as runs/first. `harness checkpoint COMMAND --help` says more.
"""

LIST = """\
List the checkpoints of a run, oldest first, and those that were found damaged and set aside.

health: candidate (not enough clean steps have followed it yet), good (enough have), tainted (taken after something went
wrong), damaged (set aside).
"""

VERIFY = """\
Read every byte of all checkpoints, or of those named, and compare with what was saved. Changes nothing. One line each:
ok, or the file and what is wrong with it. Exit code 0: all are whole; 1: one or more are damaged; 75: none was found
damaged, but one or more could not be read, so try again later; 2: likewise, but another version wrote them.
"""

PRUNE = """\
Delete the checkpoints that retention does not keep, as the run itself does. The newest good one always stays, and so
does the one that is next to prove good. Safe while the run is training.
"""


def main(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    try:
        match list(argv):
            case ["-h" | "--help" | "help", *_]:
                print(HELP, end="")
                return EXIT_DONE
            case ["list", *arguments]:
                return list_command(arguments)
            case ["verify", *arguments]:
                return verify_command(arguments)
            case ["prune", *arguments]:
                return prune_command(arguments)
            case ["export", *arguments]:
                from launch.cli import model_exchange

                return model_exchange.export_command(arguments)
            case ["import", *arguments]:
                from launch.cli import model_exchange

                return model_exchange.import_command(arguments)
            case [unknown, *_]:
                raise ConfigError("checkpoint", f"unknown command {unknown!r}; choose {COMMANDS}")
            case _:
                raise ConfigError("checkpoint", f"missing command; choose {COMMANDS}")
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except OSError as error:
        print(f"harness: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        print("harness: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def list_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint list`."""
    parser = parser_of("list", LIST)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    args = parser.parse_args(arguments)
    run = run_at(args.run)
    now_s, rows = time.time(), rows_of(run.checkpoints)
    if args.json:
        print(json.dumps({"run": str(run.path), "checkpoints": [asdict(row) for row in rows]}))
    else:
        print(render(rows, now_s=now_s) if rows else f"{run.path} has no checkpoints")
    return EXIT_DONE


def verify_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint verify`."""
    parser = parser_of("verify", VERIFY)
    parser.add_argument("name", nargs="*", metavar="NAME", help="a checkpoint, as list prints it; default: all")
    args = parser.parse_args(arguments)
    run = run_at(args.run)
    paths = named(run, args.name) if args.name else [each.path for each in catalog.list_checkpoints(run.checkpoints)]
    if not paths:
        print(f"{run.path} has no checkpoints")
    codes = {EXIT_DONE}
    for path in paths:
        problem, code = problem_of(path)
        if problem is not None and not path.exists():
            print(f"{path.name}  gone meanwhile")
            continue
        print(f"{path.name}  {problem or 'ok'}", flush=True)
        codes.add(code)
    return next(code for code in (EXIT_DAMAGED, EXIT_INTERRUPTED, EXIT_BAD_CONFIG, EXIT_DONE) if code in codes)


def prune_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint prune`."""
    args = prune_parser().parse_args(arguments)
    run = run_at(args.run)
    keep, keep_every_steps = retention(run, args)
    for checkpoint in catalog.list_checkpoints(run.checkpoints):
        if checkpoint.health is Health.unread:
            catalog.read_health(checkpoint.path)  # raises, and says why nothing is deleted

    def expendable() -> list[Checkpoint]:
        return catalog.select_for_deletion(catalog.list_checkpoints(run.checkpoints), keep=keep, keep_every_steps=keep_every_steps)

    sizes: list[int] = []
    for checkpoint in expendable():
        if checkpoint in expendable():  # the run may have judged anew while the last one was deleted
            sizes += drop(checkpoint.path, checkpoint.health, dry_run=args.dry_run)
    for path in catalog.list_damaged(run.checkpoints) if args.list_damaged else ():
        sizes += drop(path, QUARANTINED, dry_run=args.dry_run)
    print(f"{'would delete' if args.dry_run else 'deleted'} {len(sizes)}, {size_text(sum(sizes))}")
    return EXIT_DONE


def prune_parser() -> ArgumentParser:
    parser = parser_of("prune", PRUNE)
    parser.add_argument("--keep", metavar="K", type=int, help="how many of the newest stay; default: as the run says")
    parser.add_argument(
        "--keep-every-steps",
        metavar="M",
        type=int,
        help="the first in every M steps stays too; 0: none; default: as the run says",
    )
    parser.add_argument("--damaged", action="store_true", help="delete also those that were set aside")
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and delete nothing")
    return parser


def parser_of(command: str, description: str) -> ArgumentParser:
    parser = CommandParser(
        prog=f"harness checkpoint {command}", description=description, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    return parser


def run_at(word: str) -> RunDir:
    """The run directory that is meant."""
    run = RunDir(Path(word))
    known = run.config.is_file() or run.checkpoints.is_dir()
    require(known, str(run.path), "is not a run directory: it has neither config.yaml nor checkpoints")
    return run


def named(run: RunDir, names: Sequence[str]) -> list[Path]:
    """Checkpoints by name, also those that were set aside."""
    listed = [each.path for each in catalog.list_checkpoints(run.checkpoints)] + catalog.list_damaged(run.checkpoints)
    paths = {path.name: path for path in listed}
    for name in names:
        require(name in paths, name, f"no such checkpoint; {run.path} has {', '.join(paths) or 'none'}")
    return [paths[name] for name in names]


def retention(run: RunDir, args: Namespace) -> tuple[int, int]:
    """How many of the newest stay, and the steps between those that stay for ever: as asked, else as the run does."""
    stated = {"keep": KEEP, "keep_every_steps": KEEP_EVERY_STEPS} | stated_retention(run)
    keep = stated["keep"] if args.keep is None else args.keep
    keep_every_steps = stated["keep_every_steps"] if args.keep_every_steps is None else args.keep_every_steps
    require(isinstance(keep, int) and keep >= 1, "--keep", f"must be at least 1, got {keep!r}")
    valid = isinstance(keep_every_steps, int) and keep_every_steps >= 0
    require(valid, "--keep-every-steps", f"must be 0 or more, got {keep_every_steps!r}")
    return keep, keep_every_steps


def stated_retention(run: RunDir) -> dict[str, Any]:
    """The section of the run's configuration; a file that cannot be read is refused, for it may ask to keep more."""
    if not run.config.exists():
        return {}
    try:
        section = yaml.safe_load(run.config.read_text(encoding="utf-8"))["checkpoint"]
    except (ValueError, KeyError, TypeError, yaml.YAMLError):
        section = None
    require(isinstance(section, dict), str(run.config), "does not say what to keep under `checkpoint`")
    return dict(section)


def problem_of(path: Path) -> tuple[str | None, int]:
    """What is wrong with a checkpoint, naming the file, and the exit code for it; None and 0 when it is whole."""
    try:
        with ProgressBar() as bar:
            integrity.verify(path, progress=counter(bar, path.name, integrity.read_manifest(path).bytes))
    except Damaged as damage:
        return f"{damage.path.name}: {damage.problem}", EXIT_DAMAGED
    except StorageError as error:
        return str(error), EXIT_INTERRUPTED
    except OtherVersion as error:
        return str(error), EXIT_BAD_CONFIG
    return None, EXIT_DONE


def counter(bar: ProgressBar, stage: str, total: int) -> Callable[[int], None]:
    """Adds up what several threads have read, and shows it."""
    lock, done = Lock(), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            bar.show(stage, done, total)

    return count


def drop(path: Path, health: str, *, dry_run: bool) -> list[int]:
    """Delete one and say so; returns its bytes, or nothing where it had gone already."""
    num_bytes = bytes_of(path)
    if not dry_run and not catalog.delete(path):
        return []
    print(f"{path.name}  {health}  {size_text(num_bytes)}", flush=True)
    return [num_bytes]
