"""Fast processes for tests: forked from a server that has started Python and imported torch once.

`Launched` does what `python -m MODULE ARGUMENTS` does, in its own session, with its output in files: a complete
launcher, which can receive signals, be killed and be waited for. Its parent is the fork server, not the test. A test
can pass a function (`first`) that runs in the process before the module.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from functools import cache
from importlib import import_module
from multiprocessing import forkserver, get_context, set_forkserver_preload
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Self
from unittest.mock import patch

ROOT = Path(__file__).parents[1]


@cache
def forks() -> ForkServerContext:
    """The context of the fork server. Torch is imported with one thread, as in each of two ranks on two cores."""
    set_forkserver_preload(["tests.preloaded"])
    with patch.dict(os.environ, OMP_NUM_THREADS="1"), chdir(ROOT):
        forkserver.ensure_running()
    return get_context("forkserver")


def _run(module: str, arguments: tuple[str, ...], output: str, first: Callable[[], None] | None, cwd: str) -> None:
    os.setsid()
    if first is not None:
        first()
    os.chdir(cwd)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with Path(f"{output}.{name}").open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    sys.exit(import_module(module).main(arguments))


class Launched:
    """A forked process with the methods of `subprocess.Popen` that tests use; its process group is killed on exit."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        output: Path,
        first: Callable[[], None] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self._output = output
        self._process = forks().Process(target=_run, args=(module, arguments, str(output), first, str(cwd)))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def stdout(self) -> str:
        return Path(f"{self._output}.stdout").read_text()

    @property
    def stderr(self) -> str:
        return Path(f"{self._output}.stderr").read_text()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill_group(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            self.kill_group()
