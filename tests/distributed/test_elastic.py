"""A run resumes with any number of ranks that can share its batch, and its ranks open few sockets."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.distributed.collectives import all_reduce_sum, broadcast, gather_results
from harness.distributed.world import connect
from tests.distributed import cases
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

OVERRIDES = ("model.num_layers=1", "train.batch_size=16", "train.micro_batch_size=4")
CONSTANT = ("optim.warmup_steps=2", "optim.schedule=constant", "run.resume=changed")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumes_on_more_and_on_fewer_ranks_up_to_rounding(ranks: Pool, tmp_path: Path, optimizer: str) -> None:
    constant = (*CONSTANT, f"optim={optimizer}")
    for size, until in ((1, 2), (3, 4), (2, 6)):
        overrides = (*OVERRIDES, *constant, f"train.num_steps={until}")
        code, records = ranks.run(size, cases.run, str(tmp_path), "run.name=elastic", *overrides)[0]
        assert code == 0
    overrides = (*OVERRIDES, *constant, "train.num_steps=6")
    code, expected = ranks.run(2, cases.run, str(tmp_path), "run.name=whole", *overrides)[0]
    assert code == 0
    assert [record.cursor for record in records] == [record.cursor for record in expected] == list(range(6))
    assert [record.batch["fingerprint"] for record in records] == [each.batch["fingerprint"] for each in expected]
    assert [record.tokens for record in records] == [record.tokens for record in expected]
    assert [record.loss for record in records] == pytest.approx([record.loss for record in expected], rel=2e-5)
    assert [record.grad_norm for record in records] == pytest.approx([each.grad_norm for each in expected], rel=1e-3)
    assert records[-1].loss < records[0].loss


def test_gradient_norms_of_ranks_with_different_shares_are_comparable(ranks: Pool, tmp_path: Path) -> None:
    """Ranks 0 and 1 have a row each; of three ranks, the last one has two. Theirs is as if they had two as well."""
    norms = []
    for size in (4, 3):
        overrides = (
            "model.num_layers=1",
            "train.batch_size=4",
            "train.num_steps=1",
            "optim.warmup_steps=0",
            f"run.name={size}",
        )
        code, records = ranks.run(size, cases.run, str(tmp_path), *overrides)[0]
        assert code == 0
        norms.append(dict(records[0].ranks["grad_norm"]["worst"]))
    growth = [norms[1][rank] / norms[0][rank] for rank in (0, 1)]
    assert growth[0] == pytest.approx(growth[1], rel=1e-3)
    assert 1.41 < growth[0] < 2.01


def num_sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


def wait_for_all(size: int) -> None:
    """A barrier over the store, which needs no further socket: no peer connects to a rank that has not counted yet."""
    store = dist.distributed_c10d._get_default_store()
    store.add("counted", 1)
    while store.add("counted", 0) < size:
        time.sleep(0.01)


def opened_sockets() -> tuple[int, int]:
    """Number of sockets of this rank after connecting, and after the collectives of a step and a save."""
    before = num_sockets()
    world = connect(cases.tiny().parallel)
    idle = num_sockets()
    wait_for_all(world.size)
    all_reduce_sum(torch.ones(1000))
    broadcast(world.rank)
    gather_results(lambda: world.rank)
    gather_results(lambda: world.rank, world.background_group)
    busy = num_sockets()
    gather_results(lambda: 0)  # barrier: no rank disconnects before all have counted
    return idle - before, busy - before


def test_sockets_of_a_rank_do_not_grow_with_the_world_size(ranks: Pool) -> None:
    """Rank 0 is left out: it serves the store, to which every rank has one connection."""
    four, eight = (ranks.run(size, opened_sockets)[1:] for size in (4, 8))
    idle = [max(each for each, _ in counts) for counts in (four, eight)]
    busy = [max(each for _, each in counts) for counts in (four, eight)]
    assert idle[1] <= idle[0] + 1, "a peer is connected with the first message"
    assert busy[1] <= busy[0] + 2, "rings and trees: four more peers in two groups add one or two sockets"


def collective_timeout(flag: str) -> tuple[str, float]:
    """The error of a collective that the only peer never enters, and the time until the error."""
    cfg = cases.tiny().parallel
    cfg.timeout_s = 2.0
    world = connect(cfg)
    path, began_s = Path(flag), time.monotonic()
    if world.rank == 1:
        while not path.exists() and time.monotonic() < began_s + 60:
            time.sleep(0.05)
        return "", 0.0
    try:
        gather_results(lambda: world.rank)
    except RuntimeError as error:
        return str(error), time.monotonic() - began_s
    finally:
        path.touch()
    return "", 0.0


def test_a_missing_peer_times_out(ranks: Pool, tmp_path: Path) -> None:
    (message, took_s), _ = ranks.run(2, collective_timeout, str(tmp_path / "flag"))
    assert "timed out" in message.lower() or "timeout" in message.lower()
    assert took_s < 20
