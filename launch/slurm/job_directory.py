"""Prepares the run directory of a Slurm job: config, code, and the job id.

`python -m launch.slurm.job_directory [overrides]` does so inside a job that was submitted with a plain `sbatch
slurm/train.sbatch`, and prints the run directory and the directory of its code. A job that restarts finds both
unchanged. An error is one line on stderr and exit code 2. If the storage failed, there is no record of the job that
could limit its requeues: the number of its starts does. The exit code is 75 if it may be requeued, else 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO, cast, final

from harness.config import compose
from harness.config.errors import (
    EXIT_BAD_CONFIG,
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    ConfigError,
    StorageError,
    require,
)
from harness.config.schema import Config
from harness.control import stop_requests
from harness.core.locking.run_lease import naming_full_disk
from harness.core.rundir import RunDir, locate, write_atomically
from harness.core.safe_stream import SafeStream
from launch.changed_config import prepare_fitting_run
from launch.slurm import code_snapshot
from launch.slurm.controller import queue_state


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The newest job of a run, stored in slurm/job.json."""

    job: str
    """Job id; for a task of an array ARRAY_TASK."""
    code: str
    excluded: Mapping[str, float] = field(default_factory=dict)
    """Nodes that the submission excluded because its runs had blamed them -> until when, in seconds since 1970."""


def slurm_folder(run: RunDir) -> Path:
    """Directory for the files that only Slurm needs."""
    return run.path / "slurm"


def code_root(run: RunDir) -> Path:
    return run.path / "code"


def prepare_job_run(cfg: Config) -> RunDir:
    """Create a run directory, or accept a changed config; clears an earlier stop request."""
    run = prepare_fitting_run(cfg)
    with naming_full_disk(run.path):
        stop_requests.clear_stop_file(run)
        slurm_folder(run).mkdir(exist_ok=True)
    return run


def write_job(run: RunDir, job: SlurmJob) -> None:
    with naming_full_disk(run.path):
        write_atomically(slurm_folder(run) / "job.json", json.dumps(asdict(job)) + "\n")


def read_job(run: RunDir) -> SlurmJob | None:
    """The newest job of a run; None if it never had one."""
    try:
        return SlurmJob(**json.loads((slurm_folder(run) / "job.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def claim_run(run: RunDir, job: str) -> None:
    """Make this job the owner of the run; rejects it if another active job owns it."""
    known = read_job(run)
    if known is not None and known.job == job:
        return
    check_unclaimed(run, known, job)
    code = known.code if known is not None else str(Path(__file__).resolve().parents[2])
    write_job(run, SlurmJob(job=job, code=code))


def check_unclaimed(run: RunDir, known: SlurmJob | None, job: str) -> None:
    """Reject a run that another active job owns."""
    if known is not None and known.job != job and (state := queue_state(known.job)):
        raise ConfigError(str(run.path), f"belongs to job {known.job}, which is {state}; job {job} does not start it")


def prepare_in_job(cfg: Config, job: str, num_nodes: int) -> tuple[Path, Path]:
    """The run directory and the code of this job, created at its first start."""
    message = f"must leave at least 2 of the {num_nodes} nodes of this job, got {cfg.launch.spares}"
    require(cfg.launch.spares == 0 or num_nodes - cfg.launch.spares > 1, "launch.spares", message)
    cfg.launch.nodes, cfg.launch.min_nodes = num_nodes - cfg.launch.spares, None
    cfg.run.name = cfg.run.name or f"{cfg.model.name}-job-{job}"
    known = read_job(locate(cfg))
    if known is None or known.job != job:
        check_unclaimed(locate(cfg), known, job)
        run = prepare_job_run(cfg)
        known = SlurmJob(job=job, code=str(code_snapshot.save_snapshot(code_root(run).resolve())))
        write_job(run, known)
    return locate(cfg).path.resolve(), Path(known.code)


def job_id(environment: Mapping[str, str]) -> str:
    """The id of this job; for a task of an array ARRAY_TASK, since its number may also be that of another task."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment["SLURM_JOB_ID"]


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the run of this job; returns the exit code."""
    num_nodes, job = int(os.environ["SLURM_JOB_NUM_NODES"]), job_id(os.environ)
    most = 0
    try:
        cfg = compose.load(sys.argv[1:] if argv is None else argv)
        most = cfg.launch.slurm.max_requeues
        run, code = prepare_in_job(cfg, job, num_nodes)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except StorageError as error:
        requeues = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        decision = "is requeued" if requeues < most else "ends"
        limit = f"requeued {requeues} times, launch.slurm.max_requeues={most}"
        print(f"harness: {error}\nharness: job {job} {decision}: {limit}", file=sys.stderr)
        return EXIT_INTERRUPTED if requeues < most else EXIT_CRASHED
    print(f"{run}\n{code}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.stderr = cast(TextIO, SafeStream(sys.stderr))  # the log of the job may be on a full disk
    sys.exit(main())
