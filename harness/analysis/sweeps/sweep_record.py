"""`sweep.yaml`: what a sweep is made of, as it lies in its directory beside the directories of its jobs.

Why: a directory of runs must say by itself what was varied, so that the sweep can be resumed, extended and reported.
How: the launcher writes it before the first job begins; words that are swept again under the same name extend it. Where
there is none, any directory of runs is a sweep over those keys in which their configurations differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness.config.compose import flat
from harness.config.errors import ConfigError, require
from harness.core.rundir import RunDir, write_atomically
from harness.telemetry.tracking.parent_run import SWEEP_FILE

NOT_SWEPT = ("run.name", "run.dir", "run.resume", "telemetry.", "launch.")
"""Keys that may differ between runs without being what they are compared by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    name: str
    """Of its directory."""
    overrides: dict[str, str] = field(default_factory=dict)
    """Swept key -> value, as on the command line."""
    problem: str = ""
    """Why it was never started: one line; empty: it may run."""

    @property
    def words(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.overrides.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    name: str
    created: float
    """Seconds since 1970."""
    words: list[str]
    """The command line that was last swept, without `harness train`."""
    fixed: list[str]
    """Those of its words that every job shares."""
    jobs: list[Job]

    @property
    def keys(self) -> list[str]:
        """What is swept, in the order of the command line."""
        return list(dict.fromkeys(key for job in self.jobs for key in job.overrides))

    def values(self, key: str) -> list[str]:
        """The values a key takes, each once, in the order of the jobs."""
        return list(dict.fromkeys(job.overrides[key] for job in self.jobs if key in job.overrides))


def write(sweep: Sweep, directory: Path) -> None:
    write_atomically(directory / SWEEP_FILE, yaml.safe_dump(asdict(sweep), sort_keys=False))


def extended(earlier: Sweep | None, now: Sweep) -> Sweep:
    """The sweep of now with the jobs that were laid out before it: what ran is not forgotten."""
    if earlier is None:
        return now
    names = {job.name for job in now.jobs}
    kept = [job for job in earlier.jobs if job.name not in names and not job.problem]
    return Sweep(
        name=now.name, created=earlier.created, words=now.words, fixed=now.fixed, jobs=sorted_jobs([*kept, *now.jobs])
    )


def sorted_jobs(jobs: Sequence[Job]) -> list[Job]:
    """By their values: numbers by size, before words."""
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
    """The sweep of a directory: written down there, or what its runs differ in."""
    require(directory.is_dir(), str(directory), "is not a directory")
    path = directory / SWEEP_FILE
    if not path.exists():
        return discovered(directory)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Sweep(**tree | {"jobs": [Job(**job) for job in tree["jobs"]]})
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):
        raise ConfigError(
            str(path), "is not the record of a sweep; remove it to report on the runs beside it"
        ) from None


def read_if_there(directory: Path) -> Sweep | None:
    return read(directory) if (directory / SWEEP_FILE).exists() else None


def discovered(directory: Path) -> Sweep:
    """Any runs that lie side by side, and the keys whose values differ between them."""
    runs = [RunDir(path) for path in sorted(directory.iterdir()) if (path / "config.yaml").is_file()]
    require(bool(runs), str(directory), f"holds neither a {SWEEP_FILE} nor directories of runs")
    configs = {run.path.name: flat(configuration(run)) for run in runs}
    keys = differing(list(configs.values()))
    jobs = [
        Job(name=name, overrides={key: as_word(config.get(key)) for key in keys}) for name, config in configs.items()
    ]
    created = min(run.config.stat().st_mtime for run in runs)
    return Sweep(name=directory.resolve().name, created=created, words=[], fixed=[], jobs=sorted_jobs(jobs))


def configuration(run: RunDir) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(str(run.config), "is not YAML") from None
    require(isinstance(tree, dict), str(run.config), "is not the configuration of a run")
    assert isinstance(tree, dict)
    return tree


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which configurations differ, but for those that only name a run."""
    keys = dict.fromkeys(key for config in configs for key in config if not key.startswith(NOT_SWEPT))
    return [key for key in keys if len({as_word(config.get(key)) for config in configs}) > 1]


def as_word(value: Any) -> str:
    """A value as one would write it on the command line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            return str(value)
