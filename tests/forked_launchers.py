"""`harness` commands for tests, with launchers that are forked too: `python -m launch.local.node` imports no torch.

Drills and sweeps start a launcher for each run. Here they run in a process of the fork server (`tests.forks`), which
has imported all that a launcher needs and has one thread, so a fork of it does what the new interpreter would do.
`ForkedPopen` changes only how the launcher is started: its session, output, environment, exit code and death are those
of `subprocess.Popen`. Namespaces that `nsenter` would enter are entered by the fork.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn

from harness.config import compose
from harness.control.stop_requests import STOP_SIGNALS
from harness.core import processes
from tests import composed
from tests.cluster.namespaces import enter_namespaces
from tests.forks import Launched

MODULES = ("launch.local.node", "launch.cli.main")
"""The launcher of a node, and the command that starts launchers."""


NAMESPACES = {"-n": "net", "-u": "uts", "-p": "pid", "-m": "mnt"}
"""Options of `nsenter` -> names in /proc/PID/ns."""


class LauncherCommand(NamedTuple):
    """`python -m MODULE ARGUMENTS`, taken apart."""

    module: str
    arguments: list[str]
    spaces: tuple[str, ...]
    """Files of the namespaces to enter first."""


def parse_command(args: Sequence[str]) -> LauncherCommand | None:
    """None: another command, or one that enters namespaces in another way."""
    command, python = list(args), processes.command("")[:-1]
    module = next((each for each in MODULES if each in command), None)
    start = -1 if module is None else command.index(module) - len(python)
    if module is None or start < 0 or command[start : start + len(python)] != python:
        return None
    arguments = command[start + len(python) + 1 :]
    match command[:start]:
        case []:
            return LauncherCommand(module, arguments, ())
        case ["nsenter", "-t", pid, *options, "sh", "-c", _, "sh", _] if set(options) <= NAMESPACES.keys():
            return LauncherCommand(
                module, arguments, tuple(f"/proc/{pid}/ns/{NAMESPACES[option]}" for option in options)
            )
        case _:
            return None


class ForkedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks this process where it would start the launcher of a node."""

    @staticmethod
    def find_command(args: Sequence[str]) -> LauncherCommand | None:
        """The command to fork; None: start it as usual."""
        return parse_command(args)

    @staticmethod
    def may_fork() -> bool:
        """Whether no other thread can hold a lock, which would stay locked in a fork."""
        return threading.active_count() == 1

    def _execute_child(self, args: Any, *others: Any) -> None:
        command = self.find_command(args) if self.may_fork() else None
        if command is None:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        (*_, env, _, _, _), pipes, (*_, is_session, _) = others[:9], others[9:15], others[15:]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            run_launcher(command, env, (pipes[0], pipes[3], pipes[5]), is_session=is_session)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_launcher(
    command: LauncherCommand, environment: Mapping[str, str], standard: Sequence[int], *, is_session: bool
) -> NoReturn:
    """Continue a fork as the launcher; `standard`: the descriptors of stdin, stdout and stderr, -1: inherited."""
    code = 1
    try:
        if is_session:
            os.setsid()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for target, source in enumerate(standard):
            if source != -1:
                os.dup2(source, target)
        os.environ.clear()
        os.environ.update(environment)
        if command.spaces:
            cwd = Path.cwd()
            enter_namespaces(command.spaces)
            os.chdir(cwd)
        code = import_module(command.module).main(command.arguments)
        util._exit_function()  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_launchers() -> None:
    """Fork launchers in this process from now on, and compose configs from the tree that the fork server has read."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    compose.load = composed.load


def harness(
    *arguments: str, cwd: Path, within_s: float, first: Callable[[], None] = fork_launchers
) -> subprocess.CompletedProcess[str]:
    """`harness ARGUMENTS` in this directory. It is killed after `within_s` seconds, with the launchers it started."""
    with (
        TemporaryDirectory() as output,
        Launched("launch.cli.main", *arguments, output=Path(output) / "harness", first=first, cwd=cwd) as command,
    ):
        code = command.wait(within_s)
        return subprocess.CompletedProcess(arguments, code, command.stdout, command.stderr)
