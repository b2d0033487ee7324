"""The rule that decides whether failed ranks start again inside the job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.restart_budget import FailedStart, Reached, RestartDecision, decide_restart
from tests import composed

LIMITS = replace(composed.load([]).launch, max_restarts=3, restart_window=100.0)
RARE_S = 1000.0
"""Seconds between failures that are too far apart for the window."""


def failed(
    step: int | None, *, code: int = 1, error: str = "", at: int | None = None, time_s: float = 0.0
) -> FailedStart:
    reached = None if step is None else (0, step)
    return FailedStart(
        exit_code=code, time_s=time_s, reached=reached, error=error, step=(step or 0) if at is None else at
    )


def decide(*failures: FailedStart, before: Reached | None = None, obstacle: str = "") -> RestartDecision:
    """The decision about failures that are far apart in time."""
    spaced = [replace(failure, time_s=RARE_S * number) for number, failure in enumerate(failures)]
    return decide_restart(spaced, LIMITS, before=before, obstacle=obstacle)


def test_the_default_restarts_a_few_times() -> None:
    launch = composed.load([]).launch
    assert (launch.max_restarts, launch.restart_window) == (3, 300.0)


@pytest.mark.parametrize("code", [0, 2, 3, 75])
def test_final_and_interrupted_ends_are_never_restarted(code: int) -> None:
    assert not decide(failed(5, code=code)).again
    assert decide(failed(5)) == RestartDecision(True, "restart 1")


def test_an_obstacle_and_a_limit_of_0_allow_no_restart() -> None:
    assert decide(failed(5), obstacle="a stop was requested") == RestartDecision(False, "a stop was requested")
    none = replace(LIMITS, max_restarts=0)
    assert decide_restart([failed(5)], none, before=None) == RestartDecision(
        False, "launch.max_restarts=0 allows no restart"
    )


def test_restarts_without_a_new_step_end_the_run() -> None:
    """Progress at the first start, then three restarts that reach no new step."""
    ends = [failed(57), failed(55), failed(None), failed(57)]
    assert [decide(*ends[:number]).again for number in range(1, 5)] == [True, True, True, False]
    assert decide(*ends).reason == ("restarted 3 times without a new step (the last is 57), launch.max_restarts=3")
    assert decide(*ends[:3], failed(58)).again, "one new step resets the count"
    again = [*ends[:3], failed(58), failed(58), failed(58), failed(58)]
    assert [decide(*again[:number]).again for number in range(5, 8)] == [True, True, False]


def test_steps_of_an_earlier_launcher_are_no_progress() -> None:
    """The run resumed from a checkpoint and never got farther than before."""
    ends = [failed(40)] * 4
    assert decide(*ends[:3], before=(0, 57)).again
    assert not decide(*ends, before=(0, 57)).again


def test_a_later_generation_is_progress() -> None:
    """After a rollback the steps are lower than before."""
    ends = [failed(57), failed(57), failed(57)]
    assert not decide(*ends, failed(30)).again
    assert decide(*ends, replace(failed(30), reached=(1, 30))).again


def test_a_run_that_never_reaches_a_step_ends() -> None:
    ends = [failed(None)] * 4
    assert decide(*ends[:3]).again
    assert decide(*ends).reason.startswith("restarted 3 times without a new step (there is none)")


def test_the_same_error_at_the_same_step_twice_ends_the_run() -> None:
    first = failed(6, error="ZeroDivisionError in step.py:3")
    assert decide(first).again
    assert decide(first, first) == RestartDecision(
        False, "the same error at step 6 twice: ZeroDivisionError in step.py:3"
    )
    early = replace(first, step=-1)
    assert decide(early, early).reason == "the same error before the first step twice: ZeroDivisionError in step.py:3"
    assert decide(first, replace(first, step=7)).again, "at another step"
    assert decide(first, replace(first, error="ValueError in step.py:3")).again, "another error"
    killed = failed(6)
    assert decide(killed, killed).again, "a kill has no error"
    assert decide(first, killed, first).again, "not twice in a row"


def test_the_window_limits_restarts_with_progress() -> None:
    """Failures every 30 s, each with new steps: the fourth is the third within 100 s that follows a restart."""
    ends = [failed(10 * number, time_s=30.0 * number) for number in range(1, 6)]
    assert [decide_restart(ends[:number], LIMITS, before=None).again for number in range(1, 5)] == [
        True,
        True,
        True,
        False,
    ]
    assert decide_restart(ends[:4], LIMITS, before=None).reason == (
        "restarted 3 times within 100 s, launch.max_restarts=3 in launch.restart_window=100"
    )
    slow = [replace(end, time_s=4.0 * end.time_s) for end in ends]
    assert decide_restart(slow, LIMITS, before=None).again


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e6)), max_size=8))
def test_no_run_is_restarted_for_ever(before: list[tuple[int, float]]) -> None:
    """Whatever happened before, a run without a new step ends within `max_restarts` more starts."""
    ends = [failed(step, time_s=time_s) for step, time_s in before]
    for number in range(LIMITS.max_restarts + 1):
        ends.append(failed(2, time_s=1e7 + RARE_S * number))
        if not decide_restart(ends, LIMITS, before=(0, 3)).again:
            return
    pytest.fail("restarted too often")
