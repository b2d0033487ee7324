"""`harness replay`: reruns the step that caused an incident, to tell a hardware fault from bad data.

How: the run directory holds everything: the iteration, the checkpoint before it, and the log between them. The ranks
are started as for a run, as many as in the log if this machine can. The result goes into the folder of the incident.
The run itself may keep training; nothing else in its directory changes. A damaged checkpoint is an error and is not
renamed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness.analysis.replay import history
from harness.analysis.replay.history import History
from harness.analysis.replay.replay_text import render
from harness.analysis.replay.request import choose_path, config_of_path, plan_replay
from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.core.rundir import RunDir, write_atomically
from harness.core.stderr_lines import print_warning
from harness.telemetry.event_log import read_steps
from harness.telemetry.log_index import read_blocks
from launch.cli.parser import CommandParser

DESCRIPTION = """\
Restore the newest good checkpoint before the step that caused an incident, replay the log up to it, and run the step
twice. If the logged values recur, the cause is deterministic; otherwise it is transient (the hardware). Names the first
operation with a non-finite result, forward or backward, measures activations and token losses of the step, and compares
the batch with its neighbours on this and on an older state (data, or data x state). --precision fp32 repeats the step
in fp32. The result is RUN/incidents/NNN/replay.json; the post-mortem is rewritten with it. If RUN cannot be written,
the result is only printed.
"""
LONG_S = 7 * 86400.0
"""Disables hang detection: a replay has no training loop with a heartbeat."""


def main(argv: Sequence[str]) -> int:
    """Replay; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        run = RunDir(args.run)
        require(run.events.is_file(), str(run.path), "is not a run directory: it has no events.jsonl")
        text = replay(run, args)
        store_result(run, args, text)
    except (ConfigError, StorageError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG
    print(text if args.json else render(json.loads(text)), end="")
    return EXIT_DONE


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="harness replay", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as runs/first")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--incident", type=int, metavar="N", help="replay the step that caused this incident")
    which.add_argument("--iteration", type=int, metavar="N", help="replay any iteration of the log")
    parser.add_argument("--batch", action="store_true", help="measure the samples of the batch one by one")
    parser.add_argument(
        "--precision", choices=["fp32"], help="also compute the step in fp32: an overflow of the format, or structural?"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks; default: as in the log")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    return parser


def replay(run: RunDir, args: Namespace) -> str:
    """Run the ranks of the replay; returns the result."""
    log = history.read(run.events)
    iteration = find_iteration(log, args)
    ranks = args.ranks or log.world_size(iteration)
    require(ranks >= 1, "--ranks", f"must be at least 1, got {ranks}")
    path = choose_path(run, log, iteration)
    cfg = config_of_path(run, compose.read(run.config), log, path)
    planned = plan_replay(run, cfg, log, path, ranks=ranks, report=Path())
    order = replace(planned, with_samples=args.batch, in_fp32=args.precision is not None)

    from harness.analysis.replay.rerun import replay_config, run_replay_worker
    from launch.local import start

    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        launch_cfg = replace(cfg.launch, nproc=ranks, hang_after_s=LONG_S, start_within_s=LONG_S)
        run_cfg = replace(cfg.run, dir=scratch, name="replay")
        replay_cfg = replace(replay_config(cfg), launch=launch_cfg, run=run_cfg)
        if ranks % cfg.parallel.context:  # these ranks cannot share sequences as the run did
            replay_cfg = replace(replay_cfg, parallel=replace(replay_cfg.parallel, context=1))
        result = Path(scratch) / history.REPLAY_FILE
        code = start.launch(replay_cfg, partial(run_replay_worker, replace(order, report=result)))
        require(code == EXIT_DONE, str(run.path), f"the replay ended with exit code {code}")
        return result.read_text(encoding="utf-8")


def store_result(run: RunDir, args: Namespace, text: str) -> None:
    """Write the result into the run directory, and the post-mortem of the incident again.

    A user who may only read the run gets a warning: the result is printed in any case.
    """
    folder = f"{args.incident:03d}" if args.incident is not None else f"iteration-{args.iteration}"
    report = run.incidents / folder / history.REPLAY_FILE
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(report, text)
        if args.incident is not None:
            update_postmortem(run, args.incident)
    except OSError as error:
        print_warning(f"the result is printed and not stored: {error.filename or report}: {error.strerror}")


def update_postmortem(run: RunDir, incident: int) -> None:
    """Rewrite the post-mortem with the result of the replay."""
    from harness.analysis.postmortem.gather import find_incident
    from harness.analysis.postmortem.write import write_folder

    write_folder(run, find_incident(run, incident))


def find_iteration(log: History, args: Namespace) -> int:
    if args.incident is not None:
        return history.guilty_step(log, args.incident).iteration
    iteration: int = args.iteration
    if not read_steps(log.log, iteration, iteration):
        ends = [end for block in read_blocks(log.log) for end in (block.first, block.last) if end is not None]
        known = f"the log has {min(ends)} to {max(ends)}" if ends else "the log has none"
        raise ConfigError("--iteration", f"no iteration {iteration}; {known}")
    return iteration
