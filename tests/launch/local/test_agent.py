"""The end of torch's agent, with a store that freezes; its other parts are tested with real ranks in `test_start`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from inspect import getsource
from threading import Event
from typing import Any, final

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec

from harness.core.events import EndCause
from launch.local import agent
from launch.local.agent import Agent, StaticRendezvous
from launch.local.node_group import NodeFailure, NodeGroup, RendezvousSpec


@final
class FrozenStore:
    """The connection to the store of a process that was stopped: whatever the time limit, nothing answers."""

    def __init__(self) -> None:
        self.timeout = timedelta(seconds=1)
        self.gone = Event()

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def add(self, _key: str, _amount: int) -> int:
        self.gone.wait(60)
        return 1

    def wait(self, _keys: list[str]) -> None:
        pass


@pytest.fixture
def store() -> Iterator[FrozenStore]:
    store = FrozenStore()
    yield store
    store.gone.set()


def test_a_frozen_store_does_not_hold_a_node_whose_ranks_have_ended(
    store: FrozenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = NodeGroup(RendezvousSpec(num_nodes=2, node_rank=1), "127.0.0.1", "start", 0, None, 1.0)
    spec = WorkerSpec("default", 1, StaticRendezvous(group), entrypoint=print, max_restarts=0)
    node: Any = Agent(spec, [], [], lambda _: None, group)  # torch declares both fields below as None
    node._store, node._worker_group.group_world_size = store, 2
    monkeypatch.setattr(agent, "EXIT_BARRIER_S", 0.5)
    begun_s = time.monotonic()
    node._exit_barrier()
    assert 0.5 <= time.monotonic() - begun_s < 5
    monkeypatch.setattr(agent, "EXIT_BARRIER_S", 60.0)
    group.failure = NodeFailure(node_rank=0, host="a", exit_code=1, line="is gone", cause=EndCause.lost_node)
    node._exit_barrier()
    assert time.monotonic() - begun_s < 10, "a node that is lost is not waited for"


def test_torch_waits_in_this_method_at_the_end() -> None:
    """Checked on torch 2.13."""
    assert "self._exit_barrier()" in getsource(SimpleElasticAgent._invoke_run)
