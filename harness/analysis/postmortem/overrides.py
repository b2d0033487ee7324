"""The words of a command line that give a configuration again.

Why: a post-mortem ends in a command that somebody can run, and a run directory holds the resolved configuration, not
the words it came from.
How: the groups are guessed from what the configuration says of itself, the rest are the keys that still differ. The
words are then composed, and only returned where they give the configuration again; otherwise there are none.
Left out: what says where and how visibly a run happens, such as `launch` and `telemetry`; the next one has its own.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from harness.config import compose
from harness.config.data import DataKind
from harness.config.errors import ConfigError
from harness.config.optim import ScheduleKind
from harness.config.schema import Config
from harness.core.rundir import MAY_DIFFER, RunDir

NOT_SAID = (*MAY_DIFFER, "run.name")
NAMED = ("data.sources.",)
"""Sections whose keys are names of the user's choice: they must be added."""


def overrides_in(run: RunDir) -> list[str]:
    """The words for the configuration of a run; what another version wrote may give none."""
    try:
        return overrides_of(compose.read(run.config))
    except ConfigError:
        return []


def overrides_of(cfg: Config) -> list[str]:
    """The words; empty where no words were found that give this configuration."""
    groups = groups_of(cfg)
    try:
        wanted, start = said(cfg), said(compose.load(groups))
        words = [*groups, *differing(wanted, start, cfg)]
        return words if said(compose.load(words)) == wanted else []
    except ConfigError:
        return []


def groups_of(cfg: Config) -> list[str]:
    """Options of groups that bring most keys to where they are."""
    kinds = {source.kind for source in cfg.data.sources.values()}
    data = str(min(kinds)) if list(cfg.data.sources) == ["main"] else "mixture"
    chosen = {
        "model": cfg.model.name,
        "data": data,
        "optim": "adamw_wsd" if cfg.optim.schedule is ScheduleKind.wsd else "adamw",
        "precision": str(cfg.precision.kind),
        "parallel": "hsdp" if cfg.parallel.replicate > 1 else "fsdp",
    }
    defaults = {"model": "tiny", "data": str(DataKind.embedded), "optim": "adamw", "precision": "fp32"}
    defaults["parallel"] = "fsdp"
    return [
        f"{group}={option}"
        for group, option in chosen.items()
        if option in compose.options_of(group) and option != defaults[group]
    ]


def said(cfg: Config) -> dict[str, Any]:
    """Keys and values that decide what is computed."""
    return {key: value for key, value in compose.flat(compose.plain(cfg)).items() if not key.startswith(NOT_SAID)}


def differing(wanted: dict[str, Any], start: dict[str, Any], cfg: Config) -> list[str]:
    """One word for each key that differs; a source that is not there is added whole."""
    names = [name for name in cfg.data.sources if not any(key.startswith(f"data.sources.{name}.") for key in start)]
    added = [f"data.sources.{name}." for name in names]
    sources = compose.plain(cfg)["data"]["sources"]
    gone = {key.split(".")[2] for key in start if key.startswith(NAMED)} - set(cfg.data.sources)
    keys = [key for key in wanted if wanted[key] != start.get(key, object())]
    words = [f"{key}={value_of(wanted[key])}" for key in keys if not key.startswith(tuple(added) or ("\0",))]
    if names:
        words.append(f"+data.sources={value_of({name: sources[name] for name in names})}")
    return [*words, *(f"~data.sources.{name}" for name in sorted(gone))]


def value_of(value: Any) -> str:
    """A value as Hydra reads it on the command line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str() if value and all(letter.isalnum() or letter in "_-./" for letter in value):
            return value
        case str():
            return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        case list():
            return "[" + ",".join(value_of(each) for each in value) + "]"
        case dict():
            return "{" + ",".join(f"{key}:{value_of(each)}" for key, each in value.items()) + "}"
        case _:
            return str(yaml.safe_dump(value, default_flow_style=True).splitlines()[0])


def command(*words: str) -> str:
    """A command line for a shell."""
    return " ".join(shlex.quote(word) for word in words)
