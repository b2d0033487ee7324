"""Checks before a run starts that its sinks can work on this machine: packages, credentials, programs."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from harness.config.errors import require
from harness.config.telemetry import TelemetryConfig, WandbMode
from harness.core.credentials import KEY, resolve_uri
from harness.telemetry.alerts.channels import resolve_webhook
from harness.telemetry.sinks.store_uri import is_directory

NETRC = "~/.netrc"


def require_packages(cfg: TelemetryConfig) -> None:
    """Reject a sink whose package is not installed; the message names the extra."""
    for name, is_enabled in (("wandb", cfg.wandb.enabled), ("tensorboard", cfg.tensorboard.enabled)):
        message = f"needs the package {name}: pip install 'pretraining-harness[{name}]'"
        require(not is_enabled or find_spec(name) is not None, f"telemetry.{name}.enabled", message)


def require_sinks(cfg: TelemetryConfig) -> None:
    """Reject sinks that cannot work here. Secrets are looked up and not shown."""
    require_packages(cfg)
    if cfg.mlflow and cfg.tracking_uri is not None:
        message = "is a directory, which cannot hold a metric and the parts of it; use sqlite:///PATH, or a server"
        require(not is_directory(resolve_uri(cfg.tracking_uri)), KEY, message)
    if cfg.wandb.enabled and cfg.wandb.mode is WandbMode.online:
        netrc = Path(os.environ.get("NETRC", NETRC)).expanduser()
        has_key = bool(os.environ.get("WANDB_API_KEY")) or netrc.is_file()
        message = "online needs the environment variable WANDB_API_KEY, or `wandb login`; or choose offline"
        require(has_key, "telemetry.wandb.mode", message)
    alerts = cfg.alerts
    if alerts.webhook.url is not None:
        resolve_webhook(alerts.webhook.url)
    programs = {
        "telemetry.alerts.command.run": alerts.command.run[:1],
        "telemetry.alerts.email.sendmail": [alerts.email.sendmail] if alerts.email.to else [],
    }
    for key, names in programs.items():
        for name in names:
            require(shutil.which(name) is not None, key, f"no program {name} on this machine")
