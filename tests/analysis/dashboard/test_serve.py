"""The live server over real HTTP: sends new rows, serves only allowed files, writes nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from harness.analysis.dashboard.serve import Server, open_server
from harness.core.rundir import RunDir
from tests.analysis.dashboard.logs import BEGUN, long_run, record, write_load


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(long_run(tmp_path / "first", 60))
    folder = run.path / "incidents" / "001"
    folder.mkdir(parents=True)
    (folder / "postmortem.html").write_text("<h1>what happened</h1>", encoding="utf-8")
    (folder / "secret.key").write_text("no", encoding="utf-8")
    (run.path / "config.yaml").write_text("{}", encoding="utf-8")
    (folder / "leads-out.md").symlink_to(run.path / "config.yaml")
    return run


@pytest.fixture
def server(run: RunDir) -> Iterator[Server]:
    with open_server(run, host="127.0.0.1", port=0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def losses(table: dict[str, Any]) -> list[float]:
    return [float(x) for x in np.frombuffer(base64.b64decode(table["columns"]["loss"]["low"]), "<f4")]


def listing(run: RunDir) -> list[tuple[str, int, int]]:
    files = [(path, path.lstat()) for path in sorted(run.path.rglob("*"))]
    return [(str(path), info.st_size, info.st_mtime_ns) for path, info in files]


def test_only_new_rows_are_sent(server: Server, run: RunDir) -> None:
    before = listing(run)
    status, headers, body = ask(server, "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert b'"live":true' in body
    assert b"connect-src 'self'" in body
    first = json.loads(ask(server, "/data.json")[2])
    assert len(losses(first["steps"])) == first["steps"]["total"] == 60
    query = f"/data.json?steps=60&probes=6&evals=20&seen={first['facts']['revision']}"
    assert ask(server, query)[::2] == (204, b"")
    assert listing(run) == before
    with run.events.open("a", encoding="utf-8") as log:
        log.write(record(61, time=BEGUN + 100, loss=1.25) + "\n" + record(62, time=BEGUN + 101, loss=1.5)[:50])
    update = json.loads(ask(server, query)[2])
    assert losses(update["steps"]) == [1.25]
    assert update["steps"]["total"] == 61
    assert update["probes"]["num_rows"] == 0
    assert update["facts"]["run"]["loss"] == "1.2500"
    seen = f"/data.json?steps=61&seen={update['facts']['revision']}"
    assert ask(server, seen)[0] == 204
    (run.path / "incidents" / "001" / "postmortem.md").write_text("# Spike", encoding="utf-8")
    assert "<h1>Spike</h1>" in json.loads(ask(server, seen)[2])["facts"]["incidents"][0]["postmortem"]


def test_rows_of_a_run_that_replaces_another_one_are_told_apart(server: Server, run: RunDir) -> None:
    """Both logs have the same size; the times differ."""
    seen = json.loads(ask(server, "/data.json")[2])["facts"]
    run.events.write_text(run.events.read_text().replace('"time":1750', '"time":1760'))
    update = json.loads(ask(server, f"/data.json?seen={seen['revision']}")[2])
    assert update["steps"]["total"] == 60
    assert update["facts"]["run"]["num_starts"] == seen["run"]["num_starts"]
    assert update["facts"]["log"] != seen["log"]


def test_the_load_of_the_machines_is_sent_when_it_changes(server: Server, run: RunDir) -> None:
    first = json.loads(ask(server, "/data.json")[2])
    assert first["system"]["num_rows"] == 0
    write_load(run.path, 5, last=60)
    query = f"/data.json?seen={first['facts']['revision']}&load={first['facts']['load']}"
    update = json.loads(ask(server, query)[2])
    assert update["system"]["num_rows"] == 5
    assert "system" not in json.loads(ask(server, f"/data.json?load={update['facts']['load']}")[2])


@pytest.mark.parametrize("query", ["steps=-1", "steps=abc", "steps=99999999999", "steps=1e9", "seen=%00", "steps="])
def test_invalid_query_is_answered(server: Server, query: str) -> None:
    assert ask(server, f"/data.json?{query}")[0] == 200


def test_evidence_is_served_without_script_rights(server: Server) -> None:
    status, headers, body = ask(server, "/incidents/001/postmortem.html")
    assert (status, body) == (200, b"<h1>what happened</h1>")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    status, headers, body = ask(server, "/incidents/001/postmortem.html", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, "22", b"")


@pytest.mark.parametrize(
    "path",
    [
        "/config.yaml",
        "/events.jsonl",
        "/../config.yaml",
        "/incidents/001/../../config.yaml",
        "/incidents/001/..%2f..%2fconfig.yaml",
        "/incidents/001/%2e%2e/%2e%2e/config.yaml",
        "/incidents/001/",
        "/incidents/001",
        "/incidents/../config.yaml",
        "/incidents/001//etc/passwd",
        "/incidents/001/secret.key",
        "/incidents/001/leads-out.md",
        "/incidents/999/postmortem.md",
        "//etc/passwd",
        "/%00",
    ],
)
def test_other_paths_are_not_found(server: Server, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_writing_methods_are_rejected(server: Server, method: str) -> None:
    assert ask(server, "/data.json", method)[0] == 501


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:1", 200), ("127.0.0.1", 200), ("evil.example", 403), ("", 403)]
)
def test_only_loopback_host_names_are_answered(server: Server, host: str, status: int) -> None:
    assert ask(server, "/data.json", Host=host)[0] == status


def test_default_address_is_loopback(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
