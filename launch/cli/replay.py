"""`harness replay`: the guilty step of an incident once more, to tell the machine from the data.

How: the run directory says everything: which step it was, which checkpoint lies before it, and which way leads from
there. The ranks are started as for a run, as many as made the step where this machine can, and the result goes into the
folder of the incident once there is one. The run itself may go on meanwhile; nothing else of it is changed: a damaged
checkpoint is an error and keeps its name.
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
from typing import TYPE_CHECKING

from harness.analysis.replay import history
from harness.analysis.replay.history import History
from harness.analysis.replay.wording import render
from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.config.schema import Config
from harness.core import events
from harness.core.rundir import RunDir, write_atomically
from launch.cli.parser import Parser

if TYPE_CHECKING:
    from harness.build import Parts

DESCRIPTION = """\
Restore the newest good state from before a guilty step, take the same way there, and make the step twice: does what the
log says come again (deterministic) or not (transient: the machine)? Names the first module that made something not
finite, and compares the batch with its neighbours on this and on an older state (data, or data x state). The result
lies in RUN/incidents/NNN/replay.json, and the post-mortem tells of it.
"""
LONG_S = 7 * 86400.0
"""A replay has no loop that could be taken for hung."""


def main(argv: Sequence[str]) -> int:
    """Replay; returns the exit code."""
    try:
        words = parser().parse_args(argv)
        run = RunDir(words.run)
        require(run.events.is_file(), str(run.path), "is not a run directory: it has no events.jsonl")
        cfg = compose.read(run.config)
        report = replay(run, cfg, words)
        text = report.read_text(encoding="utf-8")
        if words.incident is not None:
            rewrite(run, words.incident)
    except (ConfigError, StorageError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(error, StorageError) else EXIT_BAD_CONFIG
    print(text if words.json else render(json.loads(text)), end="")
    return EXIT_DONE


def parser() -> ArgumentParser:
    parser = Parser(prog="harness replay", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as runs/first")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--incident", type=int, metavar="N", help="the guilty step of this incident")
    which.add_argument("--iteration", type=int, metavar="N", help="or any step of the log")
    parser.add_argument("--batch", action="store_true", help="weigh the samples of the batch one by one")
    parser.add_argument("--ranks", type=int, metavar="N", help="default: as many as made the step")
    parser.add_argument("--json", action="store_true", help="the whole result as JSON")
    return parser


def replay(run: RunDir, cfg: Config, words: Namespace) -> Path:
    """Start the ranks and wait for them; returns where the result lies."""
    log = history.read(events.read(run.events))
    iteration = iteration_of(log, words)
    ranks = words.ranks or log.world_size(iteration)
    require(ranks >= 1, "--ranks", f"must be at least 1, got {ranks}")
    good = [
        each.name
        for each in catalog.list_checkpoints(run.checkpoints)
        if each.health in (Health.good, Health.candidate)
    ]
    way = history.way(log, iteration, good)
    report = run.incidents / (f"{words.incident:03d}" if words.incident else f"iteration-{iteration}") / "replay.json"

    from harness.analysis.replay.rerun import Order, run_worker, uncompiled
    from launch.local import start

    order = Order(
        run=run.path.resolve(),
        report=Path(),
        checkpoint=way.checkpoint,
        way=way.records,
        older=history.older(log, iteration, good, way.checkpoint),
        exactly=ranks == log.world_size(iteration) and not cfg.parallel.compile,
        with_samples=words.batch,
        tamper=partial(spoil_again, run.path.resolve(), log.world_size(iteration)) if run.drill.exists() else None,
    )
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        launched = replace(cfg.launch, nproc=ranks, hang_after_s=LONG_S, start_within_s=LONG_S)
        placed = replace(cfg.run, dir=scratch, name="replay")
        started = replace(uncompiled(cfg), launch=launched, run=placed)
        made = Path(scratch) / report.name
        code = start.launch(started, partial(run_worker, replace(order, report=made)))
        require(code == EXIT_DONE, str(run.path), f"the replay ended with exit code {code}")
        report.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(report, made.read_text(encoding="utf-8"))
    return report


def spoil_again(run: Path, world_size: int, parts: Parts) -> None:
    """In a drill, the bad data that was there is there again."""
    from harness.faults.data import corrupt_planned_batches

    corrupt_planned_batches(RunDir(run), parts.batches, world_size)


def rewrite(run: RunDir, incident: int) -> None:
    """Let the post-mortem tell of the replay; it can be written later, too."""
    from harness.analysis.postmortem.gather import find
    from harness.analysis.postmortem.write import write_folder

    write_folder(run, find(run, incident))


def iteration_of(log: History, words: Namespace) -> int:
    if words.incident is not None:
        return history.guilty(log, words.incident).iteration
    known = f"the log has {min(log.records)} to {max(log.records)}" if log.records else "the log has none"
    require(words.iteration in log.records, "--iteration", f"no step {words.iteration}; {known}")
    return int(words.iteration)
