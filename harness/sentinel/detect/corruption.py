"""Detects silent data corruption: a micro-batch that was computed twice gave different bits.

How: the step report says which ranks differ, and at which stage (`harness.recomputation`). The first difference raises
`corruption`; its update was rejected. The check is then repeated in the next steps, `NUM_REPEATS` times: on own rows,
and on those of another rank. If it fails again, or if a rank that was named alone before is named alone again, the
error lasts and `corrupting_rank` is raised; otherwise `corruption_passed`. The ranks are those that every failed check
names, so a repetition narrows them down. A lasting error began after the last clean check of the same kind: a rank that
makes the same error every time passes all checks on its own rows.
A rank stands for its machine. After a restart, differences count only for ranks that are still on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from harness.core.events import Finding, FindingKind, ReducedRecord
from harness.sentinel.detect.guards import make_finding

NUM_REPEATS = 2
OWN, OTHER = "own", "other"


@final
@dataclass(slots=True)
class CorruptionGuard:
    suspects: list[int] = field(default_factory=list)
    """Ranks that the checks of the present difference name."""
    num_left: int = 0
    """Repeated checks that have not been reported yet."""
    num_failed: int = 0
    """Failed checks of the present difference."""
    failed_ranks: list[int] = field(default_factory=list)
    """Ranks that were the only suspect of an earlier difference."""
    clean_iterations: dict[str, int] = field(default_factory=dict)
    """Rows that were computed again (`OWN` or `OTHER`) -> the last such check without a difference."""
    first_rows: str = ""
    """Rows of the first failed check of the present difference."""
    what: str = ""
    """What differed first, in the first failed check."""
    groups: list[str] = field(default_factory=list)
    machines: dict[str, list[int]] = field(default_factory=dict)
    """Machine -> its ranks, since the last start; empty: unknown."""

    @property
    def is_repeating(self) -> bool:
        return self.num_left > 0

    def on_start(self, machines: dict[str, list[int]]) -> None:
        """Forget the differences of ranks that run on another machine since this start."""
        if not machines:
            return
        before, now = _machine_of_each_rank(self.machines), _machine_of_each_rank(machines)
        moved = {rank for rank, machine in now.items() if before.get(rank) != machine}
        self.failed_ranks = [rank for rank in self.failed_ranks if rank not in moved]
        if not moved.isdisjoint(self.suspects):
            self.suspects, self.num_left = [], 0
        self.machines = machines

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        """Follow the checks; a record without one changes nothing."""
        if record.recomputed is None:
            return
        rows = OWN if record.recomputed == 0 else OTHER
        if not self.is_repeating:
            if not record.corrupted_ranks:
                self.clean_iterations[rows] = record.iteration
                return
            self.suspects, self.num_left, self.num_failed = list(record.corrupted_ranks), NUM_REPEATS, 1
            self.what, self.groups, self.first_rows = record.corrupted, list(record.corrupted_groups), rows
            by = "the same rank" if rows == OWN else "another rank"
            message = f"{self._named()}: {self.what} differs when {by} computes it again; repeating the check"
            yield self._finding(FindingKind.corruption, record, message)
            return
        self.num_left -= 1
        if record.corrupted_ranks:
            self.num_failed += 1
            self.suspects = [rank for rank in self.suspects if rank in record.corrupted_ranks] or self.suspects
        if self.num_left:
            return
        if self.num_failed > 1 or (len(self.suspects) == 1 and self.suspects[0] in self.failed_ranks):
            message = f"{self._named()}: {self.what} differed in {self.num_failed} of {1 + NUM_REPEATS} checks"
            if self.num_failed == 1:
                message += ", and once before"
            finding = self._finding(FindingKind.corrupting_rank, record, f"{message}; the error lasts")
            finding.onset = self.clean_iterations.get(self.first_rows, 0) + 1
            yield finding
        else:
            message = (
                f"{self._named()}: {self.what} was equal in {NUM_REPEATS} repeated checks; the error was transient"
            )
            yield self._finding(FindingKind.corruption_passed, record, message)
        if len(self.suspects) == 1 and self.suspects[0] not in self.failed_ranks:
            self.failed_ranks.append(self.suspects[0])

    def _named(self) -> str:
        ranks = " or ".join(map(str, self.suspects))
        return f"rank {ranks}"

    def _finding(self, kind: FindingKind, record: ReducedRecord, message: str) -> Finding:
        finding = make_finding(kind, record, self.num_failed, 0.0, message)
        finding.ranks, finding.groups, finding.cursors = list(self.suspects), list(self.groups), []
        return finding


def _machine_of_each_rank(machines: dict[str, list[int]]) -> dict[int, str]:
    return {rank: machine for machine, ranks in machines.items() for rank in ranks}
