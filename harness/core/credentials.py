"""Passwords and tokens of a tracking URI: kept off the disk, and cut out of text that is shown.

A run writes its configuration to config.yaml, mlflow.json, sweep.yaml and MLflow itself, so a secret in
`telemetry.tracking_uri` would be copied to all of them. It is refused. MLflow reads user, password and token from the
environment by itself; any other URI, such as that of a database with a password, can be given as `env:NAME`: what is
written is the name of the variable, and only the process that sends to MLflow reads its value.
"""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from harness.config.errors import ConfigError, require

ENVIRONMENT = "env:"
KEY = "telemetry.tracking_uri"
SECRET = re.compile(r"token|secret|passw|pwd|credential|auth|key|sig", re.IGNORECASE)
"""In the name of a parameter of a URI."""
ADVICE = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; or put the whole URI into an "
    f"environment variable NAME and give {KEY}={ENVIRONMENT}NAME"
)
_SHOWN = (
    (re.compile(r"(?<=://)[^/@\s]+@"), "***@"),
    (re.compile(r"(?<=://)([^/:@\s]*):[^@\s]*@"), "***@"),
    (re.compile(rf"([?&][^=&\s]*(?:{SECRET.pattern})[^=&\s]*)=[^&#\s]+", re.IGNORECASE), r"\1=***"),
)


def without_credentials(text: str) -> str:
    """`text` with user, password and secret parameters of any URI in it hidden."""
    for pattern, shown in _SHOWN:
        text = pattern.sub(shown, text)
    return text


def holds_credentials(uri: str) -> bool:
    """Whether a URI holds a password or a token: of a server any user counts, of a database only a password."""
    parts = urlsplit(uri)
    if any(SECRET.search(name) and value for name, value in parse_qsl(parts.query)):
        return True
    if parts.scheme in ("http", "https"):
        return "@" in parts.netloc
    return re.match(r"[^:/?#]+://[^:/@?#]*:[^@]+@", uri) is not None


def require_no_credentials(uri: str | None) -> None:
    """Refuse a URI that must not be written down; the message does not repeat it."""
    if uri is None:
        return
    name = uri.removeprefix(ENVIRONMENT)
    valid = name == uri or name.isidentifier()
    require(valid, KEY, f"after {ENVIRONMENT} comes the name of an environment variable")
    require(not holds_credentials(uri), KEY, f"holds a password or token, which would be written to disk; {ADVICE}")


def require_variable(uri: str | None) -> None:
    """Refuse `env:NAME` where the variable is not set."""
    if uri is not None and uri.startswith(ENVIRONMENT):
        real_uri(uri)


def real_uri(uri: str) -> str:
    """The URI to connect to: the value of the variable where one is named."""
    if not uri.startswith(ENVIRONMENT):
        return uri
    name = uri.removeprefix(ENVIRONMENT)
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(KEY, f"the environment variable {name} is not set")
    return value


def is_same_store(first: str, second: str) -> bool:
    """Whether two URIs name one store, whoever reads them."""
    return first == second or _bare(first) == _bare(second)


def _bare(uri: str) -> str:
    try:
        return re.sub(r"(?<=://)[^/\s]*@", "", real_uri(uri))
    except ConfigError:
        return uri


def through_environment(uri: str) -> str:
    """A server's URI without its user and password, which MLflow then finds in the environment of this process.

    MLflow and its libraries print URIs; what they do not know they cannot print.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.username is None:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
