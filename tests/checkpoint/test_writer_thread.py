"""Jobs run one after the other in a thread; their events and exceptions reach the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from harness.checkpoint.writer_thread import WriterThread

PATIENCE_S = 10


@pytest.fixture
def writer() -> Iterator[WriterThread[int]]:
    writer: WriterThread[int] = WriterThread()
    yield writer
    writer.close()


def test_events_are_returned_once_and_in_order(writer: WriterThread[int]) -> None:
    writer.wait()
    for number in range(3):
        writer.submit(lambda number=number: [number, 10 * number])  # type: ignore[misc]
    writer.wait()
    assert list(writer.drain_events()) == [0, 0, 1, 10, 2, 20]
    assert list(writer.drain_events()) == []


def test_unexpected_error_is_raised_by_drain_events_and_later_jobs_run(writer: WriterThread[int]) -> None:
    writer.submit(lambda: [1 // 0])
    writer.submit(lambda: [7])
    writer.wait()
    with pytest.raises(ZeroDivisionError):
        list(writer.drain_events())
    assert list(writer.drain_events()) == [7]


def test_wait_returns_after_the_last_job(writer: WriterThread[int]) -> None:
    may_end = [threading.Event(), threading.Event()]
    for each in may_end:
        writer.submit(lambda each=each: [int(each.wait(PATIENCE_S))])  # type: ignore[misc]
    waiting = threading.Thread(target=writer.wait)
    waiting.start()
    for each in may_end:
        waiting.join(0.05)
        assert waiting.is_alive()
        each.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert list(writer.drain_events()) == [1, 1]


def test_thread_ends_after_submitted_jobs_and_is_a_daemon() -> None:
    before = set(threading.enumerate())
    writer: WriterThread[int] = WriterThread()
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    writer.submit(lambda: [7])
    writer.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert list(writer.drain_events()) == [7]
