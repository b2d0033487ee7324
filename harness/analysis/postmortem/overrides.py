"""Finds the command-line overrides that reproduce a resolved configuration.

Why: a post-mortem ends in a command to run, but a run directory holds the resolved configuration, not its overrides.
How: group options are guessed from the configuration; the other overrides are the keys that still differ. The result
is composed again and returned only if it reproduces the configuration.
Left out: sections such as `launch` and `telemetry`, which do not affect what is computed.
"""

from __future__ import annotations

from typing import Any

from harness.config import compose, conf_files
from harness.config.command_line import override
from harness.config.data import DataKind
from harness.config.errors import ConfigError, StorageError
from harness.config.optim import OptimConfig, OptimizerKind, ScheduleKind
from harness.config.schema import Config
from harness.core.rundir import MAY_DIFFER, RunDir

IGNORED = (*MAY_DIFFER, "run.name")
NAMED = ("data.sources.",)
"""Sections whose keys are chosen by the user. New keys need Hydra's `+`."""


def overrides_in(run: RunDir) -> list[str] | None:
    """Overrides that reproduce the configuration of a run; None if another version wrote it and it cannot be read."""
    try:
        return overrides_of(compose.read(run.config))
    except (ConfigError, StorageError):
        return None


def overrides_of(cfg: Config) -> list[str] | None:
    """Overrides that reproduce a configuration; empty if it is the default, None if none were found."""
    groups = [*groups_of(cfg), *required_overrides(cfg)]
    try:
        wanted, start = computed_settings(cfg), computed_settings(compose.load(groups))
        overrides = [*groups, *differing_overrides(wanted, start, cfg)]
        return overrides if computed_settings(compose.load(overrides)) == wanted else None
    except ConfigError:
        return None


def groups_of(cfg: Config) -> list[str]:
    """Group options that set most keys to their values."""
    kinds = {source.kind for source in cfg.data.sources.values()}
    data = str(min(kinds)) if list(cfg.data.sources) == ["main"] else "mixture"
    chosen = {
        "model": cfg.model.name,
        "data": data,
        "optim": _optim_option(cfg.optim),
        "precision": str(cfg.precision.kind),
        "parallel": "hsdp" if cfg.parallel.replicate > 1 else "fsdp",
    }
    defaults = {"model": "tiny", "data": str(DataKind.embedded), "optim": "adamw", "precision": "fp32"}
    defaults["parallel"] = "fsdp"
    return [
        f"{group}={option}"
        for group, option in chosen.items()
        if option in conf_files.options_of(group) and option != defaults[group]
    ]


def _optim_option(cfg: OptimConfig) -> str:
    if cfg.kind is OptimizerKind.muon:
        return "muon"
    return "adamw_wsd" if cfg.schedule is ScheduleKind.wsd else "adamw"


def required_overrides(cfg: Config) -> list[str]:
    """Overrides without which the group options are no valid configuration: `data=files` needs paths."""
    sources = cfg.data.sources
    is_files = list(sources) == ["main"] and sources["main"].kind is DataKind.files
    return [override("data.sources.main.paths", list(sources["main"].paths))] if is_files else []


def computed_settings(cfg: Config) -> dict[str, Any]:
    """Keys and values that affect what is computed."""
    return {key: value for key, value in compose.flat(compose.plain(cfg)).items() if not key.startswith(IGNORED)}


def differing_overrides(wanted: dict[str, Any], start: dict[str, Any], cfg: Config) -> list[str]:
    """One override for each key that differs; a new data source is added as a whole."""
    names = [name for name in cfg.data.sources if not any(key.startswith(f"data.sources.{name}.") for key in start)]
    added = [f"data.sources.{name}." for name in names]
    sources = compose.plain(cfg)["data"]["sources"]
    gone = {key.split(".")[2] for key in start if key.startswith(NAMED)} - set(cfg.data.sources)
    keys = [key for key in wanted if wanted[key] != start.get(key, object())]
    overrides = [override(key, wanted[key]) for key in keys if not key.startswith(tuple(added) or ("\0",))]
    if names:
        overrides.append(override("+data.sources", {name: sources[name] for name in names}))
    return [*overrides, *(f"~data.sources.{name}" for name in sorted(gone))]
