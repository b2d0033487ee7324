"""Delivers one alert: POST to a webhook, a command, or e-mail through sendmail.

Each function raises if the alert was not accepted. No message contains the URL of the webhook, which is a secret: it is
read from the environment or from a file each time it is needed, and written nowhere.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from email.message import EmailMessage
from enum import StrEnum
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from harness.config.alerts import AlertKind, AlertsConfig
from harness.config.errors import ConfigError, require

REQUEST_TIMEOUT_S = 10.0
PROGRAM_TIMEOUT_S = 60.0
LAST_BYTES = 4096
REJECTED = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
"""Answers of a webhook that are about the content of an alert."""
URL_KEY = "telemetry.alerts.webhook.url"


class ChannelKind(StrEnum):
    """Where an alert goes."""

    webhook = "webhook"
    command = "command"
    email = "email"


class DeliveryError(Exception):
    """A channel did not accept an alert; it may accept it later."""


class RejectedError(DeliveryError):
    """A channel does not accept this alert; it may accept others."""


def channels_for(cfg: AlertsConfig, kind: AlertKind) -> list[ChannelKind]:
    """The channels that get alerts of this kind."""
    wanted = {
        ChannelKind.webhook: cfg.webhook.url is not None and kind in cfg.webhook.events,
        ChannelKind.command: bool(cfg.command.run) and kind in cfg.command.events,
        ChannelKind.email: bool(cfg.email.to) and kind in cfg.email.events,
    }
    return [channel for channel, is_wanted in wanted.items() if is_wanted]


def deliver(channel: ChannelKind, cfg: AlertsConfig, fields: dict[str, Any]) -> None:
    """Deliver an alert with these fields: `text` for people, the others for programs."""
    match channel:
        case ChannelKind.webhook:
            post_webhook(find_webhook(cfg), fields["text"])
        case ChannelKind.command:
            variables = {f"HARNESS_ALERT_{name.upper()}": str(value) for name, value in fields.items()}
            run_program(cfg.command.run, json.dumps(fields) + "\n", variables)
        case ChannelKind.email:
            run_program([cfg.email.sendmail, "-t", "-i"], render_email(cfg, fields), {})


def find_webhook(cfg: AlertsConfig) -> str:
    """The URL of the webhook while a run trains. Its file may be missing for a moment, so that is no invalid config."""
    assert cfg.webhook.url is not None
    try:
        return resolve_webhook(cfg.webhook.url)
    except ConfigError as error:
        raise DeliveryError(str(error)) from None


def resolve_webhook(reference: str) -> str:
    """The URL behind `env:NAME` or `file:PATH`. Raises ConfigError, without the URL, if there is none."""
    source, _, name = reference.partition(":")
    if source == "env":
        url = os.environ.get(name, "")
        require(bool(url), URL_KEY, f"the environment variable {name} is not set")
    else:
        try:
            url = Path(name).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(URL_KEY, f"cannot read {name}: {problem}") from None
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable() and " " not in url
    except ValueError:
        valid = False
    require(valid, URL_KEY, f"{reference} does not hold an http or https URL")
    return url


@final
class NoRedirects(HTTPRedirectHandler):
    """Follows no redirect: urllib repeats a POST as a GET without the text, and a login page would answer with 200."""

    def redirect_request(self, *_: object) -> None:
        """None: the answer is an error."""


def post_webhook(url: str, text: str) -> None:
    """POST `{"text": ...}`; an answer other than 2xx raises."""
    body = json.dumps({"text": text}).encode()
    request = Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    try:
        with build_opener(NoRedirects).open(request, timeout=REQUEST_TIMEOUT_S):
            pass
    except HTTPError as error:
        error.close()
        if error.code in REJECTED:
            raise RejectedError(f"the webhook rejected the alert with HTTP status {error.code}") from None
        advice = ", a redirect: give its final URL" if error.code // 100 == 3 else ""
        raise DeliveryError(f"the webhook answered with HTTP status {error.code}{advice}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        problem = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
        raise DeliveryError(f"the webhook did not answer: {problem}") from None


def run_program(command: Sequence[str], text: str, variables: dict[str, str]) -> None:
    """Run a program with `text` on stdin and these variables; an exit code other than 0 raises.

    What it writes to stderr goes to a file. A pipe would stay open as long as a process that it leaves behind.
    """
    with ExitStack() as files:
        stderr: IO[bytes] | None = None
        with suppress(OSError):  # no room for a file: the alert is sent without it
            stderr = files.enter_context(TemporaryFile())
        try:
            done = subprocess.run(
                [*command],
                input=text.encode(),
                env=os.environ | variables,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if stderr is None else stderr,
                check=False,
                timeout=PROGRAM_TIMEOUT_S,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise DeliveryError(f"{command[0]} took longer than {PROGRAM_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise DeliveryError(f"cannot run {command[0]}: {error.strerror}") from None
        if done.returncode != 0:
            said = last_output_line(stderr)
            raise DeliveryError(f"{command[0]} exited with code {done.returncode}" + (f": {said}" if said else ""))


def last_output_line(output: IO[bytes] | None) -> str:
    """The last line that a program wrote; empty if there is none."""
    if output is None:
        return ""
    output.seek(max(0, output.seek(0, os.SEEK_END) - LAST_BYTES))
    return next(reversed(output.read().decode(errors="replace").strip().splitlines()), "")


def render_email(cfg: AlertsConfig, fields: dict[str, Any]) -> str:
    """The message with its headers, as sendmail reads it."""
    message = EmailMessage()
    subject = str(fields["text"]).splitlines()[0]
    message["Subject"] = subject if len(subject) <= 150 else f"{subject[:149]}…"
    message["To"] = ", ".join(cfg.email.to)
    if cfg.email.sender is not None:
        message["From"] = cfg.email.sender
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(f"{fields['text']}\n")
    return message.as_string()
