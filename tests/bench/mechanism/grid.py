"""Trains the grid of `tests.bench.mechanism.experiment` and writes the comparison.

    python -m tests.bench.mechanism                                   72 small runs, some minutes on 2 cores
    python -m tests.bench.mechanism --seeds 1 model.dim=128           one seed, a wider model

How: each run is one rank in a process of this machine, as many at a time as there are cores. Finished runs are not
trained again, so that an interrupted experiment can be continued. The runs, `mechanism.png`, `effects.json` and
`report.md` are in one directory.
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

from harness.config.compose import load
from harness.config.errors import EXIT_DONE, require
from harness.core import event_json
from harness.core.events import RunEnded, StepRecord
from harness.core.rundir import RunDir, write_atomically
from launch.cli.parser import CommandParser
from tests.bench.mechanism.experiment import (
    BURST_AT,
    CELLS,
    Cell,
    Effect,
    answer_questions,
    burst_plan,
    effects_table,
    measure_effect,
)

DESCRIPTION = """\
Train every combination of beta2 (0.95, 0.999), clip (off, 1, 0.5) and weight decay (0.1, 0.01) twice, with and without
one batch of rare tokens, and compare: what does such a burst do, and which setting protects from it?
"""


SETTINGS = (
    "data=synthetic",
    "data.synthetic.rare_tokens=32",
    "data.synthetic.rare_probability=0.0005",
    "telemetry=plain",
    "telemetry.picture=false",
    "model.dim=64",
    "model.num_layers=2",
    "model.ffn_dim=176",
    "model.vocab_size=512",
    "train.num_steps=280",
    "train.batch_size=16",
    "train.sequence_length=64",
    "optim.schedule=constant",
    "parallel.device=cpu",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
    "checkpoint.ring.slots=0",
    "sentinel.probe_every=1",
)
"""A small model on common tokens with a thin tail of rare ones; every step is probed."""
UNREACHABLE = tuple(
    f"sentinel.detect.{bound}=1e9"
    for bound in (
        "gate_sigmas",
        "gate_loss_factor",
        "gate_grad_factor",
        "gate_loss_cap",
        "gate_grad_cap",
        "joint_sigmas",
        "joint_grad_factor",
        "spike_sigmas",
        "row_sigmas",
        "lone_sigmas",
    )
)
"""Bounds that no value reaches, so that no update is rejected or undone."""


class Trial(NamedTuple):
    """One run of the grid."""

    directory: Path
    """Parent directory of all runs."""
    cell: Cell
    seed: int
    has_burst: bool
    overrides: tuple[str, ...] = ()
    """Overrides of the training; the same for all."""
    burst_at: int = BURST_AT

    @property
    def run(self) -> RunDir:
        kind = "burst" if self.has_burst else "clean"
        return RunDir(self.directory / f"{self.cell.name},seed={self.seed},{kind}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    args = build_parser().parse_intermixed_args(argv)
    require(args.seeds >= 1, "--seeds", f"must be at least 1, got {args.seeds}")
    directory: Path = args.output
    directory.mkdir(parents=True, exist_ok=True)
    seeds, overrides = range(args.seeds), tuple(args.overrides)
    load([*SETTINGS, *UNREACHABLE, *overrides])
    burst_trials, clean_trials = (
        {cell: [Trial(directory, cell, seed, has_burst, overrides) for seed in seeds] for cell in CELLS}
        for has_burst in (True, False)
    )
    run_all(
        [trial for seed in seeds for cell in CELLS for trial in (burst_trials[cell][seed], clean_trials[cell][seed])]
    )
    burst = {cell: [records(trial) for trial in trials] for cell, trials in burst_trials.items()}
    clean = {cell: [records(trial) for trial in trials] for cell, trials in clean_trials.items()}
    effects = {
        cell: [
            measure_effect(with_burst, without) for with_burst, without in zip(burst[cell], clean[cell], strict=True)
        ]
        for cell in CELLS
    }
    report = f"{effects_table(effects)}\n" + "".join(f"- {line}\n" for line in answer_questions(effects))
    write_atomically(directory / "report.md", report)
    write_atomically(directory / "effects.json", as_json(effects))
    from tests.bench.mechanism.picture import draw

    draw(burst, directory / "mechanism.png")
    print(f"{report}\n{directory / 'mechanism.png'}  {directory / 'report.md'}  {directory / 'effects.json'}")
    return EXIT_DONE


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="python -m tests.bench.mechanism", description=DESCRIPTION)
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="override of the training, such as model.dim=128"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds; default: 3")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/mechanism"), metavar="DIR", help="default: %(default)s"
    )
    return parser


def run_all(trials: Sequence[Trial]) -> None:
    """Train the missing runs, with a line of progress for each."""
    missing = [trial for trial in trials if not is_done(trial.run)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for number, trial in enumerate(pool.map(train, missing), start=1):
            print(f"{number}/{len(missing)} {trial.run.path.name}", file=sys.stderr, flush=True)


def is_done(run: RunDir) -> bool:
    return run.events.exists() and any(
        isinstance(event, RunEnded) and event.exit_code == EXIT_DONE for event in event_json.read(run.events)
    )


def train(trial: Trial) -> Trial:
    """Train one run on one thread."""
    import torch

    from launch.local.worker import select_worker

    torch.set_num_threads(1)
    run = trial.run
    run.logs.mkdir(parents=True, exist_ok=True)
    if trial.has_burst:
        write_atomically(run.drill, json.dumps({"plan": burst_plan(trial.seed, at=trial.burst_at).as_dict()}))
    location = [f"run.dir='{run.path.parent}'", f"run.name='{run.path.name}'", f"run.seed={trial.seed}"]
    cfg = load([*SETTINGS, *UNREACHABLE, *location, *trial.overrides, *trial.cell.overrides])
    with (run.logs / "console.txt").open("w") as console, redirect_stdout(console):
        code = select_worker(run)(cfg)
    assert code == EXIT_DONE, f"{run.path} ended with {code}"
    return trial


def records(trial: Trial) -> list[StepRecord]:
    return [event for event in event_json.read(trial.run.events) if isinstance(event, StepRecord)]


def as_json(effects: dict[Cell, list[Effect]]) -> str:
    rows = [
        cell._asdict() | {"seed": seed} | asdict(effect_of_seed)
        for cell, cell_effects in effects.items()
        for seed, effect_of_seed in enumerate(cell_effects)
    ]
    return json.dumps(rows, indent=1) + "\n"
