"""Several NCCL ranks on one GPU: each rank is a host of its own to NCCL, and they talk over loopback sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

LIMIT_S = 400.0
WORKER = "import sys; from tests.distributed.drilling import run; sys.exit(run(sys.argv[1]))"


def run_ranks(directory: Path, *, num_ranks: int) -> list[int]:
    """Train a run that is laid out in `directory` with the worker it calls for; the exit codes in rank order."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    for rank in range(num_ranks):
        log = (directory / "logs" / f"rank-{rank}.txt").open("wb")
        place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        address = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_HOSTID": f"h{rank}",
        }
        environment = os.environ | {name: str(value) for name, value in {**place, **address}.items()}
        command = [sys.executable, "-c", WORKER, str(directory)]
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        return [process.wait(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
