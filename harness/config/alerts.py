"""Config section `telemetry.alerts`: which alerts go to a webhook, a command or e-mail."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from harness.config.errors import require, require_duration


class AlertKind(StrEnum):
    """What an alert is about."""

    incident = "incident"
    """An incident opened."""
    incident_ended = "incident_ended"
    """An incident ended; its post-mortem is written."""
    action = "action"
    """The sentinel or an operator acted: skip, rewind, rollback, cool, swap, ..."""
    halt = "halt"
    """The sentinel halted the run."""
    hang = "hang"
    """A rank hangs."""
    restarted = "restarted"
    """A rank died, hung or raised, or a machine was lost, and all ranks start again inside the job."""
    node_out = "node_out"
    """A machine was lost, left out of the run for its faults, or failed the health check of a Slurm job."""
    no_progress = "no_progress"
    """No new iteration for `no_progress_minutes`."""
    finished = "finished"
    """All steps are done."""
    stopped = "stopped"
    """Asked to stop, saved, resumable (exit code 75)."""
    failed = "failed"
    """The run crashed, or its processes are gone without a word."""


def every_kind() -> list[AlertKind]:
    return list(AlertKind)


@dataclass(slots=True, kw_only=True)
class WebhookConfig:
    """POST of `{"text": ...}`, as Slack, Mattermost and Discord (with `/slack`) accept it."""

    url: str | None = None
    """env:NAME or file:PATH: where the URL is, because the URL is a secret and this config is written to disk; null: no
    webhook."""
    events: list[AlertKind] = field(default_factory=every_kind)
    """Kinds of alert that go there."""

    def __post_init__(self) -> None:
        valid = self.url is None or (self.url.partition(":")[0] in ("env", "file") and bool(self.url.partition(":")[2]))
        message = "must be env:NAME (an environment variable) or file:PATH with the URL, which is a secret, or null"
        require(valid, "telemetry.alerts.webhook.url", message)


@dataclass(slots=True, kw_only=True)
class AlertCommandConfig:
    """A program that gets an alert as JSON on stdin and in the variables HARNESS_ALERT_*."""

    run: list[str] = field(default_factory=list)
    """Program and arguments, run without a shell; empty: no command."""
    events: list[AlertKind] = field(default_factory=every_kind)
    """Kinds of alert that go there."""


@dataclass(slots=True, kw_only=True)
class EmailConfig:
    """E-mail through the sendmail program of the machine of rank 0."""

    to: list[str] = field(default_factory=list)
    """Addresses; empty: no e-mail."""
    sender: str | None = None
    """Address in `From`; null: sendmail chooses."""
    sendmail: str = "/usr/sbin/sendmail"
    """Program that takes a message with headers on stdin, called with -t -i."""
    events: list[AlertKind] = field(default_factory=every_kind)
    """Kinds of alert that go there."""

    def __post_init__(self) -> None:
        for address in [*self.to, *([] if self.sender is None else [self.sender])]:
            valid = "@" in address and not set(address) & set(" \r\n,<>")
            require(valid, "telemetry.alerts.email", f"must hold plain addresses name@host, got {address!r}")


@dataclass(slots=True, kw_only=True)
class AlertsConfig:
    """Alerts about a run, sent by its sink process."""

    webhook: WebhookConfig = field(default_factory=WebhookConfig)
    command: AlertCommandConfig = field(default_factory=AlertCommandConfig)
    email: EmailConfig = field(default_factory=EmailConfig)
    no_progress_minutes: float = 30.0
    """Minutes without a new iteration after which `no_progress` is sent; 0: never. A pause does not count."""
    repeat_minutes: float = 60.0
    """An alert about the same thing is sent again after this many minutes at the earliest."""
    per_hour: int = 30
    """Most alerts of the kinds incident, incident_ended and action in an hour, by channel; the next one says how many
    were left out. Other kinds are rare and always sent."""
    base_url: str | None = None
    """URL under which the run directories are served, for links to post-mortems; null: paths on disk."""

    def __post_init__(self) -> None:
        value = self.no_progress_minutes
        require(value >= 0, "telemetry.alerts.no_progress_minutes", f"must be 0 (never) or more, got {value}")
        message = f"must be at least 1, got {self.repeat_minutes}"
        require(self.repeat_minutes >= 1, "telemetry.alerts.repeat_minutes", message)
        for name in ("no_progress_minutes", "repeat_minutes"):
            require_duration(getattr(self, name), f"telemetry.alerts.{name}", unit_s=60)
        require(self.per_hour >= 1, "telemetry.alerts.per_hour", f"must be at least 1, got {self.per_hour}")

    @property
    def has_channel(self) -> bool:
        return self.webhook.url is not None or bool(self.command.run) or bool(self.email.to)
