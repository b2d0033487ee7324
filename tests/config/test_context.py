"""Invalid values of `parallel.context` give one line that names the key."""

from __future__ import annotations

import pytest

from harness.config.errors import ConfigError
from harness.config.schema import check_world, sharing
from tests.composed import load


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["parallel.context=0"], r"parallel\.context: must be at least 1, got 0"),
        (
            ["parallel.context=4", "train.sequence_length=100"],
            r"train\.sequence_length: must be a multiple of 2 x parallel\.context \(8\), got 100",
        ),
    ],
)
def test_an_invalid_context_is_rejected(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}$"):
        load(overrides)


@pytest.mark.parametrize(
    ("size", "overrides", "line"),
    [
        (3, ["parallel.context=2"], r"parallel\.context: must divide the number of ranks \(3\), got 2"),
        (
            6,
            ["parallel.context=2", "parallel.replicate=2"],
            r"parallel\.context: must divide the number of ranks of a replica \(3\), got 2",
        ),
        (
            8,
            ["parallel.context=2", "train.batch_size=3"],
            r"train\.batch_size: must be at least the number of ranks / parallel\.context \(4\), one .* got 3",
        ),
    ],
)
def test_ranks_that_cannot_share_sequences_are_rejected(size: int, overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}$"):
        check_world(load(overrides), size)


def test_a_batch_is_divided_among_the_groups() -> None:
    cfg = load(["parallel.context=4", "train.batch_size=2", "train.sequence_length=64"])
    check_world(cfg, 8)
    assert sharing(cfg, 8).largest_share == 1
