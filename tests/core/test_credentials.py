"""Tests of secrets in a tracking URI: detection, masking, and that they never reach the disk."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from harness.config import compose
from harness.config.errors import ConfigError
from harness.core import rundir
from harness.core.credentials import holds_credentials, move_credentials_to_environment, without_credentials
from harness.core.processes import last_line
from harness.core.rundir import RunDir
from harness.telemetry.sinks.mlflow_progress import MlflowProgress, load_progress
from harness.telemetry.sinks.sink_process import SINK_LOG, SinkProcess
from harness.telemetry.sinks.store_uri import absolute_uri, connection_uri
from tests.distributed import cases
from tests.forks import Launched

SECRET = "hunter2"
VARIABLE = "STORE_OF_A_TEST"

SECRETS = {
    f"https://ann:{SECRET}@mlflow.example/x": "https://***@mlflow.example/x",
    f"https://{SECRET}@mlflow.example": "https://***@mlflow.example",
    f"http://mlflow.example:5000/?token={SECRET}&a=1": "http://mlflow.example:5000/?token=***&a=1",
    f"http://mlflow.example/x?a=1&api_key={SECRET}": "http://mlflow.example/x?a=1&api_key=***",
    f"postgresql://ann:{SECRET}@db:5432/mlflow": "postgresql://***@db:5432/mlflow",
    f"postgresql+psycopg2://ann:a/{SECRET}@db/mlflow": "postgresql+psycopg2://***@db/mlflow",
    f"mysql://db/mlflow?user=ann&password={SECRET}": "mysql://db/mlflow?user=ann&password=***",
}
"""A URI that holds a secret -> its masked form."""

HARMLESS = (
    "http://127.0.0.1:5000",
    "https://mlflow.example/team/@me",
    "sqlite:////home/ann@lab/a:b@c/mlflow.db",
    "postgresql://ann@db:5432/mlflow",
    "databricks://profile",
    "file:///tmp/mlruns",
    "env:MLFLOW_TRACKING_URI",
)


@pytest.mark.parametrize("uri", SECRETS)
def test_a_uri_with_a_secret_is_rejected_without_printing_it(tmp_path: Path, uri: str) -> None:
    assert holds_credentials(uri)
    assert without_credentials(f"no answer from {uri}") == f"no answer from {SECRETS[uri]}"
    overrides = [f"run.dir={tmp_path}", "run.name=a", f"telemetry.tracking_uri='{uri}'"]
    with pytest.raises(
        ConfigError, match=r"^telemetry\.tracking_uri: must not hold a password or token.*MLFLOW_TRACKING_"
    ) as it:
        compose.load(overrides)
    assert SECRET not in str(it.value)


@pytest.mark.parametrize("uri", HARMLESS)
def test_a_uri_without_a_secret_is_accepted_and_shown_unchanged(uri: str) -> None:
    assert compose.load([f"telemetry.tracking_uri='{uri}'"]).telemetry.tracking_uri == uri
    assert without_credentials(uri) == uri or uri.startswith(("sqlite", "postgresql")), "a user may be hidden"


def test_the_error_of_an_unparsable_override_masks_its_secret() -> None:
    with pytest.raises(ConfigError) as it:
        compose.load([f"telemetry.tracking_uri=https://ann:{SECRET}@mlflow.example/x?a={{"])
    assert SECRET not in str(it.value)


def test_a_run_of_an_earlier_version_can_be_read_but_not_written_again(tmp_path: Path) -> None:
    cfg = compose.load([f"run.dir={tmp_path}", "run.name=old"])
    cfg.telemetry.tracking_uri = f"https://ann:{SECRET}@mlflow.example"
    (tmp_path / "old").mkdir()
    run = rundir.locate(cfg)
    run.config.write_text(compose.to_yaml(cfg))
    read = compose.read(run.config)
    assert read == cfg
    with pytest.raises(ConfigError, match=r"^telemetry\.tracking_uri: must not hold a password"):
        rundir.prepare_run_dir(read, run)


def test_progress_of_an_earlier_version_keeps_its_run_and_loses_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    MlflowProgress(tracking_uri=f"https://ann:{SECRET}@mlflow.example", key="k", run_id="r", offset=7).save(run)
    monkeypatch.setenv(VARIABLE, f"https://ann:{SECRET}@mlflow.example")
    for uri in (f"env:{VARIABLE}", "https://mlflow.example"):
        progress = load_progress(run, uri)
        assert (progress.tracking_uri, progress.run_id, progress.offset) == (uri, "r", 7)
        assert SECRET not in run.mlflow.read_text()
    assert load_progress(run, "https://elsewhere.example").run_id is None


def test_a_variable_is_read_when_a_connection_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"env:{VARIABLE}"
    assert absolute_uri(uri, runs=tmp_path) == uri
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(
        ConfigError, match=rf"^telemetry\.tracking_uri: the environment variable {VARIABLE} is not set$"
    ):
        connection_uri(uri)
    monkeypatch.setenv(VARIABLE, f"sqlite:///{tmp_path}/a.db")
    assert connection_uri(uri) == f"sqlite:///{tmp_path}/a.db"
    with pytest.raises(ConfigError, match="must be env:NAME with the name of an environment variable"):
        compose.load([f"telemetry.tracking_uri='env:http://ann:{SECRET}@x'"])


def test_user_and_password_of_a_server_move_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "before")
    assert (
        move_credentials_to_environment("https://ann%40lab:hunter%2F2@mlflow.example:5000/x")
        == "https://mlflow.example:5000/x"
    )
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "ann@lab"
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "hunter/2"
    assert move_credentials_to_environment("https://mlflow.example") == "https://mlflow.example"


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A server that rejects every request: its address, and the Authorization header of each request."""
    headers: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(self.headers.get("Authorization", ""))
            self.send_error(403, "not today")

        do_POST = do_GET  # noqa: N815 -- the library's name

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.server_address[1]}", headers
        listening.shutdown()
        thread.join()


@pytest.mark.full
def test_a_run_writes_no_secret_and_its_sink_process_sends_it(
    tmp_path: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, headers = server
    tracking = ("telemetry=mlflow", f"telemetry.tracking_uri=env:{VARIABLE}", "telemetry.exit_wait_s=0")
    quiet = ("telemetry.picture=false", "telemetry.postmortem=false")
    overrides = [*cases.TINY, *tracking, *quiet, f"run.dir={tmp_path / 'runs'}", "run.name=a", "launch.nproc=1"]
    with Launched("tests.core.test_credentials", address, *overrides, output=tmp_path / "output") as process:
        assert process.wait(timeout=120) == 0, process.stderr
    run = RunDir(tmp_path / "runs" / "a")
    monkeypatch.setenv(VARIABLE, uri_at(address))
    sender = SinkProcess.start(run)
    deadline = time.monotonic() + 120
    while not (headers and "next try in" in last_line(run.logs / SINK_LOG)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    sender.finish(0)
    encoded = base64.b64encode(f"ann:{SECRET}".encode())
    assert set(headers) == {f"Basic {encoded.decode()}"}
    assert json.loads(run.mlflow.read_text())["tracking_uri"] == f"env:{VARIABLE}"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {run.config, run.manifest, run.events, run.logs / SINK_LOG} <= set(files)
    for secret in (SECRET.encode(), encoded):
        assert not [path for path in files if secret in path.read_bytes()]


def uri_at(address: str) -> str:
    return f"http://ann:{SECRET}@{address}"


def main(args: tuple[str, ...]) -> int:
    """`harness train` with a password in its environment."""
    from launch.cli import main as cli

    address, *overrides = args
    os.environ[VARIABLE] = uri_at(address)
    return cli.main(["train", *overrides])


@pytest.mark.full
def test_a_rejected_sweep_writes_no_secret(tmp_path: Path) -> None:
    secret = f"telemetry.tracking_uri=https://ann:{SECRET}@mlflow.example"
    args = ("train", "--multirun", *cases.TINY, secret, f"run.dir={tmp_path / 'runs'}", "optim.lr=0.1,0.2")
    with Launched("launch.cli.main", *args, output=tmp_path / "output") as process:
        assert process.wait(timeout=200) == 2
    assert SECRET not in process.stderr + process.stdout
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
