"""A run directory that is ready for a job: configuration, code, and which job it belongs to.

`python -m launch.slurm.job_directory [overrides]` does it inside a job that a person submitted with a plain `sbatch
slurm/train.sbatch`, and prints the run directory and the directory of its code. A job that begins again finds both as
it left them. A complaint is one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError
from harness.config.schema import Config
from harness.control import stop_requests
from harness.core import rundir
from harness.core.events import to_json
from harness.core.rundir import RunDir, append_line, locate, write_atomically
from harness.telemetry.event_log import last_iteration
from launch.slurm import code_snapshot
from launch.slurm.controller import queue_state


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the run directory remembers of its newest job."""

    job: str
    """The number Slurm gave it; of an array, the task's own name."""
    code: str


def folder(run: RunDir) -> Path:
    """What only Slurm needs."""
    return run.path / "slurm"


def code_root(run: RunDir) -> Path:
    return run.path / "code"


def lay_out(cfg: Config) -> RunDir:
    """Create the directory of a run, or admit a change of its configuration; an earlier stop is taken back."""
    run = locate(cfg)
    seen = max(last_iteration(run.events), 0)
    if changes := rundir.prepare(cfg, run, iteration=seen):
        append_line(run.events, to_json(rundir.make_config_change_event(changes, iteration=seen)))
    stop_requests.clear(run)
    folder(run).mkdir(exist_ok=True)
    return run


def remember(run: RunDir, job: Job) -> None:
    write_atomically(folder(run) / "job.json", json.dumps(asdict(job)) + "\n")


def recall(run: RunDir) -> Job | None:
    """The newest job of a run; None where it never had one."""
    try:
        return Job(**json.loads((folder(run) / "job.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def claim(run: RunDir, job: str) -> None:
    """Take the run for this job; refuse where another job that waits or runs has it, so that no two write to it."""
    known = recall(run)
    if known is not None and known.job == job:
        return
    check_not_taken(run, known, job)
    code = known.code if known is not None else str(Path(__file__).resolve().parents[2])
    remember(run, Job(job=job, code=code))


def check_not_taken(run: RunDir, known: Job | None, job: str) -> None:
    """Refuse a run whose own job, another one, waits or runs."""
    if known is not None and known.job != job and (state := queue_state(known.job)):
        raise ConfigError(str(run.path), f"belongs to job {known.job}, which is {state}; job {job} leaves it alone")


def lay_out_in_job(cfg: Config, job: str, num_nodes: int) -> tuple[Path, Path]:
    """The run directory and the code of this job, made at its first start."""
    cfg.launch.nodes, cfg.launch.min_nodes = num_nodes, None
    cfg.run.name = cfg.run.name or f"{cfg.model.name}-job-{job}"
    known = recall(locate(cfg))
    if known is None or known.job != job:
        check_not_taken(locate(cfg), known, job)
        run = lay_out(cfg)
        known = Job(job=job, code=str(code_snapshot.take(code_root(run).resolve())))
        remember(run, known)
    return locate(cfg).path.resolve(), Path(known.code)


def job_of(environment: Mapping[str, str]) -> str:
    """The number of this job; of an array, the task's own name, since its number may also be that of another task."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment["SLURM_JOB_ID"]


def main(argv: Sequence[str] | None = None) -> int:
    """Lay out the run of this job; returns the exit code."""
    num_nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    try:
        cfg = compose.load(sys.argv[1:] if argv is None else argv)
        run, code = lay_out_in_job(cfg, job_of(os.environ), num_nodes)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    print(f"{run}\n{code}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
