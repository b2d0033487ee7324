"""Jobs run one after the other in a thread, and what they return or raise comes back to the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from harness.checkpoint.writer_thread import Clerk

PATIENCE_S = 10


@pytest.fixture
def clerk() -> Iterator[Clerk[int]]:
    clerk: Clerk[int] = Clerk()
    yield clerk
    clerk.close()


def test_results_come_back_once_and_in_order(clerk: Clerk[int]) -> None:
    clerk.wait()
    for number in range(3):
        clerk.give(lambda number=number: [number, 10 * number])  # type: ignore[misc]
    clerk.wait()
    assert list(clerk.news()) == [0, 0, 1, 10, 2, 20]
    assert list(clerk.news()) == []


def test_an_unexpected_error_is_raised_where_the_loop_asks_and_stops_no_later_job(clerk: Clerk[int]) -> None:
    clerk.give(lambda: [1 // 0])
    clerk.give(lambda: [7])
    clerk.wait()
    with pytest.raises(ZeroDivisionError):
        list(clerk.news())
    assert list(clerk.news()) == [7]


def test_waiting_ends_when_the_last_job_is_done(clerk: Clerk[int]) -> None:
    may_end = [threading.Event(), threading.Event()]
    for each in may_end:
        clerk.give(lambda each=each: [int(each.wait(PATIENCE_S))])  # type: ignore[misc]
    waiting = threading.Thread(target=clerk.wait)
    waiting.start()
    for each in may_end:
        waiting.join(0.05)
        assert waiting.is_alive()
        each.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert list(clerk.news()) == [1, 1]


def test_the_thread_ends_after_the_jobs_that_were_given_and_never_holds_up_the_process() -> None:
    before = set(threading.enumerate())
    clerk: Clerk[int] = Clerk()
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    clerk.give(lambda: [7])
    clerk.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert list(clerk.news()) == [7]
