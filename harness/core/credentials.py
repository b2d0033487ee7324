"""Keeps passwords and tokens of a tracking URI off the disk, and masks them in text that is shown.

A run writes its configuration to config.yaml, mlflow.json, sweep.yaml and MLflow. A secret in `telemetry.tracking_uri`
would be copied to all of them, so such a URI is an invalid config. MLflow reads user, password and token from the
environment. Any other URI, such as that of a database with a password, can be given as `env:NAME`: the name of the
variable is written, and only the process that sends to MLflow reads its value.
"""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from harness.config.errors import ConfigError, require

ENVIRONMENT = "env:"
KEY = "telemetry.tracking_uri"
SECRET = re.compile(r"token|secret|passw|pwd|credential|auth|key|sig", re.IGNORECASE)
"""Matches the name of a URI parameter that holds a secret."""
ADVICE = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; or put the whole URI into an "
    f"environment variable NAME and give {KEY}={ENVIRONMENT}NAME"
)
_MASKS = (
    (re.compile(r"(?<=://)[^/@\s]+@"), "***@"),
    (re.compile(r"(?<=://)([^/:@\s]*):[^@\s]*@"), "***@"),
    (re.compile(rf"([?&][^=&\s]*(?:{SECRET.pattern})[^=&\s]*)=[^&#\s]+", re.IGNORECASE), r"\1=***"),
)


def without_credentials(text: str) -> str:
    """Mask user, password and secret parameters of every URI in `text`."""
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text


def holds_credentials(uri: str) -> bool:
    """Whether a URI holds a password or a token. For a server any user counts, for a database only a password."""
    parts = urlsplit(uri)
    if any(SECRET.search(name) and value for name, value in parse_qsl(parts.query)):
        return True
    if parts.scheme in ("http", "https"):
        return "@" in parts.netloc
    return re.match(r"[^:/?#]+://[^:/@?#]*:[^@]+@", uri) is not None


def require_no_credentials(uri: str | None) -> None:
    """Reject a URI that holds a secret. The error message does not repeat the URI."""
    if uri is None:
        return
    name = uri.removeprefix(ENVIRONMENT)
    valid = name == uri or name.isidentifier()
    require(valid, KEY, f"must be {ENVIRONMENT}NAME with the name of an environment variable")
    message = f"must not hold a password or token, because it is written to disk; {ADVICE}"
    require(not holds_credentials(uri), KEY, message)


def resolve_uri(uri: str) -> str:
    """The URI to connect to: `env:NAME` is replaced by the value of the variable."""
    if not uri.startswith(ENVIRONMENT):
        return uri
    name = uri.removeprefix(ENVIRONMENT)
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(KEY, f"the environment variable {name} is not set")
    return value


def is_same_store(first: str, second: str) -> bool:
    """Whether two URIs name the same store, credentials aside."""
    return first == second or _strip_user(first) == _strip_user(second)


def _strip_user(uri: str) -> str:
    try:
        return re.sub(r"(?<=://)[^/\s]*@", "", resolve_uri(uri))
    except ConfigError:
        return uri


def move_credentials_to_environment(uri: str) -> str:
    """Strip user and password from a server's URI and set them as MLflow's environment variables.

    MLflow and its libraries print URIs; this keeps secrets out of their output.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.username is None:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
