"""Jobs that do not fit are rejected, and the suggested change is the cheapest that fits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from harness.analysis.plan.fit import refusal
from harness.analysis.plan.memory import memory
from harness.config.schema import Config
from tests.composed import load


@cache
def config(*overrides: str) -> Config:
    return load(["+experiment=1b_bf16", "parallel.reshard_after_forward=false", *overrides])


def on(memory_gb: float, cfg: Config) -> Config:
    """The same job on devices of another size."""
    return replace(cfg, cluster=replace(cfg.cluster, memory_gb=memory_gb))


def suggested(line: str) -> list[str]:
    return re.findall(r"(?:parallel|train)\.\w+=\w+", line)


def test_fitting_and_unknown_jobs_are_accepted() -> None:
    assert refusal(config(), world_size=1) == ""
    assert refusal(config("cluster=auto", "train.batch_size=512"), world_size=1) == ""


def test_limit_is_the_device_memory() -> None:
    needed = memory(config(), world_size=1).needed_bytes
    assert refusal(on((needed + 1) / 1e9, config()), world_size=1) == ""
    assert refusal(on((needed - 1) / 1e9, config()), world_size=1) != ""


def test_ranks_that_share_a_gpu_have_their_part_of_its_memory() -> None:
    shared = config("launch.ranks_per_gpu=2")
    needed = memory(shared, world_size=2).needed_bytes
    assert refusal(on(2 * (needed + 1) / 1e9, shared), world_size=2) == ""
    assert "has 35 GB" in refusal(on(70, shared), world_size=2)


def test_message_names_largest_part_and_change() -> None:
    assert refusal(on(60, config()), world_size=1) == (
        "cluster.memory_gb: the only rank needs 70.5 GB of device memory and has 60 GB; the largest part is "
        "activations, 49.4 GB; parallel.activation_checkpointing=selective saves 15 GB and fits"
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
def test_cheapest_change_that_fits(memory_gb: float, cure: list[str]) -> None:
    line = refusal(on(memory_gb, config()), world_size=1)
    assert suggested(line) == cure, line
    assert refusal(on(memory_gb, config(*cure)), world_size=1) == ""


def test_more_ranks_if_no_change_helps() -> None:
    overrides = ["model=70b", "train.batch_size=512", "parallel.reshard_after_forward=true"]
    line = refusal(config(*overrides), world_size=8)
    ranks = re.search(r"; ([\d,]+) ranks and ", line)
    assert ranks is not None, line
    number = int(ranks[1].replace(",", ""))
    assert refusal(config(*overrides, *suggested(line)), world_size=number) == ""
    assert refusal(config(*overrides, *suggested(line)), world_size=number // 2) != ""


def test_job_that_no_change_makes_fit() -> None:
    line = refusal(config("model=70b", "train.sequence_length=4000"), world_size=8)
    assert line.endswith(" GB"), line
    assert "no setting of parallel and train.micro_batch_size needs less than" in line


def test_a_sequence_that_does_not_fit_is_shared_by_several_ranks() -> None:
    overrides = ("train.sequence_length=524288", "train.batch_size=8", "train.micro_batch_size=1")
    job = on(80.0, config(*overrides, "parallel.activation_checkpointing=full"))
    line = refusal(job, world_size=8)
    assert "parallel.context=" in line
    assert (
        refusal(on(80.0, config(*overrides, *suggested(line), "parallel.activation_checkpointing=full")), world_size=8)
        == ""
    )
