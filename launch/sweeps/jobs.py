"""Names the jobs of a sweep, assigns their directories, checks them, and finds what is left to run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness.analysis.sweeps.sweep_record import Job
from harness.config.errors import EXIT_HALTED, ConfigError, require
from harness.config.launch import LaunchKind
from harness.config.run import ResumePolicy
from harness.config.schema import Config, check_world
from harness.core.events import RunEnded
from harness.core.rundir import RunDir, locate
from harness.telemetry.event_log import tail
from launch.changed_config import require_fitting
from launch.sweeps import scheduler

LONGEST_NAME = 150


class JobState(StrEnum):
    """Whether a job still has to run."""

    pending = "pending"
    finished = "finished"
    halted = "halted"
    queued = "queued"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedJob:
    """A job as Hydra composed it: a config, or the error in it."""

    sweep: Path
    """Directory of the sweep."""
    overrides: dict[str, str]
    """Swept key -> value."""
    cfg: Config | None
    problem: str = ""


def name_jobs(directory: Path, composed: Sequence[ComposedJob]) -> list[tuple[Job, Config | None]]:
    """Every distinct job, with its directory in the sweep, checked against this machine and its run directory."""
    jobs: list[tuple[Job, Config | None]] = []
    taken: set[str] = set()
    seen: set[tuple[str, ...]] = set()
    gpus = scheduler.visible_gpus()
    for number, item in enumerate(composed):
        overrides = tuple(f"{key}={value}" for key, value in item.overrides.items())
        if overrides and overrides in seen:
            continue
        seen.add(overrides)
        name = directory_name(overrides, number, taken)
        taken.add(name)
        problem, cfg = item.problem, item.cfg
        if cfg is not None:
            try:
                assign_directory(cfg, directory, name)
                require_fitting(cfg, locate(cfg))
                check_launch(cfg, gpus)
            except ConfigError as error:
                problem, cfg = str(error), None
        jobs.append((Job(name=name, overrides=dict(item.overrides), problem=problem), cfg))
    return jobs


def check_launch(cfg: Config, gpus: Sequence[str]) -> None:
    """Reject a config that cannot run on its number of ranks."""
    message = "a sweep runs with launch=local or launch=slurm; print the manifest of one run at a time"
    require(cfg.launch.kind is not LaunchKind.k8s, "launch", message)
    if cfg.launch.kind is LaunchKind.slurm:
        from launch.slurm import submit

        submit.check_submission(cfg)
    else:
        check_world(cfg, scheduler.ranks_of_job(cfg, gpus))


def directory_name(overrides: Sequence[str], number: int, taken: set[str]) -> str:
    """Directory name made of the swept overrides; independent of what else is swept."""
    name = re.sub(r"[^\w.,=+-]", "-", ",".join(overrides)).lstrip(".")
    if 0 < len(name) <= LONGEST_NAME and name not in taken:
        return name
    return f"job-{hashlib.sha256(' '.join(overrides).encode()).hexdigest()[:8]}" if overrides else f"job-{number}"


def assign_directory(cfg: Config, sweep: Path, name: str) -> None:
    """Set the run directory of a job; the sweep shares one MLflow store with the runs beside it."""
    if cfg.telemetry.tracking_uri is None:
        cfg.telemetry.tracking_uri = f"sqlite:///{Path(cfg.run.dir).resolve() / 'mlflow.db'}"
    cfg.run.dir, cfg.run.name = str(sweep), name


def find_job_state(run: RunDir, cfg: Config) -> JobState:
    """Whether a job still has to run, from the last event of its log."""
    last = next(reversed(tail(run.events)), None)
    match last:
        case RunEnded(exit_code=0, step=step) if step >= cfg.train.num_steps:
            return JobState.finished
        case RunEnded(exit_code=code) if code == EXIT_HALTED and cfg.run.resume is not ResumePolicy.changed:
            return JobState.halted
        case _:
            return JobState.queued if cfg.launch.kind is LaunchKind.slurm and is_queued(run) else JobState.pending


def is_queued(run: RunDir) -> bool:
    """Whether Slurm has an active job for a run."""
    from launch.slurm import controller, job_directory

    known = job_directory.read_job(run)
    return known is not None and bool(controller.queue_state(known.job))
