"""One step: gradients, one all-reduce of signals, one bit that refuses or applies; and an evaluation, which is none.

Everything here is issued to the device and not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from harness.build import Parts
from harness.config.schema import Config
from harness.core.events import EvalRecord
from harness.core.state import RunState
from harness.data.batch import Batch
from harness.distributed.collectives import all_reduce_sum
from harness.distributed.fsdp import free_gathered_weights, reduce_replicas
from harness.model.transformer import document_mask
from harness.sentinel.device.step_report import pack, totals


def forward_backward(parts: Parts, batch: Batch, *, cfg: Config, probe: bool) -> None:
    """Gradients of the mean loss over the global batch, one micro-batch at a time."""
    seed = parts.scale.scale / (cfg.train.batch_size * cfg.train.sequence_length)
    micro_batches = batch.micro_batches(cfg.train.micro_batch_size)
    for number, rows in enumerate(micro_batches, start=1):
        if parts.world.replicate > 1:
            reduce_replicas(parts.model, now=number == len(micro_batches))
        with parts.products.probing(probe and not rows.is_padding):
            output = parts.model(rows.inputs, rows.targets, seed=seed, probe=probe, mask=mask_of(rows))
            parts.compute_clock.end()
            output.objective.backward()
        parts.signals.add_forward(
            row_losses=output.row_losses,
            row_tokens=output.row_tokens,
            sources=rows.sources,
            z_loss=output.z_sum,
            layers=output.activation_square_sums,
            token_losses=output.token_loss_counts,
        )


def mask_of(rows: Batch) -> torch.Tensor | None:
    """Who may attend to whom, where documents are kept apart."""
    return None if rows.documents is None else document_mask(rows.documents)


@torch.no_grad()
def judge_and_update(parts: Parts, *, cfg: Config, probe: bool, planned: bool = False) -> torch.Tensor:
    """Reduce the signals, refuse or apply the update, and report; all on the device. `planned`: a planned change of the
    data or of the schedule has just begun."""
    parts.signals.add_gradients()
    if probe:
        betas = (cfg.optim.beta1, cfg.optim.beta2)
        rates = parts.update.rates_by_name
        parts.signals.add_state(moments=parts.update.state(), rates=rates, betas=betas, eps=cfg.optim.eps)
    if probe and parts.products.in_fp8:
        parts.signals.add_fp8(parts.products.take())
    reduced = parts.signals.reduce()
    scale = parts.scale.scale.clone()
    expected = cfg.train.batch_size * cfg.train.sequence_length
    total = totals(parts.signals.layout, reduced, scale=scale, expected_tokens=expected)
    judgement = parts.gate.judge(
        loss=total.loss, grad_norm=total.grad_norm, warming=parts.update.warming, planned=planned
    )
    parts.products.learn(judgement.refuse)
    lr = parts.update.apply(refuse=judgement.refuse, grad_norm=total.grad_norm, divisor=total.divisor)
    parts.scale.update(overflow=judgement.overflow, refused=judgement.refuse)
    return pack(reduced, total, judgement=judgement, lr=lr, step=parts.update.step, scale=scale)


@torch.no_grad()
def _forward_only(parts: Parts, micro_batches: Iterable[Batch]) -> torch.Tensor:
    """This rank's summed loss and its tokens [2], without gradients."""
    sums = torch.zeros(2, dtype=torch.float64, device=parts.world.device)
    with parts.products.probing(False):
        for rows in micro_batches:
            output = parts.model(rows.inputs, rows.targets, mask=mask_of(rows))
            sums += torch.stack([output.row_losses.sum(), output.row_tokens.sum()])
    free_gathered_weights(parts.model)
    return sums


def loss_sums(parts: Parts, batch: Batch, *, cfg: Config) -> torch.Tensor:
    """This rank's summed loss of a batch and its tokens [2]."""
    return _forward_only(parts, batch.micro_batches(cfg.train.micro_batch_size))


def held_out_sums(parts: Parts) -> torch.Tensor:
    """Summed loss and tokens [2] of the fixed held-out rows, over all ranks; on the device and not waited for."""
    return all_reduce_sum(_forward_only(parts, parts.check.rows))


def measure_held_out(parts: Parts, state: RunState) -> None:
    """Refresh the clean level of the held-out check; the loss is read when a later report is."""
    if parts.check.rows:
        parts.check.send(held_out_sums(parts), state)


def evaluate(parts: Parts, state: RunState, *, cfg: Config, beat: Callable[[], None] = lambda: None) -> EvalRecord:
    """Mean loss on the held-out batches, the same ones every time; `beat` says that it goes on."""
    sums = torch.zeros(2, dtype=torch.float64, device=parts.world.device)
    for index in range(min(cfg.eval.num_batches, len(parts.held_out))):
        beat()
        sums += loss_sums(parts, parts.held_out[index], cfg=cfg)
    loss_sum, tokens = all_reduce_sum(sums).tolist()  # sync: an evaluation is rare and its end is waited for
    return EvalRecord(
        time=time.time(), iteration=state.iteration, step=state.step, loss=loss_sum / tokens, tokens=int(tokens)
    )
