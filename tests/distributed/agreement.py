"""Findings and actions of every rank when only one rank has a bad signal; run on real ranks by name.

Signals, all-reduce, record, detectors, policy and the branches of the loop are the real code. Only the results of the
forward and backward pass are made up, so that every finding takes about a second.
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

GUILTY = 2
NUM_WARM, MOST_STEPS = 130, 130
OVERRIDES = ("precision=fp8_emulated", "sentinel.detect.divergence_rows=40")


@dataclass
class Said:
    """A rank's signals of a step, and the facts that only its host has."""

    loss: float = 3.0
    grad: float = 1.0
    own_grad: float = 1.0
    weights: float = 10.0
    moments: float = 1.0
    v: float = 1e-3
    zeros: float = 0.01
    weight_digest: int = 5
    step_s: float = 0.1
    busy_s: float = 0.05
    plan: int = 7
    fingerprint: int = 0
    lr: float = 1e-3
    scale: float = 1024.0
    local: dict[str, Any] = field(default_factory=dict)
    """Rank-local fields of the record."""


Spoil = Callable[[Said, int], None]
"""Changes the faulty rank's signals, this many steps after the warm-up."""


def healthy(_said: Said, _at: int) -> None:
    """Healthy signals."""


def _set(said: Said, _at: int, **values: Any) -> None:
    for name, value in values.items():
        setattr(said, name, value)


def _rise(said: Said, at: int, *, factor: float, of: tuple[str, ...]) -> None:
    for name in of:
        setattr(said, name, getattr(said, name) * (1 + factor * at))


def _once(said: Said, at: int, **values: Any) -> None:
    if at == 0:
        _set(said, at, **values)


def _fall(said: Said, at: int) -> None:
    said.v = 1e-9 if at >= 5 else said.v


SPOILS: dict[FindingKind, Spoil] = {
    FindingKind.nonfinite: partial(_once, loss=math.nan),
    FindingKind.loss_spike: partial(_set, loss=12.0, grad=30.0),
    FindingKind.grad_spike: partial(_once, grad=1e4),
    FindingKind.divergence: partial(_rise, factor=0.05, of=("loss", "grad")),
    FindingKind.level_shift: partial(_set, loss=3.6),
    FindingKind.weight_drift: partial(_set, weights=1e3),
    FindingKind.v_stale: partial(_set, v=1.0),
    FindingKind.duplicate_batch: partial(_set, fingerprint=1),
    FindingKind.optimizer_reset: _fall,
    FindingKind.fp8_range: partial(_set, zeros=0.99),
    FindingKind.rank_outlier: partial(_set, own_grad=1e4),
    FindingKind.replica_mismatch: partial(_set, weight_digest=6),
    FindingKind.data_mismatch: partial(_set, plan=8),
}
"""A bad signal of one rank -> the finding of all ranks."""
OF_ALL_RANKS: dict[FindingKind, Spoil] = {
    FindingKind.slow: partial(_set, step_s=1.0),
    FindingKind.speed_recovered: lambda said, at: _set(said, at, step_s=1.0 if at < 30 else 0.1),
    FindingKind.lr_jump: partial(_set, lr=1.0),
    FindingKind.scale_collapse: partial(_set, scale=0.5),
}
"""Findings that no single rank can cause: a median, and state that each rank holds for itself."""
LOCAL: dict[str, Spoil] = {
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
    parted: list[dict[str, list[int]]] = field(default_factory=list)
    """Ranks whose digests differed, from the records."""


class Driven:
    """One rank: its parts, and a sentinel after a healthy warm-up."""

    def __init__(self) -> None:
        self.cfg: Config = cases.tiny(*OVERRIDES)
        self.world = connect(self.cfg.parallel)
        self.parts: Parts = cases._build(self.cfg, self.world)
        self.state = RunState()
        self.run = cast(Any, SimpleNamespace(cfg=self.cfg, parts=self.parts, state=self.state))
        self.trace = Trace()
        for _ in range(NUM_WARM):
            self.step(healthy, 0)
        assert self.trace.found == [], self.trace.found
        self.warm = (deepcopy(self.parts.sentinel), deepcopy(self.state))

    def drive(self, spoil: Spoil, *, by_all: bool = False, until: str = "", steps: int = MOST_STEPS) -> Trace:
        """Run some steps after the warm-up, or until some steps after a finding of this kind."""
        sentinel, state = deepcopy(self.warm)
        self.parts.sentinel, self.state, self.trace = sentinel, state, Trace()
        self.run.state = state
        spoils = spoil if by_all or self.world.rank == GUILTY else healthy
        for at in range(steps):
            self.step(spoils, at)
            if until and any(kind == until and now < state.iteration - 12 for kind, now in self.trace.found):
                break
            if self.trace.parted or any(kind == ActionKind.halt for kind, _ in self.trace.actions):
                break
        return self.trace

    def step(self, spoil: Spoil, at: int) -> None:
        """One iteration of the loop, with made-up numbers in place of the model's."""
        parts, state, cursor = self.parts, self.state, self.state.cursor
        said = self._healthy(cursor)
        spoil(said, at)
        branches = train.choose_branches(self.run, cursor, planned=False)
        report = self._report(said, branches)
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
        )
        record: StepRecord = unpack_report(
            parts.signals.layout, facts, report, dim=32, dynamic_scale=True, clip_norm=None, replicate=2
        )
        record = replace(record, beta2=0.95 if branches.probe else None, **said.local)
        state.correct_step(refused=record.refused)
        self.trace.branches.append(branches)
        if record.digests:
            self.trace.parted.append(record.digests)
            return
        findings, action = parts.sentinel.process_record(record)
        self.trace.found += [(finding.kind, finding.iteration) for finding in findings]
        while action is not None:
            self.trace.actions.append((action.kind, action.iteration))
            if action.kind is ActionKind.halt:
                break
            action = parts.sentinel.on_outcome(self._done(action))
        self.trace.digests.append(parts.sentinel.digest)

    def _healthy(self, cursor: int) -> Said:
        """This rank's signals, with noise shared by all ranks and its own batch."""
        noise = random.Random(cursor)
        loss, grad = 3.0 * math.exp(noise.gauss(0, 0.01)), math.exp(noise.gauss(0, 0.05))
        said = Said(loss=loss, grad=grad, own_grad=grad)
        if self.world.rank == GUILTY:
            said.fingerprint = 1 + cursor
        else:
            said.v = 0.0
        return said

    def _report(self, said: Said, branches: train.Branches) -> torch.Tensor:
        signals, layout, size = self.parts.signals, self.parts.signals.layout, self.world.size
        vector, tokens = signals.vector, 100.0
        layout.scalar(vector, "tokens").fill_(tokens)
        layout.scalar(vector, "loss").fill_(said.loss * tokens)
        layout.part(vector, "group_squares").fill_(said.grad**2 / size)
        layout.slots(vector)[1, self.world.rank] = said.own_grad**2
        if branches.probe:
            layout.part(vector, "group_params").fill_(said.weights**2 / size)
            layout.part(vector, "group_moments").fill_(said.moments)
            layout.scalar(vector, "v").fill_(said.v**2 / size)
            layout.scalar(vector, "update").fill_(1e-6)
            layout.part(vector, "fp8_zeros").fill_(said.zeros)
            layout.part(vector, "fp8_nonzeros").fill_(1.0)
            layout.part(vector, "fp8_tensors").fill_(1.0)
            layout.part(vector, "fp8_scales").fill_(1.0)
            signals._set_slot("weight_digest", torch.tensor(float(said.weight_digest)))
        signals.add_host_facts(
            decision=self.parts.sentinel.digest_with(branches), busy_s=said.busy_s, step_s=said.step_s
        )
        signals.add_data(fingerprint=said.fingerprint, plan=said.plan)
        reduced = signals.reduce()
        one = torch.ones(())
        total = totals(layout, reduced, scale=one, expected_tokens=int(tokens * size))
        refuse = ~(total.loss.isfinite() & total.grad_norm.isfinite())
        bounds = torch.full((2,), math.inf)
        verdict = GateDecision(refuse.float(), refuse.float(), bounds)
        step = torch.tensor(self.state.step + 1 - int(refuse))
        lr = torch.tensor(said.lr)
        return pack_report(reduced, total, decision=verdict, lr=lr, step=step, scale=torch.tensor(said.scale))

    def _done(self, action: Any) -> Outcome:
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


def every_case() -> dict[str, Trace]:
    """Run all cases in one process group."""
    driven = Driven()
    traces = {str(kind): driven.drive(spoil, until=kind) for kind, spoil in SPOILS.items()}
    traces |= {str(kind): driven.drive(spoil, by_all=True, until=kind) for kind, spoil in OF_ALL_RANKS.items()}
    traces |= {name: driven.drive(spoil, steps=15) for name, spoil in LOCAL.items()}
    traces |= {f"parted by {name}": driven.drive(spoil, steps=15) for name, spoil in partings(driven).items()}
    return traces


def partings(driven: Driven) -> dict[str, Spoil]:
    """Change state that all ranks should share on one rank, so that its branches differ."""

    def look_closer() -> None:
        driven.parts.sentinel.probe_next_step = True

    def leave_fp8() -> None:
        driven.parts.sentinel.policy.policy_state.fallback.is_on = True

    def count_otherwise() -> None:
        driven.state.step += 1

    def at_the_third(change: Callable[[], None]) -> Spoil:
        return lambda _said, at: change() if at == 2 else None

    def another_rate(said: Said, at: int) -> None:
        said.lr = 1.0 if at == 2 else said.lr

    return {
        "probe": at_the_third(look_closer),
        "fp8": at_the_third(leave_fp8),
        "step": at_the_third(count_otherwise),
        "a finding": another_rate,
        "save": at_the_third(driven.parts.checkpoints.request_save),  # the last one: nothing takes it back
    }
