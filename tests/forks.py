"""Processes for tests that need not start Python and import torch: they are forked from a server that did it once.

A process of `launched` does what `python -m MODULE WORDS` does, in a session of its own, with files for its output: a
whole launcher, which may be sent signals, killed and waited for. Its parent is the server, not the test. What has to be
done in that process before (`first`) is named by the test.
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
    """Where processes of tests come from. Torch is loaded for one thread, as in each of two ranks on two cores."""
    set_forkserver_preload(["tests.preloaded"])
    with patch.dict(os.environ, OMP_NUM_THREADS="1"), chdir(ROOT):
        forkserver.ensure_running()
    return get_context("forkserver")


def _run(module: str, words: tuple[str, ...], output: str, first: Callable[[], None] | None) -> None:
    os.setsid()
    if first is not None:
        first()
    os.chdir(ROOT)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with Path(f"{output}.{name}").open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    sys.exit(import_module(module).main(words))


class Launched:
    """A process of its own, with the part of `subprocess.Popen` that tests use; its group is killed in the end."""

    def __init__(self, module: str, *words: str, output: Path, first: Callable[[], None] | None = None) -> None:
        self._output = output
        self._process = forks().Process(target=_run, args=(module, words, str(output), first))
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
