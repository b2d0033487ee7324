"""Failed reads are retried with growing pauses, up to a total budget."""

from __future__ import annotations

import errno
import time
from itertools import islice

import pytest

from harness.checkpoint.io_retry import IoRetry, pauses
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
