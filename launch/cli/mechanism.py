"""`harness drill mechanism`: trains the grid of `harness.analysis.mechanism.experiment` and writes what came of it.

How: each run is one rank in a process of this machine, as many at a time as there are cores; a run that is already
there is not trained again, so that an interrupted experiment goes on. Everything lies under one directory: the runs,
`mechanism.png`, `effects.json` and `report.md`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from harness.analysis.mechanism.experiment import CELLS, Cell, Effect, answers, effect, plan, table
from harness.config.compose import load
from harness.config.errors import EXIT_DONE, require
from harness.core import events
from harness.core.events import RunEnded, StepRecord
from harness.core.rundir import RunDir, write_atomically
from launch.cli.parser import Parser

DESCRIPTION = """\
Train every combination of beta2 (0.95, 0.999), clip (off, 1, 0.5) and weight decay (0.1, 0.01) twice, with one batch of
rare tokens and without, and compare: what does such a burst do, and what protects from it?
"""


EXPERIMENT = "+experiment=mechanism"


class Trial(NamedTuple):
    """One run of the grid."""

    directory: Path
    """Of all runs."""
    cell: Cell
    seed: int
    is_struck: bool
    words: tuple[str, ...] = ()
    """Overrides of the training; the same for all."""

    @property
    def run(self) -> RunDir:
        kind = "burst" if self.is_struck else "clean"
        return RunDir(self.directory / f"{self.cell.name},seed={self.seed},{kind}")


def main(argv: Sequence[str]) -> int:
    """Run the experiment; returns the exit code."""
    words = parser().parse_intermixed_args(argv)
    require(words.seeds >= 1, "--seeds", f"must be at least 1, got {words.seeds}")
    directory: Path = words.output
    directory.mkdir(parents=True, exist_ok=True)
    seeds, overrides = range(words.seeds), tuple(words.override)
    load([EXPERIMENT, *overrides])
    struck, spared = (
        {cell: [Trial(directory, cell, seed, is_struck, overrides) for seed in seeds] for cell in CELLS}
        for is_struck in (True, False)
    )
    run_all([trial for seed in seeds for cell in CELLS for trial in (struck[cell][seed], spared[cell][seed])])
    burst = {cell: [records(trial) for trial in trials] for cell, trials in struck.items()}
    clean = {cell: [records(trial) for trial in trials] for cell, trials in spared.items()}
    effects = {
        cell: [effect(hit, missed) for hit, missed in zip(burst[cell], clean[cell], strict=True)] for cell in CELLS
    }
    report = f"{table(effects)}\n" + "".join(f"- {line}\n" for line in answers(effects))
    write_atomically(directory / "report.md", report)
    write_atomically(directory / "effects.json", as_json(effects))
    from harness.analysis.mechanism.picture import draw

    draw(burst, directory / "mechanism.png")
    print(f"{report}\n{directory / 'mechanism.png'}  {directory / 'report.md'}  {directory / 'effects.json'}")
    return EXIT_DONE


def parser() -> ArgumentParser:
    parser = Parser(prog="harness drill mechanism", description=DESCRIPTION)
    parser.add_argument("override", nargs="*", metavar="OVERRIDE", help="of the training: model.dim=128")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="repetitions; default: 3")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/mechanism"), metavar="DIR", help="default: %(default)s"
    )
    return parser


def run_all(trials: Sequence[Trial]) -> None:
    """Train what is not there yet, with a line of progress for each."""
    missing = [trial for trial in trials if not is_done(trial.run)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for number, trial in enumerate(pool.map(train, missing), start=1):
            print(f"{number}/{len(missing)} {trial.run.path.name}", file=sys.stderr, flush=True)


def is_done(run: RunDir) -> bool:
    return run.events.exists() and any(
        isinstance(event, RunEnded) and event.exit_code == EXIT_DONE for event in events.read(run.events)
    )


def train(trial: Trial) -> Trial:
    """One run from its beginning to its end, on one thread."""
    import torch

    from launch.local.worker import select_worker

    torch.set_num_threads(1)
    run = trial.run
    run.logs.mkdir(parents=True, exist_ok=True)
    if trial.is_struck:
        write_atomically(run.drill, json.dumps({"plan": plan(trial.seed).as_dict()}))
    place = [f"run.dir='{run.path.parent}'", f"run.name='{run.path.name}'", f"run.seed={trial.seed}"]
    cfg = load([EXPERIMENT, *place, *trial.words, *trial.cell.words])
    with (run.logs / "console.txt").open("w") as console, redirect_stdout(console):
        code = select_worker(run)(cfg)
    assert code == EXIT_DONE, f"{run.path} ended with {code}"
    return trial


def records(trial: Trial) -> list[StepRecord]:
    return [event for event in events.read(trial.run.events) if isinstance(event, StepRecord)]


def as_json(effects: dict[Cell, list[Effect]]) -> str:
    rows = [
        cell._asdict() | {"seed": seed} | asdict(each)
        for cell, several in effects.items()
        for seed, each in enumerate(several)
    ]
    return json.dumps(rows, indent=1) + "\n"
