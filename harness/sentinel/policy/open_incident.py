"""One open incident: where it is, what was tried, and what the loss does while it is watched.

Why: the response to a finding depends on what was tried before at the same place, and on how the loss develops.
How: an incident stores its place (in iterations for restores, in steps to recognise the place again), the rung it has
reached, and the loss level before its onset. While it is watched, `evaluate_watch` compares the median of the last few
losses with that level. Back to the level: recovered. Still falling: recovering, and watched on. No longer falling, or
never: a bad update got through (stuck). Still high when the watch ends: lingering. A small rise without an overshoot
and without a known cause is new data and is accepted: damage falls from a peak, new data does not. The type of a spike
follows from this trajectory (`harness.sentinel.detect.trajectory`), not from the action that was taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Self, final

from harness.config.sentinel import PolicyConfig
from harness.core.events import Action, ActionKind, FindingKind
from harness.sentinel.detect.trajectory import RecoveryTrend, classify_trajectory, has_recovered, has_turned
from harness.sentinel.policy.lineage import Lineage

NUM_RECENT = 9
SPIKE_SIGMAS = 3.0
"""A rejected loss this many sigmas above the level before the onset is a loss spike."""
RISING_SIGMAS, FALLING_ERRORS = 3.0, 1.0
"""A rise within the recent losses that noise does not cause, in sigmas; a slope that noise rarely causes, in standard
errors."""
MOST_REFUSED = 64
"""Rejected updates of one incident that are stored."""
HALVED, QUARTER = 0.5, 0.25
"""Falls of the height that prolong a watch: to this share since the last time, or by this share of the peak."""


class Rung(IntEnum):
    """The ladder of one incident. The cures (cool, swap, precision) follow a restore."""

    none = -1
    watch = 0
    skip = 1
    rewind = 2
    wide = 3
    """Rewind further, and exclude the neighbours of the blamed batches too."""
    rollback = 4
    cure = 5
    """Roll back further, then cool, swap or change the precision."""
    halt = 6


class IncidentVerdict(StrEnum):
    """How an incident ended, or what its watch shows."""

    harmless = "harmless"
    """A warning sign without consequences."""
    recovered = "recovered"
    accepted = "accepted"
    """The new loss level comes from new data."""
    cured = "cured"
    """Something was done, and `clean_steps` without a finding followed."""
    undone = "undone"
    """A restore for another incident undid its steps."""
    stuck = "stuck"
    """The spike does not recover by itself."""
    lingering = "lingering"
    """The loss is still high at the end of the watch."""


class ClosedIncident(NamedTuple):
    incident: int
    verdict: IncidentVerdict
    spike_type: int | None
    """1 recovered, 2 lingering, 3 divergent; None: no loss spike, or undone before its trajectory was known."""


CAUSES = frozenset(
    {
        FindingKind.grad_spike,
        FindingKind.v_stale,
        FindingKind.rank_outlier,
        FindingKind.lr_jump,
        FindingKind.fp8_range,
        FindingKind.corruption,
    }
)
"""Findings that precede a loss spike and are then its known cause."""
WARNING_SIGNS = CAUSES | {FindingKind.weight_drift, FindingKind.precursor}
"""Findings that do no damage by themselves."""
REJECTION_KINDS = frozenset({"refusal", "refusals"})
"""Kinds of an incident in which updates were rejected and no applied update was suspicious."""
DIVERGENT = frozenset({FindingKind.divergence, FindingKind.nonfinite, "nonfinite weights"})
"""Findings that make a spike type 3, whatever the loss does afterwards."""
BATCH_NOT_AT_FAULT = frozenset(
    {
        FindingKind.lr_jump,
        FindingKind.optimizer_reset,
        FindingKind.scale_collapse,
        FindingKind.fp8_range,
        FindingKind.weights_changed,
        FindingKind.corrupting_rank,
    }
)
"""Findings that no batch is blamed for."""
STATE_FINDINGS = BATCH_NOT_AT_FAULT | {FindingKind.nonfinite, FindingKind.replica_mismatch, "nonfinite weights"}
"""Findings about the state itself. The held-out loss adds nothing to them."""


@final
@dataclass(slots=True, kw_only=True)
class OpenIncident:
    number: int
    onset: int
    """Iteration."""
    onset_step: int
    end_step: int
    """The highest step with a finding."""
    level: float | None = None
    """Loss before the onset."""
    sigma: float = 0.0
    """Robust standard deviation of the loss before the onset."""
    kinds: list[str] = field(default_factory=list)
    """Kinds of its findings, in order of appearance."""
    new_kinds: list[str] = field(default_factory=list)
    """Kinds of its findings since the last restore; older findings say nothing about the present state."""
    cursors: list[int] = field(default_factory=list)
    """Batches named by its findings."""
    source: str | None = None
    """The data source that stands out in its batch."""
    unfit: str = ""
    """Message of its fp8_range finding; empty if there is none."""
    rung: int = Rung.none
    is_restored: bool = False
    """A state was restored, and there was no finding since."""
    is_passed: bool = False
    """After the last restore the run passed the place with clean steps before the next finding."""
    target_step: int | None = None
    """The earliest step that was restored."""
    without_margin: bool = False
    """There was no state well before the onset; any state before the onset is allowed."""
    is_hopeless: bool = False
    """There was no state to restore at all."""
    failed_cures: list[str] = field(default_factory=list)
    watched_since: int | None = None
    """Iteration."""
    watched_until: int = 0
    """Iteration."""
    refused: list[list[float]] = field(default_factory=list)
    """Batch, loss and gradient norm of each finite rejected update since the last restore; newest last."""
    given_back: list[int] = field(default_factory=list)
    """Those of its rejected batches that were given back since."""
    num_excessive: int = 0
    """How many of them had a gradient norm above its own bound."""
    is_finite: bool = True
    """All its rejected updates had a finite loss and gradient norm."""
    is_checked: bool = False
    """The held-out loss was measured since the last restore, and not only at the start of a spike."""
    is_healthy: bool = False
    """That held-out loss was at its expected level: the state is not damaged."""
    expected: float | None = None
    """Held-out loss of a healthy state, computed when the check was chosen."""
    peak: float | None = None
    """Highest median of the recent losses while watched."""
    last_height: float | None = None
    """Height above the level when the watch was last prolonged."""
    trend: RecoveryTrend = field(default_factory=RecoveryTrend)
    """Last move of the median of the recent losses while watched."""
    is_divergent: bool = False
    """A loss or the weights were not finite, or the loss diverged."""
    type_so_far: int | None = None
    """Type of the spike by the trajectory of the finite losses so far; None without a loss spike."""
    excluded: list[int] = field(default_factory=list)
    """First and last batch that its last restore excluded; empty: none."""
    trial_step: int | None = None
    """The step near which remedies are tried: that of the onset, after a restore; None: tried already, or no
    restore."""

    @property
    def is_treated(self) -> bool:
        """A restore was chosen for it."""
        return self.rung >= Rung.rewind

    @property
    def is_watched(self) -> bool:
        return self.watched_since is not None and not self.is_treated

    @property
    def has_cause(self) -> bool:
        return not CAUSES.isdisjoint(self.kinds)

    @property
    def shows_damage(self) -> bool:
        """It is watched and has a finding beyond warning signs."""
        return self.is_watched and not WARNING_SIGNS.issuperset(self.kinds)

    @property
    def has_only_rejections(self) -> bool:
        """It consists of rejected updates; no applied update was suspicious."""
        return REJECTION_KINDS.issuperset(self.kinds)

    @property
    def blames_data(self) -> bool:
        """Whether batches are excluded: not at first for findings that no batch causes, but after a failed restore."""
        return self.target_step is not None or BATCH_NOT_AT_FAULT.isdisjoint(self.kinds)

    @property
    def spike_type(self) -> int | None:
        """1 recovered, 2 lingering, 3 divergent; None without a loss spike."""
        return 3 if self.is_divergent else self.type_so_far

    @property
    def may_be_checked(self) -> bool:
        """Whether the held-out loss can tell damage from new data: no finding concerns the state itself."""
        return not self.is_checked and self.is_finite and STATE_FINDINGS.isdisjoint(self.new_kinds)

    @property
    def looks_like_data(self) -> bool:
        """Most of the rejected updates, if any, were rejected for their loss and not for their gradient norm."""
        return 2 * self.num_excessive < max(len(self.refused), 1)

    @property
    def rejected_batches(self) -> list[list[int]]:
        """First and last batch of each range of rejected updates that were not given back, in ascending order."""
        ranges: list[list[int]] = []
        for batch in sorted({int(batch) for batch, _, _ in self.refused}.difference(self.given_back)):
            if ranges and ranges[-1][1] == batch - 1:
                ranges[-1][1] = batch
            else:
                ranges.append([batch, batch])
        return ranges

    def is_trial_due(self, step: int, *, lead_steps: int) -> bool:
        """Whether a run that has issued this many steps is so near to the onset that remedies can be tried."""
        return (
            self.is_restored
            and self.trial_step is not None
            and self.trial_step - lead_steps <= step <= self.trial_step + lead_steps
        )

    def add_rejected(self, *, cursor: int, loss: float, grad_norm: float, is_excessive: bool) -> None:
        """Add a finite rejected update."""
        self.refused = [*self.refused[1 - MOST_REFUSED :], [cursor, loss, grad_norm]]
        self.given_back = [batch for batch in self.given_back if batch != cursor]
        self.num_excessive += is_excessive
        if self.level is not None and self.height(loss) > SPIKE_SIGMAS * self.sigma:
            self.type_so_far = self.type_so_far or 1  # the rejected update did not change the state

    def add_finding(self, kind: str, *, onset: int, onset_step: int, step: int, cursors: Iterable[int]) -> None:
        """Add a finding. The first one after a restore moves the onset; so does one that follows a rejected update
        after `NUM_RECENT` clean steps, because the rejected update did not change the state."""
        is_past = onset_step - self.end_step >= NUM_RECENT
        resets_onset = self.is_restored or (is_past and self.has_only_rejections and not self.is_treated)
        if self.is_restored:
            self.is_passed, self.new_kinds = is_past, []
        for kinds in (self.kinds, self.new_kinds):
            if kind not in kinds:
                kinds.append(kind)
        self.is_divergent = self.is_divergent or kind in DIVERGENT
        self.end_step = max(self.end_step, step)
        if resets_onset or onset < self.onset:
            self.onset, self.onset_step = onset, onset_step
        if resets_onset:
            self.cursors = []
        self.is_restored = False
        self.cursors += [cursor for cursor in cursors if cursor not in self.cursors]

    def on_action(self, action: Action, *, cfg: PolicyConfig) -> None:
        """Record an action that was chosen for it."""
        match action.kind:
            case ActionKind.watch | ActionKind.qk_clip:
                self.rung = max(self.rung, Rung.watch)
                self.watched_since = action.iteration
                self.watched_until = action.iteration + cfg.watch_iterations
                self.trend = RecoveryTrend(moved_at=action.iteration)
            case ActionKind.skip:
                self.rung = max(self.rung, Rung.skip)
            case ActionKind.check:
                self.expected = action.level
            case ActionKind.trial:
                self.trial_step = None
            case ActionKind.rewind:
                self.rung = Rung.wide if self.is_treated else Rung.rewind
                self.excluded = list(action.exclude)
            case ActionKind.rollback:
                self.rung = Rung.cure if self.rung >= Rung.rollback else Rung.rollback
                self.excluded = list(action.exclude)

    def height(self, loss: float | None) -> float:
        """Height of a loss above the level before the onset."""
        return 0.0 if self.level is None or loss is None else loss - self.level

    def is_tolerable(self, lineage: Lineage, iteration: int, *, cfg: PolicyConfig) -> bool:
        """Whether a lasting rise of the loss may be watched: it falls, or looks like new data."""
        recent = lineage.recent_loss(NUM_RECENT, since=self.onset)
        if recent is None or self.level is None:
            return True
        looks_like_data = not self.has_cause and self.height(recent) <= cfg.accept_rise_nats
        return looks_like_data or self._is_recovering(lineage, iteration, cfg=cfg) or self._has_turned(recent)

    def evaluate_watch(self, lineage: Lineage, iteration: int, *, cfg: PolicyConfig) -> IncidentVerdict | None:
        """The verdict of the watch so far; None: keep watching. Prolongs the watch of a spike that keeps falling."""
        assert self.watched_since is not None
        if WARNING_SIGNS.issuperset(self.kinds) or self.level is None:
            period = cfg.patience_iterations if WARNING_SIGNS.issuperset(self.kinds) else cfg.watch_iterations
            return IncidentVerdict.harmless if iteration - self.watched_since >= period else None
        recent = lineage.recent_loss(NUM_RECENT, since=self.watched_since)
        if recent is None:
            return IncidentVerdict.lingering if iteration >= self.watched_until else None
        self._follow(recent, iteration, level=self.level)
        if has_recovered(level=self.level, sigma=self.sigma, loss=recent):
            return IncidentVerdict.recovered
        is_lower = self._has_turned(recent)
        is_acceptable = not is_lower and not self.has_cause and self.height(recent) <= cfg.accept_rise_nats
        if not is_lower and not is_acceptable and self._is_stuck(lineage, iteration, cfg=cfg):
            return IncidentVerdict.stuck
        if iteration < self.watched_until:
            return None
        return IncidentVerdict.accepted if is_acceptable else self._prolong_watch(recent, lineage, iteration, cfg=cfg)

    def _follow(self, recent: float, iteration: int, *, level: float) -> None:
        """Update peak, trend and type with the median of the recent losses."""
        self.peak = recent if self.peak is None else max(self.peak, recent)
        self.trend.follow(recent, iteration, level=level, sigma=self.sigma)
        self.type_so_far = classify_trajectory(
            level=level, sigma=self.sigma, peak=self.peak, loss=recent, is_rising=self.trend.direction > 0
        )

    def _has_turned(self, recent: float) -> bool:
        """The loss falls from its peak, as healing damage does; with new data it stays."""
        if self.peak is None or self.level is None:
            return False
        return has_turned(level=self.level, sigma=self.sigma, peak=self.peak, loss=recent)

    def _is_recovering(self, lineage: Lineage, iteration: int, *, cfg: PolicyConfig) -> bool:
        """Whether the loss still falls: by its last move, or, if it falls slowly, by its slope since then."""
        if self.trend.is_recovering(iteration, patience=cfg.patience_iterations):
            return True
        is_old = iteration - self.trend.moved_at >= cfg.patience_iterations
        return is_old and lineage.fall_in_errors(since=self.trend.moved_at, sigma=self.sigma) > FALLING_ERRORS

    def _is_stuck(self, lineage: Lineage, iteration: int, *, cfg: PolicyConfig) -> bool:
        """Whether the patience is over: the loss still rises, or did not move for that long. The patience with a loss
        that stopped rising starts at its peak."""
        assert self.watched_since is not None
        overdue_since = self.watched_since + cfg.patience_iterations
        if iteration < overdue_since or self._is_recovering(lineage, iteration, cfg=cfg):
            return False
        if self.trend.direction > 0:
            is_rising = lineage.recent_rise(NUM_RECENT, since=self.watched_since) > RISING_SIGMAS * self.sigma
            if is_rising or self.trend.moved_at >= overdue_since + NUM_RECENT // 2:  # half a window: lag of the median
                return True
        return iteration - self.trend.moved_at >= cfg.patience_iterations

    def _prolong_watch(
        self, recent: float, lineage: Lineage, iteration: int, *, cfg: PolicyConfig
    ) -> IncidentVerdict | None:
        """Prolong the watch if the height halved since the last time, or still falls and fell by a quarter of the peak.
        This ends, because noise bounds the height."""
        peak = self.height(self.peak)
        before = peak if self.last_height is None else self.last_height
        is_recovering = self._is_recovering(lineage, iteration, cfg=cfg)
        limit = max(HALVED * before, before - QUARTER * peak) if is_recovering else HALVED * before
        if self.height(recent) > limit:
            return IncidentVerdict.lingering
        self.last_height = self.height(recent)
        self.watched_until = iteration + cfg.watch_iterations
        return None

    def state(self) -> dict[str, Any]:
        """Plain data; the field names are part of the checkpoint format."""
        return asdict(self)

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        """A state of an older version has no `new_kinds` (all of its kinds count) and no `trend`, but `pending`, which
        a restart drops."""
        fields = deepcopy({"new_kinds": state["kinds"], "trend": {}} | state)
        fields.pop("pending", None)
        return cls(**(fields | {"trend": RecoveryTrend(**fields["trend"])}))
