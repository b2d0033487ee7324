"""Runs drills whose fault restarts a run, and prints a table: times to notice, restart and first update, steps lost.

`python -m tests.bench.restart` is the command.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from harness.core.events import RunStarted
from harness.core.rundir import RunDir
from harness.drills import scenario as scenarios
from harness.drills.drill_record import DrillEvidence, gather
from harness.drills.infrastructure_campaign import are_identical
from harness.drills.score import Card
from harness.drills.score_card import markdown_table
from launch.drills.fault_environment import UnavailableError
from launch.drills.runner import run_drill
from tests.gpu.nccl import AT_125M

SHARED_DIR = Path("/dev/shm")
NCCL_TRAINING = (
    *AT_125M,
    "train.num_steps=30",
    "checkpoint.ring.every_steps=5",
    f"checkpoint.ring.shared_dir={SHARED_DIR}",
    "precision=bf16",
    "parallel.device=cuda",
)
"""125m parameters, short steps: collectives of ranks that share a GPU go over sockets."""
NCCL_FAULT = ("drill.fault.at=23",)
RESTART_DRILLS = (
    "kill_rank",
    "raised_error",
    "hung_rank",
    "kill_node",
    "preemption",
    "corrupted_checkpoint",
    "lost_node",
    "lost_coordinator",
    "lost_partners",
    "unreachable_node",
    "hung_node",
)
"""Scenarios of processes and nodes whose fault restarts the run; the last ones have several nodes and spares."""
DRILL_TRAINING = ("parallel.device=cpu", "launch.hang_after_s=10")
HEAD = ("drill", "ranks", "state from", "noticed", "restarted", "first update", "steps lost", "identical", "")


class DrillRow(NamedTuple):
    """A finished drill."""

    label: str
    card: Card
    victim: DrillEvidence
    identical: bool | None
    """Weights and moments at the end are those of the twin."""

    @property
    def passed(self) -> bool:
        return self.card.passed and bool(self.identical)

    @property
    def cells(self) -> tuple[str, ...]:
        score = self.card.score
        started = list(self.victim.of(RunStarted))
        times = (score.notice_s, score.restart_s, score.first_update_s)
        return (
            self.label,
            str(started[0].world_size if started else "-"),
            describe_source(started[1:]),
            *("-" if value is None else f"{value:.1f} s" for value in times),
            str(score.steps_lost),
            {True: "yes", False: "NO", None: "not compared"}[self.identical],
            "" if self.passed else "FAILED",
        )


def describe_source(restarts: Sequence[RunStarted]) -> str:
    """Where the state of the last start came from."""
    if not restarts:
        return "-"
    started = restarts[-1]
    fetched = f", {len(started.fetched_ranks)} shards from a partner" if started.fetched_ranks else ""
    return f"memory{fetched}" if started.in_memory else "disk"


@contextmanager
def kept_directory(keep: Path | None) -> Iterator[Path]:
    """The directory of the runs: `keep`, or a temporary one."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def run_one(name: str, label: str, runs: Path, overrides: Sequence[str]) -> DrillRow:
    """Run one drill; the progress goes to stderr. An equal twin is reused."""
    scenario = scenarios.load_scenario(name, overrides)
    training = [override for override in overrides if not scenarios.changes_scenario(override)]
    card = run_drill(name, scenario, [*training, f"run.dir={runs}"], report=print_progress, to_mlflow=False)
    victim, twin = RunDir(runs / f"drill-{name}"), RunDir(runs / f"drill-{name}-twin")
    row = DrillRow(label, card, gather(victim), are_identical(victim, twin))
    if not row.passed:
        print_failure(row, victim)
    return row


def measure_nccl_restarts(
    ranks_per_gpu: Sequence[int], overrides: Sequence[str], *, rounds: int, runs: Path
) -> list[DrillRow]:
    """Kill a rank among NCCL ranks that share one GPU, at 125m; one row a kill."""
    usage = shutil.disk_usage(SHARED_DIR)
    print_progress(f"{SHARED_DIR}: {usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free; {os.cpu_count()} cores")
    rows = []
    for num_ranks in ranks_per_gpu:
        sharing = (f"launch.nproc={num_ranks}", f"launch.ranks_per_gpu={num_ranks}")
        for _ in range(rounds):
            words = (*NCCL_TRAINING, *sharing, *NCCL_FAULT, *overrides)
            rows.append(run_one("kill_rank", "kill_rank", runs / str(num_ranks), words))
            print_progress(" | ".join(rows[-1].cells))
    return rows


def measure_drills(names: Sequence[str], overrides: Sequence[str], *, runs: Path) -> list[DrillRow]:
    """Run drills on CPU ranks of this machine; one row each. One that the machine cannot run is skipped."""
    rows = []
    for name in names:
        try:
            rows.append(run_one(name, name, runs, (*DRILL_TRAINING, *overrides)))
        except UnavailableError as error:
            print_progress(f"{name} was skipped: {error}")
            continue
        print_progress(" | ".join(rows[-1].cells))
    return rows


def print_table(rows: Sequence[DrillRow]) -> None:
    print("\n".join(markdown_table(HEAD, [row.cells for row in rows])), flush=True)


def print_failure(row: DrillRow, victim: RunDir) -> None:
    """What is needed to find the cause: broken bounds, remarks and the end of every log."""
    broken = [f"{bound.name}: {bound.measured}, wanted {bound.wanted}" for bound in row.card.bounds if bound.wanted]
    print_progress("\n".join([f"{row.label} FAILED", *broken, *row.card.score.remarks]))
    for path in sorted(victim.logs.rglob("*.std*")):
        if text := path.read_text(encoding="utf-8", errors="replace"):
            print_progress(f"--- {path.relative_to(victim.path)}\n{text[-3000:]}")


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
