"""A case: one incident as the policy sees it, from its onset until the run has left it well behind.

Why: what to do about a finding depends on what was tried before at the same place, and on what the loss does meanwhile.
How: a case holds where the trouble lies (in iterations for restores, in steps for recognising the place again), the
rung of the ladder it has reached, and what was normal before. While it is watched, `judge` looks at the median of the
last few losses: down to normal again is recovered (type 1); stuck near its peak is a bad update that slipped through;
still high when the watch ends is lingering (type 2). A step up that never overshot, is small and has no known cause is
other data, and is accepted: damage comes down from a peak, data does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Self, final

from harness.config.sentinel import PolicyConfig
from harness.core.events import Action, ActionKind, FindingKind
from harness.sentinel.policy.lineage import Lineage

NUM_RECENT = 9
RECOVERED_SIGMAS = 0.5
TURNED, TURNED_SIGMAS = 0.25, 2.0
"""A spike is coming down by itself once it fell by this share of its height, and by more than noise does."""
MOST_REFUSED = 64
"""Rejected batches of one incident that are remembered."""
HALVED = 0.5
"""What must be left at most of a spike's height for its watch to be prolonged."""


class Rung(IntEnum):
    """The ladder of one case; the cures (cool, swap, precision) follow a restore."""

    none = -1
    watch = 0
    skip = 1
    rewind = 2
    wide = 3
    """Rewind further, without the neighbours of the guilty batches."""
    rollback = 4
    cure = 5
    """Roll back further, then cool, swap or change the precision."""
    halt = 6


class IncidentVerdict(StrEnum):
    """What became of a case, or of watching it."""

    harmless = "harmless"
    """A sign of trouble that no trouble followed."""
    recovered = "recovered"
    accepted = "accepted"
    """The new level of the loss is that of other data."""
    cured = "cured"
    """The run has left the place well behind since something was done."""
    undone = "undone"
    """A restore for another case took its steps back."""
    stuck = "stuck"
    lingering = "lingering"


class ClosedIncident(NamedTuple):
    incident: int
    verdict: IncidentVerdict
    spike_type: int | None
    """1 recovered by itself, 2 lingering, 3 divergent; None: no spike, or cured before it could show."""


CAUSES = frozenset(
    {
        FindingKind.grad_spike,
        FindingKind.v_stale,
        FindingKind.rank_outlier,
        FindingKind.lr_jump,
        FindingKind.fp8_range,
    }
)
"""Signs that come before a loss spike; when one does, its cause is known."""
WARNING_SIGNS = CAUSES | {FindingKind.weight_drift}
"""Findings that alone do no harm."""
REJECTION_KINDS = frozenset({"refusal", "refusals"})
"""What a case is made of where updates were refused and none that was applied did harm."""
DIVERGENT = frozenset({FindingKind.divergence, FindingKind.nonfinite})
BATCH_NOT_AT_FAULT = frozenset(
    {FindingKind.lr_jump, FindingKind.optimizer_reset, FindingKind.scale_collapse, FindingKind.fp8_range}
)
"""What no batch is to blame for."""
STATE_FINDINGS = BATCH_NOT_AT_FAULT | {FindingKind.nonfinite, FindingKind.replica_mismatch, "nonfinite weights"}
"""What is known of the state itself; a held-out loss says nothing more about it."""


@final
@dataclass(slots=True, kw_only=True)
class OpenIncident:
    number: int
    onset: int
    """Iteration."""
    onset_step: int
    end_step: int
    """The furthest step at which it showed."""
    level: float | None = None
    """Loss before the onset."""
    sigma: float = 0.0
    kinds: list[str] = field(default_factory=list)
    """Of its findings, in order of appearance."""
    new_kinds: list[str] = field(default_factory=list)
    """Of those since the last restore: what was found before says nothing about the state of now."""
    cursors: list[int] = field(default_factory=list)
    """Batches that its findings name."""
    source: str | None = None
    """The source that stands out in its batch."""
    unfit: str = ""
    """What did not fit into fp8, in words; empty: nothing was found of that."""
    rung: int = Rung.none
    is_restored: bool = False
    """The run was set back, and nothing has shown since."""
    is_passed: bool = False
    """After the last restore the run passed the place with clean steps before anything showed again."""
    target_step: int | None = None
    """The earliest step it was set back to."""
    without_margin: bool = False
    """There was nothing to go back to well before the onset; anything before it will do."""
    is_hopeless: bool = False
    """There was nothing to go back to at all."""
    failed_cures: list[str] = field(default_factory=list)
    watched_since: int | None = None
    """Iteration."""
    watched_until: int = 0
    refused: list[list[float]] = field(default_factory=list)
    """Batch, loss and gradient norm of each rejected update that was finite, since the last restore; newest last."""
    num_excessive: int = 0
    """How many of them had a gradient norm beyond its own bound."""
    is_finite: bool = True
    """Every rejected update of it had a finite loss and gradient norm."""
    is_checked: bool = False
    """The held-out loss was measured for it since the last restore, and not only as a spike began."""
    is_healthy: bool = False
    """And was at its level: the state is not damaged."""
    expected: float | None = None
    """The held-out loss of a healthy state, when the check was decided."""
    pending: list[int] = field(default_factory=list)
    """Batches whose updates were rejected, and which nothing was decided about before the check was done."""
    peak: float | None = None
    """Highest median of recent losses while watched."""
    last_height: float | None = None
    """Above the level, when the watch was last prolonged."""

    @property
    def is_treated(self) -> bool:
        return self.rung >= Rung.rewind

    @property
    def is_watched(self) -> bool:
        return self.watched_since is not None and not self.is_treated

    @property
    def has_cause(self) -> bool:
        return not CAUSES.isdisjoint(self.kinds)

    @property
    def shows_damage(self) -> bool:
        """Something more than a sign of trouble shows, and is watched."""
        return self.is_watched and not WARNING_SIGNS.issuperset(self.kinds)

    @property
    def has_only_rejections(self) -> bool:
        """Nothing that was applied ever looked suspicious: all there is to blame is what was refused."""
        return REJECTION_KINDS.issuperset(self.kinds)

    @property
    def blames_data(self) -> bool:
        """Once a restore without an exclusion did not help, data is excluded too."""
        return self.target_step is not None or BATCH_NOT_AT_FAULT.isdisjoint(self.kinds)

    @property
    def spike_type(self) -> int | None:
        if not DIVERGENT.isdisjoint(self.kinds):
            return 3
        return 2 if self.rung >= Rung.rollback else None

    @property
    def may_be_checked(self) -> bool:
        """Whether a held-out loss can tell damage from other data: nothing is known of the state itself yet."""
        return not self.is_checked and self.is_finite and STATE_FINDINGS.isdisjoint(self.new_kinds)

    @property
    def looks_like_data(self) -> bool:
        """Where updates were rejected: for their loss, most of them, and not for their gradients."""
        return 2 * self.num_excessive < max(len(self.refused), 1)

    @property
    def rejected_batches(self) -> list[list[int]]:
        """Ranges of the batches whose updates were rejected, in the order of the batches."""
        ranges: list[list[int]] = []
        for batch in sorted({int(batch) for batch, _, _ in self.refused}):
            if ranges and ranges[-1][1] == batch - 1:
                ranges[-1][1] = batch
            else:
                ranges.append([batch, batch])
        return ranges

    def add_rejected(self, *, cursor: int, loss: float, grad_norm: float, is_excessive: bool) -> None:
        """A finite update of it was rejected."""
        self.refused = [*self.refused[1 - MOST_REFUSED :], [cursor, loss, grad_norm]]
        self.num_excessive += is_excessive

    def add_finding(self, kind: str, *, onset: int, onset_step: int, step: int, cursors: Iterable[int]) -> None:
        """One more finding; the first after a restore starts the place anew, and so does one that comes so many clean
        steps after a refusal: that changed nothing, and the state since is as good as before it."""
        is_past = onset_step - self.end_step >= NUM_RECENT
        begins_anew = self.is_restored or (is_past and self.has_only_rejections and not self.is_treated)
        if self.is_restored:
            self.is_passed, self.new_kinds = is_past, []
        for kinds in (self.kinds, self.new_kinds):
            if kind not in kinds:
                kinds.append(kind)
        self.end_step = max(self.end_step, step)
        if begins_anew or onset < self.onset:
            self.onset, self.onset_step = onset, onset_step
        if begins_anew:
            self.cursors = []
        self.is_restored = False
        self.cursors += [cursor for cursor in cursors if cursor not in self.cursors]

    def on_action(self, action: Action, *, cfg: PolicyConfig) -> None:
        """Something was decided about it."""
        match action.kind:
            case ActionKind.watch:
                self.rung = max(self.rung, Rung.watch)
                self.watched_since = action.iteration
                self.watched_until = action.iteration + cfg.watch_iterations
            case ActionKind.skip:
                self.rung = max(self.rung, Rung.skip)
                first, last = action.exclude or (0, -1)
                self.pending = [cursor for cursor in self.pending if not first <= cursor <= last]
            case ActionKind.check:
                self.expected = action.level
            case ActionKind.rewind:
                self.rung = Rung.wide if self.is_treated else Rung.rewind
            case ActionKind.rollback:
                self.rung = Rung.cure if self.rung >= Rung.rollback else Rung.rollback

    def height(self, loss: float | None) -> float:
        """Of a loss above the level from before."""
        return 0.0 if self.level is None or loss is None else loss - self.level

    def has_turned(self, recent: float) -> bool:
        """It comes down from its peak, as damage that heals does; other data stays where it is."""
        fall = self.height(self.peak) - self.height(recent)
        return fall > max(TURNED * self.height(self.peak), TURNED_SIGMAS * self.sigma)

    def is_tolerable(self, lineage: Lineage, *, cfg: PolicyConfig) -> bool:
        """Whether a lasting rise of the loss may be watched: it comes down, or looks like other data."""
        recent = lineage.recent_loss(NUM_RECENT, since=self.onset)
        if recent is None or self.level is None:
            return True
        looks_like_data = not self.has_cause and self.height(recent) <= cfg.accept_rise_nats
        return looks_like_data or (self.peak is not None and self.has_turned(recent))

    def evaluate_watch(self, lineage: Lineage, iteration: int, *, cfg: PolicyConfig) -> IncidentVerdict | None:
        """What watching it says so far; None: go on. Prolongs the watch of a spike that keeps coming down."""
        assert self.watched_since is not None
        if WARNING_SIGNS.issuperset(self.kinds) or self.level is None:
            period = cfg.patience_iterations if WARNING_SIGNS.issuperset(self.kinds) else cfg.watch_iterations
            return IncidentVerdict.harmless if iteration - self.watched_since >= period else None
        recent = lineage.recent_loss(NUM_RECENT, since=self.watched_since)
        if recent is None:
            return IncidentVerdict.lingering if iteration >= self.watched_until else None
        self.peak = recent if self.peak is None else max(self.peak, recent)
        if self.height(recent) <= RECOVERED_SIGMAS * self.sigma:
            return IncidentVerdict.recovered
        has_turned = self.has_turned(recent)
        is_acceptable = not has_turned and not self.has_cause and self.height(recent) <= cfg.accept_rise_nats
        is_overdue = iteration - self.watched_since >= cfg.patience_iterations
        if is_overdue and not has_turned and not is_acceptable:
            return IncidentVerdict.stuck
        if iteration < self.watched_until:
            return None
        return IncidentVerdict.accepted if is_acceptable else self._prolong_watch(recent, iteration, cfg=cfg)

    def _prolong_watch(self, recent: float, iteration: int, *, cfg: PolicyConfig) -> IncidentVerdict | None:
        """A spike that halved since the last look may go on; halving cannot go on for ever above the noise."""
        before = self.height(self.peak) if self.last_height is None else self.last_height
        if self.height(recent) > HALVED * before:
            return IncidentVerdict.lingering
        self.last_height = self.height(recent)
        self.watched_until = iteration + cfg.watch_iterations
        return None

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        """A state of an older version has no `new_kinds`: all of its kinds count."""
        return cls(**deepcopy({"new_kinds": state["kinds"]} | state))
