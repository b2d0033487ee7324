"""Tests of infrastructure campaigns: the schedule is a pure function of the seed; the result is judged correctly."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis.dashboard.goodput import Account, Goodput
from harness.checkpoint import catalog
from harness.checkpoint.integrity import Manifest, hash_files, write_checkpoint_manifest
from harness.config.errors import ConfigError
from harness.core.rundir import RunDir
from harness.drills import infrastructure_campaign as campaign
from harness.drills.campaign import DrawnFault
from harness.drills.infrastructure_campaign import NAMES, InfrastructureCampaign
from harness.drills.scenario import Scenario
from harness.faults.fault_plan import CLOCK_FAULTS, FaultKind
from tests import composed
from tests.drills import logs


@cache
def known() -> dict[str, Scenario]:
    """Cached, and not read at import: every worker imports this file, and one runs it."""
    return campaign.infrastructure_scenarios()


def draw(seed: int = 0, *, every_s: float = 120.0, minutes: float = 20.0, num_ranks: int = 2) -> list[DrawnFault]:
    return campaign.draw_schedule(known(), seed=seed, every_s=every_s, minutes=minutes, num_ranks=num_ranks)


def test_every_fault_that_can_be_planned_by_the_clock_takes_part() -> None:
    assert {scenario.fault.kind for scenario in known().values()} == set(CLOCK_FAULTS)
    cfg = composed.load(campaign.long_training_overrides(120.0))
    assert (cfg.launch.hang_after_s, cfg.launch.restart_window) == (15, 240)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**40), every_s=st.floats(100, 600), num_ranks=st.integers(1, 9))
def test_a_schedule_is_a_pure_function_of_its_seed(seed: int, every_s: float, num_ranks: int) -> None:
    schedule = draw(seed, every_s=every_s, num_ranks=num_ranks)
    assert schedule == draw(seed, every_s=every_s, num_ranks=num_ranks)
    times = [drawn.fault.at_s or 0.0 for drawn in schedule]
    assert all(0.49 * every_s <= later - earlier <= 1.51 * every_s for earlier, later in pairwise(times))
    assert 0.7 * every_s <= times[0]
    assert times[-1] >= campaign.LONGEST * 60 * 20 - 1.5 * every_s, "a slow run meets faults to its end"
    for first in range(0, len(schedule) - len(NAMES) + 1, len(NAMES)):
        assert {drawn.name for drawn in schedule[first : first + len(NAMES)]} == set(NAMES), "each once, then again"
    assert all(0 <= (drawn.fault.rank or 0) < num_ranks for drawn in schedule)
    lasting = {drawn.fault.kind for drawn in schedule if drawn.fault.duration_s}
    assert lasting == ({FaultKind.full_disk} if len(schedule) >= len(NAMES) else lasting)


def test_seeds_differ_and_one_fault_can_be_repeated() -> None:
    assert [drawn.name for drawn in draw(0)] != [drawn.name for drawn in draw(1)]
    (only,) = campaign.only_fault(draw(), 3, every_s=120.0)
    assert only.fault == replace(draw()[3].fault, at_s=campaign.FIRST_AT_S)
    assert str(only).startswith(f"{only.name} at 30 s on rank ")
    with pytest.raises(ConfigError, match=r"^--fault: must be from 0 to 29 for this --minutes and --every, got 30$"):
        campaign.only_fault(draw(), 30, every_s=120.0)


def test_steps_fill_the_time_at_the_measured_speed() -> None:
    seconds = dict.fromkeys(Account, 0.0) | {Account.kept: 5.0, Account.starting: 3.0}
    measured = Goodput(
        seconds=seconds, wall_s=8.0, num_kept=51, num_refused=0, num_undone=0, tokens_kept=0, tokens_consumed=0
    )
    assert campaign.choose_num_steps(measured, minutes=2) == 1200, "the first step is part of the start"


def result(**changes: object) -> InfrastructureCampaign:
    schedule = [DrawnFault(name="kill_rank", scenario=replace(known()["kill_rank"], fault=draw()[0].fault))]
    values = {
        "seed": 7,
        "every_s": 120.0,
        "minutes": 60.0,
        "words": ["model.dim=32"],
        "cards": campaign.make_cards(schedule, logs.killed_and_resumed()),
        "wall_s": 600.0,
        "effective": 0.93,
        "twin_effective": 0.97,
        "lost_s": {"killed rank": 30.0, "pause": 0.0},
        "starts": 2,
        "exit_code": 0,
        "step": 20,
        "num_steps": 20,
        "identical": True,
        "skipped": ["network_down: needs root"],
    }
    return InfrastructureCampaign(**(values | changes))  # type: ignore[arg-type]


def test_the_report_of_a_campaign() -> None:
    assert campaign.campaign_text(result()) == (
        "fault        struck  cause            noticed  restarted  first update  steps lost\n"
        "0 kill_rank  22 s    unknown failure  0.2 s    0.8 s      1.5 s         3\n"
        "1 of 1 fault survived, 0 lost, in 10.0 minutes with 2 starts; 3 steps trained again\n"
        "effective training time 93.0%, wanted at least 90%; without faults 97.0%\n"
        "lost time: killed rank 5.0%\n"
        "weights and moments at step 20: identical to those of the run without faults\n"
        "skipped: network_down: needs root\n"
        "passed\n"
    )
    assert campaign.campaign_markdown(result()).startswith("# Infrastructure campaign 7: passed\n\n| fault | struck |")
    assert json.loads(json.dumps(result().as_dict()))["passed"] is True


@pytest.mark.parametrize(
    ("changes", "survived"),
    [
        ({"effective": 0.89}, True),
        ({"identical": False}, False),
        ({"identical": None}, False),
        ({"exit_code": 1}, False),
        ({"step": 19}, False),
        ({"cards": []}, False),
    ],
)
def test_a_campaign_passes_only_if_nothing_was_lost_and_the_goal_is_met(
    changes: dict[str, object], survived: bool
) -> None:
    failed = result(**changes)
    assert (failed.passed, failed.survived) == (False, survived)
    assert campaign.campaign_text(failed).endswith("FAILED\n")


def test_a_lost_fault_can_be_repeated() -> None:
    (card,) = result().cards
    lost = result(cards=[replace(card, recovery=replace(card.recovery, recovered=False))])
    assert not lost.passed
    command = "harness drill campaign --infrastructure --seed 7 --minutes 60 --every 120 --fault 0 model.dim=32"
    assert f"lost, repeat with: {command}\n" in campaign.campaign_text(lost)
    assert "0 of 1 fault survived, 1 lost" in campaign.campaign_text(lost)


def save(run: RunDir, step: int, tensors: bytes, state: str) -> None:
    directory = run.checkpoints / catalog.name_of(step, 0)
    directory.mkdir(parents=True)
    (directory / "__0_0.distcp").write_bytes(tensors)
    (directory / "state.json").write_text(state)
    files = hash_files(directory, ["__0_0.distcp", "state.json"])
    manifest = Manifest(step=step, generation=0, iteration=step, tokens=1, time=1.0, world_size=1, files=files)
    write_checkpoint_manifest(directory, manifest)


def test_final_weights_are_compared_byte_for_byte(tmp_path: Path) -> None:
    first, second, third, fourth = (RunDir(tmp_path / name) for name in "abcd")
    save(first, 40, b"old", "{}")
    save(first, 50, b"weights", '{"iteration": 50}')
    save(second, 50, b"weights", '{"iteration": 58}')
    save(third, 50, b"Weights", '{"iteration": 50}')
    assert campaign.are_identical(first, second) is True, "the number of iterations may differ"
    assert campaign.are_identical(first, third) is False
    save(second, 60, b"weights", "{}")
    assert campaign.are_identical(first, second) is False, "of another step"
    assert campaign.are_identical(first, fourth) is None
