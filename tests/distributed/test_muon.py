"""Runs with Muon on real ranks: resume, change of the optimizer, drills, probes."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.events import StepRecord
from tests.distributed import cases
from tests.distributed.pool import Pool
from tests.distributed.test_drills import CONSTANT, RUN_OVERRIDES, SHORT, SHORT_SEQUENCES, assert_passed, run_drill

MUON = ("optim=muon", "optim.schedule=constant", "run.resume=changed", "model.num_layers=1")
Numbers = list[tuple[int, float, float, float]]


def train(ranks: Pool, directory: Path, *overrides: str, size: int = 2) -> list[StepRecord]:
    (code, records), *_ = ranks.run(size, cases.run, str(directory), *overrides)
    assert code == 0
    return records  # type: ignore[no-any-return]


def numbers(records: list[StepRecord]) -> Numbers:
    return [(record.step, record.loss, record.grad_norm, record.weight_norm or 0.0) for record in records]


@pytest.mark.full
@pytest.mark.parametrize(("size", "overrides"), [(2, ()), (4, ("parallel=hsdp",))])
def test_a_run_resumes_bit_identically(ranks: Pool, tmp_path: Path, size: int, overrides: tuple[str, ...]) -> None:
    whole = train(ranks, tmp_path, "run.name=whole", "train.num_steps=6", *MUON, *overrides, size=size)
    for until in (3, 6):
        resumed = train(ranks, tmp_path, "run.name=parts", f"train.num_steps={until}", *MUON, *overrides, size=size)
    assert numbers(resumed) == numbers(whole)
    assert whole[-1].loss < whole[0].loss


@pytest.mark.full
def test_a_run_with_adamw_continues_with_muon_but_not_the_other_way_round(ranks: Pool, tmp_path: Path) -> None:
    """Muon continues with AdamW's first moment; AdamW has no second moment to continue with."""
    common = ("run.name=a", *MUON)
    train(ranks, tmp_path, *common, "optim=adamw", "train.num_steps=3")
    continued = train(ranks, tmp_path, *common, "train.num_steps=6")
    assert [record.step for record in continued] == list(range(1, 7))
    for result in ranks.run(2, cases.start_run, str(tmp_path), *common, "optim=adamw", "train.num_steps=8"):
        assert result.code == 2
        assert "a checkpoint of Muon (optim.kind) has no state that AdamW could continue with" in result.problem
        assert len(result.problem.splitlines()) == 1


@pytest.fixture(scope="module")
def drills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drills with the same training config share their common part and their twin."""
    return tmp_path_factory.mktemp("drills")


@pytest.mark.full
@pytest.mark.parametrize("name", ["nan_grad", "poisoned_batch", "optimizer_reset", "bit_flip_weight"])
def test_a_drill_passes_its_score_card(ranks: Pool, drills: Path, name: str) -> None:
    overrides = (*RUN_OVERRIDES, SHORT_SEQUENCES, "optim=muon", CONSTANT)
    card = run_drill(ranks, drills, name, overrides, table=SHORT)
    assert_passed(card)


def test_a_probe_measures_second_moments_of_adamw_alone(ranks: Pool, tmp_path: Path) -> None:
    """Blocks have none to compare the gradient with: their gradient over the moments of their norms would be huge."""
    every = ("sentinel.probe_every=1", "run.name=a", "train.num_steps=5", "optim.clip_norm=null")
    records = train(ranks, tmp_path, *MUON, *every)
    for record in records[1:]:
        assert record.v_norm is not None and record.v_norm > 0  # noqa: PT018
        assert record.square_ratio is not None and record.square_ratio < 4  # noqa: PT018
        assert record.update_ratio is not None and 0 < record.update_ratio < 0.1  # noqa: PT018
        assert record.param_norm == pytest.approx(record.weight_norm, rel=1e-2)
