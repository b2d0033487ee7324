"""Torch's elastic agent with changes: a finished rendezvous, pooled processes, early failure reports, a bounded end.

Why: torch's own rendezvous listens on every address of the machine, assigns ranks in order of arrival or needs a free
port, and does not detect the loss of another node. It starts every rank as a new process, which imports torch again.
Its agent stops the remaining workers for up to 30 s before it reports that one died, and waits without a limit at the
end if the store of node 0 freezes.
How: `StaticRendezvous` passes on the result of `launch.local.rendezvous`; torch's store listens on the socket opened
there. The processes wait in `launch.local.worker_pool` for a task: torchrun's environment and the function to call.
Left out: torch's own restarts. They share one store between all starts, with stale keys of dead ranks (torch 2.13), and
do not ask whether the run makes progress. Every restart has its own agent and store (`launch.local.restart`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import Any, final

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
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

from harness.config.errors import EXIT_CRASHED
from harness.control.stop_requests import RESTART_COUNT
from harness.core.events import EndCause
from harness.core.node_name import machine_name
from launch.local.node_address import RendezvousError
from launch.local.node_group import NodeFailure, NodeGroup
from launch.local.worker_pool import PooledWorker, WorkerTask

POLL_S = 0.1
STORE_TIMEOUT_S = 60.0
"""How long a node waits for torch's store, and later for a key of it."""
EXIT_BARRIER_S = 30.0
"""How long a node waits for the others after its own ranks ended without an error: node 0 hosts the store."""

NO_ERROR_FILE = ""
"""Torch would read a worker's error from this file; `launch.local.ranks` has its own."""

FailureCallback = Callable[[ChildFailedError], None]


@final
class StaticRendezvous(RendezvousHandler):
    """A torch rendezvous handler for nodes that have already joined."""

    def __init__(self, group: NodeGroup) -> None:
        self._group = group

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        group = self._group
        opening = connect_to_store(group)
        deadline_s = time.monotonic() + STORE_TIMEOUT_S
        while not wait([opening], timeout=POLL_S).done:
            if group.failure is not None:
                raise RendezvousError(f"node {group.node_rank} ({machine_name()}) stops: {group.failure.line}")
            if time.monotonic() > deadline_s:
                raise self._report_no_store(f"no answer within {STORE_TIMEOUT_S:.0f} s")
        try:
            store = opening.result()
        except DistError as error:
            raise self._report_no_store(str(error).splitlines()[0]) from None
        where = RendezvousStoreInfo(group.address, group.store_port)
        return RendezvousInfo(store, group.node_rank, group.num_nodes, where)

    def _report_no_store(self, problem: str) -> RendezvousError:
        """Report at once that this node has no store: the agent then waits for its workers, which have no task."""
        group, host = self._group, machine_name()
        where = f"torch's store at {group.address}:{group.store_port}"
        line = f"node {group.node_rank} ({host}) cannot reach {where}: {problem}"
        group.report_failure(
            NodeFailure(node_rank=group.node_rank, host=host, exit_code=EXIT_CRASHED, line=line, cause=EndCause.error)
        )
        return RendezvousError(line)

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


def connect_to_store(group: NodeGroup) -> Future[TCPStore]:
    """Connect to torch's store in a thread that may be left behind, and serve the store on node 0.

    torch limits the time of an attempt to connect, of which it makes two, but waits without a limit for the answer of a
    store whose socket is open and which nobody serves yet.
    """
    opening: Future[TCPStore] = Future()
    serving: dict[str, Any] = {}
    if group.store_socket is not None:
        serving = {"is_master": True, "master_listen_fd": group.store_socket.detach()}

    def connect() -> None:
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        try:
            store = TCPStore(group.address, group.store_port, wait_for_workers=False, timeout=timeout, **serving)
            opening.set_result(store)
        except Exception as error:
            opening.set_exception(error)

    Thread(target=connect, name="store", daemon=True).start()
    return opening


@final
class Agent(SimpleElasticAgent):
    """Assigns tasks to the pooled workers of this node and waits for them."""

    def __init__(
        self,
        spec: WorkerSpec,
        processes: Sequence[PooledWorker],
        tasks: Sequence[WorkerTask],
        on_failure: FailureCallback,
        group: NodeGroup,
    ):
        super().__init__(spec, exit_barrier_timeout=EXIT_BARRIER_S)
        self._processes, self._tasks, self._on_failure = processes, tasks, on_failure
        self._group = group

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for worker, process, task in zip(worker_group.workers, self._processes, self._tasks, strict=True):
            environment = torchrun_environment(worker_group, worker, restarts=self._group.restarts)
            process.assign(replace(task, environment=task.environment | environment))
        return {local_rank: process.pid for local_rank, process in enumerate(self._processes)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {}
        dead = []
        for worker, process in zip(worker_group.workers, self._processes, strict=True):
            exit_code = process.exit_code  # read before the pipe: a result is in the pipe by the time the process exits
            code = process.poll_result()
            if code is not None:
                codes[worker.global_rank] = code
            elif exit_code is not None:
                dead.append((exit_code >= 0, worker, process.pid, exit_code))
        if dead:
            dead.sort(key=lambda item: item[0])  # killed by a signal first: those are causes, not victims
            failures = {
                worker.global_rank: ProcessFailure(worker.local_rank, pid, exit_code, NO_ERROR_FILE)
                for _, worker, pid, exit_code in dead
            }
            self._on_failure(ChildFailedError("worker", failures))
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if len(codes) < len(self._processes):
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=codes)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 -- torch passes it
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Stop the workers that are still running; the pool dismisses the others."""
        deadline_s = time.monotonic() + timeout
        for process in self._running_workers():
            process.send_signal(death_sig)
        while self._running_workers() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        for process in self._running_workers():
            process.send_signal(signal.SIGKILL)

    def _exit_barrier(self) -> None:
        """Torch's barrier, in a thread that may be left behind: its calls to a store that nobody serves any more, such
        as that of a node 0 that has frozen, have no time limit."""
        barrier = Thread(target=super()._exit_barrier, name="exit-barrier", daemon=True)
        barrier.start()
        deadline_s = time.monotonic() + EXIT_BARRIER_S
        while barrier.is_alive() and self._group.failure is None and time.monotonic() < deadline_s:
            barrier.join(POLL_S)

    def _running_workers(self) -> list[PooledWorker]:
        return [process for process in self._processes if process.exit_code is None and process.poll_result() is None]


def torchrun_environment(group: WorkerGroup, worker: Worker, *, restarts: int) -> dict[str, str]:
    """The environment variables that torchrun sets for a rank."""
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
        RESTART_COUNT: str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def run_agent(
    group: NodeGroup, processes: Sequence[PooledWorker], tasks: Sequence[WorkerTask], *, on_failure: FailureCallback
) -> dict[int, int]:
    """Run the ranks of this node to their end; returns the exit code of each. Raises ChildFailedError if one fails, and
    RendezvousError if torch's store does not answer."""
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks by arithmetic: no exchange that a lost node could block
    spec = WorkerSpec(
        role="default",
        local_world_size=len(processes),
        entrypoint=tasks[0].call,
        rdzv_handler=StaticRendezvous(group),
        max_restarts=0,
        monitor_interval=POLL_S,
        local_addr=group.address,
    )
    result = Agent(spec, processes, tasks, on_failure, group).run()
    if result.is_failed():
        raise ChildFailedError("worker", result.failures)
    return dict(result.return_values)
