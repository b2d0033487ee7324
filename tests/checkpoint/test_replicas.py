"""A partner's copy of a snapshot: what it holds, when it is withdrawn, and what happens to a damaged one; on real
ranks."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.checkpoint.replicas import ReplicaKeeper
from harness.checkpoint.ring import Ring
from harness.checkpoint.shared_snapshots import open_shared
from harness.core.state import RunState
from harness.distributed.collectives import gather_results
from harness.distributed.world import connect
from tests.checkpoint.test_ring_in_process import RING
from tests.composed import load
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full


class PartnerBench:
    """A ring over one tensor on a rank that is alone on its node."""

    def __init__(self, directory: str) -> None:
        self.rank = int(os.environ["RANK"])
        os.environ["GROUP_RANK"] = str(self.rank)
        self.world = connect(load(["parallel.device=cpu"]).parallel)
        memory = Path(directory) / f"node-{self.rank}"
        memory.mkdir()
        cfg = replace(deepcopy(RING), slots=2, shared_dir=str(memory), replicas=1)
        self.tensor = torch.zeros(1000 + 64 * self.rank)
        opened = open_shared(cfg, Path(directory), world=self.world, config="c")
        self.ring = Ring({"tensor": self.tensor}, cfg=cfg, world=self.world, shared=opened)
        assert self.ring.shared is not None
        self.shared = self.ring.shared
        self.shared.begin_start("first", None)

    def take(self, iteration: int) -> None:
        self.tensor.fill_(iteration + self.rank)
        self.ring.take_snapshot(RunState(iteration=iteration)).complete(step=iteration, refused_in_row=0)
        self.trust(iteration + 1)

    def trust(self, iteration: int) -> None:
        self.ring.trust(iteration)
        self.shared.wait()
        gather_results(lambda: None)

    def replicas(self) -> list[tuple[int, int, float]]:
        """Shard, iteration and value of every replica on this node."""
        found = []
        for name, header in self.shared.files.headers().items():
            if name.startswith("replica-"):
                content = bytearray(self.shared.files.block(name).read_bytes())
                (value,) = set(torch.frombuffer(content, dtype=torch.float32)[:1000].tolist())
                found.append((header.shard, header.iteration, value))
        return sorted(found)


def run_replicas(directory: str) -> dict[str, list[tuple[int, int, float]]]:
    bench = PartnerBench(directory)
    seen = {}
    bench.take(10)
    bench.take(20)
    bench.take(30)
    seen["newest two"] = bench.replicas()
    bench.ring.distrust(30)
    seen["distrusted"] = bench.replicas()
    bench.trust(35)
    seen["trusted again"] = bench.replicas()
    swap = ReplicaKeeper.swap
    if bench.rank == 0:

        def damage_and_swap(self: ReplicaKeeper, name: str, outgoing: object, sha256: str) -> str | None:
            outgoing.content[3] ^= 1  # type: ignore[attr-defined]
            return swap(self, name, outgoing, sha256)  # type: ignore[arg-type]

        ReplicaKeeper.swap = damage_and_swap  # type: ignore[method-assign]
    bench.take(40)
    ReplicaKeeper.swap = swap  # type: ignore[method-assign]
    seen["damaged on the way"] = bench.replicas()
    bench.ring.end_sharing()
    bench.ring.close()
    seen["closed"] = [(0, 0, 0.0) for _ in bench.shared.folder.parent.iterdir()]
    return seen


def test_a_partner_keeps_the_newest_intact_snapshot(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, run_replicas, str(tmp_path))
    assert first["newest two"] == [(1, 20, 21.0), (1, 30, 31.0)]
    assert second["newest two"] == [(0, 20, 20.0), (0, 30, 30.0)]
    assert first["distrusted"] == [(1, 20, 21.0)]
    assert first["trusted again"] == [(1, 20, 21.0), (1, 30, 31.0)]
    assert first["damaged on the way"] == [(1, 30, 31.0), (1, 40, 41.0)]
    assert second["damaged on the way"] == [(0, 30, 30.0)]
    assert first["closed"] == second["closed"] == []
