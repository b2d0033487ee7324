"""Real ranks for tests: processes that run one distributed case after another.

Each case is a module-level function `case(*arguments) -> result` that runs on `size` ranks at once with torchrun's
environment set and a fresh rendezvous; the results come back in rank order. An exception on any rank fails the case
with that rank's traceback, and ranks that would wait for it for ever are replaced.
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


def _serve(orders: Connection) -> None:
    import torch
    from torch.distributed.tensor import debug

    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (the console of a run, which nobody reads)
    os.chdir(ROOT)  # not the directory of the first test: the process is reused
    torch.set_num_threads(1)
    gc.freeze = lambda: None  # a run freezes what it built; this process outlives the run and must free it
    while True:
        order = orders.recv()
        if order is None:
            return
        function, arguments, environment = order
        os.environ.update(environment)
        try:
            orders.send((True, function(*arguments)))
        except BaseException:
            orders.send((False, traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            # DTensor's cache of operators holds the mesh, and the mesh holds the group with its threads and sockets.
            debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
            gc.collect()


class Pool:
    """Up to four ranks, started when first needed."""

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, size: int, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run the case on `size` ranks; results in rank order."""
        while len(self._workers) < size:
            self._start()
        with reserved_port() as port:
            for rank, (_, orders) in enumerate(self._workers[:size]):
                environment = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                orders.send((case, arguments, environment))
            return self._collect(size)

    def _collect(self, size: int) -> list[Any]:
        results: list[Any] = []
        for rank, (_, orders) in enumerate(self._workers[:size]):
            if not orders.poll(CASE_TIMEOUT_S):
                self.close(force=True)
                raise AssertionError(f"rank {rank} did not answer in {CASE_TIMEOUT_S} s")
            succeeded, result = orders.recv()
            if not succeeded:
                self.close(force=True)
                raise AssertionError(f"rank {rank} of {size} failed:\n{result}")
            results.append(result)
        return results

    def _start(self) -> None:
        ours, theirs = forks().Pipe()
        process = forks().Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def close(self, *, force: bool = False) -> None:
        for process, orders in self._workers:
            if force:
                process.kill()
            else:
                orders.send(None)
            process.join()
            orders.close()
        self._workers.clear()
