"""The configuration that an incident ran with: that of the run without what later resumes have changed.

Why: the remedy of a post-mortem is a resume with another configuration. Judged by that, the incident would have another
cause as soon as its remedy is applied.
How: each resume with `run.resume=changed` has recorded the old values.
Left out: a change while the incident was open. It is part of the incident.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.analysis.postmortem.overrides import NAMED, overrides_of
from harness.analysis.replay.request import set_value
from harness.config import compose
from harness.config.errors import ConfigError, StorageError
from harness.config.explain import explain
from harness.config.schema import Config
from harness.control.inbox import config_changes
from harness.core.credentials import without_credentials
from harness.core.events import Incident
from harness.core.rundir import RunDir

FILES = ".files"
"""A change of a source that is recorded like a config key and is none: hashes of its files."""


def values_before_later_resumes(run: RunDir, incident: Incident) -> dict[str, Any]:
    """Config key -> its value in the incident, for each key that a resume after the incident has changed."""
    later = [event for event in config_changes(run) if event.iteration >= incident.last]
    return {
        key: old
        for event in reversed(later)
        for key, (old, _new) in event.changes.items()
        if not (key.startswith(NAMED) and key.endswith(FILES))
    }


def added_sources(undone: Mapping[str, Any]) -> list[str]:
    """Names of the data sources that were not in the configuration of the incident."""
    kinds = [key for key, old in undone.items() if key.startswith(NAMED) and key.endswith(".kind") and old is None]
    return [key.split(".")[2] for key in kinds]


def settings_at(run: RunDir, incident: Incident, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an incident; `settings` are those of the run now. Credentials are removed, because evidence is
    shared."""
    undone = values_before_later_resumes(run, incident)
    added = tuple(f"data.sources.{name}." for name in added_sources(undone))
    undone = {key: without_credentials(old) if isinstance(old, str) else old for key, old in undone.items()}
    return {key: value for key, value in (settings | undone).items() if not key.startswith(added)}


def overrides_at(run: RunDir, incident: Incident) -> list[str] | None:
    """Overrides that reproduce the configuration of an incident; None if another version wrote it and it cannot be
    read."""
    try:
        return overrides_of(config_at(run, incident))
    except (ConfigError, StorageError):
        return None


def config_at(run: RunDir, incident: Incident) -> Config:
    """The configuration of an incident."""
    cfg, undone = compose.read(run.config), values_before_later_resumes(run, incident)
    if not undone:
        return cfg
    tree = compose.plain(cfg)
    sources = tree["data"]["sources"]
    for key, old in undone.items():
        if key.startswith(NAMED):
            sources.setdefault(key.split(".")[2], {})  # a source that was removed later
        set_value(tree, key, old)
    for name in added_sources(undone):
        del sources[name]
    try:
        return compose.validate(tree)
    except Exception as error:
        raise explain(error) from None
