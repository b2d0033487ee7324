"""Trials of remedies against the fixed ladder: held-out loss and steps lost, over drills and unstable runs.

    python -m tests.bench.trials                               all cases, 3 seeds, with and without trials
    python -m tests.bench.trials --only hot --seeds 2          the cases whose names contain `hot`
    python -m tests.bench.trials --only lr_spike --trial-steps 40

Every case is a pair of runs of one rank from the same seed: `sentinel.policy.trials` 0 and 4. Cases:

- every drill of one rank whose expected actions include a rewind or a rollback: the ladder's first choice is right;
- `burst`: a batch of rare tokens as in `tests.bench.mechanism`, with beta2 0.999, without clipping, and with a gate
  that lets it through;
- `hot`: the learning rate rises without end, without QK-norm: excluding batches does not help, a lower rate does.

Steps lost are all iterations that are not part of the final model: rejected, undone, or trained in a trial and dropped.
Runs that ended are not trained again. `report.md` and `results.json` are in the output directory.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import final

from harness.config.compose import load
from harness.config.errors import EXIT_DONE, require
from harness.core import event_json
from harness.core.events import Action, ActionKind, EvalRecord, Outcome, RunEnded, StepRecord, TrialMeasured
from harness.core.rundir import RunDir, write_atomically
from harness.drills.scenario import load_scenario, names
from harness.faults.fault_plan import FaultPlan
from harness.sentinel.policy.policy_state import RESTORES
from launch.cli.parser import CommandParser
from tests.bench.mechanism.experiment import burst_plan
from tests.bench.mechanism.grid import SETTINGS as BURST_SETTINGS

NUM_TRIALS = 4
COMMON = ("eval.num_batches=16", "telemetry=plain", "telemetry.picture=false", "telemetry.postmortem=false")
GATE_BOUNDS = ("gate_sigmas", "gate_loss_factor", "gate_grad_factor", "gate_loss_cap", "gate_grad_cap")
OPEN_GATE = tuple(f"sentinel.detect.{bound}=1e9" for bound in (*GATE_BOUNDS, "joint_sigmas", "joint_grad_factor"))
"""No finite update is rejected, so that a burst reaches the weights and only a restore removes it."""
FREQUENT = ("checkpoint.every_steps=40", "checkpoint.ring.slots=3", "checkpoint.ring.every_steps=10")
HOT_RATES = (3.0, 5.0)
"""Learning rates at the end of the run; those that train this model best are near 0.03."""
HOT = (
    "data=synthetic",
    "+without=qk_norm",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=48",
    "model.vocab_size=256",
    "train.num_steps=160",
    "train.batch_size=8",
    "train.sequence_length=32",
    "optim.schedule=constant",
    "optim.warmup_steps=160",
    "optim.clip_norm=null",
    "parallel.device=cpu",
    "checkpoint.every_steps=20",
    "checkpoint.good_after_steps=5",
    "checkpoint.ring.every_steps=5",
    "sentinel.policy.rollback_margin_steps=10",
    "sentinel.policy.rollback_window_batches=10",
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    overrides: tuple[str, ...]
    plan: FaultPlan | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run."""

    case: Case
    seed: int
    trials: int
    trial_steps: int
    directory: Path

    @property
    def run(self) -> RunDir:
        kind = f"trials-{self.trial_steps}" if self.trials else "ladder"
        return RunDir(self.directory / f"{self.case.name}-seed-{self.seed}-{kind}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: str
    seed: int
    trials: int
    exit_code: int
    step: int
    num_steps: int
    held_out: float | None
    """Held-out loss after the last step; None: the run did not reach it."""
    steps_lost: int
    num_restores: int
    num_trials: int
    remedies: list[str]
    """Remedies that won, other than the ladder's own choice."""


def list_cases(seed: int) -> list[Case]:
    """All cases; the faults of drills are drawn from the seed too."""
    found = []
    for name in names():
        scenario = load_scenario(name)
        is_one_rank = not any(key.startswith(("launch.", "parallel.replicate=")) for key in scenario.train)
        if is_one_rank and not set(RESTORES).isdisjoint(scenario.expected.actions) and not scenario.expected.exit_code:
            plan = replace(scenario.plan, seed=seed)
            found.append(Case(name=f"drill-{name}", overrides=tuple(scenario.train), plan=plan))
    burst = (*BURST_SETTINGS, *FREQUENT, *OPEN_GATE, "optim.beta2=0.999", "optim.clip_norm=null")
    found.append(Case(name="burst", overrides=burst, plan=burst_plan(seed)))
    found += [Case(name=f"hot-{lr:g}", overrides=(*HOT, f"optim.lr={lr:g}")) for lr in HOT_RATES]
    return found


def train(job: Job) -> Job:
    """Train one run on one thread."""
    import torch

    from launch.local.worker import select_worker

    torch.set_num_threads(1)
    run = job.run
    run.logs.mkdir(parents=True, exist_ok=True)
    if job.case.plan is not None:
        write_atomically(run.drill, json.dumps({"plan": job.case.plan.as_dict()}))
    overrides = [*job.case.overrides, *COMMON, f"run.dir='{run.path.parent}'", f"run.name='{run.path.name}'"]
    overrides += [f"run.seed={job.seed}", f"sentinel.policy.trials={job.trials}"]
    overrides += [f"sentinel.policy.trial_steps={job.trial_steps}"]
    cfg = load(overrides)
    cfg = load([*overrides, f"eval.every_steps={cfg.train.num_steps}"])
    with (run.logs / "console.txt").open("w") as console, redirect_stdout(console):
        select_worker(run)(cfg)
    return job


def is_ended(run: RunDir) -> bool:
    return run.events.exists() and any(isinstance(event, RunEnded) for event in event_json.read(run.events))


def measure(job: Job) -> Result:
    """The result of a run that has ended."""
    log = list(event_json.read(job.run.events))
    records = [event for event in log if isinstance(event, StepRecord)]
    outcomes = [event for event in log if isinstance(event, Outcome)]
    trials = [outcome for outcome in outcomes if outcome.kind is ActionKind.trial]
    num_tried = sum(event.steps for event in log if isinstance(event, TrialMeasured))
    end = next(event for event in reversed(log) if isinstance(event, RunEnded))
    evals = [event for event in log if isinstance(event, EvalRecord) and event.step == end.step]
    return Result(
        case=job.case.name,
        seed=job.seed,
        trials=job.trials,
        exit_code=end.exit_code,
        step=end.step,
        num_steps=load(list(job.case.overrides)).train.num_steps,
        held_out=evals[-1].loss if evals else None,
        steps_lost=len(records) - end.step + num_tried - sum(outcome.kept_steps for outcome in trials),
        num_restores=sum(isinstance(event, Action) and event.kind in RESTORES for event in log),
        num_trials=len(trials),
        remedies=[outcome.remedy for outcome in trials if outcome.remedy not in ("", "unchanged")],
    )


def report_table(results: Sequence[Result]) -> str:
    """One row for each case: means over the seeds, the range of the difference in brackets."""
    lines = [
        "| case | runs | halted: ladder / trials | held-out loss: ladder | trials | difference (range) | "
        "steps lost: ladder | trials | difference, % of steps (range) | remedies chosen |",
        "|---|---:|---|---:|---:|---|---:|---:|---|---|",
    ]
    for name in dict.fromkeys(result.case for result in results):
        pairs = pair_runs([result for result in results if result.case == name])
        if pairs:
            lines.append(report_row(name, pairs))
    return "\n".join(lines) + "\n"


def pair_runs(results: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Both runs of each seed: without and with trials."""
    by_kind = {(result.seed, result.trials > 0): result for result in results}
    seeds = sorted({seed for seed, _ in by_kind})
    return [
        (by_kind[seed, False], by_kind[seed, True]) for seed in seeds if {(seed, False), (seed, True)} <= set(by_kind)
    ]


def report_row(name: str, pairs: Sequence[tuple[Result, Result]]) -> str:
    halted = [sum(pair[kind].exit_code != EXIT_DONE for pair in pairs) for kind in (0, 1)]
    losses = [(a.held_out, b.held_out) for a, b in pairs if a.held_out is not None and b.held_out is not None]
    gaps = [after - before for before, after in losses]
    loss_cells = [f"{mean(pair[kind] for pair in losses):.4f}" if losses else "-" for kind in (0, 1)]
    extra = [100 * (after.steps_lost - before.steps_lost) / before.num_steps for before, after in pairs]
    lost_cells = [f"{mean(pair[kind].steps_lost for pair in pairs):.1f}" for kind in (0, 1)]
    chosen = [remedy for _, with_trials in pairs for remedy in with_trials.remedies]
    counts = ", ".join(f"{remedy} x {chosen.count(remedy)}" for remedy in dict.fromkeys(chosen)) or "none"
    cells = [name, str(len(pairs)), f"{halted[0]} / {halted[1]}", *loss_cells, spread(gaps, digits=4)]
    return f"| {' | '.join([*cells, *lost_cells, spread(extra, digits=1), counts])} |"


def spread(values: Sequence[float], *, digits: int) -> str:
    """Mean and range."""
    if not values:
        return "-"
    low, middle, high = (f"{value:+.{digits}f}" for value in (min(values), mean(values), max(values)))
    return f"{middle} ({low} to {high})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = build_parser().parse_args(argv)
    require(args.seeds >= 1, "--seeds", f"must be at least 1, got {args.seeds}")
    jobs = [
        Job(case=case, seed=seed, trials=trials, trial_steps=args.trial_steps, directory=args.output)
        for seed in range(args.seeds)
        for case in list_cases(seed)
        if args.only in case.name
        for trials in (0, NUM_TRIALS)
    ]
    require(bool(jobs), "--only", f"must be part of a case name, got {args.only}")
    args.output.mkdir(parents=True, exist_ok=True)
    missing = [job for job in jobs if not is_ended(job.run)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for number, job in enumerate(pool.map(train, missing), start=1):
            print(f"{number}/{len(missing)} {job.run.path.name}", file=sys.stderr, flush=True)
    results = [measure(job) for job in jobs]
    table = report_table(results)
    write_atomically(args.output / "report.md", table)
    write_atomically(args.output / "results.json", json.dumps([asdict(result) for result in results], indent=1) + "\n")
    print(table)
    return EXIT_DONE


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="python -m tests.bench.trials", description="Compare trials with the fixed ladder.")
    parser.add_argument("--only", default="", metavar="NAME", help="only the cases whose names contain this")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds; default: 3")
    parser.add_argument("--trial-steps", type=int, default=10, metavar="N", help="steps of a trial; default: 10")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="runs at a time; default: cores")
    parser.add_argument("--output", type=Path, default=Path("runs/trials"), metavar="DIR", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
