"""Computes the URI of the MLflow store of a run, without importing torch or MLflow.

Without `telemetry.tracking_uri`, all runs in `run.dir` share one sqlite file, so that a sweep is one table. Relative
sqlite paths are made absolute, because the rest of a run may be sent later and from another directory. `env:NAME` is
replaced by the value of the environment variable only when a connection is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from harness.config.schema import Config
from harness.core.credentials import ENVIRONMENT, move_credentials_to_environment, resolve_uri
from harness.core.locking.file_lock import exclusive

SQLITE = "sqlite:///"


def tracking_uri(cfg: Config) -> str:
    """The store of a run, with an absolute path."""
    return absolute_uri(cfg.telemetry.tracking_uri, runs=Path(cfg.run.dir))


def absolute_uri(uri: str | None, *, runs: Path) -> str:
    """Make a sqlite path absolute. Without a URI, use `mlflow.db` in the directory of the runs."""
    if uri is None:
        return f"{SQLITE}{runs.resolve() / 'mlflow.db'}"
    database = None if uri.startswith(ENVIRONMENT) else sqlite_path(uri)
    return uri if database is None else f"{SQLITE}{database.resolve()}"


def sqlite_path(uri: str) -> Path | None:
    """The file of a sqlite store; None for any other store."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) and uri != SQLITE else None


def is_directory(uri: str) -> bool:
    """Whether MLflow would keep the runs as files in a directory. It writes a metric `grad_norm` as a file, so it
    cannot write `grad_norm/blocks.0`, which would lie in a directory of that name."""
    scheme = urlsplit(uri).scheme
    return scheme == "file" or (not scheme and not uri.startswith("databricks"))


def connection_uri(uri: str) -> str:
    """The URI to pass to MLflow: variables resolved, credentials of a server moved to the environment."""
    return absolute_uri(move_credentials_to_environment(resolve_uri(uri)), runs=Path())


@contextmanager
def schema_lock(uri: str) -> Iterator[None]:
    """Serialize the opening of a sqlite store, because the first process that opens it creates the tables."""
    database = sqlite_path(uri)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(database.with_name(f".{database.name}.lock"), keep_trying=lambda: True):
        yield
