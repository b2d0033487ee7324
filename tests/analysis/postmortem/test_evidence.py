from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from harness.analysis.postmortem import evidence as schema
from harness.analysis.postmortem.evidence import (
    SCHEMA,
    Cost,
    Evidence,
    GuiltyBatch,
    Hypothesis,
    IncidentNumbers,
    RunFacts,
)
from harness.analysis.postmortem.rules.causes import Cause
from harness.analysis.postmortem.rules.data_rules import find_planned_change
from harness.config.errors import ConfigError
from tests.analysis.postmortem import stories

DOCUMENT = (Path(__file__).parents[3] / "docs" / "evidence.md").read_text()


def test_written_evidence_reads_back_equal(tmp_path: Path) -> None:
    evidence = stories.evidence_of(stories.write(tmp_path / "run", stories.one_rank()))
    path = tmp_path / "evidence.json"
    schema.write(evidence, path)
    assert json.loads(path.read_text()) == schema.to_tree(schema.read(path))
    again = schema.read(path)
    assert (again.incident, again.cost, again.batches) == (evidence.incident, evidence.cost, evidence.batches)
    assert math.isnan(again.numbers.peak_grad or 0.0)
    assert replace(again.numbers, peak_grad=0.0) == replace(evidence.numbers, peak_grad=0.0)
    assert len(again.records) == len(evidence.records)
    nan = [record for record in again.records if record.grad_norm != record.grad_norm]
    assert [record.nonfinite_ranks for record in nan] == [[1]]


def test_docs_name_every_key_and_cause() -> None:
    assert f"schema {SCHEMA}" in DOCUMENT.splitlines()[0]
    for kind in (Evidence, RunFacts, GuiltyBatch, Cost, IncidentNumbers, Hypothesis):
        missing = [each.name for each in fields(kind) if f"`{each.name}`" not in DOCUMENT]
        assert missing == [], kind.__name__
    assert [cause for cause in Cause if f"| {cause} |" not in DOCUMENT] == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "has schema None, this version reads 1"),
        ('{"schema": 2}', "has schema 2, this version reads 1"),
        ('{"schema": 1}', "is not evidence of an incident: 'records'"),
        ("no", "is not JSON"),
    ],
)
def test_invalid_file_is_an_error_that_names_it(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "evidence.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        schema.read(path)
    assert str(error.value) == f"{path}: {complaint}"


def test_batch_that_differs_from_disk_is_changed() -> None:
    assert GuiltyBatch(index=1, fingerprint="ab", reread="cd").is_changed
    assert not GuiltyBatch(index=1, fingerprint="ab", reread="ab").is_changed
    assert not GuiltyBatch(index=1, fingerprint="ab").is_changed


@pytest.mark.parametrize(("key", "is_change"), [("files", False), ("paths", False), ("weight", True)])
def test_files_that_are_read_later_are_no_change_of_the_data(tmp_path: Path, key: str, is_change: bool) -> None:
    resumed = stories.changed_config(stories.ONSET - 1, **{f"data__sources__main__{key}": [1, 2]})
    evidence = stories.evidence_of(stories.write(tmp_path / "run", [*stories.poisoned(), resumed]))
    assert (find_planned_change(evidence) is not None) == is_change
