"""The training loop has no host sync, checked on a CPU; and the guard finds every kind of host sync.

The loop runs without torch.compile: modes do not see into compiled blocks. tests/gpu has the same test on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from harness import train
from harness.core import event_json
from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from harness.distributed.reduce_scatter import MeasuredReduceScatter
from harness.distributed.world import rank_from_environment
from harness.faults.site import intercept
from harness.precision.fp8.emulation import EmulatedEngine
from harness.run import Ending, Run
from tests.distributed import cases
from tests.distributed.cases import tiny
from tests.distributed.pool import Pool
from tests.no_sync import SyncError, no_sync

LOOP = (
    "run.name=guarded",
    "train.num_steps=3",
    "sentinel.probe_every=2",
    "sentinel.sdc.every=1",
    "optim.qk_clip=0.01",
    "checkpoint.ring.slots=2",
    "checkpoint.ring.every_steps=2",
    "eval.every_steps=3",
    "eval.num_batches=1",
)
"""Steps with and without a probe, a snapshot and an evaluation; each computes a micro-batch twice."""

FULL = "parallel.activation_checkpointing=full"
ONE_LAYER = "model.num_layers=1"

ALLOWED_READS = {
    "harness/data/batches.py:_fill",
    "harness/held_out.py:receive",
    "harness/sentinel/device/step_report.py:unpack_report",
    "harness/step.py:evaluate",
}
"""Where the loop may read a tensor on the host; on CUDA all but the evaluation read host memory."""

TensorCall = Callable[[Tensor], Any]
"""A call that is inserted into the loop; its argument holds four positive values."""

READS: dict[str, TensorCall] = {
    ".item()": lambda numbers: numbers[0].item(),
    ".tolist()": lambda numbers: numbers.tolist(),
    ".numpy()": lambda numbers: numbers.numpy(),
    "numpy.asarray()": lambda numbers: np.asarray(numbers),
    ".cpu()": lambda numbers: numbers.cpu(),
    ".to(text)": lambda numbers: numbers.to("cpu"),
    ".to(device)": lambda numbers: numbers.to(numbers.device),
    ".to(device=)": lambda numbers: numbers.to(dtype=torch.float64, device="cpu"),
    "bool()": lambda numbers: bool(numbers[0]),
    "a branch": lambda numbers: 1 if numbers[0] > 0 else 2,
    "float()": lambda numbers: float(numbers[0]),
    "int()": lambda numbers: int(numbers[0]),
    "format()": lambda numbers: f"{numbers[0]:.3f}",
    "in": lambda numbers: 3.0 in numbers,
    "a range": lambda numbers: range(numbers.argmax()),
    "an element": lambda numbers: numbers[numbers.argmax()],
    "a slice": lambda numbers: numbers[: numbers.argmax()],
    "nonzero()": lambda numbers: numbers.nonzero(),
    "where(condition)": lambda numbers: torch.where(numbers > 0),
    "a mask": lambda numbers: numbers[numbers > 0],
    "an assignment by mask": lambda numbers: numbers.clone().__setitem__(numbers > 0, numbers),
    "masked_select()": lambda numbers: numbers.masked_select(numbers > 0),
    "unique()": lambda numbers: numbers.unique(),  # type: ignore[no-untyped-call]
    "bincount()": lambda numbers: numbers.long().bincount(),
    "repeat_interleave()": lambda numbers: numbers.repeat_interleave(torch.ones_like(numbers).long()),
    "one_hot()": lambda numbers: F.one_hot(numbers.long()),
    "equal()": lambda numbers: torch.equal(numbers, numbers + 1),
    "allclose()": lambda numbers: torch.allclose(numbers, numbers + 1),
    "is_nonzero()": lambda numbers: torch.is_nonzero(numbers[0]),
    "tensor(device=)": lambda numbers: torch.tensor([1.0], device=numbers.device),
    "new_tensor(device=)": lambda numbers: numbers.new_tensor([1.0], device=numbers.device),
    "another type of device": lambda numbers: torch.empty(4, device="meta").copy_(numbers),
}
"""Every kind of host sync, each on its own line."""

HARMLESS: dict[str, TensorCall] = {
    "a marked line": lambda numbers: numbers.tolist(),  # sync: allowed by this mark
    "another dtype": lambda numbers: numbers.to(torch.float64),
    "a non-blocking copy": lambda numbers: numbers.to(numbers.device, non_blocking=True),
    "a host scalar": lambda numbers: torch.tensor(1.0) * numbers,
    "where()": lambda numbers: torch.where(numbers > 0, numbers, 0.0),
    "elements": lambda numbers: numbers[numbers.argsort()],
    "an assignment to elements": lambda numbers: numbers.clone().index_put_((numbers.argsort(),), numbers),
    "one_hot(classes)": lambda numbers: F.one_hot(numbers.argsort(), 4),
    "a fixed number of repeats": lambda numbers: numbers.repeat_interleave(2),
}


def call_all(tensor: Tensor) -> None:
    """Make all calls, forbidden and allowed."""
    numbers = 1 + torch.zeros_like(tensor.detach(), dtype=torch.float32).flatten()[:4]
    for call in (*READS.values(), *HARMLESS.values()):
        call(numbers)


def in_forward(run: Run) -> None:
    run.parts.model.get_submodule("blocks.1.mlp").register_forward_hook(
        lambda _module, _inputs, output: call_all(output)
    )


def in_backward(run: Run) -> None:
    def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:  # not in an evaluation
            output.register_hook(call_all)  # type: ignore[no-untyped-call]

    run.parts.model.get_submodule("blocks.1.mlp").register_forward_hook(hook)


def in_recomputation(run: Run) -> None:
    """Needs activation checkpointing: the hook is called again inside the backward pass, and makes its calls there.

    The hook is not at the end of the block, because the recomputation stops when all saved tensors are recomputed.
    """

    def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
        if torch._C._current_graph_task_id() >= 0:
            call_all(output)

    run.parts.model.get_submodule("blocks.1.attention.output").register_forward_hook(hook)


def in_fp8_kernel(_run: Run) -> None:
    """Needs fp8: inside the operators, which the dispatcher calls without modes."""
    gemm = EmulatedEngine.gemm

    def with_reads(engine: EmulatedEngine, left: Any, right: Any, **options: Any) -> Tensor:
        call_all(left.scale_inv)
        return gemm(engine, left, right, **options)

    EmulatedEngine.gemm = with_reads  # type: ignore[assignment,method-assign]


def in_reduce_scatter(run: Run) -> None:
    """Needs several ranks."""
    for module in run.parts.model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(MeasuredReduceScatter(run.parts.comm_stats, before_measuring=[call_all]))


def in_gate(run: Run) -> None:
    run.parts.gate = intercept(run.parts.gate, "decide", lambda: call_all(torch.ones(4)), first=True)


def in_update(run: Run) -> None:
    run.parts.update = intercept(run.parts.update, "apply", lambda: call_all(torch.ones(4)), first=True)


def in_mailbox(run: Run) -> None:
    run.parts.mailbox = intercept(run.parts.mailbox, "post", lambda: call_all(torch.ones(4)), first=True)


def in_snapshot(run: Run) -> None:
    copy = run.parts.ring._copy

    def with_reads(slot: Any) -> None:
        call_all(torch.ones(4))
        copy(slot)

    run.parts.ring._copy = with_reads  # type: ignore[method-assign]


def guarded_run(directory: str, site: Callable[[Run], None] | None, *overrides: str) -> tuple[list[str], str]:
    """Run the loop inside the guard; returns the marked places that it reached, and the guard's error message."""
    loop, reached, message = train.train, set[str](), ""
    micro_batch_size = 8 // rank_from_environment()[1] // 2  # two micro-batches
    cfg = tiny(*LOOP, f"train.micro_batch_size={micro_batch_size}", *overrides, directory=directory)

    def guarded_loop(run: Run) -> Ending:
        nonlocal reached, message
        if site is not None:
            site(run)
        try:
            with no_sync() as reached:
                ending = loop(run)
        except SyncError as error:
            message = str(error)
        return ending

    with patch.object(train, "train", guarded_loop), patch.object(EmulatedEngine, "gemm", EmulatedEngine.gemm):
        assert train.run_worker(cfg) == 0
    return sorted(reached), message


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (1, ("precision=fp16", "precision.loss_scale_growth_interval=2")),
        (1, ("precision=fp8_emulated", "precision.fp8.recipe=block")),
        (2, ("precision=bf16", "parallel.activation_checkpointing=selective")),
        (2, ("optim=muon",)),
        pytest.param(2, ("precision=fp8_emulated", "precision.fp8.recipe=delayed", FULL), marks=pytest.mark.full),
        pytest.param(1, ("precision=bf16", FULL), marks=pytest.mark.full),
        pytest.param(
            1, ("precision=fp8_emulated", "parallel.activation_checkpointing=selective"), marks=pytest.mark.full
        ),
        pytest.param(2, ("precision=fp32", "optim.clip_value=1.0"), marks=pytest.mark.full),
        pytest.param(2, ("precision=fp16", FULL), marks=pytest.mark.full),
        pytest.param(2, ("precision=fp8_emulated",), marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, int) else " ".join(value),
)
def test_the_loop_has_no_host_sync(ranks: Pool, tmp_path: Path, size: int, overrides: tuple[str, ...]) -> None:
    results = ranks.run(size, guarded_run, str(tmp_path), None, ONE_LAYER, *overrides)
    assert results == [(sorted(ALLOWED_READS), "")] * size


@pytest.mark.parametrize(
    ("site", "size", "overrides"),
    [
        (in_backward, 1, ()),
        (in_recomputation, 1, (FULL, "precision=bf16")),
        (in_fp8_kernel, 1, ("precision=fp8_emulated",)),
        (in_reduce_scatter, 2, ()),
        (in_snapshot, 1, ()),
        pytest.param(in_forward, 1, (), marks=pytest.mark.full),
        pytest.param(in_recomputation, 1, (FULL,), marks=pytest.mark.full),
        pytest.param(in_gate, 1, (), marks=pytest.mark.full),
        pytest.param(in_update, 1, (), marks=pytest.mark.full),
        pytest.param(in_mailbox, 1, (), marks=pytest.mark.full),
    ],
)
def test_every_kind_of_host_sync_is_found_and_named(
    ranks: Pool, tmp_path: Path, site: Callable[[Run], None], size: int, overrides: tuple[str, ...]
) -> None:
    here = Path(__file__).name
    expected = {f"tests/{here}:{call.__code__.co_firstlineno}": name for name, call in READS.items()}
    for _, message in ranks.run(size, guarded_run, str(tmp_path), site, "train.num_steps=2", *overrides):
        places = {":".join(line.split(":")[:2]) for line in message.splitlines()[1:]}
        assert {expected.get(place, place) for place in places} == set(READS)


@pytest.mark.full
def test_the_guard_does_not_change_results(ranks: Pool, tmp_path: Path) -> None:
    overrides = (*LOOP, "train.micro_batch_size=4", "precision=fp8_emulated", FULL, ONE_LAYER)
    ((_, plain),) = ranks.run(1, cases.run, str(tmp_path / "plain"), *overrides)
    ranks.run(1, guarded_run, str(tmp_path / "guarded"), None, *overrides)
    records = event_json.read(RunDir(tmp_path / "guarded" / "guarded").events)
    guarded = [record.loss for record in records if isinstance(record, StepRecord)]
    assert guarded == [record.loss for record in plain]
    assert len(guarded) == 3
