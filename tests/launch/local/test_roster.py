"""Which launcher runs which node: all combinations of lost, faulty and healthy launchers of a small run."""

from __future__ import annotations

import json
from itertools import product

import pytest

from launch.local.roster import TOLERATED, choose_roster, pack_roster, unpack_roster
from launch.slurm.node_exclusion import NodeFaultKind

ROSTER = (0, 1, 2)
LOST = "lost"
STATES = (LOST, None, NodeFaultKind.slow, NodeFaultKind.hung)
ALLOWED = ((3,), (2, 3), (1, 2, 3), (1, 3))
HUNG, SLOW, CORRUPTING = NodeFaultKind.hung, NodeFaultKind.slow, NodeFaultKind.corrupting


@pytest.mark.parametrize("allowed", ALLOWED, ids=str)
def test_every_combination_follows_the_rules(allowed: tuple[int, ...]) -> None:
    for states in product(STATES, repeat=4):
        present = {0: None} | {number: state for number, state in enumerate(states, start=1) if state != LOST}
        healthy = [number for number, state in present.items() if state is None]
        chosen = choose_roster(ROSTER, present, allowed=allowed)  # type: ignore[arg-type]
        where = f"{states} on {allowed}: {chosen}"
        if chosen is None:
            assert len(present) < min(allowed), where
            continue
        assert chosen[0] == 0, f"node 0 coordinates: {where}"
        assert len(set(chosen)) == len(chosen), where
        assert len(chosen) in allowed, where
        assert set(chosen) <= set(present), f"a lost launcher runs nothing: {where}"
        if len(healthy) >= 3:
            assert set(chosen) <= set(healthy), f"healthy ones suffice: {where}"
            assert len(chosen) == 3, where
        if len(chosen) == 3:
            kept = [number for number in ROSTER if number in healthy]
            assert [chosen[number] for number in kept] == kept, f"a healthy node keeps its ranks: {where}"
        serious = [number for number in chosen if present[number] is not None and present[number] not in TOLERATED]
        if serious:
            assert len(chosen) - 1 not in allowed, f"it would run without: {where}"
        unused = [number for number in healthy if number not in chosen]
        if any(present[number] is not None for number in chosen):
            assert not unused, f"a healthy one waits: {where}"
        most = max((size for size in allowed if size <= len(healthy)), default=0)
        assert len(chosen) >= most, f"more healthy nodes are there: {where}"


@pytest.mark.parametrize(
    ("roster", "present", "allowed", "expected"),
    [
        ((0, 1), {0: None, 2: None}, (2,), (0, 2)),
        ((0, 1), {0: None}, (1, 2), (0,)),
        ((0, 1), {0: None}, (2,), None),
        ((0, 1, 2), {0: None, 2: None}, (2, 3), (0, 2)),
        ((0, 1, 2), {0: None, 2: None, 3: None}, (2, 3), (0, 3, 2)),
        ((0, 1, 2), {0: None, 1: SLOW, 3: None}, (2, 3), (0, 1, 3)),
        ((0, 1, 2), {0: None, 1: SLOW, 2: CORRUPTING, 3: None}, (3,), (0, 1, 3)),
        ((0, 1), {0: None, 1: SLOW}, (1, 2), (0, 1)),
        ((0, 1), {0: None, 1: HUNG}, (1, 2), (0,)),
        ((0, 1), {0: None, 1: HUNG}, (2,), (0, 1)),
        ((0, 1), {0: HUNG, 1: None, 2: None}, (2,), (0, 1)),
        ((0, 1, 2), {0: None, 1: HUNG, 2: CORRUPTING}, (2, 3), (0, 1)),
        ((0, 1, 2), {0: None, 1: CORRUPTING, 2: HUNG}, (2, 3), (0, 2)),
        ((0, 1, 2), {0: None, 1: None, 3: SLOW}, (2, 3), (0, 1)),
        ((0, 2), {0: None, 1: HUNG}, (2,), (0, 1)),
        ((0, 2), {0: None, 1: HUNG, 3: SLOW}, (2,), (0, 3)),
        ((0,), {0: None, 1: None}, (1, 2), (0, 1)),
        ((0,), {0: None, 1: SLOW}, (1, 2), (0,)),
        ((0, 1, 2, 3), {0: None, 1: None, 2: None}, (2, 4), (0, 1)),
    ],
    ids=[
        "a spare replaces a lost node",
        "fewer nodes",
        "not enough nodes",
        "node ranks move up",
        "a spare takes the node rank of the lost one",
        "a lost node comes before a slow one",
        "a corrupting node comes before a slow one",
        "a slow node stays without a spare",
        "a hung node is left out",
        "a hung node stays if all are needed",
        "node 0 is never replaced",
        "the worst of two is left out",
        "in any order",
        "fewer nodes are better than one that is out",
        "a node that is out is better than no run",
        "of two that are out the less serious one",
        "a node is taken back",
        "a slow node is not taken back",
        "only a number of nodes that can run",
    ],
)
def test_single_cases(
    roster: tuple[int, ...],
    present: dict[int, NodeFaultKind | None],
    allowed: tuple[int, ...],
    expected: tuple[int, ...] | None,
) -> None:
    assert choose_roster(roster, present, allowed=allowed) == expected


@pytest.mark.parametrize("allowed", ALLOWED, ids=str)
def test_every_launcher_that_coordinates_runs_ranks(allowed: tuple[int, ...]) -> None:
    """After launcher 0 was lost, any other one may coordinate: only the one that does hosts torch's store."""
    for coordinator, states in product(range(1, 5), product(STATES, repeat=4)):
        present = {number: state for number, state in enumerate(states, start=1) if state != LOST}
        present[coordinator] = None
        chosen = choose_roster(ROSTER, present, allowed=allowed, coordinator=coordinator)  # type: ignore[arg-type]
        assert chosen is None or coordinator in chosen, f"{coordinator}, {states} on {allowed}: {chosen}"


def test_a_coordinator_behind_the_others_is_kept_on_fewer_nodes() -> None:
    present = dict.fromkeys((4, 6, 7, 8, 9, 10, 11))
    chosen = choose_roster((8, 9, 10, 11, 4, 5, 6, 7), present, allowed=(4, 8), coordinator=4)
    assert chosen == (8, 9, 10, 4)


@pytest.mark.parametrize("roster", [(0,), (0, 1, 2), (0, 5, 2, 3), (0, 2, 1), (0, 2, 4)])
def test_a_roster_survives_its_message(roster: tuple[int, ...]) -> None:
    assert unpack_roster(json.loads(json.dumps(pack_roster(roster)))) == roster


def test_a_roster_of_many_nodes_is_short_and_quick() -> None:
    num_nodes = 16_384
    roster = tuple(range(num_nodes))
    present = {number: None for number in range(num_nodes + 4) if number not in (7, 4000)}
    chosen = choose_roster(roster, present, allowed=(num_nodes,))
    assert chosen is not None
    assert (chosen[7], chosen[4000], len(chosen)) == (num_nodes, num_nodes + 1, num_nodes)
    assert len(pack_roster(chosen)) == 5
