"""The jobs of a sweep: named, placed in its directory, checked, and what is left to do of each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness.analysis.sweeps.sweep_record import Job
from harness.config.errors import EXIT_HALTED, ConfigError
from harness.config.launch import LaunchKind
from harness.config.run import ResumePolicy
from harness.config.schema import Config, check_world
from harness.core.events import RunEnded
from harness.core.rundir import RunDir, check_resume, locate
from harness.telemetry.event_log import tail
from launch.sweeps import scheduler

LONGEST_NAME = 150


class Need(StrEnum):
    """What is left to do of a job."""

    run = "run"
    finished = "finished"
    halted = "halted"
    queued = "queued"


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A job as Hydra composed it: a configuration, or what is wrong with it."""

    sweep: Path
    """Directory of the sweep."""
    overrides: dict[str, str]
    """Swept key -> value."""
    cfg: Config | None
    problem: str = ""


def named(directory: Path, composed: Sequence[Composed]) -> list[tuple[Job, Config | None]]:
    """Every job once, placed in the sweep and checked against this machine and what lies in its directory."""
    jobs: list[tuple[Job, Config | None]] = []
    taken: set[str] = set()
    seen: set[tuple[str, ...]] = set()
    gpus = scheduler.visible_gpus()
    for number, each in enumerate(composed):
        words = tuple(f"{key}={value}" for key, value in each.overrides.items())
        if words and words in seen:
            continue
        seen.add(words)
        name = directory_name(words, number, taken)
        taken.add(name)
        problem, cfg = each.problem, each.cfg
        if cfg is not None:
            try:
                place(cfg, directory, name)
                check_resume(cfg, locate(cfg))
                check_launch(cfg, gpus)
            except ConfigError as error:
                problem, cfg = str(error), None
        jobs.append((Job(name=name, overrides=dict(each.overrides), problem=problem), cfg))
    return jobs


def check_launch(cfg: Config, gpus: Sequence[str]) -> None:
    """Refuse what the ranks could not divide among them."""
    if cfg.launch.kind is LaunchKind.slurm:
        from launch.slurm import submit

        submit.check(cfg)
    else:
        check_world(cfg, scheduler.num_ranks(cfg, gpus))


def directory_name(words: Sequence[str], number: int, taken: set[str]) -> str:
    """What was swept, as far as a file system takes it; the same for the same words, whatever else is swept."""
    name = re.sub(r"[^\w.,=+-]", "-", ",".join(words)).lstrip(".")
    if 0 < len(name) <= LONGEST_NAME and name not in taken:
        return name
    return f"job-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:8]}" if words else f"job-{number}"


def place(cfg: Config, sweep: Path, name: str) -> None:
    """Give a job its directory; the sweep shares one MLflow store with the runs beside it."""
    if cfg.telemetry.tracking_uri is None:
        cfg.telemetry.tracking_uri = f"sqlite:///{Path(cfg.run.dir).resolve() / 'mlflow.db'}"
    cfg.run.dir, cfg.run.name = str(sweep), name


def need(run: RunDir, cfg: Config) -> Need:
    """What is left to do of a job, by the last word of its log."""
    last = next(reversed(tail(run.events)), None)
    match last:
        case RunEnded(exit_code=0, step=step) if step >= cfg.train.num_steps:
            return Need.finished
        case RunEnded(exit_code=code) if code == EXIT_HALTED and cfg.run.resume is not ResumePolicy.changed:
            return Need.halted
        case _:
            return Need.queued if cfg.launch.kind is LaunchKind.slurm and is_queued(run) else Need.run


def is_queued(run: RunDir) -> bool:
    """Whether Slurm still has a job for a run."""
    from launch.slurm import controller, job_directory

    known = job_directory.recall(run)
    return known is not None and bool(controller.queue_state(known.job))
