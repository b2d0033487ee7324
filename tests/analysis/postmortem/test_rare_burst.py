"""From a rare token to its remedy, in real runs: burst, spike, post-mortem, stratified batches, no spike."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.postmortem.gather import find_incident, gather_evidence, incidents
from harness.analysis.postmortem.measures import measure
from harness.analysis.postmortem.rules.causes import Cause
from harness.analysis.postmortem.rules.hypotheses import rank_causes
from harness.analysis.postmortem.rules.remedies import remedy_of
from harness.analysis.postmortem.verification import check_log, kept_steps, verification_of
from harness.analysis.postmortem.write import complete_evidence
from harness.core.rundir import RunDir
from harness.telemetry.event_log import read_non_step_events, read_steps
from launch.cli.main import main
from tests import composed
from tests.analysis.postmortem import rare_burst
from tests.analysis.postmortem.rare_burst import (
    BURST_BATCH,
    NUM_IN_BURST,
    OTHER_BATCHES,
    RARE,
    add_rare_token,
    write_corpus,
)
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

RUN = ("telemetry=plain", "telemetry.picture=false", "telemetry.postmortem=false", "parallel.device=cpu")


def test_burst_is_found_and_stratified_batches_have_no_spike(ranks: Pool, tmp_path: Path) -> None:
    corpus = tmp_path / "text.bin"
    write_corpus(corpus, sequence_length=16)
    preset = ["+experiment=rare_burst", f"data.sources.main.paths=[{corpus}]", *RUN]
    add_rare_token(corpus, composed.load(preset))

    def train(name: str, *overrides: str) -> RunDir:
        where = (f"run.dir={tmp_path}", f"run.name={name}")
        assert ranks.run(1, rare_burst.train_preset, *preset, *overrides, *where) == [0]
        return RunDir(tmp_path / name)

    plain = train("plain")
    (incident,) = incidents(read_non_step_events(plain.events))
    evidence = gather_evidence(plain, find_incident(plain, incident.number))
    complete_evidence(plain, evidence)
    assert evidence.numbers.onset_cursor == BURST_BATCH
    first = rank_causes(evidence, measure(evidence))[0]
    assert first.cause is Cause.long_tail_token
    assert f"{RARE} x{NUM_IN_BURST} of {NUM_IN_BURST + len(OTHER_BATCHES)} in the corpus" in first.reason.text
    remedy = remedy_of(first.cause, evidence)
    assert remedy.overrides == ["optim.clip_norm=0.5", "data.stratify.rare_below=10"]
    cured = train("cured", remedy.overrides[1])
    assert incidents(read_non_step_events(cured.events)) == []
    assert main(["verify", str(plain.path), "--incident", "1"]) == 1, "the run itself kept the spike"
    unclipped = verification_of(evidence, None)
    records = read_steps(cured.events, 0, 200)
    assert [each.text for each in check_log(unclipped, kept_steps(records), clip_norm=1.0) if not each.passed] == []
