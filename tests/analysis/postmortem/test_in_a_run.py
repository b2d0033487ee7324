"""A real two-rank run with a fault: the post-mortem exists when it ends, and its command runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from harness.analysis.postmortem import evidence as schema
from harness.analysis.postmortem.measures import measure
from harness.analysis.postmortem.rules.hypotheses import rank_causes
from harness.analysis.postmortem.write import EVIDENCE, MARKDOWN, PAGE
from harness.core.rundir import RunDir
from launch.cli.main import main
from tests.distributed import cases, faulty_runs
from tests.distributed.faulty_runs import Fault
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

OVERRIDES = (
    "run.name=victim",
    "train.num_steps=60",
    "optim.warmup_steps=5",
    "telemetry.postmortem=true",
    "cluster.price_per_gpu_hour=2.5",
)


def test_run_writes_its_postmortem_and_its_check_passes(ranks: Pool, tmp_path: Path) -> None:
    """A NaN gradient of one rank is rejected; the run starts the report by itself and waits for it at its end."""
    fault = Fault("gradient", 1, factor=float("nan"), batch=40)
    first, _ = ranks.run(2, faulty_runs.run, str(tmp_path), fault, *OVERRIDES)
    assert first.code == 0
    folder = RunDir(tmp_path / "victim").incidents / "001"
    evidence = schema.read(folder / EVIDENCE)
    assert rank_causes(evidence, measure(evidence))[0].cause == "corrupted rank"
    assert evidence.incident.ranks == [1]
    (batch,) = evidence.batches
    assert batch.reread == batch.fingerprint, "what was trained on is what the configuration gives"
    assert batch.samples
    assert evidence.cost.money is not None
    assert (folder / PAGE).stat().st_size > 100_000

    lines = [line.strip() for line in (folder / MARKDOWN).read_text().splitlines()]
    train, check = (
        shlex.split(next(line for line in lines if line.startswith(f"harness {word} "))) for word in ("train", "verify")
    )
    overrides = [arg for arg in train[2:] if not arg.startswith("run.dir=")]
    ((code, records), _) = ranks.run(2, cases.run, str(tmp_path), *overrides)
    assert (code, records[-1].step) == (0, 60)
    assert main(check[1:]) == 0
    assert main(["verify", str(tmp_path / "victim"), "--incident", "1"]) == 0, "the run itself passed the place"
    assert (tmp_path / "lessons.md").read_text().count("- victim 001: ") == 1
