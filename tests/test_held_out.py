"""Held-out rows must have tokens to predict. Every measurement of their loss is read once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from harness.analysis.held_out_loss import read_held_out_rows
from harness.config import compose
from harness.config.errors import ConfigError
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.data.batch import IGNORED, Batch
from harness.held_out import HeldOut, combine_hashes, hash_rows
from tests.distributed import cases
from tests.distributed.pool import Pool

EOD = 7
MASKED = (
    "model.num_layers=1",
    "train.num_steps=2",
    "data=files",
    "data.eval_fraction=0.1",
    "data.document_mask=true",
    f"data.eod_token={EOD}",
)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_each_measurement_is_read_with_a_report_behind_it(lag: int) -> None:
    """Also if a measurement follows every step, while older ones wait for their reports."""
    check, read = HeldOut([]), []
    check.send(torch.tensor([6.0, 2.0]), RunState())
    for iteration in range(1, 9):
        check.send(torch.tensor([3.0 * iteration, 3.0]), RunState(step=iteration, iteration=iteration))
        if iteration > lag:
            read.append(check.receive(iteration - lag))
    assert [(each.iteration, each.loss) for each in read if each] == [(0, 3.0), *((n, n) for n in range(1, 8 - lag))]
    check.forget()
    assert check.receive(100) is None


def test_the_hash_of_the_rows_does_not_depend_on_the_rank_that_has_them() -> None:
    tokens = torch.arange(24).reshape(4, 6)
    whole = Batch(tokens[:, :-1], tokens[:, 1:], torch.zeros(4, dtype=torch.int64), None, None)
    first, second = (hash_rows(part) for part in whole.micro_batches(2))
    alone = combine_hashes([hash_rows(whole)])
    assert combine_hashes([first, second]) == combine_hashes([second, first]) == alone
    ignored = whole._replace(targets=torch.full_like(whole.targets, IGNORED))
    assert alone not in (combine_hashes([first]), combine_hashes([hash_rows(ignored)]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("eval.num_batches", ("eval.every_steps=1", "eval.num_batches=2", "sentinel.held_out_rows=0")),
        ("sentinel.held_out_rows", ("sentinel.held_out_rows=4",)),
    ],
)
def test_held_out_rows_without_a_token_to_predict_are_rejected(
    ranks: Pool, tmp_path: Path, key: str, overrides: tuple[str, ...]
) -> None:
    """The corpus ends with padding, in which every token ends a document."""
    file = tmp_path / "corpus.bin"
    tokens = np.random.default_rng(0).integers(0, 250, 6401, dtype=np.uint16)
    padded = np.append(tokens[:-1000], np.full(1000, EOD, np.uint16))
    arguments = (str(tmp_path), *MASKED, f"data.sources.main.paths=[{file}]", *overrides)
    padded.tofile(file)
    for rank in ranks.run(2, cases.start_run, *arguments, "run.name=padded"):
        assert rank.problem.startswith(f"{key}: gives held-out rows without a token to predict")
        assert "\n" not in rank.problem
    tokens.tofile(file)
    assert [rank.code for rank in ranks.run(2, cases.start_run, *arguments, "run.name=text")] == [0, 0]

    padded.tofile(file)
    run = RunDir(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"^--eval-rows: gives held-out rows without a token to predict"):
        read_held_out_rows(compose.read(run.config), run, num_rows=4, device=torch.device("cpu"))
