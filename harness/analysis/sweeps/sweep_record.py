"""Reads and writes `sweep.yaml`, the record of a sweep in its directory.

Why: the directory must describe what was varied, so that the sweep can be resumed, extended and reported.
How: the launcher writes the file before the first job starts. A second sweep with the same name extends it. Without the
file, any directory of runs counts as a sweep over the keys in which their configurations differ.
An override that a later sweep command gives all its jobs is not that of the earlier jobs. Each job keeps its own, and a
key with several values counts as swept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from harness.analysis.postmortem.overrides import overrides_in
from harness.config.command_line import shell_command
from harness.config.compose import flat
from harness.config.errors import ConfigError, require
from harness.core.rundir import RunDir, write_atomically
from harness.telemetry.sinks.parent_run import SWEEP_FILE

NOT_SWEPT = ("run.name", "run.dir", "run.resume", "telemetry.", "launch.")
"""Keys that may differ between runs without counting as swept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    name: str
    """Name of its directory."""
    overrides: dict[str, str] = field(default_factory=dict)
    """Swept key -> value, as on the command line."""
    fixed: list[str] = field(default_factory=list)
    """The other overrides of its sweep command."""
    problem: str = ""
    """Error message of an invalid config; empty: the job can run. Only records of older versions hold invalid jobs."""

    @property
    def override_list(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.overrides.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    name: str
    created: float
    """Seconds since 1970."""
    words: list[str]
    """Arguments of the last sweep command, without `harness train`; empty: there is no record of it."""
    fixed: list[str]
    """Overrides of the last sweep command that are not swept."""
    jobs: list[Job]

    @property
    def keys(self) -> list[str]:
        """Swept keys, in the order of the command line."""
        return list(dict.fromkeys(key for job in self.jobs for key in job.overrides))

    def values(self, key: str) -> list[str]:
        """Distinct values of a key, in the order of the jobs."""
        return list(dict.fromkeys(job.overrides[key] for job in self.jobs if key in job.overrides))


def write(sweep: Sweep, directory: Path) -> None:
    write_atomically(directory / SWEEP_FILE, yaml.safe_dump(asdict(sweep), sort_keys=False))


def extend_sweep(earlier: Sweep | None, now: Sweep, *, started: Collection[str]) -> Sweep:
    """The jobs of the new sweep that can run, together with those of an earlier one.

    `started`: names of the jobs that the new command starts. Every other job keeps its earlier entry, because it was
    trained with the settings of that one.
    """
    accepted = [job for job in now.jobs if not job.problem]
    if earlier is None:
        return replace(now, jobs=accepted)
    before = {job.name: job for job in earlier.jobs if not job.problem}
    new = {job.name: job for job in accepted if job.name in started or job.name not in before}
    jobs = sort_jobs(count_differences_as_swept([*(before | new).values()]))
    return replace(now, created=earlier.created, jobs=jobs)


def count_differences_as_swept(jobs: Sequence[Job]) -> list[Job]:
    """The jobs with the fixed overrides in which they differ among the swept ones."""
    swept = {key for job in jobs for key in job.overrides}
    settings = [dict(override.split("=", 1) for override in job.fixed) for job in jobs]
    values = {key: {each.get(key) for each in settings} for key in set().union(*settings)}
    differing = {key for key in values if key in swept or (len(values[key]) > 1 and is_compared(key))}
    return [
        replace(
            job,
            overrides=job.overrides | {key: value for key, value in each.items() if key in differing},
            fixed=[override for override in job.fixed if override.partition("=")[0] not in differing],
        )
        for job, each in zip(jobs, settings, strict=True)
    ]


def is_compared(key: str) -> bool:
    """Whether runs that differ in this key of an override count as different."""
    return not f"{key.lstrip('+~')}.".startswith(NOT_SWEPT)


def sort_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Sorted by their values: numbers by size, then strings."""
    return sorted(jobs, key=lambda job: [sort_key(value) for value in job.overrides.values()])


def sort_key(value: str) -> tuple[int, float, str]:
    number = as_number(value)
    return (1, 0.0, value) if number is None else (0, number, value)


def as_number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def read(directory: Path) -> Sweep:
    """The sweep of a directory, from its record or from the differences between its runs."""
    require(directory.is_dir(), str(directory), "is not a directory")
    path = directory / SWEEP_FILE
    if not path.exists():
        return discover_sweep(directory)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        shared = {"fixed": tree["fixed"]}  # older records have it once, for all jobs
        return Sweep(**tree | {"jobs": [Job(**shared | job) for job in tree["jobs"]]})
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):
        raise ConfigError(
            str(path), "is not a valid sweep record; remove it to report on the runs in its directory"
        ) from None


def read_if_exists(directory: Path) -> Sweep | None:
    return read(directory) if (directory / SWEEP_FILE).exists() else None


def discover_sweep(directory: Path) -> Sweep:
    """A sweep over the runs in a directory and the keys in which they differ."""
    runs = [RunDir(path) for path in sorted(directory.iterdir()) if (path / "config.yaml").is_file()]
    require(bool(runs), str(directory), f"has neither a {SWEEP_FILE} nor run directories")
    configs = {run.path.name: flat(read_run_config(run)) for run in runs}
    keys = differing_keys(list(configs.values()))
    jobs = [
        Job(name=name, overrides={key: override_value(config.get(key)) for key in keys})
        for name, config in configs.items()
    ]
    created = min(run.config.stat().st_mtime for run in runs)
    return Sweep(name=directory.resolve().name, created=created, words=[], fixed=[], jobs=sort_jobs(jobs))


def read_run_config(run: RunDir) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(str(run.config), "is not YAML") from None
    require(isinstance(tree, dict), str(run.config), "is not the configuration of a run")
    assert isinstance(tree, dict)
    return tree


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys in which configurations differ, except those of `NOT_SWEPT`."""
    keys = dict.fromkeys(key for config in configs for key in config if not key.startswith(NOT_SWEPT))
    return [key for key in keys if len({override_value(config.get(key)) for config in configs}) > 1]


def train_command(directory: Path, sweep: Sweep, job: Job) -> str:
    """The command that trains a job again; empty: no overrides give its configuration.

    Without a record of the sweep they are those that reproduce the configuration of the run.
    """
    overrides = [*job.fixed, *job.override_list] if sweep.words else overrides_in(RunDir(directory / job.name))
    return shell_command("harness", "train", *overrides) if overrides is not None else ""


def override_value(value: Any) -> str:
    """A value as in a command-line override."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            return str(value)
