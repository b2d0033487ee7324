"""Replays of real incidents on real ranks: a transient fault is not reproduced, bad data is."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from harness import train
from harness.analysis.replay import history
from harness.analysis.replay.measured_step import add_measurements
from harness.analysis.replay.replay_text import render
from harness.analysis.replay.request import ReplayRequest, can_reproduce, repeat_data_fault
from harness.analysis.replay.rerun import config_in_fp32, replay_config, run_replay_worker
from harness.build import Parts
from harness.checkpoint import catalog
from harness.config.precision import PrecisionKind
from harness.core import event_json
from harness.core.events import Action, ActionKind, Outcome, StepRecord
from harness.core.rundir import RunDir
from harness.distributed.compile_cache import DIRECTORY, VARIABLES
from harness.distributed.shards import local
from harness.faults import drill_worker
from harness.faults.fault_plan import Fault, FaultKind, FaultPlan
from launch.cli.main import main
from tests.composed import load
from tests.distributed import faulty_runs
from tests.distributed.cases import TINY, tiny
from tests.distributed.common_part import copy_common_part
from tests.distributed.pool import Pool
from tests.forks import Launched

RUN = (
    "train.num_steps=40",
    "optim.warmup_steps=5",
    "checkpoint.every_steps=10",
    "checkpoint.good_after_steps=3",
    "checkpoint.keep=100",
    "checkpoint.ring.every_steps=4",
)


def replay_on(
    ranks: Pool,
    run: RunDir,
    *,
    iteration: int | None = None,
    samples: bool = False,
    in_fp32: bool = False,
    tamper: Callable[[Parts], None] | None = None,
    overrides: tuple[str, ...] = (),
    has_older: bool = True,
    size: int = 2,
) -> dict[str, Any]:
    """Replay a step, by default the guilty one of the first incident, on `size` ranks."""
    cfg = replay_config(load([*TINY, *RUN, *overrides, f"run.dir={run.path.parent}", f"run.name={run.path.name}"]))
    log = history.read(run.events)
    guilty = iteration or history.guilty_step(log, 1).iteration
    names = [saved.name for saved in catalog.list_checkpoints(run.checkpoints)]
    path = history.find_path(log, guilty, names)
    request = ReplayRequest(
        run=run.path,
        report=run.path / "replay.json",
        checkpoint=path.checkpoint,
        steps=history.read_path(log, path),
        logits_clipped_after=log.logits_clipped_after,
        older=path.older,
        has_older=has_older,
        exactly=True,
        with_samples=samples,
        in_fp32=in_fp32,
        tamper=tamper,
    )
    assert ranks.run(size, run_replay_worker, request, cfg) == [0] * size
    result: dict[str, Any] = json.loads(request.report.read_text())
    return result


@pytest.fixture(scope="module")
def victim(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Rank 1's gradient is NaN once, at iteration 36."""
    directory = tmp_path_factory.mktemp("replay")
    fault = faulty_runs.Fault("gradient", 1, factor=math.nan, iteration=36)
    ranks.run(2, faulty_runs.run, str(directory), fault, "run.name=victim", *RUN)
    return RunDir(directory / "victim")


@pytest.mark.full
def test_transient_fault_is_not_reproduced(ranks: Pool, victim: RunDir) -> None:
    before = victim.events.read_bytes(), victim.ledger.read_bytes(), sorted(victim.checkpoints.iterdir())
    found = replay_on(ranks, victim, samples=True)
    assert (found["iteration"], found["cursor"]) == (36, 35)
    assert (found["checkpoint"], found["num_on_the_way"]) == ("step-00000030-gen-0", 5)
    assert found["left_the_log_at"] is None
    assert found["logged"]["grad_norm"] == "nan"
    assert found["first"] == found["second"]
    assert math.isfinite(found["first"]["grad_norm"])
    assert (found["nature"], found["cause"], found["seen"]) == ("transient", "unknown", {})
    assert "suspect a hardware fault" in render(found)
    assert before == (victim.events.read_bytes(), victim.ledger.read_bytes(), sorted(victim.checkpoints.iterdir()))


@pytest.mark.full
def test_samples_have_loss_gradient_norm_and_source(ranks: Pool, victim: RunDir) -> None:
    found = replay_on(ranks, victim, samples=True, has_older=False)
    assert (found["before"], found["cause"]) == (None, "unknown"), "the run began with this checkpoint"
    losses = [sample["loss"] for sample in found["samples"]]
    assert len(losses) == 8
    assert sum(losses) / 8 == pytest.approx(found["first"]["loss"], rel=1e-5)
    assert all(sample["file"] == "pydoc_data.topics" and sample["grad_norm"] > 0 for sample in found["samples"])
    assert "x the median)" in render(found)


def test_guilty_step_is_measured(ranks: Pool, victim: RunDir) -> None:
    """The run did not probe iteration 36; the replay measures it, the embedding too, and the post-mortem shows it."""
    found = replay_on(ranks, victim)
    measured = found["measured"]
    points = {point["point"]: point for point in measured["activations"]}
    assert {"embedding", "blocks.0.attention", "blocks.0.mlp", "blocks.0", "blocks.1", "norm"} <= points.keys()
    assert all(0 < point["rms"] <= point["amax"] for point in points.values())
    probed = measured["probed"]
    assert probed["activation_rms"]["embedding"] == points["embedding"]["rms"]
    assert probed["activation_rms"]["blocks.1"] == pytest.approx(points["blocks.1"]["rms"], rel=1e-4)
    assert sum(probed["token_loss_counts"]) == 8 * 32
    worst = [token["loss"] for token in measured["worst_tokens"]]
    assert worst == sorted(worst, reverse=True)
    assert {token["row"] for token in measured["worst_tokens"]} <= set(range(8))
    assert worst[0] > found["first"]["loss"]
    records = [event for event in event_json.read(victim.events) if isinstance(event, StepRecord)]
    assert not records[35].token_loss_counts
    add_measurements(records, found)
    assert sum(records[35].token_loss_counts) == 8 * 32
    assert next(iter(records[35].activation_rms)) == "embedding"
    assert records[35].v_norm is None, "the fault struck once, so the replay has another gradient"
    for other in ({"left_the_log_at": 33}, {"logged": found["logged"] | {"loss": 9.0}}):
        unfaithful = [replace(records[35], token_loss_counts=[])]
        add_measurements(unfaithful, found | other)
        assert not unfaithful[0].token_loss_counts
    reproduced = [replace(records[35], token_loss_counts=[])]
    add_measurements(reproduced, found | {"nature": "deterministic"})
    assert reproduced[0].v_norm == probed["v_norm"]


def test_numbers_are_compared_exactly_where_the_bits_are_promised(tmp_path: Path) -> None:
    """On CPUs without compilation, or in a deterministic run; a compiled replay needs the same promise."""
    run = RunDir(tmp_path)
    for device, is_compiled, is_deterministic, expected in (
        ("cpu", "false", "false", True),
        ("cpu", "true", "false", False),
        ("cuda", "false", "false", False),
        ("cuda", "true", "true", True),
    ):
        run.manifest.write_text(json.dumps({"hardware": {"device": device}}))
        cfg = load([*TINY, f"parallel.compile={is_compiled}", f"run.deterministic={is_deterministic}"])
        assert can_reproduce(run, cfg) is expected
        assert replay_config(cfg).parallel.compile is (cfg.parallel.compile and cfg.run.deterministic)
    run.manifest.unlink()
    assert can_reproduce(run, load(TINY)), "a run without a manifest is an old one"


COMPILED = (
    "model.num_layers=1",
    "parallel.compile=true",
    "run.deterministic=true",
    "optim.warmup_steps=1",
    "train.num_steps=4",
    "checkpoint.every_steps=2",
    "sentinel.held_out_rows=0",
    "run.name=compiled",
)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_compiled_deterministic_run_is_replayed_compiled(ranks: Pool, tmp_path: Path) -> None:
    """The hooks that measure the step are called although its blocks are compiled. Kernels are kept beside the run, and
    a restart compiles no others. One rank has the same kernels as two, and traces its block once."""
    usual = {name: os.environ[name] for name in VARIABLES}
    ranks.run(1, set_up_inductor, dict.fromkeys(usual), True)
    try:
        assert ranks.run(1, train_in, str(tmp_path), *RUN, *COMPILED) == [0]
        compiled = compiled_kernels(tmp_path)
        more = ("train.num_steps=5", "run.resume=changed")
        assert ranks.run(1, train_in, str(tmp_path), *RUN, *COMPILED, *more) == [0]
        assert compiled_kernels(tmp_path) == compiled != []
        found = replay_on(ranks, RunDir(tmp_path / "compiled"), iteration=4, overrides=COMPILED, size=1)
    finally:
        ranks.run(1, set_up_inductor, usual, None)
    assert (found["checkpoint"], found["left_the_log_at"], found["nature"]) == (
        "step-00000002-gen-0",
        None,
        "deterministic",
    )
    assert found["first"] == found["second"] == found["logged"]
    assert {point["point"] for point in found["measured"]["activations"]} >= {"blocks.0.attention", "blocks.0.mlp"}


FP16 = ("precision=fp16", "precision.initial_loss_scale=1e9", "run.name=scaled", "train.num_steps=20")


@pytest.fixture(scope="module")
def scaled(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An fp16 run whose first gradients overflow, until the loss scale fits."""
    directory = tmp_path_factory.mktemp("scaled")
    assert ranks.run(2, train_in, str(directory), *RUN, *FP16) == [0, 0]
    return RunDir(directory / "scaled")


def set_up_inductor(variables: Mapping[str, str | None], vec_isa_ok: bool | None) -> None:
    """Set variables of this process; None: remove. `vec_isa_ok`: whether the vector instructions that the CPU names
    work; None: compile programs that try them."""
    inductor.cpp.vec_isa_ok = vec_isa_ok
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def compiled_kernels(runs: Path) -> list[str]:
    return sorted(file.name for file in (runs / DIRECTORY).rglob("*.so"))


def train_in(directory: str, *overrides: str) -> int:
    return train.run_worker(load([*TINY, *overrides, f"run.dir={directory}"]))


def break_weights(parts: Parts) -> None:
    with torch.no_grad():
        local(next(iter(parts.update.parameters.values()))).fill_(math.inf)


@pytest.mark.full
def test_step_in_fp32_tells_an_overflow_from_a_structural_cause(ranks: Pool, scaled: RunDir) -> None:
    first = replay_on(ranks, scaled, iteration=1, in_fp32=True, overrides=FP16)
    assert first["logged"]["grad_norm"] in ("inf", "nan")
    assert math.isfinite(first["in_fp32"]["grad_norm"])
    assert first["precision_verdict"] == "fp16 overflow: the step is finite in fp32"
    assert {seen["backward"] for seen in first["seen"].values()} == {"gradient of the logits"}
    assert not any(seen["forward"] for seen in first["seen"].values())
    assert "fp16 overflow: the step is finite in fp32" in render(first)
    broken = replay_on(ranks, scaled, iteration=1, in_fp32=True, tamper=break_weights, overrides=FP16)
    assert broken["precision_verdict"] == "structural: the step is not finite in fp32 either"


def test_a_run_with_phases_of_its_precision_is_repeated_in_fp32() -> None:
    cfg = load([*TINY, "precision=fp8_emulated", "precision.phases=[{from_batch: 3, kind: bf16}]"])
    assert config_in_fp32(cfg).precision.kind is PrecisionKind.fp32


@pytest.mark.full
def test_command_repeats_the_step_in_fp32(scaled: RunDir, tmp_path: Path) -> None:
    """`harness replay` starts the ranks itself and writes the result into the run directory."""
    arguments = ("replay", str(scaled.path), "--iteration", "1", "--precision", "fp32")
    with Launched("launch.cli.main", *arguments, output=tmp_path / "output") as command:
        assert command.wait(timeout=200) == 0, command.stderr
        assert "verdict    deterministic" in command.stdout
        assert "fp16 overflow: the step is finite in fp32" in command.stdout
    assert (scaled.incidents / "iteration-1" / history.REPLAY_FILE).is_file()


def test_healthy_fp16_run_with_an_initial_overflow_exits_with_0(
    scaled: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    log = [event for event in event_json.read(scaled.events) if isinstance(event, StepRecord)]
    assert log[0].refused
    assert not log[-1].refused
    assert main(["diagnose", str(scaled.path)]) == 0
    assert "none needed: the loss scale has adapted" in capsys.readouterr().out


def run_drill(directory: str) -> int:
    """Train with the drill plan in the run directory."""
    return drill_worker.run_drill_worker(load([*TINY, *RUN, f"run.dir={directory}", "run.name=poisoned"]))


@pytest.mark.full
def test_bad_data_is_reproduced_on_both_states(ranks: Pool, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "poisoned")
    run.path.mkdir()
    plan = FaultPlan(seed=0, faults=[Fault(kind=FaultKind.poisoned_batch, at=34)])
    run.drill.write_text(json.dumps({"plan": plan.as_dict()}))
    assert ranks.run(2, run_drill, str(tmp_path)) == [0, 0]
    found = replay_on(ranks, run, iteration=35, tamper=partial(repeat_data_fault, run.path, 2, 1))
    assert (found["cursor"], found["left_the_log_at"]) == (34, None)
    assert found["first"] == found["second"] == found["logged"]
    assert (found["nature"], found["cause"]) == ("deterministic", "data")
    assert "also stands out on an older state" in render(found)
    assert replay_on(ranks, run, iteration=35)["nature"] == "transient", "with other data it is another step"


def test_clean_step_is_reproduced_bit_for_bit(ranks: Pool, victim: RunDir) -> None:
    """The replay equals the log bit for bit, also after the log's round trip through JSON."""
    log = [event for event in event_json.read(victim.events) if isinstance(event, StepRecord)]
    cfg = replay_config(load([*TINY, *RUN, f"run.dir={victim.path.parent}", f"run.name={victim.path.name}"]))
    request = ReplayRequest(
        run=victim.path,
        report=victim.path / "clean.json",
        checkpoint=None,
        steps=log[:15],
        earlier=log[:14],
        older=None,
        exactly=True,
        with_samples=False,
    )
    assert ranks.run(2, run_replay_worker, request, cfg) == [0, 0]
    found = json.loads(request.report.read_text())
    assert (found["nature"], found["cause"]) == ("deterministic", "none")
    assert found["first"]["loss"] == log[14].loss
    assert "cause      none: loss and gradient norm of the step are ordinary\n" in render(found)


@pytest.mark.full
def test_steps_after_the_policy_began_to_clip_logits_are_reproduced(ranks: Pool, tmp_path: Path) -> None:
    """The action stands in the log of the first start; the second one clips in every step."""
    run, bound = RunDir(tmp_path / "clipped"), "sentinel.detect.logit_bound=0.01"
    copy_common_part(ranks, tmp_path, tiny(*RUN, bound), 12, run)
    at: dict[str, Any] = {"time": 0.0, "iteration": 12, "step": 12, "kind": ActionKind.qk_clip, "incident": 1}
    with run.events.open("a") as log:
        for event in (Action(**at, onset=12, reason="logits grow"), Outcome(**at, succeeded=True)):
            log.write(f"{event_json.to_json(event)}\n")
    ranks.run(2, faulty_runs.run, str(tmp_path), None, "run.name=clipped", *RUN, bound)
    found = replay_on(ranks, run, iteration=19, overrides=(bound,))
    assert (found["checkpoint"], found["num_on_the_way"]) == ("step-00000012-gen-0", 6)
    assert found["left_the_log_at"] is None
    assert found["first"] == found["logged"]
