"""Recomputation on 2 NCCL ranks that share a GPU: clean steps agree to the bit, a flipped bit names its rank and layer.

Rank against itself and rank against rank, compiled, bf16 and fp8: the kernels of two processes give the same bits.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.core.event_json import read
from harness.core.events import Action, ActionKind, Finding, FindingKind
from harness.core.rundir import RunDir
from harness.drills import directories, scenario
from harness.drills.drill_record import DrillRecord
from tests.distributed import cases, corruption_cases
from tests.distributed.corruption_cases import CheckedSteps
from tests.distributed.drill_cases import inspect_run_with
from tests.distributed.pool import Pool
from tests.gpu.nccl import read_logs, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("nccl-matrix"),
]

ON_GPU = (
    "parallel.device=cuda",
    "launch.ranks_per_gpu=2",
    "run.deterministic=true",
    "model.dim=256",
    "model.ffn_dim=512",
    "train.sequence_length=256",
)
CLEAN = [
    pytest.param(("precision=bf16", "parallel.compile=true"), id="bf16, compiled"),
    pytest.param(
        ("precision=bf16", "parallel.compile=true", "parallel.activation_checkpointing=full"), id="bf16, full, compiled"
    ),
    pytest.param(("precision=fp8", "parallel.compile=true"), id="fp8, compiled"),
    pytest.param(
        ("precision=fp8", "parallel.compile=true", "parallel.activation_checkpointing=full"), id="fp8, full, compiled"
    ),
    pytest.param(("precision=bf16", "parallel.compile=false", "data.document_mask=true"), id="bf16, documents, eager"),
]


def run_steps(
    pool: Pool, directory: Path, fault: dict[str, Any] | None, distances: list[int | None], *overrides: str
) -> CheckedSteps:
    """The steps on 2 ranks; both report the same."""
    if "precision=fp8" in overrides and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    seen = pool.run(
        2, inspect_run_with, str(directory), (*ON_GPU, *overrides), corruption_cases.checked_steps, fault, distances
    )
    print(f"{directory.name}: {seen[0].ranks} {seen[0].stages} {seen[0].refused} {seen[0].losses}")
    assert seen[0] == seen[1]
    result: CheckedSteps = seen[0]
    return result


@pytest.mark.parametrize("overrides", CLEAN)
def test_clean_steps_agree_and_leave_no_trace(nccl_ranks: Pool, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    checked = run_steps(nccl_ranks, tmp_path / "checked", None, [0, 1, 0, 1, 0, 1], *overrides)
    plain = run_steps(nccl_ranks, tmp_path / "plain", None, [None] * 6, *overrides)
    assert checked.stages == [""] * 6
    assert checked.refused == [False] * 6
    assert (checked.losses, checked.digests) == (plain.losses, plain.digests)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("kind", "layer", "stage"),
    [
        ("bit_flip_activation", "blocks.1", "output of blocks.1"),
        ("bit_flip_read", "blocks.1.mlp.up", "output of blocks.1"),
        ("bit_flip_backward", "blocks.0", "gradient of blocks.0"),
    ],
)
def test_a_flipped_bit_names_its_rank_and_layer(
    nccl_ranks: Pool, tmp_path: Path, kind: str, layer: str, stage: str, precision: str
) -> None:
    """In every pass of rank 1, with a value drawn anew. The other blocks are compiled. No update is applied."""
    fault = {"kind": kind, "rank": 1, "layer": layer, "bit": 21, "duration": 9}
    overrides = (f"precision={precision}", "parallel.compile=true")
    seen = run_steps(nccl_ranks, tmp_path, fault, [0, 0, 1], *overrides)
    assert seen.ranks == [[1], [1], [0, 1]]
    assert seen.stages == [stage] * 3
    assert seen.refused == [True] * 3
    assert len(set(seen.digests)) == 1, "weights and moments stay, bit for bit"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_checked_step_has_no_host_sync(nccl_ranks: Pool, tmp_path: Path, precision: str) -> None:
    if precision == "fp8" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    loop = ("train.num_steps=12", "sentinel.probe_every=3", "sentinel.sdc.every=1", "parallel.compile=true")
    records = nccl_ranks.run(2, cases.run_with_sync_as_error, str(tmp_path), *ON_GPU, f"precision={precision}", *loop)[
        0
    ]
    assert records[-1].step == 12
    assert [record.recomputed for record in records[:4]] == [0, 1, 0, 1]
    assert all(not record.corrupted_ranks for record in records)


def test_a_corrupting_rank_is_restored_once_and_then_ends_the_run(tmp_path: Path) -> None:
    """The drill `corrupting_rank` as a whole run."""
    planned = scenario.load_scenario("corrupting_rank")
    overrides = ["parallel.device=cuda", "parallel.compile=true", "precision=bf16", "launch.nproc=2"]
    cfg = directories.configure(planned.train, overrides)
    assert cfg.run.deterministic, "the default of drills"
    run = RunDir(tmp_path / "victim")
    directories.create_directory(cfg, run)
    DrillRecord(name="corrupting_rank", scenario=planned, plan=planned.plan, twin="").write(run)
    codes = run_ranks(run.path, num_ranks=2)
    assert codes == [3, 3], read_logs(run.path)
    logged = list(read(run.events))
    findings = [event for event in logged if isinstance(event, Finding)]
    for finding in findings:
        print(finding.iteration, finding.kind, finding.message)
    named = [(finding.ranks, finding.groups) for finding in findings if finding.kind is FindingKind.corrupting_rank]
    assert named == [([1], ["blocks.1"])] * 2
    actions = [event.kind for event in logged if isinstance(event, Action)]
    print(actions)
    assert actions[0] is ActionKind.skip
    assert actions[-1] is ActionKind.halt
