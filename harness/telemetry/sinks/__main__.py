"""The sink process: tails the log of a run and feeds its sinks.

    python -m harness.telemetry.sinks RUN_DIR      sends the unsent rest of a run to all its sinks, then exits
    python -m harness.telemetry.sinks SWEEP_DIR    sets the final status of a sweep in MLflow

Rank 0 starts it with its run (`sink_process`). It imports a library only if its sink is enabled, and never torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.config.errors import EXIT_BAD_CONFIG
from harness.core.child_process import ignore_trainer_signals
from harness.core.locking.lease_holder import start_of
from harness.core.rundir import RunDir
from harness.telemetry.sinks import parent_run
from harness.telemetry.sinks.feeder import send_until_end
from harness.telemetry.sinks.sink import SinkKind
from harness.telemetry.sinks.sink_log import log, report_to
from harness.telemetry.sinks.trainer_watch import Trainer

GONE = -1
"""Process id of a trainer that is known to be gone."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.telemetry.sinks", description="Send the unsent rest of a run to its sinks."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--only", choices=[*SinkKind], action="append", help="send to this sink, enabled or not")
    parser.add_argument("--wait", action="store_true", help="wait while another process sends the run")
    for name in ("--trainer", "--launcher", "--log-bytes", "--reports"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    report_to(options.reports)
    run = RunDir(options.run_dir.resolve())
    if parent_run.is_sweep(run):
        from harness.telemetry.sinks.mlflow_sink import end_sweep

        return end_sweep(run)
    if not run.config.is_file():
        log(f"{run.path} is not a run directory: it has no {run.config.name}")
        return EXIT_BAD_CONFIG
    trainer = None
    if options.log_bytes is not None:
        ignore_trainer_signals()
        launcher = options.launcher or 0
        trainer = Trainer(
            options.trainer or GONE,
            options.log_bytes,
            launcher_pid=launcher,
            launcher_started=start_of(launcher),
            with_restarts=options.trainer is None,
        )
    kinds = None if options.only is None else [SinkKind(name) for name in options.only]
    return send_until_end(run, trainer, kinds, wait=options.wait)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread of a library that waits for its server must not keep the process
