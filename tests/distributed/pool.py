"""Real ranks for tests: processes that run one distributed case after another.

Each case is a module-level function `case(*arguments) -> result` that runs on `size` ranks at once with torchrun's
environment set and a fresh rendezvous; the results come back in rank order. An exception on any rank fails the case
with that rank's traceback, and the ranks that wait for it are replaced.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from launch.local.ports import reserved_port
from tests.forks import ROOT, forks

CASE_TIMEOUT_S = 280


def _serve(pipe: Connection) -> None:
    import torch
    from torch.distributed.tensor import debug

    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (the console output is not needed)
    os.chdir(ROOT)  # not the directory of the first test: the process is reused
    torch.set_num_threads(1)
    gc.freeze = lambda: None  # a run freezes what it built; this process outlives the run and must free it
    while True:
        request = pipe.recv()
        if request is None:
            return
        function, arguments, environment = request
        os.environ.update(environment)
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            # DTensor's cache of operators holds the mesh, and the mesh holds the group with its threads and sockets.
            debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
            gc.collect()


class Pool:
    """Up to four ranks, started when first needed. `reuses=False` starts new ones for each case."""

    def __init__(self, *, reuses: bool = True, timeout_s: float = CASE_TIMEOUT_S) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._reuses, self._timeout_s = reuses, timeout_s

    def run(self, size: int, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run the case on `size` ranks; results in rank order."""
        while len(self._workers) < size:
            self._start()
        with reserved_port() as port:
            for rank, (_, pipe) in enumerate(self._workers[:size]):
                environment = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                pipe.send((case, arguments, environment))
            results = self._collect(size)
        if not self._reuses:
            self.close()
        return results

    def _collect(self, size: int) -> list[Any]:
        results: list[Any] = []
        for rank, (process, pipe) in enumerate(self._workers[:size]):
            if not pipe.poll(self._timeout_s):
                self.close(force=True)
                raise AssertionError(f"rank {rank} did not answer in {self._timeout_s:.0f} s")
            try:
                succeeded, result = pipe.recv()
            except EOFError:
                process.join()
                self.close(force=True)
                raise AssertionError(f"rank {rank} of {size} ended with exit code {process.exitcode}") from None
            if not succeeded:
                self.close(force=True)
                raise AssertionError(f"rank {rank} of {size} failed:\n{result}")
            results.append(result)
        return results

    def _start(self) -> None:
        parent_end, child_end = forks().Pipe()
        process = forks().Process(target=_serve, args=(child_end,), daemon=True)
        process.start()
        child_end.close()
        self._workers.append((process, parent_end))

    def close(self, *, force: bool = False) -> None:
        for process, pipe in self._workers:
            if force:
                process.kill()
            else:
                pipe.send(None)
            process.join()
            pipe.close()
        self._workers.clear()
