"""Which safeguards does training need? Trains the sweep `ablation` and writes one table row for each removed set.

    python -m tests.bench.ablation --jobs 12 --limit-s 480 --out ablation.json --write docs/ablation.md
    python -m tests.bench.ablation --results ablation.json --write docs/ablation.md      no training, only the table
    python -m tests.bench.ablation --steps 30 --seeds 0 --only qk_norm                   two short runs

The sweep is `harness train --multirun +sweep=ablation`, with these and any further overrides. It is stopped after
--limit-s; runs that did not end are named and are in no row. --only selects sets by a pattern such as 'qk_norm+*'; the
run with all safeguards is always trained, because the others are compared with it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from harness.analysis.sweeps import sweep_record
from harness.analysis.sweeps.job_result import read_job_result
from harness.analysis.sweeps.ranking import Basis, score_job
from harness.analysis.sweeps.sweep_text import finite_or_none
from harness.config import compose, conf_files
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_HALTED
from harness.core import processes
from harness.core.rundir import RunDir, write_atomically

NAMES = {
    "pre_norm": "pre-LN",
    "rms_norm": "RMSNorm",
    "qk_norm": "QK-norm",
    "warmup": "warm-up",
    "clipping": "clipping",
    "bf16": "bf16",
}
"""Option of the group `without` -> the safeguard that it removes."""
BASE = "nothing"
FAILED_NATS = 0.5
"""A run failed if the sentinel halted it, or if it ends this far above the median of the runs with all safeguards."""
TABLE = re.compile(r"^(<!-- ablation table -->\n).*?^(<!-- end of ablation table -->)$", re.DOTALL | re.MULTILINE)
SWEEP = "ablation"
SAVE_S = 60.0
"""Seconds for running jobs to save and end after a stop; then they are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRun:
    """The result of one run."""

    without: tuple[str, ...]
    """Options of the group `without`, in the order of `NAMES`."""
    seed: int
    step: int
    num_steps: int
    has_ended: bool
    """All steps are done, or the sentinel halted the run; False: stopped, crashed or not started."""
    final_loss: float | None
    """Last held-out loss in nats; None: not finite, or the run halted."""
    spike_score: float | None
    num_spikes: int
    num_refused: int
    """Updates that were rejected because they were not finite."""

    @property
    def loss(self) -> float:
        return math.inf if self.final_loss is None else self.final_loss


def main(argv: Sequence[str] | None = None) -> int:
    """Train or read the runs, then print and write their table; returns the exit code."""
    args = parse_args(argv)
    if args.results is None:
        runs = train(args)
    else:
        runs = [AblationRun(**row | {"without": tuple(row["without"])}) for row in json.loads(args.results.read_text())]
    if args.out is not None:
        write_atomically(args.out, json.dumps([asdict(run) for run in runs], indent=1, allow_nan=False) + "\n")
    text = render_table(runs)
    print(text)
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8")
        write_atomically(args.write, replace_table(page, text))
    return EXIT_DONE


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ablation", description=__doc__.partition("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="override of all runs, such as optim.lr=0.01")
    parser.add_argument("--steps", type=int, metavar="N", help="updates of one run; default: that of the preset")
    parser.add_argument("--seeds", default="0,1,2", metavar="N,N", help="default: %(default)s")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="removed sets to train; default: all")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time; default: as cores or GPUs allow")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--limit-s", type=float, metavar="S", help="stop the sweep after this many seconds")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the run directories here; default: temporary")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result of each run as JSON")
    parser.add_argument("--results", type=Path, metavar="FILE", help="read results from this file, train nothing")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table of this page")
    return parser.parse_intermixed_args(argv)


def train(args: argparse.Namespace) -> list[AblationRun]:
    """Train the sweep until it ends or its time is over; returns the result of each of its runs."""
    with tempfile.TemporaryDirectory() as scratch:
        parent = Path(scratch) if args.runs is None else args.runs.resolve()
        process = subprocess.Popen(
            [*processes.command("launch.cli.main", "train", "--multirun"), *sweep_overrides(args, parent)],
            env=processes.child_environment(),
        )
        try:
            process.wait(timeout=args.limit_s)
        except subprocess.TimeoutExpired:
            print(f"{args.limit_s:g} s are over: stopping the sweep", file=sys.stderr, flush=True)
            stop(process)
        if process.returncode == EXIT_BAD_CONFIG:  # the sweep has printed why
            raise SystemExit(EXIT_BAD_CONFIG)
        return read_runs(parent / SWEEP)


def sweep_overrides(args: argparse.Namespace, parent: Path) -> list[str]:
    """Arguments of `harness train --multirun`."""
    optional = {"train.num_steps": args.steps, "launch.at_once": args.jobs}
    return [
        f"+sweep={SWEEP}",
        f"run.dir='{parent}'",
        f"run.name={SWEEP}",
        f"run.seed={args.seeds}",
        f"without={','.join(map(as_override, select_sets(args.only)))}",
        f"parallel.device={args.device}",
        *(f"{key}={value}" for key, value in optional.items() if value is not None),
        *args.overrides,
    ]


def as_override(without: Sequence[str]) -> str:
    return f"[{','.join(without)}]"


def list_sets() -> list[tuple[str, ...]]:
    """All sets of removed safeguards of the preset: none, each one, each two."""
    preset = conf_files.read_tree(conf_files.conf_dir() / "sweep" / f"{SWEEP}.yaml")
    choices = re.findall(r"\[(.*?)\]", preset["hydra"]["sweeper"]["params"]["without"])
    return [tuple(filter(None, choice.split(","))) for choice in choices]


def select_sets(pattern: str) -> list[tuple[str, ...]]:
    """The empty set and those that match, as names joined by a plus sign."""
    return [chosen for chosen in list_sets() if not chosen or fnmatch.fnmatch("+".join(chosen), pattern)]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the sweep: its runs save and end; a second signal kills them."""
    for _ in range(2):
        process.terminate()
        try:
            process.wait(timeout=SAVE_S)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.wait()


def read_runs(sweep: Path) -> list[AblationRun]:
    """The results of the jobs whose runs were prepared before the sweep ended."""
    record = sweep_record.read_if_exists(sweep)
    jobs = [] if record is None else [job for job in record.jobs if RunDir(sweep / job.name).config.exists()]
    if not jobs:
        raise SystemExit("the sweep ended before it prepared a run")
    return [read_run(sweep, job) for job in jobs]


def read_run(sweep: Path, job: sweep_record.Job) -> AblationRun:
    """The result of a job, from its config and its event log."""
    settings = compose.flat(sweep_record.read_run_config(RunDir(sweep / job.name)))
    result = read_job_result(sweep, job)
    halted = result.exit_code == EXIT_HALTED
    return AblationRun(
        without=find_removed(settings),
        seed=settings["run.seed"],
        step=result.step,
        num_steps=settings["train.num_steps"],
        has_ended=halted or result.is_finished,
        final_loss=None if halted else finite_or_none(score_job(result, Basis.held_out).final),
        spike_score=result.spikes.share,
        num_spikes=result.spikes.num_spikes,
        num_refused=result.num_refused,
    )


def find_removed(settings: dict[str, Any]) -> tuple[str, ...]:
    """The options of the group `without` whose values a config has."""
    values = {
        name: compose.flat(conf_files.read_tree(conf_files.conf_dir() / "without" / f"{name}.yaml")).items()
        for name in NAMES
    }
    return tuple(name for name in NAMES if all(settings[key] == value for key, value in values[name]))


def has_failed(run: AblationRun, base: float) -> bool:
    return run.loss > base + FAILED_NATS


def render_table(runs: Sequence[AblationRun]) -> str:
    """The Markdown table of all runs that ended, and the runs that are missing."""
    ended, missing = [run for run in runs if run.has_ended], [run for run in runs if not run.has_ended]
    rows = {
        without: list(members) for without, members in groupby(sorted(ended, key=row_key), key=lambda run: run.without)
    }
    if () not in rows:
        return "No table: no run with all safeguards has ended."
    base = median(run.loss for run in rows[()])
    lines = [
        f"{len(ended)} of {len(runs)} runs ended; {ended[0].num_steps} steps each; median over the seeds, range in "
        "brackets.",
        "",
        "<!-- claims: ablation -->",
        "| removed | runs | held-out loss (nats) | above base | spike score (%) | spikes | rejected updates | failed |",
        "|---|---:|---|---:|---|---:|---:|---:|",
        *(f"| {' | '.join(row_cells(without, members, base))} |" for without, members in rows.items()),
        "",
        *summary_lines(rows, base),
    ]
    if missing:
        names = ", ".join(f"{row_name(run.without)} seed {run.seed} (step {run.step})" for run in missing)
        lines.append(f"- Not ended, and in no row: {names}.")
    return "\n".join(lines)


def row_key(run: AblationRun) -> tuple[int, list[int], int]:
    return len(run.without), [list(NAMES).index(name) for name in run.without], run.seed


def row_name(without: Sequence[str]) -> str:
    return " + ".join(NAMES[name] for name in without) or BASE


def row_cells(without: Sequence[str], members: Sequence[AblationRun], base: float) -> list[str]:
    scores = [100 * run.spike_score for run in members if run.spike_score is not None]
    above = median(run.loss for run in members) - base
    return [
        row_name(without),
        str(len(members)),
        spread([run.loss for run in members], 3),
        f"{above:+.3f}" if math.isfinite(above) else "-",
        spread(scores, 2),
        str(sum(run.num_spikes for run in members)),
        str(sum(run.num_refused for run in members)),
        str(sum(has_failed(run, base) for run in members)),
    ]


def spread(values: Sequence[float], digits: int) -> str:
    """Median and range."""
    if not values:
        return "-"
    middle, low, high = (
        f"{value:.{digits}f}" if math.isfinite(value) else "halted"
        for value in (median(values), min(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def summary_lines(rows: dict[tuple[str, ...], list[AblationRun]], base: float) -> Iterator[str]:
    """How many single removals and pairs failed, and how many are worse than every run with all safeguards."""
    worst = max(run.loss for run in rows[()])

    def count(size: int, is_bad: Callable[[AblationRun], bool], combine: Callable[[Iterator[bool]], bool]) -> str:
        chosen = [members for without, members in rows.items() if len(without) == size]
        return f"{sum(combine(is_bad(run) for run in members) for members in chosen)} of {len(chosen)}"

    def compare(is_bad: Callable[[AblationRun], bool], combine: Callable[[Iterator[bool]], bool]) -> str:
        return f"one removed {count(1, is_bad, combine)}, two removed {count(2, is_bad, combine)}"

    def failed(run: AblationRun) -> bool:
        return has_failed(run, base)

    yield f"- Failed in at least one seed: {compare(failed, any)}."
    yield f"- Failed in every seed: {compare(failed, all)}."
    yield f"- Every seed ends above the worst run with all safeguards: {compare(lambda run: run.loss > worst, all)}."


def replace_table(page: str, table: str) -> str:
    """The page with its table replaced."""
    if not TABLE.search(page):
        raise SystemExit("the page has no line <!-- ablation table --> with <!-- end of ablation table --> after it")
    return TABLE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page)


if __name__ == "__main__":
    sys.exit(main())
