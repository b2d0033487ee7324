"""`harness checkpoint average`: averages the parameters of several checkpoints of a run, and compares held-out losses.

A run that is training is not disturbed. Torch is imported after the arguments are checked. An error is one line on
stderr and exit code 2, and leaves nothing behind.
"""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.checkpoint.integrity import Damaged
from harness.checkpoint.listing import size_text
from harness.config.command_line import shell_command
from harness.config.errors import ConfigError, StorageError, require
from harness.core.event_json import parse, read
from harness.core.events import ActionKind, Intervention, Outcome
from harness.core.plural import pluralize
from harness.core.rundir import RunDir
from launch.cli.model_exchange import run_and_report_errors
from launch.cli.parser import CommandParser

AVERAGE = """\
Average the parameters of several checkpoints of a run, with equal weights or with --decay. DIR becomes a run directory
with one checkpoint, which `harness checkpoint export` and `harness sample` read. It has neither moments nor run state,
so it cannot be trained further. Checkpoints that are tainted, or that a rollback has undone, are left out. The held-out
loss of each checkpoint and of the average is printed if the data of the run can be read. Averaging needs the memory of
the largest parameter, measuring the loss that of the model.
"""
RECORD = "average.json"
NUM_ROWS = 16


def average_command(arguments: Sequence[str]) -> int:
    """`harness checkpoint average`."""
    return run_and_report_errors(lambda: average_and_print(arguments))


def average_and_print(arguments: Sequence[str]) -> None:
    args = build_parser().parse_args(arguments)
    run, output = RunDir(Path(args.run)), Path(args.output)
    require(run.config.is_file(), args.run, f"is not a run directory: it has no {run.config.name}")
    require(bool(output.name), "--output", f"must be the path of a new directory, got {args.output!r}")
    require(not (output.exists() or output.is_symlink()), "--output", f"{output} exists; choose another name")
    is_decay = args.decay is None or 0 < args.decay < 1
    require(is_decay, "--decay", f"must be above 0 and below 1, got {args.decay}")
    require(args.eval_rows >= 0, "--eval-rows", f"must be 0 (no evaluation) or more, got {args.eval_rows}")
    from harness.analysis.sampling import choose_device
    from harness.checkpoint import average
    from harness.huggingface.convert import atomic_directory

    choose_device(args.device)  # rejects a GPU that is not there before anything is written
    try:
        lineage = average.choose_lineage(run.checkpoints, read_restores(run))
    except Damaged as error:
        raise ConfigError("", str(error)) from None
    chosen = average.select_steps(lineage, args.steps) if args.steps else average.select_last(lineage, args.last)
    average.check_same_config(chosen, read_config_changes(run))
    weights = average.decay_weights(len(chosen), 1.0 if args.decay is None else args.decay)
    shares = [weight / sum(weights) for weight in weights]
    with atomic_directory(output) as scratch:
        written = average.average_checkpoints(chosen, RunDir(scratch).checkpoints, weights=weights)
        shutil.copyfile(run.config, RunDir(scratch).config)
        names = [checkpoint.name for checkpoint in chosen]
        record = {"run": str(run.path.absolute()), "checkpoints": names, "decay": args.decay, "weights": shares}
        (scratch / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    path = RunDir(output).checkpoints / written.path.name
    kind = "average" if args.decay is None else "exponential average"
    print(f"{kind} of {len(chosen)} checkpoints: {path}, {size_text(written.bytes)}")
    if args.decay is not None:
        listed = ", ".join(f"{name} {share:.4f}" for name, share in zip(names, shares, strict=True))
        print(f"  weights {listed}")
    if args.eval_rows:
        paths = {checkpoint.name: checkpoint.path for checkpoint in chosen} | {"average": path}
        print_losses(run, paths, num_rows=args.eval_rows, device_name=args.device)
    print(f"  export  {shell_command('harness', 'checkpoint', 'export', output)} --output ...")


def read_config_changes(run: RunDir) -> list[tuple[int, dict[str, Any]]]:
    """Changes of the config during the run: (iteration, key -> [old, new])."""
    if not run.interventions.exists():
        return []
    return [(event.iteration, event.changes) for event in read(run.interventions) if isinstance(event, Intervention)]


def read_restores(run: RunDir) -> list[tuple[int, int]]:
    """Iteration and restored step of each rewind and rollback, from the log of the run."""
    if not run.events.exists():
        return []
    marker = f'"{Outcome.name}"'
    with run.events.open(encoding="utf-8", errors="replace") as lines:
        events = [event for line in lines if marker in line for event in parse(line)]
    return [
        (event.iteration, event.step)
        for event in events
        if isinstance(event, Outcome) and event.succeeded and event.kind in (ActionKind.rewind, ActionKind.rollback)
    ]


def print_losses(run: RunDir, checkpoints: Mapping[str, Path], *, num_rows: int, device_name: str) -> None:
    """Print the held-out loss of each checkpoint, or why it cannot be measured; the average is already written."""
    from harness.analysis.held_out_loss import measure_loss, read_held_out_rows
    from harness.analysis.sampling import choose_device
    from harness.huggingface.convert import read_config

    cfg, device = read_config(run), choose_device(device_name)
    try:
        rows = read_held_out_rows(cfg, run, num_rows=num_rows, device=device)
    except (ConfigError, StorageError) as error:
        print(f"held-out loss: not measured: {error}")
        return
    width = max(map(len, checkpoints))
    label = f"held-out loss on {pluralize(num_rows, 'sequence')}"
    for name, path in checkpoints.items():
        print(f"  {name:<{width}}  {label} {measure_loss(path, cfg, rows, device=device):.6f}", flush=True)


def parse_steps(text: str) -> list[int]:
    """Steps separated by commas."""
    try:
        return [int(step) for step in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"must be steps separated by commas, got {text!r}") from None


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness checkpoint average", description=AVERAGE, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/first")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--last", metavar="K", type=int, help="average the K newest checkpoints")
    choice.add_argument("--steps", metavar="A,B,...", type=parse_steps, help="average the checkpoints of these steps")
    parser.add_argument(
        "--decay",
        metavar="D",
        type=float,
        help="exponential moving average: each checkpoint weighs D times the next newer one; default: equal weights",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="directory for the average; must not exist")
    parser.add_argument(
        "--eval-rows", metavar="N", type=int, default=NUM_ROWS, help=f"held-out sequences; 0: none; default: {NUM_ROWS}"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="for the losses; default: auto, a GPU if any"
    )
    return parser
