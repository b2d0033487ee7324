"""Replays an incident after its run has ended, on the CPU of this machine, within a time limit.

Why: the run probes few steps, so its post-mortem lacks activations and token losses of the guilty step. Right after the
run, the checkpoint and the batch are usually still there.
How: one rank on the CPU at low priority, in a process of its own. A replay that would not fit into the time or the
memory is not begun. Whatever prevents it is written as one line into the folder of the incident; the post-mortem shows
that line, and `harness replay` can do it later on the devices of the run.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.analysis.replay import history
from harness.analysis.replay.request import choose_path, config_of_path, plan_replay
from harness.config import compose
from harness.config.command_line import shell_command
from harness.config.errors import ConfigError, StorageError
from harness.config.parallel import DeviceKind
from harness.config.schema import Config
from harness.core.memory_limits import free_bytes
from harness.core.rundir import RunDir, write_atomically
from harness.model.size import flops_per_token, num_parameters

SKIPPED_FILE = "replay-skipped.txt"
CPU_FLOPS = 5e9
"""FLOP/s that a niced process on a busy CPU surely reaches."""
EXTRA_STEPS = 6
"""Steps that the replay computes besides those on the way: the guilty step three times, and its neighbours."""
BYTES_PER_PARAMETER = 64
"""Weights, gradients and moments in fp32, and copies of the state."""
MEMORY_SHARE = 0.5


class ReplayTimeoutError(Exception):
    """The time limit of a replay has passed."""


PREVENTING = (
    *(ConfigError, StorageError, ReplayTimeoutError, OSError, RuntimeError, MemoryError),
    *(LookupError, ValueError),  # a log that was cut or edited
)


def replay_after_run(run: RunDir, incident: int, *, within_s: float) -> bool:
    """Replay the guilty step of an incident, or write why it cannot be replayed; returns whether it was."""
    folder = run.incidents / f"{incident:03d}"
    skipped = folder / SKIPPED_FILE
    try:
        with time_limit(within_s):
            replay_on_cpu(run, incident, folder / history.REPLAY_FILE, within_s=within_s)
    except PREVENTING as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        later = shell_command("harness", "replay", run.path, "--incident", incident)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(skipped, f"The step was not replayed after the run: {reason}; run `{later}`.\n")
        return False
    skipped.unlink(missing_ok=True)
    return True


def replay_on_cpu(run: RunDir, incident: int, report: Path, *, within_s: float) -> None:
    """Replay on one rank; `ConfigError` if it does not fit into the time or the memory."""
    log = history.read(run.events)
    iteration = history.guilty_step(log, incident).iteration
    report.parent.mkdir(parents=True, exist_ok=True)
    path = choose_path(run, log, iteration)
    cfg = config_of_path(run, compose.read(run.config), log, path)
    check_cost(cfg, path.num_iterations, within_s=within_s, memory_bytes=free_bytes())
    planned = plan_replay(run, cfg, log, path, ranks=1, report=report)
    from harness.analysis.replay.rerun import replay_config, run_replay_worker

    share = math.ceil(cfg.train.batch_size / (log.world_size(iteration) // cfg.parallel.context))
    on_cpu = replace(
        replay_config(cfg),
        parallel=replace(cfg.parallel, device=DeviceKind.cpu, replicate=1, context=1, compile=False),
        train=replace(cfg.train, micro_batch_size=cfg.train.micro_batch_size or share),
    )
    is_exact = planned.exactly and cfg.parallel.device is DeviceKind.cpu
    run_replay_worker(replace(planned, exactly=is_exact), on_cpu)


def check_cost(cfg: Config, num_steps: int, *, within_s: float, memory_bytes: float) -> None:
    """Reject a replay that takes longer than the limit, or more than half of the free memory."""
    tokens = (num_steps + EXTRA_STEPS) * cfg.train.batch_size * cfg.train.sequence_length
    seconds = tokens * flops_per_token(cfg.model, cfg.train.sequence_length) / CPU_FLOPS
    if seconds > within_s:
        raise ConfigError("", f"{num_steps} steps would take about {seconds:.0f} s on the CPU")
    needed = BYTES_PER_PARAMETER * num_parameters(cfg.model)
    if needed > MEMORY_SHARE * memory_bytes:
        raise ConfigError(
            "", f"it would take {needed / 1e9:.1f} GB of memory, and {memory_bytes / 1e9:.1f} GB are free"
        )


REPEAT_S = 1.0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `ReplayTimeoutError` in the main thread when the time is over.

    The alarm repeats: Python drops an exception that meets a finalizer or a callback of the garbage collector.
    """

    def stop(_signal: int, _frame: Any) -> None:
        raise ReplayTimeoutError(f"it did not finish within {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), REPEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
