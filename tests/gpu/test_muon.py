"""Training with Muon on a GPU: against torch's own Muon, no host sync, refused updates, several NCCL ranks."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.config.optim import MuonConfig
from harness.distributed.shards import local
from harness.distributed.world import disconnect
from harness.optim.muon import MatrixOptions, Muon
from harness.step import finish_step, forward_backward
from tests.gpu import one_rank
from tests.gpu.nccl import run_case
from tests.gpu.one_rank import step, train_losses
from tests.no_sync import host_syncs_fail

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # from torch.compile and NCCL
]

single_rank = pytest.fixture(autouse=True)(one_rank.one_rank)
start = partial(one_rank.start, "precision=bf16", "optim=muon")
ON_ONE_GPU = ("parallel.device=cuda", "parallel.compile=false", "optim=muon")


@pytest.mark.parametrize("own_kernel", [False, True])
def test_equals_torch_muon(own_kernel: bool) -> None:
    """torch also orthogonalizes in bf16, one matrix at a time."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(512, 256), (256, 512), (256, 256), (512, 256)]
    initial = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
    ours = {str(number): nn.Parameter(each.clone()) for number, each in enumerate(initial)}
    theirs = [nn.Parameter(each.clone()) for each in initial]
    options = [MatrixOptions(1.0, 0.1)] * len(shapes)
    muon = Muon(ours, options, cfg=MuonConfig(), device=torch.device("cuda"), own_kernel=own_kernel)
    muon.lr.fill_(0.02)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    zero, one = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    for _ in range(4):
        for own, their in zip(ours.values(), theirs, strict=True):
            own.grad = torch.randn(own.shape, device="cuda", generator=generator)
            their.grad = own.grad.clone()
        muon.step(skip_mask=zero, divisor=one)
        reference.step()  # type: ignore[no-untyped-call]
    for own, their, was in zip(ours.values(), theirs, initial, strict=True):
        difference, moved = (own - their).norm().item(), (their - was).norm().item()
        print(f"{tuple(own.shape)}: moved {moved:.4f}, difference {difference:.6f}")
        assert difference < 0.02 * moved


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_the_step_has_no_host_sync_and_trains(compiled: str) -> None:
    parts, cfg = start(f"parallel.compile={compiled}", "optim.warmup_steps=2", "train.micro_batch_size=4")
    assert parts.update.own_kernel is (compiled == "true")
    first = train_losses(parts, cfg, 3)
    step(parts, cfg, 3, probe=True)
    with host_syncs_fail():
        for index in range(4, 7):
            step(parts, cfg, index, probe=index % 2 == 0)
    last = train_losses(parts, cfg, 8)
    print(f"compile={compiled}: losses {first} ... {last}")
    assert last[-1] < first[0] - 0.3


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_refused_update_changes_no_tensor(value: float, compiled: str) -> None:
    parts, cfg = start(f"parallel.compile={compiled}")
    step(parts, cfg, 0)
    before = {name: local(tensor).detach().clone() for name, tensor in parts.tensors().items()}
    forward_backward(parts, parts.batches[1], cfg=cfg, probe=False)
    gradient = parts.update.parameters["blocks.1.mlp.up.weight"].grad
    assert gradient is not None
    local(gradient).view(-1)[7] = value
    finish_step(parts, cfg=cfg, probe=False)
    for name, tensor in parts.tensors().items():
        if name.startswith(("model.", "optimizer.")) or name == "device.step":
            assert torch.equal(local(tensor), before[name]), name
    assert not parts.update.digest.changed
    step(parts, cfg, 2)
    name = "model.blocks.1.mlp.up.weight"
    assert not torch.equal(local(parts.tensors()[name]), before[name])
    assert not parts.update.digest.changed


def test_kernels_train_like_plain_torch() -> None:
    losses = []
    for compiled in ("false", "true"):
        parts, cfg = start(f"parallel.compile={compiled}", "optim.warmup_steps=2")
        losses.append(train_losses(parts, cfg, 8))
        disconnect()
    print(losses)
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_the_same_seed_gives_the_same_bits() -> None:
    losses = []
    for _ in range(2):
        parts, cfg = start()
        losses.append(train_losses(parts, cfg, 10))
        disconnect()
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("num_ranks", "overrides"), [(2, ()), (4, ("parallel.replicate=2",))])
def test_a_refused_update_changes_no_tensor_on_nccl_ranks(
    tmp_path: Path, num_ranks: int, overrides: tuple[str, ...]
) -> None:
    options = ("muon_refusal", *ON_ONE_GPU, *overrides)
    for outcome in run_case(tmp_path / "ranks", *options, num_ranks=num_ranks):
        assert outcome == {"unchanged": True, "equals_control": True, "moved": True}


def test_the_exchange_has_no_host_sync_on_nccl_ranks(tmp_path: Path) -> None:
    overrides = (*ON_ONE_GPU, "train.num_steps=8", "sentinel.probe_every=3")
    (tmp_path / "runs").mkdir()
    # rank 0 writes the log; the other one may read it before it is complete
    losses = run_case(tmp_path / "ranks", "guarded_losses", str(tmp_path / "runs"), *overrides, num_ranks=2)[0]
    print(losses)
    assert len(losses) == 8
    assert losses[-1] < losses[0]


@pytest.mark.timeout(900)
def test_nccl_ranks_compute_what_one_rank_computes(tmp_path: Path) -> None:
    """In fp32, but for the orthogonalization in bf16."""
    overrides = (*ON_ONE_GPU, "train.num_steps=8", "precision=fp32")
    curves = []
    for num_ranks in (1, 2, 3):
        (tmp_path / f"runs-{num_ranks}").mkdir()
        options = ("guarded_losses", str(tmp_path / f"runs-{num_ranks}"), *overrides)
        curves.append(run_case(tmp_path / f"ranks-{num_ranks}", *options, num_ranks=num_ranks)[0])
        print(num_ranks, curves[-1])
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=2e-3)
