"""A run that a test drives step by step, for the tests of the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from harness.config.sentinel import PolicyConfig
from harness.core.events import (
    Action,
    ActionKind,
    Finding,
    FindingKind,
    Outcome,
    StepRecord,
)
from harness.sentinel.policy.open_incident import ClosedIncident
from harness.sentinel.policy.policy import Policy
from tests import composed

LAG = 1


@cache
def defaults() -> PolicyConfig:
    return composed.load().sentinel.policy


def record(
    iteration: int,
    *,
    step: int | None = None,
    cursor: int | None = None,
    loss: float = 3.0,
    refused: bool = False,
    sources: dict[str, float] | None = None,
) -> StepRecord:
    """A step of a run in which every iteration was applied, unless given otherwise."""
    return StepRecord(
        time=0.0,
        iteration=iteration,
        step=iteration if step is None else step,
        cursor=iteration - 1 if cursor is None else cursor,
        tokens=0,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        tokens_per_s=0.0,
        refused=refused,
        stop_requested=False,
        step_time_s=0.0,
        flops_per_s=0.0,
        source_losses=sources or {},
    )


def finding(kind: FindingKind, now: StepRecord, *, onset: int | None = None, cursors: Sequence[int] = ()) -> Finding:
    return Finding(
        time=0.0,
        iteration=now.iteration,
        kind=kind,
        step=now.step,
        onset=now.iteration if onset is None else onset,
        value=9.0,
        bound=5.0,
        message=f"{kind} seen",
        cursors=list(cursors),
    )


def outcome(action: Action, *, step: int, succeeded: bool = True) -> Outcome:
    return Outcome(
        time=0.0,
        iteration=action.iteration + LAG,
        kind=action.kind,
        incident=action.incident,
        succeeded=succeeded,
        step=step,
    )


class Run:
    """A run that the test drives step by step; step, cursor and iteration differ only after rejections and
    `restore`."""

    def __init__(self, cfg: PolicyConfig | None = None) -> None:
        self.policy = Policy.start(cfg or defaults(), lag=LAG)
        self.iteration = self.step = self.cursor = 0
        self.closed: list[ClosedIncident] = []

    def iterate(
        self,
        *kinds: FindingKind,
        loss: float | None = None,
        refused: bool = False,
        back: int = 0,
        sources: dict[str, float] | None = None,
    ) -> Action | None:
        """Run one iteration with findings whose onset is `back` iterations ago."""
        self.iteration += 1
        self.step += not refused
        noise = 0.01 * math.sin(self.iteration)
        now = record(
            self.iteration,
            step=self.step,
            cursor=self.cursor,
            loss=3.0 + noise if loss is None else loss,
            refused=refused,
            sources=sources,
        )
        self.cursor += 1
        action = self.policy.decide(now, [finding(kind, now, onset=self.iteration - back) for kind in kinds])
        self.closed += self.policy.closed
        return action

    def iterate_clean(self, num: int) -> list[Action]:
        return [action for action in (self.iterate() for _ in range(num)) if action is not None]

    def restore(self, action: Action, *, steps: int) -> Action | None:
        """The restore succeeded and went back `steps` steps; returns the follow-up action."""
        self.step, self.cursor = self.step - steps, self.cursor - steps
        self.iteration += LAG
        return self.policy.on_outcome(outcome(action, step=self.step))

    def fail(self, action: Action | None) -> Action | None:
        assert action is not None
        return self.policy.on_outcome(outcome(action, step=self.step, succeeded=False))


def kind_of(action: Action | None) -> ActionKind | None:
    return None if action is None else action.kind


K, F = ActionKind, FindingKind
