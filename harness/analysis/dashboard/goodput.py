"""Computes goodput: where the wall time and the steps of a run went, and the stability tax.

Why: a cluster is paid by the hour, and a run that recovers by itself still loses time on each recovery.
How: every interval between two events of the log is assigned to one account, so the accounts add up to the wall time.
Time between steps is divided among kept, refused and undone steps by their step times. A step is undone if a restore,
or a start from an older checkpoint, rewinds to before it.
Left out: the cost of detection, the gate and in-memory snapshots. They run inside every step on the device, and no
event separates them; benchmarks measure steps with and without them. Time before the first event is not in the log.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, final

from harness.core.events import (
    CheckpointSaved,
    EvalRecord,
    Event,
    Intervention,
    Outcome,
    RunEnded,
    RunStarted,
)
from harness.sentinel.policy.policy_state import RESTORES


class Account(StrEnum):
    """What a second of wall time was spent on."""

    kept = "kept"
    refused = "refused"
    undone = "undone"
    restoring = "restoring"
    saving = "saving"
    evaluating = "evaluating"
    starting = "starting"
    paused = "paused"
    stopped = "stopped"


MEANINGS = {
    Account.kept: ("kept steps", "updates that are part of the current model"),
    Account.refused: ("refused steps", "computed, but not applied, because the gate rejected the update"),
    Account.undone: ("undone steps", "applied, then lost to a rewind, a rollback or a crash, and computed again"),
    Account.restoring: ("restores", "restoring an older state inside the running processes"),
    Account.saving: ("blocking saves", "training waited for a snapshot or for the last checkpoint"),
    Account.evaluating: ("evaluation", "computing the held-out loss"),
    Account.starting: ("starts", "from the start event to the first step"),
    Account.paused: ("paused", "paused by an operator"),
    Account.stopped: ("stopped", "between the last event of one start and the first event of the next"),
}
"""Account -> its label and meaning on the page."""

TAX = (Account.refused, Account.undone, Account.restoring, Account.saving)
"""Accounts that make up the stability tax."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    seconds: dict[Account, float]
    """They add up to `wall_s`."""
    wall_s: float
    """From the first event to the last."""
    num_kept: int
    num_refused: int
    num_undone: int
    tokens_kept: int
    tokens_consumed: int

    @property
    def of_time(self) -> float:
        """Share of the wall time in kept steps."""
        return self.seconds[Account.kept] / self.wall_s if self.wall_s else 0.0

    @property
    def of_tokens(self) -> float:
        """Tokens kept over tokens consumed."""
        return self.tokens_kept / self.tokens_consumed if self.tokens_consumed else 0.0

    @property
    def tax(self) -> float:
        """Stability tax: share of the wall time in the accounts of `TAX`."""
        return sum(self.seconds[account] for account in TAX) / self.wall_s if self.wall_s else 0.0


@final
@dataclass(slots=True)
class Accounts:
    """Time accounts of a run, updated with the events of its log in order."""

    _seconds: dict[Account, float] = field(default_factory=lambda: dict.fromkeys(Account, 0.0))
    _between_s: float = 0.0
    """Time between steps, to be divided among them."""
    _blocked_s: float = 0.0
    """Part of `_between_s` in which training waited for saves."""
    _open_s: float = 0.0
    """Time since the last step: time between steps if another step follows, saving if the run ends."""
    _open_blocked_s: float = 0.0
    _last_time: float | None = None
    _is_paused: bool = False
    _is_starting: bool = True
    _steps: array[int] = field(default_factory=lambda: array("q"))
    """Kept updates in order; the arrays below hold their time, tokens and counts."""
    _step_s: array[float] = field(default_factory=lambda: array("d"))
    _step_tokens: array[int] = field(default_factory=lambda: array("q"))
    _step_counts: array[int] = field(default_factory=lambda: array("q"))
    """Updates that an entry represents: itself, and those before it that sampling of the log left out."""
    _refused_s: float = 0.0
    _undone_s: float = 0.0
    _num_refused: int = 0
    _num_undone: int = 0
    _tokens_consumed: int = 0
    _batch_tokens: int = 0
    _last_tokens: int | None = 0
    """Token count at the last step; None if a restore or a restart has reset it since."""

    def add_step(self, record: Mapping[str, Any], *, num_left_out: int = 0) -> None:
        """Add a step record in its JSON form; sampling left out `num_left_out` applied steps before it."""
        step, tokens, took_s = int(record["step"]), int(record["tokens"]), float(record["step_time_s"])
        passed_s = self._advance_clock(float(record["time"]))
        self._book(Account.starting if self._is_starting else None, passed_s)
        took_s = 0.0 if self._is_starting else took_s
        self._is_starting = False
        self._between_s += self._open_s
        self._blocked_s += self._open_blocked_s
        self._open_s = self._open_blocked_s = 0.0
        if self._last_tokens is not None and tokens > self._last_tokens:
            self._batch_tokens = (tokens - self._last_tokens) // (1 + num_left_out)
        self._last_tokens = tokens
        self._tokens_consumed += self._batch_tokens * (1 + num_left_out)
        if record["refused"]:
            self._refused_s += took_s
            self._num_refused += 1
        num_kept = num_left_out + (not record["refused"])
        if num_kept:
            self._steps.append(step)
            self._step_s.append(took_s * num_kept)
            self._step_tokens.append(self._batch_tokens * num_kept)
            self._step_counts.append(num_kept)

    def add(self, event: Event) -> None:
        """Add any event except a step record."""
        passed_s = self._advance_clock(event.time)
        match event:
            case RunStarted():
                self._book(Account.stopped, passed_s, is_sure=True)
                self._undo(event.step)
                self._is_paused, self._is_starting = False, True
                self._last_tokens = None if self._tokens_consumed else 0
            case EvalRecord():
                self._book(Account.evaluating, passed_s)
            case Outcome(kind=kind) if kind in RESTORES:
                restoring_s = min(event.seconds, passed_s)
                self._book(Account.restoring, restoring_s)
                self._book(None, passed_s - restoring_s)
                if event.succeeded:
                    self._undo(event.step)
                    self._last_tokens = None
            case Intervention(changes={"command": str(command), **rest}) if "refused" not in rest:
                self._book(None, passed_s)
                name = command.split()[0]
                self._is_paused = name == "pause" or (self._is_paused and name != "resume")
            case CheckpointSaved():
                self._book(None, passed_s)
                self._open_blocked_s += event.blocked_s
            case RunEnded():
                self._book(None, passed_s)
                self._seconds[Account.saving] += self._open_s
                self._open_s = self._open_blocked_s = 0.0
            case _:
                self._book(None, passed_s)

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @property
    def batch_tokens(self) -> int:
        """Tokens of the last step's batch; 0 before the first step."""
        return self._batch_tokens

    def total(self) -> Goodput:
        """Goodput of all events added so far."""
        between_s = self._between_s + self._open_s
        blocked_s = min(self._blocked_s + self._open_blocked_s, between_s)
        steps_s = between_s - blocked_s
        kept_s = sum(self._step_s)
        clocks = {Account.kept: kept_s, Account.refused: self._refused_s, Account.undone: self._undone_s}
        whole_s = sum(clocks.values())
        seconds = dict(self._seconds)
        seconds[Account.saving] += blocked_s
        for account, clock_s in clocks.items():
            share = clock_s / whole_s if whole_s else float(account is Account.kept)
            seconds[account] += steps_s * share
        return Goodput(
            seconds=seconds,
            wall_s=sum(seconds.values()),
            num_kept=sum(self._step_counts),
            num_refused=self._num_refused,
            num_undone=self._num_undone,
            tokens_kept=sum(self._step_tokens),
            tokens_consumed=self._tokens_consumed,
        )

    def _advance_clock(self, time: float) -> float:
        """Seconds since the last event; 0 if the clock was set back."""
        passed_s = 0.0 if self._last_time is None else max(0.0, time - self._last_time)
        self._last_time = time if self._last_time is None else max(time, self._last_time)
        return passed_s

    def _book(self, account: Account | None, seconds: float, *, is_sure: bool = False) -> None:
        if self._is_paused and not is_sure:
            self._seconds[Account.paused] += seconds
        elif account is None:
            self._open_s += seconds
        else:
            self._seconds[account] += seconds

    def _undo(self, step: int) -> None:
        """Move the steps after `step` from kept to undone."""
        while self._steps and self._steps[-1] > step:
            last, took_s, tokens, count = (column.pop() for column in self._columns)
            num_undone = min(count, last - step)
            self._undone_s += took_s * num_undone / count
            self._num_undone += num_undone
            if num_undone < count:
                left = count - num_undone
                values = (step, took_s * left / count, tokens * left // count, left)
                for column, value in zip(self._columns, values, strict=True):
                    column.append(value)

    @property
    def _columns(self) -> tuple[array[Any], ...]:
        return self._steps, self._step_s, self._step_tokens, self._step_counts
