"""Measures a restart: seconds from `kill -9` of one of two ranks to the next update, and where they go.

    python -m tests.bench.restart                          three restarts by the launcher
    python -m tests.bench.restart --torchrun               the same trainer under `torchrun --max-restarts`
    python -m tests.bench.restart --drills                 the table of all process and node drills with a restart
    python -m tests.bench.restart --ranks-per-gpu 2 4      NCCL ranks that share one GPU, at 125m

Each round starts the default run on two CPU ranks, kills rank 1 after KILL_AT steps, waits for the first step of the
next start, and ends the run. The parts come from the files of the run: its log, the lease (taken when the process group
and the corpus are open) and the manifest (written when all parts are built).

With `--drills` each row is one drill on CPU ranks; `--drills kill_rank lost_node` runs only these. With
`--ranks-per-gpu` each round is the drill `kill_rank` with `run.deterministic`: a run, and a twin without the kill
that is trained once. Weights and moments at the end are compared byte for byte. Exit code 1: a drill failed, a run
differs from its twin, or the next update took longer than TARGET_S.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.core import event_json, processes
from harness.core.events import Event, RunRestarted, RunStarted, StepRecord
from harness.core.locking import directory_lease
from harness.core.rundir import RunDir
from harness.telemetry import heartbeat
from tests.bench.restart_drills import (
    RESTART_DRILLS,
    kept_directory,
    measure_drills,
    measure_nccl_restarts,
    print_table,
)

TARGET_S = 15.0
"""The next update of NCCL ranks is wanted within this many seconds."""
KILL_AT = 60
OVERRIDES = ("train.num_steps=1000", "checkpoint.every_steps=20", "parallel.device=cpu", "run.name=restart")
LIMIT_S = 300.0
POLL_S = 0.02


class RestartTimes(NamedTuple):
    """Seconds of one restart, from the kill to the first update, and its parts in order."""

    total_s: float
    parts: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    if args.ranks_per_gpu:
        return measure_on_gpu(args)
    if args.drills is not None:
        with kept_directory(args.keep) as runs:
            rows = measure_drills(args.drills or RESTART_DRILLS, args.overrides, runs=runs)
            print(f"load average {os.getloadavg()[1]:.1f}, {os.cpu_count()} cores\n")
            print_table(rows)
        return 0 if all(row.passed for row in rows) else 1
    for number in range(1, args.rounds + 1):
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as directory:
            times = measure_restart(Path(directory), torchrun=args.torchrun)
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in times.parts.items())
        print(
            f"round {number}, load average {load:.1f}: first update after {times.total_s:.2f} s ({parts})", flush=True
        )
    return 0


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the training or the drill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torchrun", action="store_true", help="restart with torchrun instead of the launcher")
    parser.add_argument("--ranks-per-gpu", type=int, nargs="+", metavar="N", help="numbers of NCCL ranks on one GPU")
    parser.add_argument("--drills", nargs="*", metavar="NAME", help="run these drills; without a name, all")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs here")
    return parser.parse_intermixed_args(argv)


def measure_on_gpu(args: argparse.Namespace) -> int:
    """Kill a rank among NCCL ranks that share a GPU; prints a table and the parts of each restart."""
    with kept_directory(args.keep) as runs:
        rows = measure_nccl_restarts(args.ranks_per_gpu, args.overrides, rounds=args.rounds, runs=runs)
        print_table(rows)
        last = [RunDir(runs / str(num_ranks) / "drill-kill_rank") for num_ranks in args.ranks_per_gpu]
        for num_ranks, run in zip(args.ranks_per_gpu, last, strict=True):
            print(f"{num_ranks} ranks, the last restart: {describe_parts(run)}", flush=True)
    in_time = all((row.card.score.first_update_s or math.inf) <= TARGET_S for row in rows)
    return 0 if in_time and all(row.passed for row in rows) else 1


def describe_parts(run: RunDir) -> str:
    """Where the seconds of the last restart of a finished drill went."""
    log = list(event_json.read(run.events))
    strikes = [event.time for event in event_json.read(run.faults)] if run.faults.exists() else []
    starts = [place for place, event in enumerate(log) if isinstance(event, RunStarted)]
    restarts: list[Event] = [event for event in log if isinstance(event, RunRestarted)]
    if not strikes or len(starts) < 2 or not restarts:
        return "there was none"
    times = split_times(run, restarts[-1:] + log[starts[-1] :], strikes[-1])
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in times.parts.items())


def measure_restart(directory: Path, *, torchrun: bool) -> RestartTimes:
    """Start a run, kill rank 1, and wait for the first step of the next start."""
    run = RunDir(directory / "runs" / "restart")
    command = processes.command("launch.cli.main", "train", *OVERRIDES)
    if torchrun:
        launcher = ("--nproc-per-node", "2", "--max-restarts", "3", "-m", "harness.train")
        command = processes.command("torch.distributed.run", *launcher, *OVERRIDES)
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=processes.child_environment() | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            wait_for_step(run, process, num_starts=1, step=KILL_AT)
            beat = heartbeat.read(heartbeat.heartbeat_file(run, 1))
            assert beat is not None
            killed = time.time()
            os.kill(beat.pid, signal.SIGKILL)
            log = wait_for_step(run, process, num_starts=2, step=0)
            return split_times(run, log, killed)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_step(run: RunDir, process: subprocess.Popen[bytes], *, num_starts: int, step: int) -> list[Event]:
    """Wait until a start has logged a step; returns the events of that start and what led to it."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, f"the run ended with exit code {process.returncode}"
        log = list(event_json.read(run.events)) if run.events.exists() else []
        starts = [place for place, event in enumerate(log) if isinstance(event, RunStarted)]
        if len(starts) >= num_starts:
            new = log[starts[num_starts - 1] :]
            if any(isinstance(event, StepRecord) and event.step >= step for event in new):
                return [event for event in log if isinstance(event, RunRestarted)] + new
        time.sleep(POLL_S)
    raise TimeoutError(f"no step {step} of start {num_starts} within {LIMIT_S:.0f} s")


def split_times(run: RunDir, log: Sequence[Event], killed: float) -> RestartTimes:
    """Split the time from the kill to the first step at the times that the files of the run hold."""
    started = next(event for event in log if isinstance(event, RunStarted))
    first = next(event for event in log if isinstance(event, StepRecord))
    lease = directory_lease.read_newest(run.lease)
    assert lease is not None
    assert lease.holder is not None
    times: dict[str, float] = {}
    for event in log:
        if isinstance(event, RunRestarted):
            times |= {"notice": event.time, "stop": event.time + event.stopped_s}
    manifest = json.loads(run.manifest.read_text(encoding="utf-8"))
    times |= {
        "processes and process group": lease.holder.since,
        "build": [manifest, *manifest["starts"]][-1]["time"],
        "resume": started.time,
        "held-out loss and first steps": first.time,
    }
    before, parts = killed, {}
    for name, until in times.items():
        parts[name], before = until - before, until
    return RestartTimes(first.time - killed, parts)


if __name__ == "__main__":
    sys.exit(main())
