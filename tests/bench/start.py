"""Measures a start: seconds from `harness train` to the first logged update, and where they go.

    python -m tests.bench.start                                                        the default on two CPU ranks
    python -m tests.bench.start --rounds 2 +experiment=1b_bf16 train.num_steps=20      1.26B parameters on a GPU

Each round starts a new run in the same directory, and kills it at its first step. So a compiled model is compiled in
the first round, and later ones find it in the compile cache of that directory. A step is logged `sentinel.lag` steps
after it was issued. The parts come from the files of the run, as in `tests.bench.restart`. `harness train --help` is
measured beside it.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from harness.core import processes
from harness.core.rundir import RunDir
from tests.bench.restart import LIMIT_S, POLL_S, RestartTimes, split_times, wait_for_step

NUM_HELPS = 5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the training")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_intermixed_args(argv)
    help_s = [measure_help() for _ in range(NUM_HELPS)]
    print(f"harness train --help: {statistics.median(help_s):.2f} s (median of {NUM_HELPS})", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        for number in range(1, options.rounds + 1):
            load = os.getloadavg()[0]
            times = measure_start(Path(directory), f"start-{number}", options.overrides)
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in times.parts.items())
            print(f"round {number}, load average {load:.1f}: first update after {times.total_s:.2f} s ({parts})")
    return 0


def measure_help() -> float:
    begun_s = time.perf_counter()
    subprocess.run(processes.command("launch.cli.main", "train", "--help"), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun_s


def measure_start(directory: Path, name: str, overrides: Sequence[str]) -> RestartTimes:
    """Start a run, wait for its first step, and kill it."""
    run = RunDir(directory / "runs" / name)
    output = directory / f"{name}.log"
    begun = time.time()
    process = subprocess.Popen(
        processes.command("launch.cli.main", "train", *overrides, f"run.name={name}", "telemetry=plain"),
        cwd=directory,
        env=processes.child_environment(),
        stdout=output.open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return split_times(run, wait_for_step(run, process, num_starts=1, step=0), begun)
    except AssertionError:
        print(output.read_text(errors="replace")[-2000:], file=sys.stderr)
        raise
    finally:
        kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and its ranks, and wait until none is left."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
