"""No batch exceeds the limit on rare tokens; everything else is unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.config.compose import load
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.rundir import locate
from harness.data.corpus.corpus import SampleOrigin, Tokens
from harness.data.corpus.token_windows import FilesCorpus
from harness.data.order.ledger import Ledger
from harness.data.order.order import samples_at
from harness.data.order.stratify import StratifiedOrder, find_rare
from harness.data.sources import RecordedData, make_rare_index, open_data, read_recorded_data


class TableCorpus:
    """A corpus of given samples."""

    vocab_size = 40

    def __init__(self, table: Tokens) -> None:
        self.table = table
        self.num_samples = len(table)

    def sample(self, index: int) -> Tokens:
        row: Tokens = self.table[index]
        return row

    def rows(self, indices: NDArray[np.int64]) -> Tokens:
        return np.stack([self.sample(index) for index in indices.tolist()])

    def documents(self, index: int) -> NDArray[np.int32]:
        return np.zeros(len(self.table[index]), dtype=np.int32)

    def origin(self, index: int) -> SampleOrigin:
        return SampleOrigin("table", index, index, index)

    def token_counts(self) -> NDArray[np.int64] | None:
        return None

    def fingerprint(self) -> str:
        return "table"


def _table(num_samples: int, num_rare: int, seed: int, length: int = 6) -> Tokens:
    """Common tokens 0 .. 2, and rare ones from 10 on in a few positions, often several of one in a sample."""
    draw = np.random.default_rng(seed)
    table = draw.integers(0, 3, size=(num_samples, length + 1))
    for row in draw.choice(num_samples, size=min(num_rare, num_samples), replace=False):
        table[row, draw.integers(0, length, size=draw.integers(1, 3))] = draw.integers(10, 14)
    return table


def _batches(
    table: Tokens, batch_size: int, seed: int, stratified: StratifiedOrder | None, passes: int
) -> list[Tokens]:
    batches: list[Tokens] = []
    for index in range(passes * len(table) // batch_size):
        turns = np.arange(index * batch_size, (index + 1) * batch_size)
        if stratified is not None:
            turns = stratified.turns(turns)
        batches.append(samples_at(turns, num_samples=len(table), seed=seed))
    return batches


def _max_rare_count(table: Tokens, batch: Tokens, rare: Tokens) -> int:
    return max((int((table[batch] == token).sum()) for token in rare), default=0)


def _rare_tokens(table: Tokens, below: int) -> Tokens:
    return np.flatnonzero(np.bincount(table[:, :-1].ravel(), minlength=40) < below)


def _stratified(table: Tokens, *, below: int, limit: int, batch_size: int, seed: int) -> StratifiedOrder:
    rare = find_rare(TableCorpus(table), range(len(table)), below=below)
    return StratifiedOrder(rare, num_samples=len(table), batch_size=batch_size, seed=seed, max_per_batch=limit)


def test_repaired_order_keeps_the_limit_that_the_plain_order_violates() -> None:
    table, below, limit = _table(600, 160, seed=1), 120, 3
    stratified = _stratified(table, below=below, limit=limit, batch_size=8, seed=4)
    rare = _rare_tokens(table, below)
    assert {10, 11, 12, 13} <= set(rare.tolist())
    plain, repaired = (_batches(table, 8, 4, order, passes=3) for order in (None, stratified))
    violating = [_max_rare_count(table, batch, rare) > limit for batch in plain]
    assert sum(violating) > 10
    assert max(_max_rare_count(table, batch, rare) for batch in repaired) <= limit
    changed = [not np.array_equal(*pair) for pair in zip(plain, repaired, strict=True)]
    assert all(now for was, now in zip(violating, changed, strict=True) if was)
    assert sum(changed) <= 2 * sum(violating) + 5, "a moved sample touches two batches, and all others stay"


@settings(deadline=None, max_examples=80)
@given(
    num_samples=st.integers(40, 150),
    num_rare=st.integers(0, 30),
    batch_size=st.integers(2, 16),
    limit=st.integers(2, 4),
    seed=st.integers(0, 1000),
)
def test_limit_holds_and_every_epoch_is_complete(
    num_samples: int, num_rare: int, batch_size: int, limit: int, seed: int
) -> None:
    table = _table(num_samples, num_rare, seed)
    stratified = _stratified(table, below=25, limit=limit, batch_size=batch_size, seed=seed)
    try:
        batches = _batches(table, batch_size, seed, stratified, passes=4)
    except ConfigError:
        reject()
    rare = _rare_tokens(table, 25)
    assert max(_max_rare_count(table, batch, rare) for batch in batches) <= limit
    stream = np.concatenate(batches)
    for epoch in range(len(stream) // num_samples):
        visited = stream[epoch * num_samples : (epoch + 1) * num_samples]
        np.testing.assert_array_equal(np.sort(visited), np.arange(num_samples))
    plain = _batches(table, batch_size, seed, None, passes=4)
    for turn, exchanged in stratified.swaps(0).items():
        assert stratified.swaps(0)[exchanged] == turn
    untouched = {turn // batch_size for epoch in range(4) for turn in stratified.swaps(epoch)}
    for index in set(range(len(batches))) - untouched:
        np.testing.assert_array_equal(batches[index], plain[index])


def test_batches_can_be_computed_in_any_order() -> None:
    table = _table(100, 30, seed=2)
    orders = [_stratified(table, below=30, limit=3, batch_size=7, seed=1) for _ in range(2)]
    indices = list(range(60))
    forward = [orders[0].turns(np.arange(7 * index, 7 * index + 7)) for index in indices]
    backward = [orders[1].turns(np.arange(7 * index, 7 * index + 7)) for index in reversed(indices)]
    assert all(map(np.array_equal, forward, reversed(backward)))
    assert any(not np.array_equal(turns, np.arange(7 * index, 7 * index + 7)) for index, turns in enumerate(forward))


def test_occurrences_are_counted_in_samples_and_frequencies_in_the_data() -> None:
    table = np.array([[0, 0, 1], [1, 2, 2], [2, 0, 0], [0, 0, 3], [3, 0, 0]])
    rare = find_rare(TableCorpus(table), range(5), below=3)
    known = {(sample, token): count for sample, token, count in zip(*map(np.ndarray.tolist, rare), strict=True)}
    expected = {(0, 1): 1, (1, 1): 1, (1, 2): 2, (2, 2): 1, (3, 3): 1, (4, 3): 1}
    assert known == expected, "the last token of a sample counts where it is seen, and once in the data"


def test_without_rare_tokens_nothing_changes() -> None:
    table = np.random.default_rng(0).integers(0, 40, size=(300, 65))
    stratified = _stratified(table, below=5, limit=1, batch_size=8, seed=0)
    assert all(stratified.swaps(epoch) == {} for epoch in range(3))


def test_sample_above_the_limit_names_the_smallest_valid_limit() -> None:
    table = _table(50, 0, seed=0)
    table[17, :4] = 30
    with pytest.raises(
        ConfigError, match=r"^data\.stratify\.max_per_batch: must be at least 4: sequence 17 .* token 30"
    ):
        _stratified(table, below=10, limit=3, batch_size=4, seed=0)
    _stratified(table, below=10, limit=4, batch_size=4, seed=0)


def test_limit_that_cannot_be_kept_is_reported() -> None:
    table = _table(12, 0, seed=0)
    table[:, 0] = 30
    stratified = _stratified(table, below=13, limit=2, batch_size=4, seed=0)
    with pytest.raises(
        ConfigError, match=r"^data\.stratify\.max_per_batch: must be above 2: no batch has room .* token 30"
    ):
        stratified.turns(np.arange(4))


LIMITED = ["data=files", "train.sequence_length=16", "data.stratify.rare_below=5", "data.stratify.max_per_batch=9"]


def _limited(directory: Path) -> Config:
    """Config of a run on 200 windows with some rare tokens, whose directory exists."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 20, 3201, dtype=np.uint16)
    tokens[draw.integers(0, 3200, 30)] = draw.integers(100, 140, 30)
    tokens.tofile(directory / "tokens.bin")
    return load([f"run.dir={directory}", "run.name=a", f"data.sources.main.paths=[{directory}/tokens.bin]", *LIMITED])


def _recorded_data(cfg: Config) -> RecordedData:
    run = locate(cfg)
    run.path.mkdir(exist_ok=True)
    return read_recorded_data(run)


def test_the_data_is_scanned_once_and_later_starts_read_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = _limited(tmp_path)
    known = _recorded_data(cfg)
    rows_read: list[int] = []
    read = FilesCorpus.rows

    def counted(corpus: FilesCorpus, indices: NDArray[np.int64]) -> Tokens:
        rows_read.append(len(indices))
        return read(corpus, indices)

    monkeypatch.setattr(FilesCorpus, "rows", counted)

    def opened(known: RecordedData | None) -> tuple[int, list[list[int]]]:
        """Rows read at opening, and the order of the samples."""
        rows_read.clear()
        train, held_out = open_data(
            cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=Ledger(), recorded=known
        )
        num_read = sum(rows_read)
        train.close()
        held_out.close()
        return num_read, [train.samples(index)[1].tolist() for index in range(40)]

    scanned, expected = opened(None)
    assert scanned > 2 * 189, "the windows to train on, twice"
    make_rare_index(cfg, known)
    num_read, order = opened(known)
    assert order == expected
    assert num_read <= 2, "the length of a row is found out from one of each stream"
    rows_read.clear()
    make_rare_index(cfg, known)
    assert sum(rows_read) == 0, "the index is made once"


def test_index_of_other_data_or_limit_is_rebuilt(tmp_path: Path) -> None:
    cfg = _limited(tmp_path)
    index = _recorded_data(cfg).rare_index
    assert index is not None
    make_rare_index(cfg, _recorded_data(cfg))
    first = index.read_bytes()
    cfg.data.stratify.rare_below = 3
    make_rare_index(cfg, _recorded_data(cfg))
    second = index.read_bytes()
    assert second != first
    index.write_bytes(first[:100])
    make_rare_index(cfg, _recorded_data(cfg))
    assert index.read_bytes() == second, "a broken one too"
    tokens = np.fromfile(tmp_path / "tokens.bin", dtype=np.uint16)
    tokens[0] = 149
    tokens.tofile(tmp_path / "tokens.bin")
    make_rare_index(cfg, _recorded_data(cfg))
    assert index.read_bytes() != second


def test_without_a_directory_no_index_is_written(tmp_path: Path) -> None:
    cfg = _limited(tmp_path)
    make_rare_index(cfg, read_recorded_data(locate(cfg)))
    assert not locate(cfg).path.exists()
