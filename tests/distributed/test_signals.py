"""Per-rank signals: which rank has a bad gradient, which is slow, whose weights differ."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor.debug import CommDebugMode

from harness.build import Parts
from harness.config.schema import Config
from harness.core.event_json import to_json
from harness.core.events import StepRecord
from harness.distributed.shards import local
from harness.distributed.world import connect
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import linear
from harness.sentinel.device.step_report import HostFacts, unpack_report
from harness.step import finish_step, forward_backward
from tests.distributed import cases
from tests.distributed.pool import Pool

GROUPS = ("embedding", "blocks.0", "blocks.1", "norm", "head")


def build_parts(*overrides: str) -> tuple[Parts, Config]:
    cfg = cases.tiny(*overrides)
    return cases._build(cfg, connect(cfg.parallel)), cfg


def step(parts: Parts, cfg: Config, index: int, *, probe: bool = True) -> StepRecord:
    """One iteration and its record, read at once."""
    forward_backward(parts, parts.batches[index], cfg=cfg, probe=probe)
    report = finish_step(parts, cfg=cfg, probe=probe)
    facts = HostFacts(iteration=index, cursor=index, tokens=0, probed=probe, posted_s=0.0, memory_bytes=0, batch={})
    return unpack_report(
        parts.signals.layout,
        facts,
        report,
        dim=cfg.model.dim,
        dynamic_scale=False,
        clip_norm=cfg.optim.clip_norm,
        replicate=cfg.parallel.replicate,
    )


BAD_GRADIENTS = (("embedding", math.nan, {"embedding"}), ("blocks.0.mlp", math.inf, {"embedding", "blocks.0"}))
"""A module whose output gradient is multiplied by a value, and the layers whose gradients are then not finite."""


def records_with_bad_gradients(faulty_rank: int, *overrides: str) -> list[StepRecord]:
    """A clean step before, between and after steps in which a rank's gradient is corrupted in a backward pass."""
    parts, cfg = build_parts(*overrides)
    records = [step(parts, cfg, 0)]
    for module, value, _ in BAD_GRADIENTS:

        def corrupt(_module: Any, _inputs: Any, output: Tensor, value: float = value) -> None:
            output.register_hook(lambda gradient: gradient * value)  # type: ignore[no-untyped-call]

        handle = None
        if parts.world.rank == faulty_rank:
            handle = parts.model.get_submodule(module).register_forward_hook(corrupt)
        records.append(step(parts, cfg, len(records)))
        if handle is not None:
            handle.remove()
        records.append(step(parts, cfg, len(records)))
    return records


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (1, ()),
        (2, ()),
        (2, ("precision=bf16", "train.micro_batch_size=2")),
        (4, ("parallel=hsdp",)),
        (2, ("parallel.replicate=2", "train.micro_batch_size=2")),
    ],
)
def test_a_bad_gradient_is_attributed_to_its_rank_and_layers(
    ranks: Pool, size: int, overrides: tuple[str, ...]
) -> None:
    faulty_rank = size // 2
    outcomes = ranks.run(size, records_with_bad_gradients, faulty_rank, *overrides)
    for records in outcomes:
        for bad, (_, _, groups) in zip(records[1::2], BAD_GRADIENTS, strict=True):
            assert bad.refused
            assert math.isfinite(bad.loss)
            assert bad.nonfinite_ranks == [faulty_rank]
            assert {name for name, norm in bad.group_grad_norms.items() if not math.isfinite(norm)} == groups
            assert set(bad.group_grad_norms) == set(GROUPS)
        for clean in records[::2]:
            assert not clean.refused
            assert clean.nonfinite_ranks == []
    as_json = [[to_json(record) for record in records] for records in outcomes]
    assert as_json == [as_json[0]] * size, "all ranks have the same record"


def record_and_reference(*overrides: str) -> tuple[StepRecord, float, float]:
    """A step's record, and this rank's loss and gradient norm from an unsharded model on its own rows."""
    parts, cfg = build_parts(*overrides)
    weights = {name: cases.full(p).detach().clone() for name, p in parts.model.named_parameters()}
    parts.signals.add_host_facts(decision=77, busy_s=parts.world.rank + 1.0)
    record = step(parts, cfg, 0)

    reference = Transformer(cfg.model, sequence_length=cfg.train.sequence_length, linear=linear)
    reference.load_state_dict(weights, strict=False)
    loss, num_tokens, squares = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for rows in parts.batches[0].micro_batches(cfg.train.micro_batch_size or cfg.train.batch_size):
        output = reference(rows.inputs, rows.targets, seed=1 / (cfg.train.batch_size * cfg.train.sequence_length))
        output.objective.backward()
        loss += output.row_losses.sum()
        num_tokens += output.row_tokens.sum()
        for parameter in reference.parameters():
            assert parameter.grad is not None
            squares += parameter.grad.square().sum()
            parameter.grad = None
    return record, float(loss / num_tokens), float(squares.sqrt())


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, ()),
        (3, ()),
        (3, ("train.micro_batch_size=1",)),
        (4, ("parallel=hsdp",)),
        (2, ("parallel.replicate=2",)),
        (2, ("train.micro_batch_size=1",)),
    ],
)
def test_per_rank_losses_and_norms_are_those_of_each_rank(ranks: Pool, size: int, overrides: tuple[str, ...]) -> None:
    outcomes = ranks.run(size, record_and_reference, *overrides)
    for record, _, _ in outcomes:
        assert record == outcomes[0][0], "all ranks have the same record"
        assert record.ranks.keys() == {"loss", "grad_norm", "step_time_s"}
        by_rank = {name: dict(spread["worst"]) for name, spread in record.ranks.items()}
        assert by_rank["step_time_s"] == {rank: rank + 1.0 for rank in range(size)}
        for rank, (_, loss, grad_norm) in enumerate(outcomes):
            assert by_rank["loss"][rank] == pytest.approx(loss, rel=1e-5)
            assert by_rank["grad_norm"][rank] == pytest.approx(grad_norm, rel=1e-4)
        assert record.digests == {}
        assert record.mismatched_ranks == []
        train = cases.tiny(*overrides).train
        assert sum(record.token_loss_counts) == train.batch_size * train.sequence_length


def probed_records(*overrides: str) -> list[StepRecord]:
    parts, cfg = build_parts(*overrides)
    return [step(parts, cfg, index) for index in range(3)]


@pytest.fixture(scope="module")
def probed_by_one_rank(ranks: Pool) -> list[StepRecord]:
    (records,) = ranks.run(1, probed_records)
    assert records[0].square_ratio is None
    return list(records)


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "overrides"),
    [(4, ("parallel=hsdp",)), (2, ("parallel.replicate=2",)), (3, ()), (3, ("train.micro_batch_size=1",))],
)
def test_probes_do_not_depend_on_the_sharding(
    ranks: Pool, probed_by_one_rank: list[StepRecord], size: int, overrides: tuple[str, ...]
) -> None:
    single = probed_by_one_rank
    for records in ranks.run(size, probed_records, *overrides):
        assert records[0].square_ratio is None
        for record, expected in zip(records, single, strict=True):
            for name in ("param_norm", "v_norm", "update_ratio", "square_ratio")[: 4 if record.step > 1 else 3]:
                assert getattr(record, name) == pytest.approx(getattr(expected, name), rel=1e-3), name
            assert record.group_param_norms == pytest.approx(expected.group_param_norms, rel=1e-5)
            assert record.token_loss_counts == expected.token_loss_counts


def digests_with_one_different(faulty_rank: int) -> dict[str, list[int]]:
    parts, cfg = build_parts()
    parts.signals.add_host_facts(decision=5 if parts.world.rank == faulty_rank else 77, busy_s=0.0)
    return step(parts, cfg, 0).digests


def test_ranks_that_decided_differently_are_found(ranks: Pool) -> None:
    for digests in ranks.run(4, digests_with_one_different, 2):
        assert digests == {"00004d": [0, 1, 3], "000005": [2]}


def records_after_flip(faulty_rank: int, *overrides: str) -> list[StepRecord]:
    """The records of four steps without probes; before the second a sign is flipped in a weight of one rank."""
    parts, cfg = build_parts(*overrides)
    records = [step(parts, cfg, 0, probe=False)]
    if parts.world.rank == faulty_rank:
        weight = local(parts.update.parameters["blocks.1.mlp.up.weight"]).detach()
        weight.view(-1)[3:4].neg_()
    return records + [step(parts, cfg, index, probe=False) for index in (1, 2, 3)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("replicate", "faulty_rank", "expected"), [(2, 3, [1, 3]), (2, 0, [0, 2]), (4, 2, [2]), (1, 2, [])]
)
def test_changed_weights_and_replicas_that_differ_are_found_one_step_later(
    ranks: Pool, replicate: int, faulty_rank: int, expected: list[int]
) -> None:
    """The second update reads the changed weight. The record of the third step names the rank, once; replicas differ
    from then on."""
    for records in ranks.run(4, records_after_flip, faulty_rank, f"parallel.replicate={replicate}"):
        assert [record.changed_ranks for record in records] == [[], [], [faulty_rank], []]
        assert [record.mismatched_ranks for record in records] == [[], [], expected, expected]


def digests_and_norms(*overrides: str) -> list[tuple[str, float | None, float | None]]:
    """Of the first step: nothing has been summed over ranks in another order yet."""
    parts, cfg = build_parts(*overrides)
    record = step(parts, cfg, 0)
    return [(record.weight_digest, record.weight_norm, record.param_norm)]


@pytest.mark.full
def test_the_digest_of_the_weights_does_not_depend_on_the_sharding(ranks: Pool) -> None:
    ((digest, norm, probed),) = ranks.run(1, digests_and_norms)[0]
    assert norm == pytest.approx(probed, rel=1e-6)
    for size, overrides in ((2, ()), (3, ()), (4, ("parallel=hsdp",))):
        for ((other, other_norm, _),) in ranks.run(size, digests_and_norms, *overrides):
            assert other == digest
            assert other_norm == pytest.approx(norm, rel=1e-5)


def losses_and_digest(is_measured: bool, probe: bool, *overrides: str) -> tuple[list[float], str]:
    """Losses and final weights of a few steps, with measured collectives or torch's own."""
    parts, cfg = build_parts(*overrides)
    for module in parts.model.modules():
        if isinstance(module, FSDPModule) and not is_measured:
            module.set_custom_all_gather(DefaultAllGather())
            module.set_custom_reduce_scatter(DefaultReduceScatter())
    records = [step(parts, cfg, index, probe=probe) for index in range(4)]
    seen = [bool(record.ranks["grad_norm"]["median"]) if "grad_norm" in record.ranks else False for record in records]
    assert seen == [is_measured] * 4
    return [record.loss for record in records], cases.digest(parts.update.parameters)


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "overrides"),
    [(2, ()), (2, ("precision=bf16", "train.micro_batch_size=1")), (4, ("parallel=hsdp",))],
)
def test_measured_collectives_change_no_bit(ranks: Pool, size: int, overrides: tuple[str, ...]) -> None:
    measured = ranks.run(size, losses_and_digest, True, True, *overrides)
    assert measured == ranks.run(size, losses_and_digest, False, False, *overrides)
    assert len(set(measured[0][0])) == 4


def all_reduces(*overrides: str) -> int:
    """Number of all-reduces in a probed step."""
    parts, cfg = build_parts(*overrides)
    step(parts, cfg, 0)
    with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
        step(parts, cfg, 1)
    names = {str(operator).replace("_", ""): count for operator, count in counted.get_comm_counts().items()}
    return sum(count for name, count in names.items() if "allreduce" in name)


def test_probes_and_slots_need_no_further_collective(ranks: Pool) -> None:
    assert ranks.run(2, all_reduces) == [1, 1]
    blocks_and_root = 3
    assert ranks.run(4, all_reduces, "parallel=hsdp") == [1 + blocks_and_root] * 4, "FSDP's own, between replicas"


def wait_time_s_with_late_rank(faulty_rank: int, delay_s: float) -> float:
    """How long this rank waited in collectives during a step in which one rank was late."""
    parts, cfg = build_parts()
    step(parts, cfg, 0)
    before_s = parts.comm_stats.waited_s
    if parts.world.rank == faulty_rank:
        time.sleep(delay_s)
    step(parts, cfg, 1)
    return parts.comm_stats.waited_s - before_s


def test_the_late_rank_waits_least(ranks: Pool) -> None:
    waited_s = ranks.run(2, wait_time_s_with_late_rank, 1, 1.0)
    assert waited_s[0] > waited_s[1] + 0.5
