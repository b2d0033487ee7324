"""Tests of subprocesses: they import the harness's own code, even if the working directory has modules of these names;
where their output goes; how they are ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import pytest

from harness.analysis.postmortem.write import MARKDOWN
from harness.core import processes
from harness.core.rundir import locate, prepare_run_dir
from harness.telemetry.postmortem_process import PostmortemProcess
from launch.sweeps import scheduler
from launch.sweeps.scheduler import ResourceSlot
from tests import composed
from tests.analysis.postmortem import stories
from tests.launch.cli.test_main import ROOT, TINY

STRAY = ("harness/__init__.py", "launch/__init__.py", "json.py")
TRAP = """\
import sys
with open({trapped!r}, "a") as log: print(__file__, "in", sys.orig_argv, file=log)
raise ImportError("trapped")
"""
START_SUBPROCESS = """\
import subprocess
from harness.core import processes
subprocess.run(processes.command("print_harness_path"), env=processes.child_environment(), cwd="/", check=True)
"""
PRINT_HARNESS_PATH = """\
import harness, json, os
print(json.dumps([harness.__file__, os.environ.get("PYTHONPATH")]))
"""


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log that gets a line whenever a stray module of the working directory is imported."""
    log, directory = tmp_path / "trapped", tmp_path / "working_directory"
    for name in STRAY:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(TRAP.format(trapped=str(log)))
    monkeypatch.chdir(directory)
    return log


def read_log(log: Path) -> str:
    return log.read_text() if log.exists() else ""


@pytest.mark.full
def test_a_post_mortem_ignores_stray_modules(trapped: Path, tmp_path: Path) -> None:
    run = stories.write(tmp_path / "run", stories.poisoned())
    writer = PostmortemProcess(run)
    writer.on_event(stories.ended())
    written = writer.finish(60)
    assert read_log(trapped) == ""
    assert written
    assert (run.incidents / "001" / MARKDOWN).exists()


@pytest.mark.full
def test_a_run_and_its_sink_process_ignore_stray_modules(trapped: Path, tmp_path: Path) -> None:
    """The launcher of a sweep's job, its rank, and the rank's sink process."""
    alerts = tmp_path / "alerts"
    overrides = [*TINY, f"run.dir={tmp_path / 'runs'}", "run.name=job", "telemetry.exit_wait_s=200"]
    overrides.append(f"telemetry.alerts.command.run=[tee,-a,{alerts}]")
    cfg = composed.load(overrides)
    run = locate(cfg)
    prepare_run_dir(cfg, run)
    with scheduler.lock_sweep(tmp_path) as lock:
        codes, _ = scheduler.run_jobs([run], [ResourceSlot(threads=1)], lock, lambda *_: None)
    assert read_log(trapped) == ""
    assert codes == {"job": 0}, (run.logs / "console.txt").read_text()
    assert [json.loads(line)["kind"] for line in alerts.read_text().splitlines()] == ["finished"]


def find_harness(python: Path | str, cwd: Path, search_path: str | None) -> tuple[str, str | None]:
    """Where a process started in `cwd` finds the harness, and its PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {} if search_path is None else {"PYTHONPATH": search_path}
    done = subprocess.run(
        [python, "-c", START_SUBPROCESS], cwd=cwd, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    found, python_path = json.loads(done.stdout)
    return found, python_path


@pytest.mark.full
@pytest.mark.parametrize(
    ("search_path_before", "inherited"),
    [
        (None, "{directory}"),
        ("", "{directory}"),
        ("/a:/b", "{directory}:/a:/b"),
        ("{directory}:/a", "{directory}:/a"),
        ("/a:{directory}", "{directory}:/a"),
    ],
)
def test_a_copy_of_the_code_imports_itself(search_path_before: str | None, inherited: str, tmp_path: Path) -> None:
    """The copy is found, although the default search path of Python has the code of the tests."""
    (tmp_path / "harness").symlink_to(ROOT / "harness")
    (tmp_path / "print_harness_path.py").write_text(PRINT_HARNESS_PATH)
    search_path = None if search_path_before is None else search_path_before.format(directory=tmp_path)
    found = str(tmp_path / "harness" / "__init__.py")
    assert find_harness(sys.executable, tmp_path, search_path) == (found, inherited.format(directory=tmp_path))


@pytest.mark.full
def test_an_installed_package_needs_no_entry_in_pythonpath(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "harness").symlink_to(ROOT / "harness")
    (site / "print_harness_path.py").write_text(PRINT_HARNESS_PATH)
    found = str(site / "harness" / "__init__.py")
    assert find_harness(tmp_path / "venv" / "bin" / "python", tmp_path, None) == (found, None)
    assert find_harness(tmp_path / "venv" / "bin" / "python", tmp_path, "/a") == (found, "/a")


MakeModule = Callable[[str], str]


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeModule:
    """Writes a module that a subprocess can run; returns its name."""

    def make(text: str) -> str:
        (tmp_path / "beside.py").write_text(text)
        return "beside"

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return make


TALK = """\
import os, sys
print("out", repr(sys.stdin.read()), sys.argv[1:], os.environ.get("RANK"), flush=True)
print("error", file=sys.stderr)
"""


def test_the_output_of_a_logged_process_is_appended_to_its_log(make_module: MakeModule, tmp_path: Path) -> None:
    log = tmp_path / "run" / "logs" / "beside.log"
    for argument in ("1", "2"):
        process = processes.start_logged(make_module(TALK), argument, log=log)
        assert process.wait(timeout=60) == 0
    assert log.read_text().splitlines() == ["out '' ['1'] None", "error", "out '' ['2'] None", "error"]


def test_a_logged_process_may_talk_by_pipes(
    make_module: MakeModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, pipe = tmp_path / "beside.log", subprocess.PIPE
    for name in processes.RANK_VARIABLES:
        monkeypatch.setenv(name, "7")
    for environment, rank in ((processes.environment_outside_ranks(), "None"), (None, "7")):
        module = make_module(TALK)
        process = processes.start_logged(module, log=log, environment=environment, stdin=pipe, stdout=pipe)
        output, _ = process.communicate(b"in", timeout=60)
        assert output.decode() == f"out 'in' [] {rank}\n"
    assert log.read_text().splitlines() == ["error", "error"]
    assert not set(processes.environment_outside_ranks()) & set(processes.RANK_VARIABLES)


def test_a_logged_process_has_a_session_of_its_own(make_module: MakeModule, tmp_path: Path) -> None:
    process = processes.start_logged(make_module("input()"), log=tmp_path / "log", stdin=subprocess.PIPE)
    assert os.getsid(process.pid) == process.pid
    process.communicate(b"\n", timeout=60)


@pytest.mark.parametrize(("code", "is_done"), [(0, True), (3, False)])
def test_a_process_that_ends_in_time_is_judged_by_its_exit_code(
    code: int, is_done: bool, make_module: MakeModule, tmp_path: Path
) -> None:
    process = processes.start_logged(make_module(f"raise SystemExit({code})"), log=tmp_path / "log")
    assert processes.wait_or_end(process, wait_s=60, grace_s=60) == is_done
    assert process.returncode == code


OBEY = "import time; print('ready', flush=True); time.sleep(600)"
REFUSE = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {OBEY}"
EXIT_WELL = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {OBEY}"


@pytest.mark.parametrize(
    ("program", "grace_s", "code"),
    [
        (OBEY, 0, -signal.SIGKILL),
        (OBEY, 60, -signal.SIGTERM),
        (REFUSE, 0.2, -signal.SIGKILL),
        (EXIT_WELL, 60, 0),
    ],
)
def test_a_process_that_takes_too_long_is_ended_and_reaped(
    program: str, grace_s: float, code: int, make_module: MakeModule, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = processes.start_logged(make_module(program), log=log)
    while processes.last_line(log) != "ready":
        time.sleep(0.01)
    assert not processes.wait_or_end(process, wait_s=0.01, grace_s=grace_s)
    assert process.returncode == code
    assert not Path(f"/proc/{process.pid}").exists()


def test_a_process_that_cannot_start_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        processes.start_logged("json", log=tmp_path / "log")


@pytest.mark.parametrize(
    ("text", "last"),
    [(None, ""), (b"", ""), (b"\n \n", ""), (b"a\n b \n\n", "b"), (b"a\n\xff", "\ufffd")],
)
def test_the_last_line_of_a_log(text: bytes | None, last: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "log").write_bytes(text)
    assert processes.last_line(tmp_path / "log") == last


TRACE = """\
import ctypes, sys
PTRACE_SEIZE = 0x4206
print(ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None), flush=True)
sys.stdin.read()
"""


def test_a_killed_process_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can reap a traced process before its tracer; like one that waits for a dead mount it outlives SIGKILL."""
    monkeypatch.setattr(processes, "KILLED_WITHIN_S", 0.2)
    sleeper = subprocess.Popen(["sleep", "600"])
    command = [sys.executable, "-c", TRACE, str(sleeper.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        is_traced = tracer.stdout.readline() == b"0\n"
        limit = Timer(20, tracer.kill)
        limit.start()
        processes.end_process(sleeper)
        is_left = sleeper.poll() is None
        limit.cancel()
    assert sleeper.wait() == -signal.SIGKILL
    if not is_traced:
        pytest.skip("this machine does not allow ptrace")
    assert is_left
