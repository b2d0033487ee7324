"""`harness dashboard`, `postmortem`, `status` and `watch` of a run in a real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.checkpoint.remote.remote_run import open_remote_run
from harness.checkpoint.remote.uploader import Uploader
from harness.core.event_json import to_json
from harness.core.rundir import RunDir
from launch.cli import dashboard, postmortem, remote_checkpoints, remote_runs, status, watch
from tests.analysis.postmortem import stories
from tests.composed import load
from tests.object_stores import StoreServer, ignore_open_connections, s3_only, server_fixture

pytestmark = [pytest.mark.full, ignore_open_connections, s3_only]

server = server_fixture()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A local run with one incident; its name is unique, and so is its place in the store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return stories.write(tmp_path / tmp_path.name, stories.poisoned())


def upload(server: StoreServer, run: RunDir) -> str:
    """Upload the run; returns its URL."""
    root = server.url("runs")
    settings = load([f"checkpoint.remote.url={root}"]).checkpoint
    list(Uploader(run, open_remote_run(root, run.path.name, retry_s=10), settings).upload_due(last=True))
    return f"{root}/{run.path.name}"


def test_a_page_and_post_mortems_of_a_run_in_the_store(
    server: StoreServer, run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = upload(server, run)
    assert dashboard.main([url]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page.is_relative_to(tmp_path / "cache")
    copied = RunDir(page.parent)
    for name in ("events.jsonl", "config.yaml"):
        assert (copied.path / name).read_bytes() == (run.path / name).read_bytes()
    assert f"<title>{run.path.name}" in page.read_text()
    assert dashboard.main([url, "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
    capsys.readouterr()
    assert postmortem.main([url, "--incident", "1"]) == 0
    printed = capsys.readouterr().out
    assert (copied.incidents / "001" / "evidence.json").is_file()
    assert postmortem.main([str(run.path), "--incident", "1"]) == 0
    here = capsys.readouterr().out
    printed, here = (
        text.replace(str(of.path), "RUN").replace(str(of.path.parent), "RUNS")
        for text, of in ((printed, copied), (here, run))
    )
    assert printed == here
    num_reads = server.count_reads(f"runs/{run.path.name}/files/")
    assert num_reads > 0
    remote_runs.run_dir_of(url)
    assert server.count_reads(f"runs/{run.path.name}/files/") == num_reads, "nothing has changed"


def test_a_run_that_goes_on_is_copied_again(server: StoreServer, run: RunDir) -> None:
    first = remote_runs.run_dir_of(upload(server, run))
    (first.path / "dashboard.html").write_text("kept")
    with run.events.open("a") as log:
        log.write(to_json(stories.healthy(stories.NUM_ROWS)) + "\n")
    again = remote_runs.run_dir_of(upload(server, run))
    assert again == first
    assert again.events.read_bytes() == run.events.read_bytes()
    assert again.dashboard.read_text() == "kept"


def test_what_cannot_be_read_is_one_line(
    server: StoreServer, run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, none = upload(server, run), server.url("runs/none")
    for main, arguments, line in (
        (status.main, [url], f"{url}: is in an object store, which has no heartbeats; `harness dashboard` reads it"),
        (watch.main, [url], f"{url}: is in an object store, which has no heartbeats; `harness dashboard` reads it"),
        (dashboard.main, [url, "--serve"], f"{url}: is in an object store, where it does not grow; --serve needs"),
        (dashboard.main, [none], f"{none}: is not a run: there is no run.json; runs are uploaded with"),
        (postmortem.main, [none], f"{none}: is not a run: there is no run.json; runs are uploaded with"),
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"harness: {line}")
        assert err.count("\n") == 1
    monkeypatch.setattr(remote_checkpoints, "RETRY_S", 0.5)
    server.relay.down()
    try:
        assert postmortem.main([url]) == 2
    finally:
        server.relay.up()
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"harness: {url}: the store cannot be read: ")
