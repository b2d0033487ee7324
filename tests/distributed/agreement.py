"""Findings and actions of every rank when only one rank has a bad signal; run on real ranks by name.

Signals, all-reduce, record, detectors, policy and the branches of the loop are the real code. Only the results of the
forward and backward pass are simulated, so that every finding takes about a second.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from harness import train
from harness.build import Parts
from harness.config.schema import Config
from harness.core.events import ActionKind, FindingKind, Outcome, StepRecord
from harness.core.state import RunState
from harness.distributed.world import connect
from harness.sentinel.device.gate import GateDecision
from harness.sentinel.device.step_report import HostFacts, pack_report, totals, unpack_report
from tests.distributed import cases

FAULTY_RANK = 2
NUM_WARMUP_STEPS, MAX_STEPS = 130, 130
OVERRIDES = ("precision=fp8_emulated", "sentinel.detect.divergence_rows=40", "sentinel.sdc.every=8")
FIRST_CHECK = 5
"""Steps from the warm-up to the first one that is computed twice."""


@dataclass
class RankSignals:
    """The signals of one rank in one step, and the facts that only its host has."""

    loss: float = 3.0
    grad: float = 1.0
    own_grad: float = 1.0
    weights: float = 10.0
    moments: float = 1.0
    v: float = 1e-3
    zeros: float = 0.01
    logit: float = 20.0
    weight_digest: int = 5
    weights_changed: bool = False
    corruption: float = 0.0
    step_s: float = 0.1
    busy_s: float = 0.05
    plan: int = 7
    fingerprint: int = 0
    lr: float = 1e-3
    scale: float = 1024.0
    local: dict[str, Any] = field(default_factory=dict)
    """Rank-local fields of the record."""


SignalFault = Callable[[RankSignals, int], None]
"""Changes the signals of the faulty rank; the integer counts the steps since the warm-up."""


def healthy(_rank_signals: RankSignals, _at: int) -> None:
    """No fault."""


def _set(rank_signals: RankSignals, _at: int, **values: Any) -> None:
    for name, value in values.items():
        setattr(rank_signals, name, value)


def _ramp(rank_signals: RankSignals, at: int, *, factor: float, of: tuple[str, ...]) -> None:
    for name in of:
        setattr(rank_signals, name, getattr(rank_signals, name) * (1 + factor * at))


def _grow(rank_signals: RankSignals, at: int, *, factor: float, of: str) -> None:
    setattr(rank_signals, of, getattr(rank_signals, of) * factor**at)


def _once(rank_signals: RankSignals, at: int, **values: Any) -> None:
    if at == 0:
        _set(rank_signals, at, **values)


def _drop_v(rank_signals: RankSignals, at: int) -> None:
    rank_signals.v = 1e-9 if at >= 5 else rank_signals.v


ONE_RANK_FAULTS: dict[FindingKind, SignalFault] = {
    FindingKind.nonfinite: partial(_once, loss=math.nan),
    FindingKind.loss_spike: partial(_set, loss=12.0, grad=30.0),
    FindingKind.grad_spike: partial(_once, grad=1e4),
    FindingKind.divergence: partial(_ramp, factor=0.05, of=("loss", "grad")),
    FindingKind.level_shift: partial(_set, loss=3.6),
    FindingKind.never_learned: partial(_set, loss=12.0),
    FindingKind.weight_drift: partial(_set, weights=1e3),
    FindingKind.v_stale: partial(_set, v=1.0),
    FindingKind.precursor: partial(_grow, factor=1.04, of="logit"),
    FindingKind.duplicate_batch: partial(_set, fingerprint=1),
    FindingKind.optimizer_reset: _drop_v,
    FindingKind.fp8_range: partial(_set, zeros=0.99),
    FindingKind.rank_outlier: partial(_set, own_grad=1e4),
    FindingKind.replica_mismatch: partial(_set, weight_digest=6),
    FindingKind.weights_changed: partial(_once, weights_changed=True),
    FindingKind.data_mismatch: partial(_set, plan=8),
    FindingKind.corruption: partial(_set, corruption=3.0),
    FindingKind.corrupting_rank: partial(_set, corruption=3.0),
    FindingKind.corruption_passed: lambda rank_signals, at: _set(
        rank_signals, at, corruption=3.0 if at <= FIRST_CHECK else 0.0
    ),
}
"""A bad signal of one rank -> the finding of all ranks."""
FROM_THE_START = {FindingKind.never_learned: 320}
"""Faults that begin with the first step of a run, and the steps that they take."""
ALL_RANK_FAULTS: dict[FindingKind, SignalFault] = {
    FindingKind.slow: partial(_set, step_s=1.0),
    FindingKind.speed_recovered: lambda rank_signals, at: _set(rank_signals, at, step_s=1.0 if at < 30 else 0.1),
    FindingKind.lr_jump: partial(_set, lr=1.0),
    FindingKind.scale_collapse: partial(_set, scale=0.5),
}
"""Findings that no single rank can cause: they depend on a median, or on state that each rank holds for itself."""
LOCAL_FACTS: dict[str, SignalFault] = {
    "own clock": partial(_set, step_s=1e3, busy_s=1e3),
    "tokens_per_s": partial(_set, local={"tokens_per_s": 1e-3, "flops_per_s": 1e-3, "mfu": 1e-9}),
    "step_time_s": partial(_set, local={"step_time_s": 1e3}),
    "memory_bytes": partial(_set, local={"memory_bytes": 2**60}),
    "time": partial(_set, local={"time": -1e9}),
    "batch": partial(_set, local={"batch": {"fingerprint": "0" * 16, "entropy_nats": 0.0, "rarest": [], "rows": {}}}),
}
"""Rank-local facts; they cause no finding and no action, except that the slowest rank is named."""


@dataclass
class Trace:
    """The findings and actions of one rank in one case."""

    found: list[tuple[str, int]] = field(default_factory=list)
    actions: list[tuple[str, int]] = field(default_factory=list)
    branches: list[tuple[Any, ...]] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    diverged: list[dict[str, list[int]]] = field(default_factory=list)
    """Ranks whose digests differed, from the records."""


class SimulatedRank:
    """One rank with simulated signals: its parts, and a sentinel after a warm-up without faults."""

    def __init__(self) -> None:
        self.cfg: Config = cases.tiny(*OVERRIDES)
        self.world = connect(self.cfg.parallel)
        self.parts: Parts = cases._build(self.cfg, self.world)
        self.state = RunState()
        self.run = cast(Any, SimpleNamespace(cfg=self.cfg, parts=self.parts, state=self.state))
        self.trace = Trace()
        self.cold = (deepcopy(self.parts.sentinel), deepcopy(self.state))
        for _ in range(NUM_WARMUP_STEPS):
            self.step(healthy, 0)
        assert self.trace.found == [], self.trace.found
        self.warm = (deepcopy(self.parts.sentinel), deepcopy(self.state))

    def run_case(
        self, fault: SignalFault, *, on_all_ranks: bool = False, until: str = "", steps: int = MAX_STEPS
    ) -> Trace:
        """Run some steps after the warm-up, or until some steps after a finding of this kind."""
        sentinel, state = deepcopy(self.cold if until in FROM_THE_START else self.warm)
        self.parts.sentinel, self.state, self.trace = sentinel, state, Trace()
        self.run.state = state
        rank_fault = fault if on_all_ranks or self.world.rank == FAULTY_RANK else healthy
        for at in range(steps):
            self.step(rank_fault, at)
            if until and any(kind == until and now < state.iteration - 12 for kind, now in self.trace.found):
                break
            if self.trace.diverged or any(kind == ActionKind.halt for kind, _ in self.trace.actions):
                break
        return self.trace

    def step(self, fault: SignalFault, at: int) -> None:
        """One iteration of the loop, with simulated numbers in place of the model's."""
        parts, state, cursor = self.parts, self.state, self.state.cursor
        rank_signals = self._healthy(cursor)
        fault(rank_signals, at)
        branches = train.choose_branches(self.run, cursor, planned=False)
        report = self._report(rank_signals, branches)
        state.advance(next_cursor=cursor + 1, tokens=1)
        facts = HostFacts(
            iteration=state.iteration,
            cursor=cursor,
            tokens=state.tokens,
            probed=branches.probe,
            posted_s=0.0,
            memory_bytes=0,
            batch={},
            in_fp8=branches.in_fp8,
            recomputed=branches.recompute,
        )
        record: StepRecord = unpack_report(
            parts.signals.layout, facts, report, dim=32, dynamic_scale=True, clip_norm=None, replicate=2
        )
        record = replace(record, beta2=0.95 if branches.probe else None, **rank_signals.local)
        state.correct_step(refused=record.refused)
        self.trace.branches.append(branches)
        if record.digests:
            self.trace.diverged.append(record.digests)
            return
        findings, action = parts.sentinel.process_record(record)
        self.trace.found += [(finding.kind, finding.iteration) for finding in findings]
        while action is not None:
            self.trace.actions.append((action.kind, action.iteration))
            if action.kind is ActionKind.halt:
                break
            action = parts.sentinel.on_outcome(self._outcome_of(action))
        self.trace.digests.append(parts.sentinel.digest)

    def _healthy(self, cursor: int) -> RankSignals:
        """This rank's signals, with noise shared by all ranks and its own batch."""
        noise = random.Random(cursor)
        loss, grad = 3.0 * math.exp(noise.gauss(0, 0.01)), math.exp(noise.gauss(0, 0.05))
        rank_signals = RankSignals(loss=loss, grad=grad, own_grad=grad)
        if self.world.rank == FAULTY_RANK:
            rank_signals.fingerprint = 1 + cursor
        else:
            rank_signals.v = 0.0
        return rank_signals

    def _report(self, rank_signals: RankSignals, branches: train.Branches) -> torch.Tensor:
        signals, layout, size = self.parts.signals, self.parts.signals.layout, self.world.size
        vector, tokens = signals.vector, 100.0
        layout.scalar(vector, "tokens").fill_(tokens)
        layout.scalar(vector, "loss").fill_(rank_signals.loss * tokens)
        layout.part(vector, "group_squares").fill_(rank_signals.grad**2 / size)
        layout.slots(vector)[1, self.world.rank] = rank_signals.own_grad**2
        signals.add_weights(
            bits=torch.tensor(rank_signals.weight_digest),
            square=torch.tensor(rank_signals.weights**2),
            changed=torch.tensor(float(rank_signals.weights_changed)),
        )
        if branches.recompute is not None:
            signals.add_corruption(torch.tensor(rank_signals.corruption))
        if branches.probe:
            layout.part(vector, "group_params").fill_(rank_signals.weights**2 / size)
            layout.part(vector, "group_moments").fill_(rank_signals.moments)
            layout.scalar(vector, "v").fill_(rank_signals.v**2 / size)
            layout.scalar(vector, "update").fill_(1e-6)
            layout.part(vector, "attention_logits").fill_(rank_signals.logit)
            layout.part(vector, "fp8_zeros").fill_(rank_signals.zeros)
            layout.part(vector, "fp8_nonzeros").fill_(1.0)
            layout.part(vector, "fp8_tensors").fill_(1.0)
            layout.part(vector, "fp8_scales").fill_(1.0)
        signals.add_host_facts(
            decision=self.parts.sentinel.digest_with(branches), busy_s=rank_signals.busy_s, step_s=rank_signals.step_s
        )
        signals.add_data(fingerprint=rank_signals.fingerprint, plan=rank_signals.plan)
        reduced = signals.reduce()
        one = torch.ones(())
        total = totals(layout, reduced, scale=one, expected_tokens=int(tokens * size))
        refuse = ~(total.loss.isfinite() & total.grad_norm.isfinite())
        bounds = torch.full((2,), math.inf)
        verdict = GateDecision(refuse.float(), refuse.float(), bounds)
        step = torch.tensor(self.state.step + 1 - int(refuse))
        lr = torch.tensor(rank_signals.lr)
        return pack_report(reduced, total, decision=verdict, lr=lr, step=step, scale=torch.tensor(rank_signals.scale))

    def _outcome_of(self, action: Any) -> Outcome:
        """Every action succeeds; a restore rewinds a few steps."""
        lost = 5 if action.kind in (ActionKind.rewind, ActionKind.rollback) else 0
        self.state.step -= lost
        self.state.generation += lost > 0
        return Outcome(
            time=float(self.world.rank),
            iteration=self.state.iteration,
            kind=action.kind,
            incident=action.incident,
            succeeded=True,
            step=self.state.step,
        )


def run_all_cases() -> dict[str, Trace]:
    """Run all cases in one process group."""
    simulation = SimulatedRank()
    traces = {
        str(kind): simulation.run_case(fault, until=kind, steps=FROM_THE_START.get(kind, MAX_STEPS))
        for kind, fault in ONE_RANK_FAULTS.items()
    }
    traces |= {
        str(kind): simulation.run_case(fault, on_all_ranks=True, until=kind) for kind, fault in ALL_RANK_FAULTS.items()
    }
    traces |= {name: simulation.run_case(fault, steps=15) for name, fault in LOCAL_FACTS.items()}
    traces |= {
        f"diverged by {name}": simulation.run_case(fault, steps=15)
        for name, fault in divergence_cases(simulation).items()
    }
    return traces


def divergence_cases(simulation: SimulatedRank) -> dict[str, SignalFault]:
    """Faults that change shared state on one rank only, so that its branches differ."""

    def request_probe() -> None:
        simulation.parts.sentinel.probe_at.add(simulation.state.iteration)

    def disable_fp8() -> None:
        simulation.parts.sentinel.policy.policy_state.fallback.is_on = True

    def change_step() -> None:
        simulation.state.step += 1

    def in_third_step(change: Callable[[], None]) -> SignalFault:
        return lambda _rank_signals, at: change() if at == 2 else None

    def change_lr(rank_signals: RankSignals, at: int) -> None:
        rank_signals.lr = 1.0 if at == 2 else rank_signals.lr

    return {
        "probe": in_third_step(request_probe),
        "fp8": in_third_step(disable_fp8),
        "step": in_third_step(change_step),
        "a finding": change_lr,
        "save": in_third_step(
            simulation.parts.checkpoints.request_save
        ),  # last, because a requested save cannot be withdrawn
    }
