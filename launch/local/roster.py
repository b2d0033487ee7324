"""Which launcher runs which node of a run: a pure rule, used at the start and at every restart inside the job.

A roster lists the launchers that run ranks, by node rank; a launcher is identified by the number with which it joined
(`--node-rank`). All others are spares. The coordinator always runs ranks. The rule changes as little as possible: a
machine that takes over a node rank has the same ranks and shards as the one it replaces.

| node | a spare is free | no spare, fewer nodes are allowed | neither |
|---|---|---|---|
| lost | replaced | left out | replaced by a machine that is out but there, else the run ends |
| out: corrupting, hung, health | replaced | left out | stays |
| out: outlier, slow | replaced | stays | stays |
| missing, since the run went on with fewer nodes | taken back | | |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from launch.slurm.node_exclusion import NodeFaultKind

Roster = tuple[int, ...]
"""Number of the launcher of each node."""

ORDER = [None, *reversed(NodeFaultKind)]
"""Launchers are used in this order: those without a fault first, then those with the least serious one."""
TOLERATED = frozenset({NodeFaultKind.outlier, NodeFaultKind.slow})
"""Faults for which a run does not continue with fewer nodes."""


def choose_roster(
    roster: Sequence[int],
    present: Mapping[int, NodeFaultKind | None],
    *,
    allowed: Collection[int],
    coordinator: int = 0,
) -> Roster | None:
    """The roster of the next start; None if there are not enough launchers.

    `present` has every launcher that can run ranks, and why it is out, or None. `allowed` are the numbers of nodes on
    which the run can continue; it wants the largest. The coordinator is never replaced while it is there.
    """
    faults = {number: None if number == coordinator else fault for number, fault in present.items()}
    used = set(roster)
    spares = [number for number, fault in faults.items() if fault is None and number not in used]
    spares.sort(key=lambda number: (number != coordinator, number), reverse=True)
    seats: list[int | None] = [number if number in faults else None for number in roster]
    lost = [seat for seat, number in enumerate(seats) if number is None]
    bad = [seat for seat, number in enumerate(roster) if faults.get(number) is not None]
    for seat in [*lost, *sorted(bad, key=lambda seat: -ORDER.index(faults[roster[seat]]))]:
        if spares:
            seats[seat] = spares.pop()
    chosen = [number for number in seats if number is not None]
    while spares and len(chosen) < max(allowed):
        chosen.append(spares.pop())
    leave_out_faulty(chosen, faults, allowed)
    if not any(size <= len(chosen) for size in allowed):
        others = sorted(faults.keys() - set(seats), key=lambda number: (ORDER.index(faults[number]), number))
        others.reverse()
        filled = [others.pop() if number is None and others else number for number in seats]
        chosen = [number for number in filled if number is not None]
        leave_out_faulty(chosen, faults, allowed)
    fitting = [size for size in allowed if size <= len(chosen)]
    if not fitting:
        return None
    order = sorted(chosen, key=lambda number: (number != coordinator, ORDER.index(faults[number])))
    kept = set(order[: max(fitting)])
    return tuple(number for number in chosen if number in kept)


def pack_roster(roster: Roster) -> list[list[int]]:
    """A roster as ranges of consecutive numbers, first and last: short in a message, also with thousands of nodes."""
    ranges: list[list[int]] = []
    for number in roster:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def unpack_roster(ranges: Sequence[Sequence[int]]) -> Roster:
    return tuple(number for first, last in ranges for number in range(first, last + 1))


def leave_out_faulty(chosen: list[int], faults: Mapping[int, NodeFaultKind | None], allowed: Collection[int]) -> None:
    """Remove launchers with a serious fault, the worst first, as long as the run can continue without them."""
    serious = [number for number in chosen if faults[number] is not None and faults[number] not in TOLERATED]
    for number in sorted(serious, key=lambda number: -ORDER.index(faults[number])):
        if len(chosen) - 1 in allowed:
            chosen.remove(number)
