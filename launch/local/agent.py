"""Torch's elastic agent, with three changes: the machines have gathered already, the processes of the ranks are there
already, and a failure is told when it is seen.

Why: torch's own rendezvous listens on every address of the machine, gives ranks in the order of arrival or asks for a
port that nobody holds, and does not know when another machine is lost; it starts every rank as a new process, which
imports torch once more; and its agent stops the remaining workers for up to half a minute before it says that one has
died.
How: `Gathered` hands on what `launch.local.rendezvous` found out; the store of torch listens on the socket that was
opened there. The processes wait in `launch.local.worker_pool` for orders, which are torchrun's environment and the
function to call.
Left out: restarts inside one start. (torch 2.13 shares the store between them, with keys of the dead in it.)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from launch.local.node_group import Machines
from launch.local.worker_pool import Orders, Reserved

POLL_S = 0.1
STORE_TIMEOUT_S = 60.0
EXIT_BARRIER_S = 30.0
"""How long machine 0, where the store is, waits for the others to end after its own ranks have ended well."""

NO_FILE = ""
"""Torch would look there for what a worker said at its end; `launch.local.ranks` knows better."""

Noticed = Callable[[ChildFailedError], None]


@final
class Gathered(RendezvousHandler):
    """The rendezvous of machines that have met."""

    def __init__(self, machines: Machines) -> None:
        self._crew = machines

    def get_backend(self) -> str:
        return "gathered"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        machines = self._crew
        listening: dict[str, Any] = {}
        if machines.store_socket is not None:
            listening = {"is_master": True, "master_listen_fd": machines.store_socket.detach()}
        store = TCPStore(
            machines.address,
            machines.store_port,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            **listening,
        )
        where = RendezvousStoreInfo(machines.address, machines.store_port)
        return RendezvousInfo(store, machines.place.node, machines.place.nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "harness"

    def shutdown(self) -> bool:
        return True


@final
class Agent(SimpleElasticAgent):
    """Gives orders to the processes of this machine and waits for them."""

    def __init__(self, spec: WorkerSpec, processes: Sequence[Reserved], orders: Sequence[Orders], noticed: Noticed):
        super().__init__(spec, exit_barrier_timeout=EXIT_BARRIER_S)
        self._processes, self._orders, self._noticed = processes, orders, noticed

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for worker, process, orders in zip(worker_group.workers, self._processes, self._orders, strict=True):
            environment = torchrun_environment(worker_group, worker)
            process.begin(replace(orders, environment=orders.environment | environment))
        return {local_rank: process.pid for local_rank, process in enumerate(self._processes)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {}
        fallen = []
        for worker, process in zip(worker_group.workers, self._processes, strict=True):
            exit_code = process.exit_code  # before the pipe is read: what it returned is in there by then
            code = process.returned()
            if code is not None:
                codes[worker.global_rank] = code
            elif exit_code is not None:
                fallen.append((exit_code >= 0, worker, process.pid, exit_code))
        if fallen:
            fallen.sort(key=lambda each: each[0])  # those that a signal killed first: no other made them fall
            failures = {
                worker.global_rank: ProcessFailure(worker.local_rank, pid, exit_code, NO_FILE)
                for _, worker, pid, exit_code in fallen
            }
            self._noticed(ChildFailedError("worker", failures))
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if len(codes) < len(self._processes):
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=codes)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 -- torch passes it
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Stop the workers that have not returned; the others are sent home by whoever holds them."""
        deadline_s = time.monotonic() + timeout
        for process in self._working():
            process.tell(death_sig)
        while self._working() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        for process in self._working():
            process.tell(signal.SIGKILL)

    def _working(self) -> list[Reserved]:
        return [each for each in self._processes if each.exit_code is None and each.returned() is None]


def torchrun_environment(group: WorkerGroup, worker: Worker) -> dict[str, str]:
    """What torchrun tells a rank, in torchrun's words."""
    spec = group.spec
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def run_agent(
    machines: Machines, processes: Sequence[Reserved], orders: Sequence[Orders], *, noticed: Noticed
) -> dict[int, int]:
    """Let the ranks of this machine begin and wait for their end; returns the exit code of each."""
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks by arithmetic: no waiting for a machine that is gone
    spec = WorkerSpec(
        role="default",
        local_world_size=len(processes),
        entrypoint=orders[0].call,
        rdzv_handler=Gathered(machines),
        max_restarts=0,
        monitor_interval=POLL_S,
        local_addr=machines.address,
    )
    result = Agent(spec, processes, orders, noticed).run()
    if result.is_failed():
        raise ChildFailedError("worker", result.failures)
    return dict(result.return_values)
