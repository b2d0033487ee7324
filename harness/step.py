"""One training step: forward/backward, one all-reduce of signals, the gate, the update. Also evaluation.

Every function only issues work to the device. Nothing waits for it, except at the end of an evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from harness.build import Parts
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.core.events import EvalRecord
from harness.core.state import RunState
from harness.data.batch import Batch
from harness.distributed.bit_digests import BitDigests, Computation
from harness.distributed.collectives import all_reduce_sum
from harness.distributed.fsdp import free_gathered_weights, set_replica_all_reduce
from harness.model.transformer import Output
from harness.recomputation import add_stored_gradients, compare_computations, discarding, fetch_rows
from harness.sentinel.device.gate import GateDecision
from harness.sentinel.device.step_report import Totals, pack_report, totals


def use_planned_precision(parts: Parts, position: int, *, cfg: Config) -> None:
    """Compute in fp8 from now on if `precision.phases` plans it for this batch and the policy has not fallen back."""
    is_planned = cfg.precision.kind_at(position) is PrecisionKind.fp8
    parts.fp8_layers.use_fp8(is_planned and not parts.sentinel.policy.in_fallback)


def forward_backward(parts: Parts, batch: Batch, *, cfg: Config, probe: bool, recompute: int | None = None) -> None:
    """Compute the gradients of the mean loss over the global batch, one micro-batch at a time.

    `recompute`: compute the first micro-batch twice, and add to the signals whether the bits differ; the second time
    the rows are those of the rank that many places on, 0: this rank's own (`harness.recomputation`).
    """
    seed = parts.loss_scale.value / (cfg.train.batch_size * cfg.train.sequence_length)
    micro_batches = batch.micro_batches(cfg.train.micro_batch_size)
    digests = None if recompute is None else parts.comm_stats.digests
    measure_logits = probe or parts.qk_clip.measures_always
    if measure_logits:
        parts.qk_clip.start_step()
    exchanges = parts.comm_stats.exchanges
    if digests is not None and recompute is not None:
        rows = fetch_rows(micro_batches[0], recompute)
        if parts.world.replicate > 1:
            set_replica_all_reduce(parts.model, enabled=True)
        with discarding(parts), digests.recording(Computation.again), exchanges.recording(Computation.again):
            differentiate(parts, rows, seed=seed, probe=probe, digests=digests, measure_logits=measure_logits)
    exchanges.start()
    for number, rows in enumerate(micro_batches, start=1):
        if parts.world.replicate > 1:
            set_replica_all_reduce(parts.model, enabled=number == len(micro_batches))
        if digests is not None and number == 1:
            with digests.recording(Computation.step), exchanges.recording(Computation.step):
                output = differentiate(
                    parts, rows, seed=seed, probe=probe, digests=digests, measure_logits=measure_logits
                )
        else:
            output = differentiate(parts, rows, seed=seed, probe=probe, measure_logits=measure_logits)
        if output.attention_logits is not None:
            parts.qk_clip.add_logits(output.attention_logits)
        parts.signals.add_forward(
            row_losses=output.row_losses,
            row_tokens=output.row_tokens,
            sources=rows.sources,
            z_loss=output.z_sum,
            layers=output.activation_square_sums,
            token_losses=output.token_loss_counts,
            entropy=output.entropy,
        )
    if probe:
        parts.signals.add_attention_logits(parts.qk_clip.logits)
    parts.signals.add_exchange(exchanges.take_first_nonfinite())
    if digests is not None and recompute is not None:
        parts.signals.add_corruption(compare_computations(digests, recompute), exchanges.first_difference(recompute))


def differentiate(
    parts: Parts,
    rows: Batch,
    *,
    seed: torch.Tensor,
    probe: bool,
    digests: BitDigests | None = None,
    measure_logits: bool = False,
) -> Output:
    """Forward and backward pass of one micro-batch; `digests` get the bits of its outputs and gradients."""
    with parts.fp8_layers.probing(probe and not rows.is_padding):
        mask = parts.model.mask_documents(rows.documents)
        with parts.emulation:
            output = parts.model(
                rows.inputs,
                rows.targets,
                seed=seed,
                probe=probe,
                mask=mask,
                digests=digests,
                measure_logits=measure_logits,
            )
        parts.compute_clock.end()
        output.objective.backward()
    if digests is not None:
        add_stored_gradients(parts, digests)
    assert isinstance(output, Output)
    return output


class StepSignals(NamedTuple):
    """The signals of one step after the all-reduce: on the device, equal on every rank."""

    reduced: torch.Tensor
    totals: Totals
    loss_scale: torch.Tensor
    """The loss scale that the gradients of this step were computed with."""


@torch.no_grad()
def reduce_signals(parts: Parts, *, cfg: Config, probe: bool) -> StepSignals:
    """Sum the signals of all ranks in one all-reduce. A probe adds sums over weights, moments and fp8 meters."""
    parts.signals.add_gradients()
    digest = parts.update.digest
    parts.signals.add_weights(bits=digest.total, square=digest.square, changed=digest.changed)
    if probe:
        betas = (cfg.optim.beta1, cfg.optim.beta2)
        rates = parts.update.rates_by_name
        parts.signals.add_state(moments=parts.update.state(), rates=rates, betas=betas, eps=cfg.optim.eps)
        if parts.update.muon is not None:
            parts.signals.add_updates(parts.update.muon.update_squares(parts.update.lr))
    if probe and parts.fp8_layers.in_fp8:
        parts.signals.add_fp8(parts.fp8_layers.take_sums())
    reduced = parts.signals.reduce()
    scale = parts.loss_scale.value.clone()
    expected = cfg.train.batch_size * cfg.train.sequence_length
    return StepSignals(
        reduced, totals(parts.signals.layout, reduced, scale=scale, expected_tokens=expected), loss_scale=scale
    )


@torch.no_grad()
def gate(parts: Parts, signals: StepSignals, *, planned: bool) -> GateDecision:
    """Accept or reject the update, from the reduced loss and gradient norm, and from recomputed micro-batches.

    The decision is one bit on the device, equal on every rank. `planned` widens the bounds after a planned change of
    the data or of the schedule. From here on the step changes what a snapshot holds, first the gate's history.
    """
    parts.ring.finish_copy()
    loss, grad_norm, _ = signals.totals
    return parts.gate.decide(
        loss=loss,
        grad_norm=grad_norm,
        warming=parts.update.warming,
        planned=planned,
        corruption=parts.signals.layout.slot(signals.reduced, "corruption").sum(),
    )


@torch.no_grad()
def apply_update(parts: Parts, signals: StepSignals, decision: GateDecision) -> torch.Tensor:
    """Apply the clipped update, or leave every parameter and moment bit for bit as it is if it was rejected.

    Returns the report of the step: everything that the host reads later, as one vector.
    """
    parts.fp8_layers.update_scale_history(decision.skip_mask)
    _, grad_norm, divisor = signals.totals
    lr = parts.update.apply(skip_mask=decision.skip_mask, grad_norm=grad_norm, divisor=divisor)
    parts.qk_clip.after_update(decision.skip_mask)
    parts.loss_scale.update(overflow=decision.overflow, refused=decision.skip_mask)
    return pack_report(
        signals.reduced,
        signals.totals,
        decision=decision,
        lr=lr,
        step=parts.update.step,
        scale=signals.loss_scale,
    )


def finish_step(parts: Parts, *, cfg: Config, probe: bool, planned: bool = False) -> torch.Tensor:
    """Everything after the backward pass: reduce the signals, gate, update. Returns the report of the step."""
    signals = reduce_signals(parts, cfg=cfg, probe=probe)
    return apply_update(parts, signals, gate(parts, signals, planned=planned))


@torch.no_grad()
def _forward_only(parts: Parts, micro_batches: Iterable[Batch]) -> torch.Tensor:
    """Return this rank's summed loss and token count [2], without gradients.

    FSDP2 keeps weights gathered after a forward pass without a backward pass. They are freed here: a later restore
    writes to the shards, and the next step must not compute with the old gathered weights.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=parts.world.device)
    with parts.fp8_layers.probing(False), parts.emulation:
        for rows in micro_batches:
            output = parts.model(rows.inputs, rows.targets, mask=parts.model.mask_documents(rows.documents))
            sums += torch.stack([output.row_losses.sum(), output.row_tokens.sum()])
    free_gathered_weights(parts.model)
    return sums


def loss_sums(parts: Parts, batch: Batch, *, cfg: Config) -> torch.Tensor:
    """Return this rank's summed loss of a batch and its token count [2]."""
    return _forward_only(parts, batch.micro_batches(cfg.train.micro_batch_size))


def held_out_sums(parts: Parts) -> torch.Tensor:
    """Return the summed loss and token count [2] of the fixed held-out rows over all ranks, without a host sync."""
    return all_reduce_sum(_forward_only(parts, parts.check.rows))


def held_out_mean(parts: Parts) -> float | None:
    """Return the loss of the current weights on the fixed held-out rows, or None if there are none."""
    if not parts.check.rows:
        return None
    loss_sum, tokens = held_out_sums(parts).tolist()  # sync: the decision about an incident needs the loss
    return float(loss_sum / tokens)


def measure_held_out(parts: Parts, state: RunState) -> None:
    """Issue a measurement of the held-out loss. The host reads it together with a later step report."""
    if parts.check.rows:
        parts.check.send(held_out_sums(parts), state)


def evaluate(parts: Parts, state: RunState, *, cfg: Config, beat: Callable[[], None] = lambda: None) -> EvalRecord:
    """Return the mean loss on the held-out batches, the same batches every time. `beat` is called before each batch."""
    sums = torch.zeros(2, dtype=torch.float64, device=parts.world.device)
    for index in range(min(cfg.eval.num_batches, len(parts.held_out))):
        beat()
        sums += loss_sums(parts, parts.held_out[index], cfg=cfg)
    loss_sum, tokens = all_reduce_sum(sums).tolist()  # sync: an evaluation is rare, and its result is needed enabled
    return EvalRecord(
        time=time.time(), iteration=state.iteration, step=state.step, loss=loss_sum / tokens, tokens=int(tokens)
    )
