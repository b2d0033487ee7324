"""`harness dashboard`, `watch` and `report` as commands."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.cli.main import main
from tests.analysis.dashboard.logs import BEGUN, long_run, record
from tests.analysis.postmortem import stories
from tests.privileges import obeying_modes

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return long_run(tmp_path / "runs" / "first", 60)


def test_the_page_is_written_completely(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/dashboard.html\n"
    assert (run / "dashboard.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert not list(run.glob(".*"))
    assert main(["dashboard", str(run), "--output", str(run / "elsewhere.html")]) == 0
    assert (run / "elsewhere.html").exists()


def test_a_page_elsewhere_links_to_the_incidents_of_the_run(tmp_path: Path) -> None:
    run = stories.write(tmp_path / "runs" / "lr=1 #2", stories.poisoned())
    post_mortem = run.incidents / "001" / "postmortem.md"
    post_mortem.parent.mkdir(parents=True)
    post_mortem.write_text("# Incident")
    assert main(["dashboard", str(run.path), "--output", str(tmp_path / "page.html")]) == 0
    assert '"runs/lr%3D1%20%232/incidents/001/postmortem.md"' in (tmp_path / "page.html").read_text()
    assert main(["dashboard", str(run.path)]) == 0
    assert '"incidents/001/postmortem.md"' in run.dashboard.read_text()


def test_watch_without_a_terminal_prints_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run)]) == 0
    assert capsys.readouterr().out.startswith("first: done · exit code 0 · all steps done · 8 ranks\nstep 60/60 ━━━")


def test_a_run_that_has_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("{}", encoding="utf-8")
    assert main(["watch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path.name}: silent · its log is empty\n"
    assert main(["dashboard", str(tmp_path)]) == 0


def test_the_index_links_existing_pages(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run.parent
    assert main(["report", str(root)]) == 0
    assert capsys.readouterr().out == f"{root}/index.html\n"
    assert "first/dashboard.html" not in (root / "index.html").read_text(encoding="utf-8")
    assert main(["report", str(root), "--build"]) == 0
    assert 'href="first/dashboard.html"' in (root / "index.html").read_text(encoding="utf-8")
    assert (run / "dashboard.html").exists()


def test_a_run_behind_a_link_is_in_the_index_with_its_own_lessons(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.parent / "lessons.md").write_text("- first 001: Clip lower.\n- second 001: Warm up longer.\n")
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    (chosen / "best").symlink_to(run, target_is_directory=True)
    assert main(["report", str(chosen), "--build"]) == 0
    assert capsys.readouterr().out == f"{chosen}/index.html\n- first 001: Clip lower.\n"
    assert 'href="best/dashboard.html"' in (chosen / "index.html").read_text(encoding="utf-8")


def test_the_page_of_a_run_of_another_user_is_left_out_of_the_index(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = long_run(run.parent / "second", 20)
    run.chmod(0o555)
    with obeying_modes():
        assert main(["report", str(run.parent), "--build"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"harness: warning: {run}/dashboard.html cannot be written: Permission denied")
    text = (run.parent / "index.html").read_text(encoding="utf-8")
    assert "first" in text
    assert 'href="second/dashboard.html"' in text
    assert (other / "dashboard.html").exists()


def test_runs_are_compared_on_one_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = long_run(run.parent / "deep" / "second", 40)
    assert main(["dashboard", str(run), str(other)]) == 0
    page = run.parent / "compare.html"
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text(encoding="utf-8")
    assert "<h1>first and second</h1>" in text
    assert '"path":"deep/second"' in text
    assert main(["dashboard", str(run), str(other), "--output", str(run / "both.html")]) == 0
    assert '"path":"../deep/second"' in (run / "both.html").read_text(encoding="utf-8")
    long_run(run.parent / "third", 20)
    assert main(["report", str(run.parent), "--build"]) == 0
    index = (run.parent / "index.html").read_text(encoding="utf-8")
    assert '<a href="compare.html">compare</a>' in index
    assert '"path":"third"' in page.read_text(encoding="utf-8")
    assert not (other.parent / "compare.html").exists()


@pytest.mark.parametrize("build", [[], ["--build"]])
def test_a_run_that_cannot_be_read_is_left_out_of_the_index(
    run: Path, build: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    events = long_run(run.parent / "second", 40) / "events.jsonl"
    events.chmod(0)
    with obeying_modes():
        assert main(["report", str(run.parent), *build]) == 0
        index = (run.parent / "index.html").read_text(encoding="utf-8")
        line = f"harness: warning: {events}: Permission denied; {events.parent} is left out\n"
        assert capsys.readouterr().err == line
        assert ">first<" in index
        assert ">second<" not in index
        assert main(["report", str(events.parent)]) == 2
        assert capsys.readouterr().err == f"{line}harness: {events.parent}: no run can be read\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["dashboard", "{}/runs/first", "{}/runs/first", "--serve"], "--serve: serves one run, got 2"),
        (
            ["dashboard", "{}/runs/first", "{}/runs/../runs/first"],
            "{}/runs/first: is given twice; compare it with another run",
        ),
        (
            ["dashboard", "{}/nowhere"],
            "{}/nowhere: is not a run directory: it has neither events.jsonl nor config.yaml",
        ),
        (["watch", "{}/nowhere"], "{}/nowhere: is not a run directory: it has neither events.jsonl nor config.yaml"),
        (["report", "{}/nowhere"], "{}/nowhere: is not a directory"),
        (["report", "{}/empty"], "{}/empty: no run found: no events.jsonl at or below it"),
        (
            ["dashboard", "{}/runs/first", "--output", "{}/no/a"],
            "{}/no/a: cannot be written: No such file or directory",
        ),
        (
            ["dashboard", "{}/runs/first", "--serve", "--port", "70000"],
            "--port: must be 0 (any free port) to 65535, got 70000",
        ),
        (["dashboard", "--serve"], "dashboard: the following arguments are required: RUN; see --help"),
        (["watch", "a", "--often"], "watch: unrecognized arguments: --often; see --help"),
    ],
)
def test_errors_are_one_line(
    run: Path, tmp_path: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert run.exists()
    assert main([arg.format(tmp_path) for arg in args]) == 2
    assert capsys.readouterr().err == f"harness: {message.format(tmp_path)}\n"


def test_a_port_in_use_is_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["dashboard", str(run), "--serve", "--port", str(port)]) == 2
    expected = f"harness: --port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert capsys.readouterr().err == expected


def test_ctrl_c_ends_the_server_and_the_terminal_view(run: Path) -> None:
    """Two real processes; the view on a pseudo-terminal, of a run in progress."""
    log = run / "events.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    log.write_text("".join(lines[:-1]), encoding="utf-8")
    server = start("dashboard", str(run), "--serve", "--port", "0")
    terminal, inner = pty.openpty()
    view = start("watch", str(run), stdout=inner)
    os.close(inner)
    assert server.stdout is not None
    assert server.stdout.readline().startswith("http://127.0.0.1:")
    seen = read_until(terminal, "step 60/60")
    with log.open("a", encoding="utf-8") as more:
        more.write(record(61, step=42, time=BEGUN + 40) + "\n")
    seen = read_until(terminal, "step 42/60")
    assert "first: silent" in seen
    for process in (server, view):
        process.send_signal(signal.SIGINT)
    assert (server.wait(timeout=200), view.wait(timeout=30)) == (0, 0)
    os.close(terminal)
    server.stdout.close()


def start(*args: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "launch.cli.main", *args]
    return subprocess.Popen(
        command, stdout=stdout, text=True, env=environment, start_new_session=True, preexec_fn=default_sigint
    )


def default_sigint() -> None:
    """A shell starts background jobs with SIGINT ignored; children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_until(terminal: int, text: str) -> str:
    seen, until_s = "", time.monotonic() + 200
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until_s - time.monotonic()))
        assert ready, f"never saw {text!r} in {seen!r}"
        seen += os.read(terminal, 65536).decode(errors="replace")
    return seen
