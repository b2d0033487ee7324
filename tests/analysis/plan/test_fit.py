"""What is refused, and that what is advised instead does fit and is the least that does."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from harness.analysis.plan.fit import refusal
from harness.analysis.plan.memory import memory
from harness.config.compose import load
from harness.config.schema import Config


@cache
def config(*words: str) -> Config:
    return load(["+experiment=1b_bf16", "parallel.reshard_after_forward=false", *words])


def on(memory_gb: float, cfg: Config) -> Config:
    """The same job on devices of another size."""
    return replace(cfg, cluster=replace(cfg.cluster, memory_gb=memory_gb))


def advised(line: str) -> list[str]:
    return re.findall(r"(?:parallel|train)\.\w+=\w+", line)


def test_what_fits_or_cannot_be_known_is_not_refused() -> None:
    assert refusal(config(), world_size=1) == ""
    assert refusal(config("cluster=auto", "train.batch_size=512"), world_size=1) == ""


def test_the_limit_is_what_the_device_has() -> None:
    needed = memory(config(), world_size=1).needed_bytes
    assert refusal(on((needed + 1) / 1e9, config()), world_size=1) == ""
    assert refusal(on((needed - 1) / 1e9, config()), world_size=1) != ""


def test_the_line_names_the_part_and_the_cure() -> None:
    assert refusal(on(60, config()), world_size=1) == (
        "cluster.memory_gb: the one rank needs 70.5 GB of device memory and has 60 GB; most of it is activations, "
        "49.4 GB; parallel.activation_checkpointing=selective saves 15 GB and fits"
    )


@pytest.mark.parametrize(
    ("memory_gb", "cure"),
    [
        (69, ["parallel.reshard_after_forward=true"]),
        (56, ["parallel.activation_checkpointing=selective"]),
        (45, ["train.micro_batch_size=2"]),
        (
            24,
            [
                "parallel.reshard_after_forward=true",
                "parallel.activation_checkpointing=full",
                "train.micro_batch_size=2",
            ],
        ),
    ],
)
def test_the_least_change_that_fits(memory_gb: float, cure: list[str]) -> None:
    line = refusal(on(memory_gb, config()), world_size=1)
    assert advised(line) == cure, line
    assert refusal(on(memory_gb, config(*cure)), world_size=1) == ""


def test_more_ranks_where_nothing_else_helps() -> None:
    words = ["model=70b", "train.batch_size=512", "parallel.reshard_after_forward=true"]
    line = refusal(config(*words), world_size=8)
    ranks = re.search(r"; ([\d,]+) ranks and ", line)
    assert ranks is not None, line
    number = int(ranks[1].replace(",", ""))
    assert refusal(config(*words, *advised(line)), world_size=number) == ""
    assert refusal(config(*words, *advised(line)), world_size=number // 2) != ""


def test_a_job_that_nothing_can_help() -> None:
    line = refusal(config("model=70b"), world_size=8)
    assert line.endswith(" GB"), line
    assert "no setting of parallel and train.micro_batch_size takes less than" in line
