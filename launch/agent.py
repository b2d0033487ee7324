"""Torch's elastic agent, with two changes: the machines have gathered already, and a failure is told when it is seen.

Why: torch's own rendezvous listens on every address of the machine, gives ranks in the order of arrival or asks for a
port that nobody holds, and does not know when another machine is lost; and its agent stops the remaining workers for up
to half a minute before it says that one has died.
How: `Gathered` hands on what `launch.muster` found out; the store of torch listens on the socket that was opened there.
Left out: restarts inside one start. (torch 2.13 shares the store between them, with keys of the dead in it.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from launch.machines import Machines
from launch.ranks import RankLogs

POLL_S = 0.1
STORE_TIMEOUT_S = 60.0
EXIT_BARRIER_S = 30.0
"""How long machine 0, where the store is, waits for the others to end after its own ranks have ended well."""

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
class Agent(LocalElasticAgent):
    """Starts the workers of this machine and waits for them."""

    def __init__(self, spec: WorkerSpec, logs: RankLogs, noticed: Noticed) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=EXIT_BARRIER_S)
        self._noticed = noticed

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and result.failures:
            self._noticed(ChildFailedError("worker", result.failures))
        return result


def run_agent(
    machines: Machines, logs: RankLogs, entry: Callable[..., int], arguments: tuple[Any, ...], *, noticed: Noticed
) -> dict[int, int]:
    """Start the ranks of this machine and wait for their end; returns the exit code of each."""
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks by arithmetic: no waiting for a machine that is gone
    spec = WorkerSpec(
        role="default",
        local_world_size=len(logs.ranks),
        entrypoint=entry,
        args=arguments,
        rdzv_handler=Gathered(machines),
        max_restarts=0,
        monitor_interval=POLL_S,
        local_addr=machines.address,
    )
    result = Agent(spec, logs, noticed).run()
    if result.is_failed():
        raise ChildFailedError("worker", result.failures)
    return dict(result.return_values)
