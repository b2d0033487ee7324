"""Starts the process that evaluates checkpoints on tasks, and turns its results into events.

Why: an evaluation takes minutes, and no step may wait for it.
How: the process runs `python -m harness.analysis.evaluation` in its own session with low priority. It prints an event a
line; a thread reads them, and `drain_events` returns them to the loop of rank 0. A result counts once its event is in
the queue of the log and `evaluations/NAME.json` is written.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Self, final

from harness.config.errors import require
from harness.config.run import EvalConfig
from harness.core import processes
from harness.core.event_json import from_json
from harness.core.events import TaskEvaluated
from harness.core.processes import last_line
from harness.core.rundir import RunDir, write_atomically
from harness.core.stderr_lines import print_warning

EVALUATION_MODULE = "harness.analysis.evaluation"
EVALUATION_LOG = "evaluation.log"
READER_WAIT_S = 10.0
"""Seconds for which the end of a run waits for the last results in the pipe."""


def require_evaluation(cfg: EvalConfig) -> None:
    """Reject tasks that cannot be evaluated here: a package or the directory of the tasks is missing."""
    if not cfg.harness:
        return
    message = "needs lm-evaluation-harness: pip install 'pretraining-harness[evaluation]'"
    require(
        all(find_spec(name) is not None for name in ("accelerate", "lm_eval", "transformers")), "eval.harness", message
    )
    folder = cfg.harness_tasks_dir
    require(folder is None or Path(folder).is_dir(), "eval.harness_tasks_dir", f"{folder} is not a directory")


@final
class EvaluationProcess:
    """Owned by rank 0; started after `config.yaml` is written."""

    def __init__(self, process: subprocess.Popen[bytes], run: RunDir) -> None:
        self._process = process
        self._run = run
        self._events: deque[TaskEvaluated] = deque()
        self._results: dict[str, dict[str, dict[str, float]]] = {}
        self._is_last = False
        """Whether the run is over, so that the process may end."""
        self._reader = Thread(target=self._read, name="evaluations", daemon=True)
        self._reader.start()

    @classmethod
    def start(cls, run: RunDir, cfg: EvalConfig) -> Self | None:
        """Start the process if `eval.harness` names tasks; if that fails, only a warning is printed."""
        if not cfg.harness:
            return None
        environment = processes.environment_outside_ranks()
        if cfg.harness_device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        args = (str(run.path), "--trainer", str(os.getpid()))
        log, pipe = run.logs / EVALUATION_LOG, subprocess.PIPE
        try:
            process = processes.start_logged(
                EVALUATION_MODULE, *args, log=log, environment=environment, stdin=pipe, stdout=pipe
            )
        except OSError as error:
            print_warning(f"cannot start the evaluation process: {error}")
            return None
        return cls(process, run)

    def drain_events(self) -> Iterator[TaskEvaluated]:
        """Yield the results since the last call; never waits."""
        while self._events:
            yield self._events.popleft()

    def finish(self, wait_s: float, *, until: Callable[[], bool] = processes.never) -> bool:
        """Let the process evaluate the last checkpoint, and wait for it, but no longer than until `until()` holds.

        False if it was not evaluated.
        """
        assert self._process.stdin is not None
        self._is_last = True
        with suppress(OSError):
            self._process.stdin.close()
        begun_s = time.monotonic()
        is_done = processes.wait_or_end(self._process, wait_s=wait_s, until=until)
        waited_s = time.monotonic() - begun_s
        self._reader.join(timeout=READER_WAIT_S)
        if not is_done and wait_s > 0:
            last = last_line(self._run.logs / EVALUATION_LOG) or f"still running after {waited_s:.0f} s"
            print_warning(f"the last checkpoint was not evaluated: {last}")
        return is_done

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError, KeyError, TypeError):
                    event = from_json(line.decode())
                    if isinstance(event, TaskEvaluated):
                        self._events.append(event)
                        self._record(event)
        if not self._is_last:
            reason = last_line(self._run.logs / EVALUATION_LOG) or "its process has ended"
            print_warning(f"no more checkpoints are evaluated until the next start: {reason}")

    def _record(self, event: TaskEvaluated) -> None:
        """Write the results of a checkpoint so far; the file says that it was evaluated."""
        scores = self._results.setdefault(event.directory, {})
        scores[event.task] = event.metrics
        path: Path = self._run.evaluations / f"{event.directory}.json"
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, json.dumps({"step": event.step, "time": event.time, "tasks": scores}, indent=1))
