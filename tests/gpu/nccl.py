"""Starts several NCCL ranks on one GPU: NCCL sees each rank as a separate host, connected over loopback sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launch.local.ports import reserved_port

AT_125M = (
    "model.dim=768",
    "model.num_layers=12",
    "model.num_heads=12",
    "model.num_kv_heads=4",
    "model.ffn_dim=2048",
    "train.sequence_length=1024",
    "train.batch_size=8",
    "optim.lr=3e-4",
    "optim.warmup_steps=20",
)
"""125m parameters in the training of a drill. Batches are small: at 6e-4 the loss of a clean run spikes in the
warm-up."""
LIMIT_S = 400.0
RUN = "import sys; from tests.distributed.drill_cases import run; sys.exit(run(sys.argv[1]))"
CASE = """
import json, os, pathlib, sys
from tests.distributed import cases
result = getattr(cases, sys.argv[2])(*sys.argv[3:])
pathlib.Path(sys.argv[1], "results", os.environ["RANK"]).write_text(json.dumps(result))
"""


def run_ranks(
    directory: Path,
    *,
    num_ranks: int,
    worker: str = RUN,
    arguments: tuple[str, ...] = (),
    limit_s: float = LIMIT_S,
) -> list[int]:
    """Start one worker process per rank on a prepared run directory; returns the exit codes in rank order."""
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        processes = []
        for rank in range(num_ranks):
            log = stack.enter_context((directory / "logs" / f"rank-{rank}.txt").open("wb"))
            rank_environment = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            network_environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_HOSTID": f"h{rank}",
            }
            environment = os.environ | {
                name: str(value) for name, value in {**rank_environment, **network_environment}.items()
            }
            command = [sys.executable, "-c", worker, str(directory), *arguments]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)
        return [process.wait(timeout=limit_s) for process in processes]


def run_case(directory: Path, name: str, *arguments: str, num_ranks: int) -> list[Any]:
    """Run a function of `tests.distributed.cases` on every rank; returns the results in rank order."""
    for path in (directory, directory / "logs", directory / "results"):
        path.mkdir()
    codes = run_ranks(directory, num_ranks=num_ranks, worker=CASE, arguments=(name, *arguments))
    assert codes == [0] * num_ranks, read_logs(directory)
    return [json.loads((directory / "results" / str(rank)).read_text()) for rank in range(num_ranks)]


def read_logs(directory: Path) -> str:
    """The end of each rank's output."""
    return "\n".join(path.read_text()[-3000:] for path in sorted((directory / "logs").glob("rank-*.txt")))
