"""The evaluation process of a run.

    python -m harness.analysis.evaluation RUN_DIR      evaluates the newest checkpoint and prints its events

Rank 0 starts it with its run (`harness.telemetry.evaluation_process`) and reads the events from its standard output,
one JSON object a line. Everything else that is printed goes to standard error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_CRASHED, EXIT_DONE, ConfigError, StorageError
from harness.config.schema import Config
from harness.core.child_process import die_with, ignore_trainer_signals, lower_priority, wait_for_trainer
from harness.core.event_json import to_json
from harness.core.rundir import RunDir
from harness.core.stderr_lines import log_with_time

POLL_S = 2.0
LIST_AGAIN_S = 10.0
"""Pause after the checkpoints could not be listed."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.analysis.evaluation", description="Evaluate checkpoints of a run on eval.harness."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    run = RunDir(options.run_dir.absolute())
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to standard output
    if options.trainer is not None:
        ignore_trainer_signals()
        lower_priority()
        die_with(options.trainer)  # a restarted trainer starts its own evaluation process, on the same device
    try:
        return evaluate_until_end(run, compose.read(run.config), events, trainer=options.trainer)
    except (ConfigError, StorageError) as error:
        log_with_time(str(error))
        return EXIT_BAD_CONFIG


def evaluate_until_end(run: RunDir, cfg: Config, events: IO[str], *, trainer: int | None) -> int:
    """Evaluate checkpoints as they appear, until the trainer has ended; then the last one.

    A trainer that is gone reads no more events, so the process ends at once. While the storage fails, the checkpoints
    are listed again after a pause. A checkpoint that cannot be evaluated is skipped; the exit code says whether it was
    the last one. `ConfigError` ends the process: no checkpoint can be evaluated.
    """
    from harness.analysis.evaluation.evaluator import TEMPORARY, NotExportedError, choose_due, evaluate_checkpoint

    for left in run.evaluations.glob(f"{TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)
    tried, failed = set[str](), set[str]()
    while True:
        is_last = trainer is None or wait_for_trainer(0)
        if trainer is not None and os.getppid() != trainer:
            return EXIT_DONE
        try:
            due = choose_due(run, cfg.eval, is_last=is_last, given_up=tried)
            is_over = is_last and due is None
            missed = choose_due(run, cfg.eval, is_last=True, given_up=tried - failed) if is_over else None
        except OSError as error:
            if trainer is None:
                raise
            log_with_time(f"the checkpoints cannot be listed: {error}")
            time.sleep(LIST_AGAIN_S)
            continue
        if due is not None:
            tried.add(due.name)
            try:
                for event in evaluate_checkpoint(run, due, cfg):
                    print(to_json(event), file=events, flush=True)
                log_with_time(f"{due.name}: evaluated")
            except ConfigError:
                raise
            except NotExportedError as error:
                failed.add(due.name)
                log_with_time(f"{due.name}: not evaluated: {error}")
            except Exception as error:  # deleted meanwhile, a dataset that cannot be loaded, a failure of the library
                failed.add(due.name)
                traceback.print_exc()
                log_with_time(f"{due.name}: not evaluated: {' '.join(str(error).split())[:300]}")
        elif is_over:
            return EXIT_DONE if missed is None else EXIT_CRASHED
        else:
            wait_for_trainer(POLL_S)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
