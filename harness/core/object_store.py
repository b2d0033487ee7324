"""Object stores by URL (`s3://`, `gs://`, any other of fsspec): list, read ranges, upload, download, delete.

Why: stores fail for seconds and return, and each client library raises errors of its own. Callers see `StorageError`
for what may work later, `ConfigError` for what never will, and `FileNotFoundError` for an object that does not exist.
Denied access, or no credentials, is a `ConfigError` of its own: a token that has expired may be renewed, and a server
of credentials may fail for a moment. Who has worked with the store before may try again.
How: fsspec is imported at the first use. A file system is opened by the first request, because some connect to do so,
and that may fail as any request may. Listings are never cached, because other processes write to the store.
Credentials and endpoints come from the environment or from the files of the client (`AWS_*`,
`GOOGLE_APPLICATION_CREDENTIALS`, `FSSPEC_S3_ENDPOINT_URL`), never from the configuration of a run.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple, TypeVar, final

from harness.config.errors import ConfigError, StorageError
from harness.core.stderr_lines import print_warning

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LOOK_EVERY_S = 1.0
"""Seconds between two looks for a stop request during a pause."""
GCS = ("gs://", "gcs://")
READ_BYTES = 2**24
"""Bytes of one request when an object is read from its beginning to its end."""
TIMEOUT_S = 20
"""Seconds that a client of S3 or GCS waits for a connection or for more bytes."""
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created", "ino")
"""Names under which file systems of fsspec give what changes with the content of an object."""


class StoredObject(NamedTuple):
    num_bytes: int
    version: str
    """Changes when the object is replaced: its ETag, checksum or time."""


def is_url(path: str) -> bool:
    """Whether a path is the URL of an object store."""
    return "://" in path


def join_url(url: str, *names: str) -> str:
    return "/".join([url.rstrip("/"), *names])


def canonical_name(url: str) -> str:
    """The same text for every spelling of an object's URL that fsspec can open, as with `s3a://` and `s3://`; the path
    of a file of this machine, as with `file://`."""
    import fsspec

    system = fsspec.get_filesystem_class(url.partition("://")[0])
    protocol = system.protocol if isinstance(system.protocol, str) else system.protocol[0]
    path = str(system._strip_protocol(url))
    if protocol in ("file", "local"):
        return path
    place = ",".join(f"{name}={value}" for name, value in sorted(system._get_kwargs_from_urls(url).items()))
    return f"{protocol}://{place}/{path}"


def require_url(url: str, key: str) -> None:
    """Reject a URL that the installed packages cannot open; the message says what to install."""
    install = f"pip install 'pretraining-harness[{'gcs' if url.startswith(GCS) else 'remote'}]'"
    try:
        import fsspec
    except ImportError:
        raise ConfigError(key, f"{url} needs fsspec: {install}") from None
    try:
        fsspec.get_filesystem_class(url.partition("://")[0])
    except (ImportError, ValueError) as error:
        is_missing = isinstance(error, ImportError) and url.startswith((*GCS, "s3://", "s3a://"))
        advice = f": {install}" if is_missing else ""
        raise ConfigError(key, f"{url} cannot be opened: {_one_line(error)}{advice}") from None


@final
class AccessDenied(ConfigError):  # noqa: N818 -- names the state of the store
    """The credentials are missing, or they do not suffice for a request."""


@final
class ObjectStore:
    """All objects below one URL, by their path relative to it; safe to use from several threads."""

    def __init__(self, url: str, *, key: str, retry_s: float, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """`key` is the config key of the URL, for messages. Failed requests are repeated for `retry_s` seconds, or
        until `is_stopping` returns true; any thread calls it."""
        require_url(url, key)
        self.url = url.rstrip("/")
        self._key = key
        self._retry_s = retry_s
        self._is_stopping = is_stopping
        self._is_closed = Event()
        self._opening = Lock()
        self._opened: tuple[Any, str] | None = None

    def close(self) -> None:
        """End the pauses between requests, of all threads: from now on a request that fails is not repeated, and
        `chunks` makes no further one."""
        self._is_closed.set()

    def find_all(self, path: str = "") -> dict[str, StoredObject]:
        """All objects below a path, by their path relative to it; empty if there are none."""

        def find() -> dict[str, StoredObject]:
            start = self._full(path)
            try:
                found = self._system.find(start, detail=True)
            except FileNotFoundError:
                return {}
            return {
                name.removeprefix(start).lstrip("/"): StoredObject(int(info["size"] or 0), _version(info))
                for name, info in found.items()
            }

        return self._repeat(find, path)

    def glob(self, pattern: str) -> list[str]:
        """Paths of the objects that match a pattern, sorted."""
        found = self._repeat(lambda: self._system.glob(self._full(pattern)), pattern)
        return sorted(name.removeprefix(self._root).lstrip("/") for name in found)

    def look_up(self, path: str) -> StoredObject | None:
        """Size and version of an object; None if there is none."""

        def look() -> StoredObject | None:
            try:
                info = self._system.info(self._full(path))
            except FileNotFoundError:
                return None
            return None if info["type"] == "directory" else StoredObject(int(info["size"] or 0), _version(info))

        return self._repeat(look, path)

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes of an object from `start` up to `end`."""
        return bytes(self._repeat(lambda: self._system.cat_file(self._full(path), start=start, end=end), path))

    def chunks(self, path: str, num_bytes: int) -> Iterator[bytes]:
        """The bytes of an object of this size, one request after the other."""
        for start in range(0, num_bytes, READ_BYTES):
            if self._is_closed.is_set():
                raise StorageError(errno.ECANCELED, "the store was closed", join_url(self.url, path))
            yield self.read(path, start, min(num_bytes, start + READ_BYTES))

    def write(self, path: str, content: bytes) -> None:
        """Create or replace an object."""
        try:
            self._repeat(lambda: self._system.pipe_file(self._full(path), content), path)
        except FileNotFoundError:
            raise self._no_bucket() from None

    def upload(self, local: Path, path: str) -> None:
        """Create or replace an object from a local file; it appears when it is complete."""
        try:
            self._repeat(lambda: self._system.put_file(str(local), self._full(path)), path)
        except FileNotFoundError:
            local.stat()  # raises if it is the local file that does not exist, or was deleted between two attempts
            raise self._no_bucket() from None

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects one after the other; one that does not exist is no error."""
        for path in paths:

            def remove(path: str = path) -> None:
                try:
                    self._system.rm_file(self._full(path))
                except FileNotFoundError:
                    return

            self._repeat(remove, path)

    def require_bucket(self) -> None:
        """Reject a URL whose bucket does not exist. Without the right to look, or without an answer, it may exist."""
        try:
            self._system.info(self._bucket)
        except FileNotFoundError:
            raise self._no_bucket() from None
        except Exception:
            return

    def _open(self) -> tuple[Any, str]:
        """The file system, and the path of the URL in it."""
        with self._opening:
            if self._opened is None:
                self._opened = self._open_file_system()
            return self._opened

    def _open_file_system(self) -> tuple[Any, str]:
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self.url.startswith(("s3://", "s3a://")):
            timeouts = {"connect_timeout": TIMEOUT_S, "read_timeout": TIMEOUT_S, "retries": {"max_attempts": 1}}
            options["config_kwargs"] = timeouts
        elif self.url.startswith(GCS):
            from aiohttp import ClientTimeout  # a dependency of gcsfs

            options["requests_timeout"] = ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
        elif self.url.startswith("file://"):
            options["auto_mkdir"] = True
        try:
            system, root = fsspec.core.url_to_fs(self.url, **options)
        except (TypeError, ValueError, FileNotFoundError) as error:
            raise ConfigError(self._key, f"{self.url} cannot be opened: {_one_line(error)}") from None
        _stop_own_repeats(system)
        return system, root.rstrip("/")

    @property
    def _system(self) -> Any:
        return self._open()[0]

    @property
    def _root(self) -> str:
        return self._open()[1]

    @property
    def _bucket(self) -> str:
        return self._root.partition("/")[0]

    def _no_bucket(self) -> ConfigError:
        return ConfigError(self._key, f"{self.url}: there is no bucket {self._bucket}; create it, or choose another")

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _repeat(self, attempt: Callable[[], T], path: str) -> T:
        """The result of the first attempt that succeeds within the time, and before `close` or a stop request;
        `StorageError` if none does."""
        name, until, pause_s = join_url(self.url, path), time.monotonic() + self._retry_s, FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except (FileNotFoundError, ConfigError):
                raise
            except Exception as error:
                if _is_denied(error):
                    raise AccessDenied(self._key, f"{name}: access denied ({_one_line(error)})") from None
                if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "NoCredentialProviders"):
                    raise AccessDenied(self._key, f"{name}: {_one_line(error)}") from None
                failure = StorageError(errno.EIO, f"the store does not answer: {_one_line(error)}", name)
                left_s = until - time.monotonic()
                if left_s <= 0 or self._is_ended_within(0):
                    raise failure from None
                pause_s = min(pause_s, left_s)
                print_warning(f"{name}: {_one_line(error)}; trying again in {pause_s:.1f} s")
            if self._is_ended_within(pause_s):
                raise failure
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _is_ended_within(self, pause_s: float) -> bool:
        """Wait for so many seconds, or until `close` or a stop request; whether one of them has come."""
        until = time.monotonic() + pause_s
        while not (is_ended := self._is_closed.is_set() or self._is_stopping()):
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            self._is_closed.wait(min(LOOK_EVERY_S, left_s))
        return is_ended


def _stop_own_repeats(system: Any) -> None:
    """Let each request fail at once: s3fs and gcsfs repeat requests by themselves, for up to half a minute and without
    a word. Here each failure is printed, and `retry_s` holds."""
    system.retries = 1  # s3fs reads it at each request
    once = getattr(getattr(type(system), "_request", None), "__wrapped__", None)
    if once is not None:
        system._request = partial(once, system)  # gcsfs: its method without the decorator that repeats it


def _is_denied(error: Exception) -> bool:
    """Whether the credentials do not suffice. gcsfs raises a plain `OSError` for status 403, and for 401 its
    `HttpError`, unless a token has expired."""
    if isinstance(error, PermissionError):
        return True
    if getattr(error, "code", None) == 401:
        return "Invalid Credentials" not in str(error)
    return isinstance(error, OSError) and str(error).startswith("Forbidden: ")


def _version(info: dict[str, Any]) -> str:
    return next((str(info[key]).strip('"') for key in _VERSION_KEYS if info.get(key)), "")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
