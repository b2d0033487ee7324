"""Tests of what is rejected before a run starts: missing packages, keys, secrets and programs, in one line each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest

from harness.config import compose
from harness.config.errors import ConfigError
from harness.telemetry.sinks import sink_checks
from harness.telemetry.sinks.sink_checks import require_sinks
from launch.train import launch_run
from tests import composed

SECRET = "https://hooks.example/services/T0/B0/hunter2"


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_sink_without_its_package_names_the_extra_and_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_checks, "find_spec", lambda _: None)
    cfg = composed.load([f"run.dir={tmp_path / 'runs'}", f"telemetry.{name}.enabled=true"])
    message = rf"^telemetry\.{name}\.enabled: needs the package {name}: pip install 'pretraining-harness\[{name}\]'$"
    with pytest.raises(ConfigError, match=message):
        launch_run(cfg)
    assert list(tmp_path.iterdir()) == []


def test_wandb_online_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_checks, "find_spec", lambda _: object())
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    cfg = composed.load(["telemetry.wandb.enabled=true"]).telemetry
    with pytest.raises(
        ConfigError, match=r"^telemetry\.wandb\.mode: online needs the environment variable WANDB_API_KEY"
    ):
        require_sinks(cfg)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    require_sinks(cfg)


def test_the_url_of_a_webhook_is_never_in_the_config() -> None:
    for override in (f"telemetry.alerts.webhook.url='{SECRET}'", "telemetry.alerts.webhook.url='env:'"):
        with pytest.raises(ConfigError, match=r"^telemetry\.alerts\.webhook\.url: must be env:NAME") as it:
            compose.load([override])
        assert "hunter2" not in str(it.value)


def test_a_secret_that_cannot_be_read_is_one_line_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(url: str) -> str:
        with pytest.raises(ConfigError) as it:
            require_sinks(composed.load([f"telemetry.alerts.webhook.url='{url}'"]).telemetry)
        assert "hunter2" not in str(it.value)
        return str(it.value).removeprefix("telemetry.alerts.webhook.url: ")

    monkeypatch.delenv("HOOK", raising=False)
    assert problem("env:HOOK") == "the environment variable HOOK is not set"
    missing = tmp_path / "hook"
    assert problem(f"file:{missing}") == f"cannot read {missing}: No such file or directory"
    for wrong in ("hunter2", "ftp://hunter2", "file:///hunter2", "http://[hunter2"):
        missing.write_text(wrong)
        assert problem(f"file:{missing}") == f"file:{missing} does not hold an http or https URL"
    missing.write_text(f"{SECRET}\n")
    require_sinks(composed.load([f"telemetry.alerts.webhook.url='file:{missing}'"]).telemetry)
    assert SECRET not in os.environ.values()


def test_a_directory_of_mlflow_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """`grad_norm` and `grad_norm/embedding` would be a file and a directory of one name."""
    monkeypatch.setenv("STORE", "file:///data/mlruns")
    for uri in ("file:///data/mlruns", "mlruns", "/data/mlruns", "env:STORE"):
        with pytest.raises(ConfigError, match=r"^telemetry.tracking_uri: is a directory, .*; use sqlite:///PATH"):
            require_sinks(composed.load([f"telemetry.tracking_uri={uri}"]).telemetry)
    for uri in ("sqlite:///mlflow.db", "http://localhost:5000", "databricks", "postgresql://host/name"):
        require_sinks(composed.load([f"telemetry.tracking_uri={uri}"]).telemetry)


def test_a_missing_program_is_named() -> None:
    for overrides, message in (
        (["telemetry.alerts.command.run=[/no/pager,now]"], "telemetry.alerts.command.run: no program /no/pager"),
        (
            ["telemetry.alerts.email.to=[a@b.example]", "telemetry.alerts.email.sendmail=/no/sendmail"],
            "telemetry.alerts.email.sendmail: no program /no/sendmail",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^{message} on this machine$"):
            require_sinks(composed.load(overrides).telemetry)
    with pytest.raises(ConfigError, match=r"must hold plain addresses name@host, got 'a b'"):
        composed.load(["telemetry.alerts.email.to=[a b]"])


@pytest.mark.full
def test_the_plain_door_checks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun -m harness.train` has no launcher: rank 0 checks before it creates the directory."""
    from harness.resume import open_run
    from harness.run_corpus import RunData

    monkeypatch.delenv("HOOK", raising=False)
    overrides = [f"run.dir={tmp_path / 'runs'}", "run.name=a", "telemetry.alerts.webhook.url=env:HOOK"]
    opened = open_run(composed.load(overrides), cast(RunData, None))
    assert opened.problem == "telemetry.alerts.webhook.url: the environment variable HOOK is not set"
    assert list(tmp_path.iterdir()) == []
