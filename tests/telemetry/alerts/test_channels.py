"""Tests of the three channels with the real thing: an HTTP server, a program, a sendmail script."""

from __future__ import annotations

import email
import email.policy
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from harness.config.alerts import AlertCommandConfig, AlertsConfig, EmailConfig, WebhookConfig
from harness.telemetry.alerts import channels
from harness.telemetry.alerts.channels import ChannelKind, DeliveryError, RejectedError, deliver, post_webhook
from tests.telemetry.alerts.webhook_server import WebhookServer, webhook_server

FIELDS = {"kind": "halt", "run": "big", "iteration": 7, "text": "[big] halted: größer\nsecond line"}


@pytest.fixture(name="server")
def _server() -> Iterator[WebhookServer]:
    with webhook_server() as server:
        yield server


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_webhook_gets_slack_json(server: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", server.url)
    deliver(ChannelKind.webhook, AlertsConfig(webhook=WebhookConfig(url="env:HOOK")), FIELDS)
    assert server.bodies == [{"text": FIELDS["text"]}]
    server.status = 500
    with pytest.raises(DeliveryError, match=r"^the webhook answered with HTTP status 500$"):
        post_webhook(server.url, "again")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_no_delivery(server: WebhookServer, status: int) -> None:
    server.status = status
    message = f"^the webhook answered with HTTP status {status}, a redirect: give its final URL$"
    with pytest.raises(DeliveryError, match=message):
        post_webhook(server.url, "lost")


def test_a_webhook_that_is_gone_is_an_error_without_its_url() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DeliveryError) as it:
        post_webhook(f"http://127.0.0.1:{port}/hunter2", "text")
    assert str(it.value) == "the webhook did not answer: Connection refused"


def test_a_command_gets_json_on_stdin_and_variables(tmp_path: Path) -> None:
    program = script(
        tmp_path / "pager",
        f'cat > {tmp_path}/stdin; echo "$1 $HARNESS_ALERT_KIND $HARNESS_ALERT_RUN" > {tmp_path}/said',
    )
    deliver(ChannelKind.command, AlertsConfig(command=AlertCommandConfig(run=[program, "a b; c"])), FIELDS)
    assert json.loads((tmp_path / "stdin").read_text()) == FIELDS
    assert (tmp_path / "said").read_text() == "a b; c halt big\n"
    failing = script(tmp_path / "failing", "echo no network >&2; exit 7")
    with pytest.raises(DeliveryError, match=r"failing exited with code 7: no network$"):
        deliver(ChannelKind.command, AlertsConfig(command=AlertCommandConfig(run=[failing])), FIELDS)
    with pytest.raises(DeliveryError, match=r"^cannot run /no/pager: No such file or directory$"):
        deliver(ChannelKind.command, AlertsConfig(command=AlertCommandConfig(run=["/no/pager"])), FIELDS)


@pytest.mark.parametrize("exit_code", [0, 7])
def test_the_exit_code_of_a_command_decides_although_it_leaves_a_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int
) -> None:
    """As `ssh` with ControlPersist does: the process that stays holds stderr."""
    monkeypatch.setattr(channels, "PROGRAM_TIMEOUT_S", 10.0)
    pid = tmp_path / "pid"
    body = f"cat > {tmp_path}/stdin; echo no network >&2; sleep 600 & echo $! > {pid}; exit {exit_code}"
    config = AlertsConfig(command=AlertCommandConfig(run=[script(tmp_path / "pager", body)]))
    said = pytest.raises(DeliveryError, match=r"pager exited with code 7: no network$")
    try:
        with said if exit_code else nullcontext():
            deliver(ChannelKind.command, config, FIELDS)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert json.loads((tmp_path / "stdin").read_text()) == FIELDS


def test_a_url_that_cannot_be_read_for_a_moment_is_tried_again(
    server: WebhookServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    with pytest.raises(DeliveryError, match=r"the environment variable HOOK is not set$"):
        deliver(ChannelKind.webhook, AlertsConfig(webhook=WebhookConfig(url="env:HOOK")), FIELDS)
    secret = tmp_path / "url"
    config = AlertsConfig(webhook=WebhookConfig(url=f"file:{secret}"))
    with pytest.raises(DeliveryError, match=r"url: No such file or directory$"):
        deliver(ChannelKind.webhook, config, FIELDS)
    secret.write_text("")
    with pytest.raises(DeliveryError, match=r"does not hold an http or https URL$"):
        deliver(ChannelKind.webhook, config, FIELDS)
    secret.write_text(f"{server.url}\n")
    deliver(ChannelKind.webhook, config, FIELDS)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_an_answer_about_the_content_rejects_the_alert_alone(server: WebhookServer, status: int) -> None:
    server.status = status
    with pytest.raises(RejectedError, match=f"^the webhook rejected the alert with HTTP status {status}$"):
        post_webhook(server.url, "too long")


def test_an_email_goes_through_sendmail(tmp_path: Path) -> None:
    program = script(tmp_path / "sendmail", f'echo "$@" > {tmp_path}/arguments; cat > {tmp_path}/message')
    cfg = EmailConfig(to=["ann@lab.example", "bob@lab.example"], sender="harness@lab.example", sendmail=program)
    deliver(ChannelKind.email, AlertsConfig(email=cfg), FIELDS)
    assert (tmp_path / "arguments").read_text() == "-t -i\n"
    message = email.message_from_bytes((tmp_path / "message").read_bytes(), policy=email.policy.default)
    assert (message["Subject"], message["To"]) == ("[big] halted: größer", "ann@lab.example, bob@lab.example")
    assert message["From"] == "harness@lab.example"
    body = message.get_body()
    assert body is not None
    assert body.get_content() == f"{FIELDS['text']}\n"
