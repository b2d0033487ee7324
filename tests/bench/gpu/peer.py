"""Common parts of all peers: config, optimizer, clipping, loss, FSDP2, and the step loop.

Peers run with favourable settings: batches are on the device before the clock starts, AdamW is fused and has one group,
gradient clipping uses `foreach`, the loss is compiled and its fp32 logits are not stored, parameters stay gathered
between forward and backward, nothing is recomputed, attention prefers cuDNN, and nothing is read back until the rounds
are over. A row "as shipped" has only the batches in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.data.order.ledger import Ledger
from harness.data.sources import open_data
from harness.distributed.world import World
from harness.model.size import num_parameters
from tests.bench.clock import do_nothing, iterate_steps
from tests.bench.gpu.rows import Entry
from tests.bench.gpu.setting import Setting

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Step = Callable[[Tensor, Tensor], Tensor]
"""Inputs and targets of a batch -> its mean loss; gradients are clipped and applied."""


class Job(NamedTuple):
    cfg: Config
    """Model shape, batch and optimizer, as in this harness."""
    world: World
    is_compiled: bool


class Peer(NamedTuple):
    name: str
    start: Callable[[Job], AbstractContextManager[Step]]
    """Builds the peer; on exit, nothing of it stays in the process, except process groups of one rank."""


@final
@dataclass(slots=True)
class Loop:
    """Runs steps of a peer, each with the next prepared batch."""

    step: Step
    batches: list[tuple[Tensor, Tensor]]
    losses: list[Tensor] = field(default_factory=list)

    def run(self, num_steps: int, begin: Callable[[], None] = do_nothing) -> None:
        for _ in iterate_steps(num_steps, begin):
            self.losses.append(self.step(*self.batches.pop(0)))


@contextmanager
def peer_entry(peer: Peer, world: World, setting: Setting, run: RunDir) -> Iterator[Entry]:
    """Build a peer, with all of its batches on the device."""
    job = Job(setting.config("precision=bf16"), world, setting.is_compiled)
    batches = load_batches(job, run, range(setting.num_steps))
    with peer.start(job) as step:
        loop = Loop(step, batches)
        yield Entry(
            sides={peer.name: loop.run},
            losses=lambda: (float(loop.losses[0]), float(loop.losses[-1])) if loop.losses else None,
            note=describe_graph_breaks,
        )


def load_batches(job: Job, run: RunDir, indices: range) -> list[tuple[Tensor, Tensor]]:
    """Load batches of a run of this harness onto the device."""
    ledger, world = Ledger.load(run.ledger, writer=False), job.world
    batches, held_out = open_data(job.cfg, rank=world.rank, world_size=world.size, device=world.device, ledger=ledger)
    try:
        chosen = [batches[index] for index in indices]
        return [(batch.inputs.clone(), batch.targets.clone()) for batch in chosen]
    finally:
        batches.close()
        held_out.close()


def describe_graph_breaks() -> str:
    """The number of graph breaks of torch.compile, which cost speed and are otherwise silent."""
    count = sum(torch._dynamo.utils.counters["graph_break"].values())
    return f"{count} graph breaks" if count else ""


def check_size(model: nn.Module, cfg: Config) -> None:
    """Raise if the model has another number of parameters than ours."""
    actual, expected = sum(parameter.numel() for parameter in model.parameters()), num_parameters(cfg.model)
    if actual != expected:
        raise ValueError(f"has {actual:,} parameters instead of {expected:,}")


def build_adamw(parameters: Iterable[nn.Parameter], cfg: Config) -> torch.optim.AdamW:
    optim = cfg.optim
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(
        parameters, lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over tokens, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_loss(job: Job) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(cross_entropy) if job.is_compiled else cross_entropy


def compile_and_shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: object, *, is_compiled: bool) -> nn.Module:
    """Compile and shard each block, then shard the rest with the root module."""
    options = {"mesh": mesh, "mp_policy": POLICY, "reshard_after_forward": False}
    for block in blocks:
        if is_compiled:
            block.compile()
        fully_shard(block, **options)  # type: ignore[call-overload]
    fully_shard(model, **options)  # type: ignore[call-overload]
    return model


@contextmanager
def plain_loop(model: nn.Module, logits: Callable[[Tensor], Tensor], loss_of: Step, job: Job) -> Iterator[Step]:
    """A plain training step: forward, backward, clip, AdamW."""
    optimizer = build_adamw(model.parameters(), job.cfg)
    max_norm = job.cfg.optim.clip_norm
    assert max_norm is not None

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(logits(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), max_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    yield step
