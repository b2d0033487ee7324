"""Which MLflow store a run reports to, as a URI; torch-free and MLflow-free.

A run that names none shares one sqlite file with its neighbours in `run.dir`, so that a sweep is one table. Relative
sqlite paths are made absolute, because the rest of a run may be sent later and from elsewhere. The name of an
environment variable (`env:NAME`) is replaced by its value only when a connection is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.config.schema import Config
from harness.core.credentials import ENVIRONMENT, real_uri, through_environment
from harness.core.locking.file_lock import exclusive

SQLITE = "sqlite:///"


def tracking_uri(cfg: Config) -> str:
    """The store of a run, resolved."""
    return resolve(cfg.telemetry.tracking_uri, runs=Path(cfg.run.dir))


def resolve(uri: str | None, *, runs: Path) -> str:
    """`uri` with an absolute path where it has one; without a URI, sqlite in the directory of the runs."""
    if uri is None:
        return f"{SQLITE}{runs.resolve() / 'mlflow.db'}"
    database = None if uri.startswith(ENVIRONMENT) else sqlite_path(uri)
    return uri if database is None else f"{SQLITE}{database.resolve()}"


def sqlite_path(uri: str) -> Path | None:
    """The file of a sqlite store; None for every other kind."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) and uri != SQLITE else None


def connection_uri(uri: str) -> str:
    """What MLflow is given: the value of a variable, and no password of a server."""
    return resolve(through_environment(real_uri(uri)), runs=Path())


@contextmanager
def schema_lock(uri: str) -> Iterator[None]:
    """One process at a time opens a sqlite store, because the first to do so creates its tables."""
    database = sqlite_path(uri)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(database.with_name(f".{database.name}.lock"), keep_trying=lambda: True):
        yield
