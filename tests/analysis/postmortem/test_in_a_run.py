"""A real two-rank run with a fault: at its end the post-mortem exists with a replay, and its commands run."""

from __future__ import annotations

import json
import math
import shlex

import pytest

from harness.analysis.postmortem import evidence as schema
from harness.analysis.postmortem.measures import measure
from harness.analysis.postmortem.rules.hypotheses import rank_causes
from harness.analysis.postmortem.write import EVIDENCE, MARKDOWN, PAGE
from harness.analysis.replay.after_run import SKIPPED_FILE
from harness.analysis.replay.history import REPLAY_FILE
from harness.core.rundir import RunDir
from launch.cli.main import main
from tests.distributed import cases, faulty_runs
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

NUM_STEPS, ITERATION = 28, 16
OVERRIDES = (
    "run.name=victim",
    f"train.num_steps={NUM_STEPS}",
    "optim.warmup_steps=5",
    "checkpoint.every_steps=10",
    "checkpoint.keep=9",
    "telemetry.postmortem=true",
    "telemetry.replay_s=300",
    "cluster.price_per_gpu_hour=2.5",
)


@pytest.fixture(scope="module")
def victim(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run in which one rank's gradient is NaN at an iteration that the run does not probe. The update is rejected;
    the run starts the report by itself and waits for it at its end."""
    directory = tmp_path_factory.mktemp("runs")
    fault = faulty_runs.Fault("gradient", 1, factor=math.nan, iteration=ITERATION)
    first, _ = ranks.run(2, faulty_runs.run, str(directory), fault, *OVERRIDES)
    assert first.code == 0
    return RunDir(directory / "victim")


def test_run_writes_its_postmortem_and_its_check_passes(ranks: Pool, victim: RunDir) -> None:
    folder = victim.incidents / "001"
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
    directory = victim.path.parent
    ((code, records), _) = ranks.run(2, cases.run, str(directory), *overrides)
    assert (code, records[-1].step) == (0, NUM_STEPS)
    assert main(check[1:]) == 0
    assert main(["verify", str(victim.path), "--incident", "1"]) == 0, "the run itself passed the place"
    assert (directory / "lessons.md").read_text().count("- victim 001: ") == 1


def test_run_replays_its_incident_and_the_report_has_the_measurements(
    victim: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = victim.incidents / "001"
    assert not (folder / SKIPPED_FILE).exists()
    replayed = json.loads((folder / REPLAY_FILE).read_text())
    assert (replayed["iteration"], replayed["checkpoint"]) == (ITERATION, "step-00000010-gen-0")
    assert replayed["nature"] == "transient"
    evidence = schema.read(folder / EVIDENCE)
    (guilty,) = [row for row in evidence.records if row.iteration == ITERATION]
    assert sum(guilty.token_loss_counts) == 8 * 32
    assert "embedding" in guilty.activation_rms
    assert sum(evidence.batches[0].token_loss_counts) == 8 * 32
    assert "## Replay" in (folder / MARKDOWN).read_text()
    assert main(["diagnose", str(victim.path)]) == 10
    assert "the replay is finite, so test the machine of the named ranks" in capsys.readouterr().out
