"""Computes goodput: where the wall time and the steps of a run went, and how much was lost to recovery.

Why: a cluster is paid by the hour, and a run that recovers by itself still loses time on each recovery.
How: every interval between two events of the log is assigned to one account, so the accounts add up to the wall time.
Time between steps is divided among kept, rejected and undone steps by their step times. A step is undone if a restore,
or a start from an older checkpoint, rewinds to before it. The log has a restore after the step that was in flight, with
an earlier time than that step, so the seconds of the restore are taken from the time before that step.
Every second outside kept steps also has one cause, such as a killed rank or a checkpoint: the time until a failure was
noticed, until the next start, until its first step, and the steps that it trains again are the cost of that failure.
Left out: the cost of detection, the gate and in-memory snapshots. They run inside every step on the device, and no
event separates them; benchmarks measure steps with and without them. Time before the first event is not in the log.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, final

from harness.analysis.dashboard.loss_causes import LossCause, LostTime, loss_cause
from harness.checkpoint.catalog import parse_name
from harness.core.events import (
    ActionKind,
    CheckpointJudged,
    CheckpointSaved,
    EvalRecord,
    Event,
    Intervention,
    Outcome,
    RunEnded,
    RunRestarted,
    RunStarted,
    TaskEvaluated,
    TrialMeasured,
)
from harness.sentinel.policy.policy_state import RESTORES


class Account(StrEnum):
    """What a second of wall time was spent on."""

    kept = "kept"
    refused = "refused"
    undone = "undone"
    restoring = "restoring"
    trying = "trying"
    saving = "saving"
    evaluating = "evaluating"
    starting = "starting"
    paused = "paused"
    stopped = "stopped"


MEANINGS = {
    Account.kept: ("kept steps", "updates that are part of the current model"),
    Account.refused: ("rejected steps", "computed, but not applied, because the gate rejected the update"),
    Account.undone: ("undone steps", "applied, then lost to a rewind, a rollback or a crash, and computed again"),
    Account.restoring: ("restores", "restoring an older state inside the running processes"),
    Account.trying: ("trials", "training with remedies after a restore, without the steps that were kept"),
    Account.saving: ("blocking saves", "training waited for a snapshot or for the last checkpoint"),
    Account.evaluating: ("evaluation", "computing the held-out loss"),
    Account.starting: ("starts", "from the start event to the first step"),
    Account.paused: ("paused", "paused by an operator"),
    Account.stopped: ("stopped", "between the last event of one start and the first event of the next"),
}
"""Account -> its label and meaning on the page."""

CAUSES_OF_ACCOUNTS = {
    Account.refused: LossCause.rejected,
    Account.restoring: LossCause.rollback,
    Account.trying: LossCause.trial,
    Account.saving: LossCause.checkpoint,
    Account.evaluating: LossCause.evaluation,
    Account.paused: LossCause.paused,
}
"""Accounts whose time always has the same cause."""

MOST_CAUSES = 4
LEAST_SHARE = 0.001
"""Share of the wall time from which a cause is named in one line."""
RECOVERY = (Account.refused, Account.undone, Account.restoring, Account.trying, Account.saving)
"""Accounts of the time lost to recovery and to being able to recover."""


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
    held_s: float = 0.0
    """Part of `wall_s` in which the run had its machines: without the time between a start that ended and the next."""
    rank_s: float = 0.0
    """`held_s` times the number of ranks of each start."""
    lost: dict[LossCause, LostTime] = field(default_factory=dict)
    """The time outside kept steps by cause; with the kept steps it adds up to `wall_s`. The largest first."""

    @property
    def of_time(self) -> float:
        """Share of the wall time in kept steps."""
        return self.seconds[Account.kept] / self.wall_s if self.wall_s else 0.0

    @property
    def of_tokens(self) -> float:
        """Tokens kept over tokens consumed."""
        return self.tokens_kept / self.tokens_consumed if self.tokens_consumed else 0.0

    @property
    def lost_s(self) -> float:
        """Seconds outside kept steps."""
        return self.wall_s - self.seconds[Account.kept]

    @property
    def main_causes(self) -> list[str]:
        """The causes of most of the lost time, with their shares of the wall time."""
        shares = [(cause, cost.seconds / self.wall_s) for cause, cost in self.lost.items() if self.wall_s]
        return [f"{cause} {share:.1%}" for cause, share in shares[:MOST_CAUSES] if share >= LEAST_SHARE]

    @property
    def lost_to_recovery(self) -> float:
        """Share of the wall time in the accounts of `RECOVERY`."""
        return sum(self.seconds[account] for account in RECOVERY) / self.wall_s if self.wall_s else 0.0


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
    _before_step_s: float = 0.0
    """Time before the last step, as far as no restore has taken it."""
    _is_first_step: bool = False
    """The last step was the first of its start, so the time before it is starting time."""
    _last_time: float | None = None
    _num_ranks: int = 0
    """Ranks of the latest start; 0: it has ended."""
    _held_s: float = 0.0
    _rank_s: float = 0.0
    _trial_s: float = 0.0
    """Time of the trial that has no outcome yet."""
    _is_paused: bool = False
    _is_starting: bool = True
    _has_started: bool = False
    _failure: RunRestarted | RunEnded | None = None
    """The event that ended the latest start; None: it has not ended, or the log does not say how."""
    _cause: LossCause = LossCause.first_start
    """Why the latest start was necessary."""
    _damaged_step: int = 0
    """Step of the newest checkpoint that was found damaged since the last step."""
    _lost: dict[LossCause, LostTime] = field(default_factory=dict)
    """Cost by cause, without undone steps, rejected steps and saves."""
    _undone_by_cause: dict[LossCause, float] = field(default_factory=dict)
    """Seconds of undone steps, by their own clocks."""
    _steps: array[int] = field(default_factory=lambda: array("q"))
    """Kept updates in order; the arrays below hold their time, tokens and counts."""
    _step_s: array[float] = field(default_factory=lambda: array("d"))
    _step_tokens: array[int] = field(default_factory=lambda: array("q"))
    _step_counts: array[int] = field(default_factory=lambda: array("q"))
    """Updates that an entry represents: itself, and those before it that sampling of the log left out."""
    _refused_s: float = 0.0
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
        self._book(None, passed_s)
        took_s = 0.0 if self._is_starting else took_s
        self._before_step_s = passed_s if self._is_starting else self._open_s
        self._is_first_step, self._is_starting = self._is_starting, False
        self._damaged_step = 0
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
        if isinstance(event, CheckpointJudged) and event.health == "damaged":
            self._damaged_step = max(self._damaged_step, parse_name(event.directory)[0])
            return  # mostly part of a start whose event follows; the time until then belongs to that one
        if isinstance(event, RunStarted) and self._failure is None:
            self._num_ranks = 0  # nothing logged when the start before it was gone
        passed_s = self._advance_clock(event.time)
        match event:
            case RunRestarted():
                self._failure = event
                self._cost_of(loss_cause(event)).times += 1
                self._book(Account.stopped, passed_s, is_sure=True, cause=loss_cause(event))
            case RunStarted():
                self._begin_start(event, passed_s)
            case EvalRecord():
                self._cost_of(LossCause.evaluation).times += 1
                self._book(Account.evaluating, passed_s)
            case TaskEvaluated():
                waited_s = min(event.blocked_s, passed_s)
                self._book(Account.evaluating, waited_s)
                self._book(None, passed_s - waited_s)
            case Outcome(kind=kind) if kind in RESTORES:
                self._book_restore(event.seconds, passed_s)
                self._damaged_step = 0
                if event.succeeded:
                    self._cost_of(LossCause.rollback).times += 1
                    self._undo(event.step, LossCause.rollback)
                    self._last_tokens = None
            case TrialMeasured():
                self._trial_s += passed_s
            case Outcome(kind=ActionKind.trial):
                trying_s = min(event.seconds, self._trial_s + passed_s)
                self._book(Account.trying, trying_s)
                self._book(None, self._trial_s + passed_s - trying_s)
                self._trial_s = 0.0
                lost = self._cost_of(LossCause.trial)
                lost.times, lost.steps = lost.times + 1, lost.steps + event.steps_lost
            case Intervention(changes={"command": str(command), **rest}) if "refused" not in rest:
                self._book(None, passed_s)
                name = command.split()[0]
                if name == "pause" and not self._is_paused:
                    self._cost_of(LossCause.paused).times += 1
                self._is_paused = name == "pause" or (self._is_paused and name != "resume")
            case CheckpointSaved():
                self._book(None, passed_s)
                self._cost_of(LossCause.checkpoint).times += 1
                self._open_blocked_s += event.blocked_s
            case RunEnded():
                self._failure, self._num_ranks = event, 0
                self._book(None, passed_s)
                self._seconds[Account.saving] += self._open_s
                self._cost_of(LossCause.checkpoint).seconds += self._open_s
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
        between_s = self._between_s + self._open_s + self._trial_s
        blocked_s = min(self._blocked_s + self._open_blocked_s, between_s)
        steps_s = between_s - blocked_s
        kept_s = sum(self._step_s)
        undone_s = sum(self._undone_by_cause.values())
        clocks = {Account.kept: kept_s, Account.refused: self._refused_s, Account.undone: undone_s}
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
            held_s=self._held_s,
            rank_s=self._rank_s,
            lost=self._lost_by_cause(blocked_s=blocked_s, share=steps_s / whole_s if whole_s else 0.0),
        )

    def _lost_by_cause(self, *, blocked_s: float, share: float) -> dict[LossCause, LostTime]:
        """The cost of each cause; `share` is the wall time of a second of the steps' own clocks."""
        lost = {cause: replace(cost) for cause, cost in self._lost.items()}

        def add(cause: LossCause, seconds: float, steps: int = 0) -> None:
            cost = lost.setdefault(cause, LostTime())
            cost.seconds += seconds
            cost.steps += steps

        add(LossCause.checkpoint, blocked_s)
        add(LossCause.rejected, self._refused_s * share, self._num_refused)
        lost[LossCause.rejected].times = self._num_refused
        for cause, undone_s in self._undone_by_cause.items():
            add(cause, undone_s * share)
        found = [(cause, cost) for cause, cost in lost.items() if cost.seconds or cost.times]
        return dict(sorted(found, key=lambda item: -item[1].seconds))

    def _begin_start(self, event: RunStarted, passed_s: float) -> None:
        """Book the time until a start, and undo the steps that it trains again."""
        self._cause = loss_cause(self._failure) if self._has_started else LossCause.first_start
        if self._trial_s:  # a trial that was killed
            self._book(Account.trying, self._trial_s, is_sure=True)
            self._trial_s = 0.0
        if not isinstance(self._failure, RunRestarted):
            self._cost_of(self._cause).times += 1
        self._book(Account.stopped, passed_s, is_sure=True, cause=self._cause)
        if self._damaged_step > event.step:  # the steps before it are lost because it is damaged
            self._cost_of(LossCause.storage).times += 1
            self._undo(self._damaged_step, self._cause)
            self._undo(event.step, LossCause.storage)
        self._undo(event.step, self._cause)
        self._has_started, self._failure, self._damaged_step = True, None, 0
        self._num_ranks = event.world_size
        self._is_paused, self._is_starting = False, True
        self._before_step_s = 0.0
        self._last_tokens = None if self._tokens_consumed else 0

    def _book_restore(self, took_s: float, passed_s: float) -> None:
        """Book a restore and the `passed_s` since the last event; what is longer was before the last step."""
        restoring_s = min(took_s, passed_s)
        self._book(Account.restoring, restoring_s)
        self._book(None, passed_s - restoring_s)
        earlier_s = min(took_s - restoring_s, self._before_step_s)
        self._before_step_s -= earlier_s
        self._book(Account.restoring, earlier_s)
        if self._is_first_step:
            self._book(Account.starting, -earlier_s, cause=self._cause)
        else:
            self._between_s -= earlier_s

    def _cost_of(self, cause: LossCause) -> LostTime:
        return self._lost.setdefault(cause, LostTime())

    def _advance_clock(self, time: float) -> float:
        """Seconds since the last event; 0 if the clock was set back."""
        passed_s = 0.0 if self._last_time is None else max(0.0, time - self._last_time)
        self._last_time = time if self._last_time is None else max(time, self._last_time)
        if self._num_ranks:
            self._held_s += passed_s
            self._rank_s += passed_s * self._num_ranks
        return passed_s

    def _book(
        self, account: Account | None, seconds: float, *, is_sure: bool = False, cause: LossCause | None = None
    ) -> None:
        """Add seconds to an account; None: time since the last step. `cause` is that of stopped and starting time."""
        if self._is_paused and not is_sure:
            account = Account.paused
        if account is None and self._has_started and self._is_starting:
            account, cause = Account.starting, self._cause
        if account is None:
            self._open_s += seconds
            return
        self._seconds[account] += seconds
        known = CAUSES_OF_ACCOUNTS.get(account, cause)
        assert known is not None, "stopped and starting time has a cause"
        self._cost_of(known).seconds += seconds

    def _undo(self, step: int, cause: LossCause) -> None:
        """Move the steps after `step` from kept to undone."""
        while self._steps and self._steps[-1] > step:
            last, took_s, tokens, count = (column.pop() for column in self._columns)
            num_undone = min(count, last - step)
            undone_s = self._undone_by_cause.get(cause, 0.0) + took_s * num_undone / count
            self._undone_by_cause[cause] = undone_s
            self._cost_of(cause).steps += num_undone
            self._num_undone += num_undone
            if num_undone < count:
                left = count - num_undone
                values = (step, took_s * left / count, tokens * left // count, left)
                for column, value in zip(self._columns, values, strict=True):
                    column.append(value)

    @property
    def _columns(self) -> tuple[array[Any], ...]:
        return self._steps, self._step_s, self._step_tokens, self._step_counts
