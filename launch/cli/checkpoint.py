"""`harness checkpoint`: lists, verifies, prunes, averages, exports and imports the checkpoints of a run.

Why: an operator uses it while the run trains, so it must not disturb the run; and it answers at once, without torch.
How: only the run directory is read. `list` and `verify` change nothing. `prune` applies the retention of the run,
checks it again before every deletion, and ignores what the run deleted meanwhile. A checkpoint that is being written
has a hidden name and is never touched. An error is one line on stderr and exit code 2; `verify` exits with 1 if a
checkpoint is damaged.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

import yaml

from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import Checkpoint, Health
from harness.checkpoint.integrity import Damaged, OtherVersion
from harness.checkpoint.listing import QUARANTINED, bytes_of, checkpoint_rows, render, size_text
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.core.object_store import is_url
from harness.core.rundir import RunDir
from launch.cli.parser import CommandParser
from launch.cli.progress_bar import ProgressBar

EXIT_DAMAGED = 1
DEFAULT_RETENTION = {"keep": 2, "keep_every_steps": 0, "keep_behind_steps": 0}
"""Retention of a run without a config."""
COMMANDS = "list, verify, prune, average, upload, export, import, or --help"

HELP = """\
usage: harness checkpoint COMMAND [ARGUMENTS]

commands:
  list     list the checkpoints of a run: harness checkpoint list RUN
  verify   compare every file with its checksum: harness checkpoint verify RUN [NAME...]
  prune    delete what retention does not keep: harness checkpoint prune RUN
  average  average the parameters of several: harness checkpoint average RUN --last K --output DIR
  upload   upload to checkpoint.remote.url what is not there yet: harness checkpoint upload RUN
  export   convert to the Hugging Face layout: harness checkpoint export RUN --output DIR
  import   convert from the Hugging Face layout: harness checkpoint import DIR RUN

RUN is a run directory, such as runs/first; for list and verify also a run in an object store, such as
s3://bucket/runs/first. See `harness checkpoint COMMAND --help` for its arguments.
"""

LIST = """\
List the checkpoints of a run, oldest first, and the damaged ones that were set aside.

health: candidate (not enough clean steps after it yet), good (enough clean steps), tainted (saved during an incident),
damaged (set aside).
"""

VERIFY = """\
Read every byte of all checkpoints, or of the named ones, and compare checksums. Changes nothing. Prints
one line each: ok, or the file and the problem. Exit code 0: all are intact; 1: one or more are damaged; 75: none is
damaged, but one or more could not be read, try again later; 2: none is damaged, but one or more were written by another
version.
"""

PRUNE = """\
Delete the checkpoints that retention does not keep, as the run itself does. The newest good checkpoint
always stays, and so does the next candidate to become good, and for ten minutes what `harness ctl RUN rollback` has
listed. Safe while the run is training.
"""


UPLOAD = """\
Upload the checkpoints and files of a run to its checkpoint.remote.url, as the run itself does: what is there already is
not sent again, every file is read back and compared, and retention applies. Prints one line for each checkpoint. While
the run trains, its own process uploads, and this command waits until the run has ended. Exit code 75: the store did not
answer for checkpoint.remote.exit_wait_s seconds.
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
            case ["average", *arguments]:
                from launch.cli import checkpoint_average

                return checkpoint_average.average_command(arguments)
            case ["upload", *arguments]:
                from launch.cli import remote_checkpoints

                run = make_parser("upload", UPLOAD).parse_args(arguments).run
                return remote_checkpoints.upload_rest(open_run_dir(run))
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
    except KeyboardInterrupt:
        print("harness: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def list_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint list`."""
    parser = make_parser("list", LIST)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args(arguments)
    if is_url(args.run):
        from launch.cli import remote_checkpoints

        return remote_checkpoints.list_remote(args.run, as_json=args.json)
    run = open_run_dir(args.run)
    now_s, rows = time.time(), checkpoint_rows(run.checkpoints)
    if args.json:
        print(json.dumps({"run": str(run.path), "checkpoints": [asdict(row) for row in rows]}))
    else:
        print(render(rows, now_s=now_s) if rows else f"{run.path} has no checkpoints")
    return EXIT_DONE


def verify_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint verify`."""
    parser = make_parser("verify", VERIFY)
    parser.add_argument(
        "name", nargs="*", metavar="NAME", help="name of a checkpoint, as printed by list; default: all"
    )
    args = parser.parse_args(arguments)
    if is_url(args.run):
        from launch.cli import remote_checkpoints

        return remote_checkpoints.verify_remote(args.run, args.name)
    run = open_run_dir(args.run)
    paths = (
        find_named(run, args.name)
        if args.name
        else [checkpoint.path for checkpoint in catalog.list_checkpoints(run.checkpoints)]
    )
    if not paths:
        print(f"{run.path} has no checkpoints")
    codes = {EXIT_DONE}
    for path in paths:
        problem, code = verify_checkpoint(path)
        if problem is not None and not path.exists():
            print(f"{path.name}  deleted meanwhile")
            continue
        print(f"{path.name}  {problem or 'ok'}", flush=True)
        codes.add(code)
    return next(code for code in (EXIT_DAMAGED, EXIT_INTERRUPTED, EXIT_BAD_CONFIG, EXIT_DONE) if code in codes)


def prune_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint prune`."""
    args = prune_parser().parse_args(arguments)
    run = open_run_dir(args.run)
    kept = retention(run, args)
    for checkpoint in catalog.list_checkpoints(run.checkpoints):
        if checkpoint.health is Health.unread:
            catalog.read_health(checkpoint.path)  # raises with the reason; nothing is deleted

    def list_expendable() -> list[Checkpoint]:
        held = catalog.held_names(run.checkpoints, now=time.time())
        return catalog.select_for_deletion(catalog.list_checkpoints(run.checkpoints), **kept, held=held)

    deleted_bytes: list[int] = []
    for checkpoint in list_expendable():
        if checkpoint in list_expendable():  # the run may have changed a health since
            deleted_bytes += delete_and_print(checkpoint.path, checkpoint.health, dry_run=args.dry_run)
    for path in catalog.list_damaged(run.checkpoints) if args.damaged else ():
        deleted_bytes += delete_and_print(path, QUARANTINED, dry_run=args.dry_run)
    total = f"{'would delete' if args.dry_run else 'deleted'} {len(deleted_bytes)}, {size_text(sum(deleted_bytes))}"
    print("; ".join([total, *describe_kept(run, kept)]))
    return EXIT_DONE


def describe_kept(run: RunDir, kept: Mapping[str, int]) -> list[str]:
    """What retention keeps beside the newest checkpoints, and why; empty if there is nothing else."""
    held = catalog.held_names(run.checkpoints, now=time.time())
    reasons = catalog.reasons_to_keep(catalog.list_checkpoints(run.checkpoints), **kept, held=held)
    names: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        names.setdefault(reason, []).append(path.name)
    names.pop(catalog.NEWEST, None)
    others = [
        f"{found[0]} ({reason})" if len(found) == 1 else f"{len(found)} ({reason})" for reason, found in names.items()
    ]
    return [f"beside the newest {kept['keep']} kept {', '.join(others)}"] if others else []


def prune_parser() -> ArgumentParser:
    parser = make_parser("prune", PRUNE)
    parser.add_argument("--keep", metavar="K", type=int, help="keep the K newest; default: as configured in the run")
    parser.add_argument(
        "--keep-every-steps",
        metavar="M",
        type=int,
        help="also keep the first in every M steps; 0: none; default: as configured in the run",
    )
    parser.add_argument(
        "--keep-behind-steps",
        metavar="M",
        type=int,
        help="also keep one that is at least M steps older than the newest; 0: none; default: as configured in the run",
    )
    parser.add_argument("--damaged", action="store_true", help="also delete damaged checkpoints that were set aside")
    parser.add_argument("--dry-run", action="store_true", help="print what would be deleted; delete nothing")
    return parser


def make_parser(command: str, description: str) -> ArgumentParser:
    parser = CommandParser(
        prog=f"harness checkpoint {command}", description=description, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/first")
    return parser


def open_run_dir(path: str) -> RunDir:
    """The run directory at a path."""
    run = RunDir(Path(path))
    known = run.config.is_file() or run.checkpoints.is_dir()
    require(known, str(run.path), "is not a run directory: it has neither config.yaml nor checkpoints")
    return run


def find_named(run: RunDir, names: Sequence[str]) -> list[Path]:
    """Checkpoints by name, also damaged ones."""
    listed = [checkpoint.path for checkpoint in catalog.list_checkpoints(run.checkpoints)] + catalog.list_damaged(
        run.checkpoints
    )
    paths = {path.name: path for path in listed}
    for name in names:
        require(name in paths, name, f"no such checkpoint; {run.path} has {', '.join(paths) or 'none'}")
    return [paths[name] for name in names]


def retention(run: RunDir, args: Namespace) -> dict[str, int]:
    """Values of `DEFAULT_RETENTION`'s keys: as given, else as configured."""
    configured = DEFAULT_RETENTION | configured_retention(run)
    kept = {}
    for key in DEFAULT_RETENTION:
        value = configured[key] if getattr(args, key) is None else getattr(args, key)
        least = 1 if key == "keep" else 0
        message = f"must be {'at least 1' if least else '0 or more'}, got {value!r}"
        require(isinstance(value, int) and value >= least, f"--{key.replace('_', '-')}", message)
        kept[key] = value
    return kept


def configured_retention(run: RunDir) -> dict[str, Any]:
    """The section `checkpoint` of the config. An unreadable config is rejected: it may ask to keep more."""
    if not run.config.exists():
        return {}
    try:
        section = yaml.safe_load(run.config.read_text(encoding="utf-8"))["checkpoint"]
    except (ValueError, KeyError, TypeError, yaml.YAMLError):
        section = None
    require(isinstance(section, dict), str(run.config), "has no valid section `checkpoint`, which sets the retention")
    return dict(section)


def verify_checkpoint(path: Path) -> tuple[str | None, int]:
    """The problem of a checkpoint, with its file, and the exit code for it; None and 0 if it is intact."""
    try:
        with ProgressBar() as bar:
            integrity.verify(path, progress=make_counter(bar, path.name, integrity.read_manifest(path).bytes))
    except Damaged as damage:
        return f"{damage.path.name}: {damage.problem}", EXIT_DAMAGED
    except StorageError as error:
        return str(error), EXIT_INTERRUPTED
    except OtherVersion as error:
        return str(error), EXIT_BAD_CONFIG
    return None, EXIT_DONE


def make_counter(bar: ProgressBar, stage: str, total: int) -> Callable[[int], None]:
    """Returns a callback that sums up what several threads have read, and shows it."""
    lock, done = Lock(), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            bar.show(stage, done, total)

    return count


def delete_and_print(path: Path, health: str, *, dry_run: bool) -> list[int]:
    """Delete one checkpoint and print it; returns its bytes, or nothing if it was already gone."""
    num_bytes = bytes_of(path)
    if not dry_run and not catalog.delete(path):
        return []
    print(f"{path.name}  {health}  {size_text(num_bytes)}", flush=True)
    return [num_bytes]
