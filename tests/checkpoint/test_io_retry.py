"""Failed reads are retried with growing pauses, up to a total budget."""

from __future__ import annotations

import errno
import time
from itertools import islice

import pytest

from harness.checkpoint.io_retry import IoRetry, StoppedError, pauses
from harness.config.errors import StorageError


@pytest.mark.parametrize(
    ("retry_s", "expected"),
    [(0, []), (0.3, [0.3]), (5, [1, 2, 2]), (120, [1, 2, 4, 8, 16, 30, 30, 29])],
)
def test_pauses_double_and_sum_to_the_budget(retry_s: float, expected: list[float]) -> None:
    assert list(islice(pauses(retry_s), 20)) == expected


def test_budget_is_shared_by_all_attempts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    retry, failures = IoRetry(1.5), [True, False, True, True]

    def attempt() -> str:
        if failures.pop(0):
            raise StorageError(errno.EIO, "cannot be read", "file")
        return "read"

    assert retry.call(attempt) == "read"
    with pytest.raises(StorageError, match="file: cannot be read"):
        retry.call(attempt)
    assert slept == [1.0, 0.5]
    assert capsys.readouterr().err.splitlines() == [
        "warning: file: cannot be read; trying again in 1 s",
        "warning: file: cannot be read; trying again in 0.5 s",
    ]


def test_a_stop_request_ends_the_retries_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed during a pause, and no further attempt is made."""
    slept: list[float] = []
    num_attempts = 0
    monkeypatch.setattr(time, "sleep", slept.append)

    def attempt() -> str:
        nonlocal num_attempts
        num_attempts += 1
        raise StorageError(errno.EIO, "cannot be read", "file")

    with pytest.raises(StoppedError, match="file: cannot be read") as stopped:
        IoRetry(300.0, is_stopping=lambda: sum(slept) >= 5).call(attempt)
    assert (slept, num_attempts) == ([1.0] * 5, 3), "pauses of 1, 2 and 4 s, of which the last is cut"
    assert isinstance(stopped.value.error, StorageError)
    assert not isinstance(stopped.value, OSError)


def test_a_stop_request_before_the_first_failure_allows_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it does not wait"))
    retry = IoRetry(300.0, is_stopping=lambda: True)
    assert retry.call(lambda: "read") == "read"

    def attempt() -> str:
        raise StorageError(errno.EIO, "cannot be read", "file")

    with pytest.raises(StoppedError):
        retry.call(attempt)
