"""No batch exceeds the limit on rare tokens; everything else is unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.rundir import locate
from harness.data.corpus.corpus import SampleOrigin, Tokens
from harness.data.corpus.token_windows import FilesCorpus
from harness.data.order.ledger import Ledger
from harness.data.order.mixture import Change, MixtureRecipe
from harness.data.order.order import samples_at
from harness.data.order.rare_token_rows import ScannedSource, find_rare, read_rare_index, write_rare_index
from harness.data.order.stratify import OrderStage, StratifiedOrder, StratifiedSource
from harness.data.sources import RecordedData, make_rare_index, open_data, read_recorded_data
from tests.composed import load


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
            turns = stratified.turns(0, turns)
        batches.append(samples_at(turns, num_samples=len(table), seed=seed))
    return batches


def _max_rare_count(table: Tokens, batch: Tokens, rare: Tokens) -> int:
    return max((int((table[batch] == token).sum()) for token in rare), default=0)


def _rare_tokens(table: Tokens, below: int) -> Tokens:
    return np.flatnonzero(np.bincount(table[:, :-1].ravel(), minlength=40) < below)


def _stratified(table: Tokens, *, below: int, limit: int, batch_size: int, seed: int) -> StratifiedOrder:
    (rare,) = find_rare([ScannedSource(TableCorpus(table), range(len(table)))], below=below)
    recipe = MixtureRecipe(weights={"only": 1.0}, changes=(), batch_size=batch_size, seed=0)
    source = StratifiedSource(rare, len(table), seed)
    return StratifiedOrder([source], [OrderStage(recipe.mixture())], max_per_batch=limit)


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


@settings(deadline=None, max_examples=40)
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
        for epoch in range(4):
            stratified.check_limit(0, epoch)
    except ConfigError:
        reject()
    batches = _batches(table, batch_size, seed, stratified, passes=4)
    rare = _rare_tokens(table, 25)
    assert max(_max_rare_count(table, batch, rare) for batch in batches) <= limit
    stream = np.concatenate(batches)
    for epoch in range(len(stream) // num_samples):
        visited = stream[epoch * num_samples : (epoch + 1) * num_samples]
        np.testing.assert_array_equal(np.sort(visited), np.arange(num_samples))
    plain = _batches(table, batch_size, seed, None, passes=4)
    for turn, exchanged in stratified.table(0, 0).items():
        assert stratified.table(0, 0)[exchanged] == turn
    untouched = {turn // batch_size for epoch in range(4) for turn in stratified.table(0, epoch)}
    for index in set(range(len(batches))) - untouched:
        np.testing.assert_array_equal(batches[index], plain[index])


def test_batches_can_be_computed_in_any_order() -> None:
    table = _table(100, 30, seed=2)
    orders = [_stratified(table, below=30, limit=3, batch_size=7, seed=1) for _ in range(2)]
    indices = list(range(60))
    forward = [orders[0].turns(0, np.arange(7 * index, 7 * index + 7)) for index in indices]
    backward = [orders[1].turns(0, np.arange(7 * index, 7 * index + 7)) for index in reversed(indices)]
    assert all(map(np.array_equal, forward, reversed(backward)))
    assert any(not np.array_equal(turns, np.arange(7 * index, 7 * index + 7)) for index, turns in enumerate(forward))


def test_occurrences_are_counted_in_samples_and_frequencies_in_the_data() -> None:
    table = np.array([[0, 0, 1], [1, 2, 2], [2, 0, 0], [0, 0, 3], [3, 0, 0]])
    (rare,) = find_rare([ScannedSource(TableCorpus(table), range(5))], below=3)
    known = {(sample, token): count for sample, token, count in zip(*map(np.ndarray.tolist, rare), strict=True)}
    expected = {(0, 1): 1, (1, 1): 1, (1, 2): 2, (2, 2): 1, (3, 3): 1, (4, 3): 1}
    assert known == expected, "the last token of a sample counts where it is seen, and once in the data"


def test_tokens_of_64_bits_are_counted() -> None:
    table = [[1, 2, 2, 3], [1, 1, 1, 1]]
    narrow, wide = (TableCorpus(np.array(table, dtype=dtype)) for dtype in ("int64", "uint64"))
    (expected,), (found,) = (find_rare([ScannedSource(each, range(2))], below=3) for each in (narrow, wide))
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert {each.dtype.name for each in found} == {"int64"}


def test_without_rare_tokens_nothing_changes() -> None:
    table = np.random.default_rng(0).integers(0, 40, size=(300, 65))
    stratified = _stratified(table, below=5, limit=1, batch_size=8, seed=0)
    assert all(stratified.table(0, epoch) == {} for epoch in range(3))


def test_a_sample_that_holds_too_many_is_alone_with_its_token_and_counted() -> None:
    """Sample 17 holds token 30 four times, sample 23 three times, and 20 others once."""
    table = _table(80, 0, seed=0)
    table[17, :4] = table[23, :3] = 30
    table[40:60, 0] = 30
    stratified = _stratified(table, below=40, limit=2, batch_size=4, seed=0)
    assert stratified.report()[1:] == (22, 2, 4, 2)
    words = "; 2 sequences hold one more often, up to 4 times: none shares a batch with another sequence"
    assert words in stratified.report().in_words()
    for epoch in range(5):
        stratified.check_limit(0, epoch)
    shared = 0
    for order in (None, stratified):
        for batch in _batches(table, 4, 0, order, passes=5):
            holders = [sample for sample in batch.tolist() if (table[sample] == 30).any()]
            if {17, 23}.isdisjoint(holders):
                assert order is None or len(holders) <= 2
            elif order is None:
                shared += len(holders) > 1
            else:
                assert len(holders) == 1, "nothing else with that token is in its batch"
    assert shared > 3, "the plain order mixes them"


def test_report_without_such_samples_is_short() -> None:
    table = _table(50, 0, seed=0)
    table[17, 0] = 30
    report = _stratified(table, below=10, limit=1, batch_size=4, seed=0).report()
    assert report.in_words() == "1 rare tokens in 1 sequences, at most 1 of each in a batch"


def test_limit_that_cannot_be_kept_is_reported_and_training_goes_on() -> None:
    table = _table(12, 0, seed=0)
    table[:, 0] = 30
    stratified = _stratified(table, below=13, limit=2, batch_size=4, seed=0)
    with pytest.raises(
        ConfigError, match=r"^data\.stratify\.max_per_batch: must be above 2: no batch has room .* token 30"
    ):
        stratified.check_limit(0, 0)
    assert sorted(stratified.turns(0, np.arange(12)).tolist()) == list(range(12))


class MixedTables:
    """Several sources of tables in a mixture that the ledger amends."""

    def __init__(self, tables: list[Tokens], *, weights: list[float], batch_size: int, below: int, limit: int) -> None:
        self.tables = tables
        names = [f"source{number}" for number in range(len(tables))]
        self.recipe = MixtureRecipe(
            weights=dict(zip(names, weights, strict=True)), changes=(), batch_size=batch_size, seed=5
        )
        rare = find_rare([ScannedSource(TableCorpus(table), range(len(table))) for table in tables], below=below)
        sources = [StratifiedSource(*pair) for pair in zip(rare, map(len, tables), range(len(tables)), strict=True)]
        self.order = StratifiedOrder(sources, self.stages([]), max_per_batch=limit)
        counts = sum(np.bincount(table[:, :-1].ravel(), minlength=40) for table in tables)
        self.rare = np.flatnonzero(np.asarray(counts) < below)

    def stages(self, amendments: list[Change]) -> list[OrderStage]:
        mixtures = [self.recipe.mixture(amendments[:count]) for count in range(len(amendments) + 1)]
        starts = [0, *(amendment.from_batch for amendment in amendments)]
        return [OrderStage(*pair) for pair in zip(mixtures, starts, strict=True)]

    def amend(self, amendments: list[Change]) -> StratifiedOrder:
        return self.order.amended(self.stages(amendments))

    def batch(self, order: StratifiedOrder | None, amendments: list[Change], index: int) -> list[tuple[int, int]]:
        """(source, sample) of each row, in order of turns."""
        sources, turns = self.recipe.mixture(amendments).batch(index)
        rows = []
        for number, table in enumerate(self.tables):
            own = np.sort(turns[sources == number])
            own = own if order is None else order.turns(number, own)
            rows += [(number, int(sample)) for sample in samples_at(own, num_samples=len(table), seed=number)]
        return rows

    def most(self, batch: list[tuple[int, int]]) -> int:
        """Most occurrences of a rare token, a sample that holds more than the limit aside if it is the only one."""
        return max(
            (sum(int((self.tables[source][sample] == token).sum()) for source, sample in batch) for token in self.rare),
            default=0,
        )


def _mixed(seed: int, *, limit: int = 2, batch_size: int = 8) -> MixedTables:
    tables = [_table(size, num_rare, seed + size) for size, num_rare in ((200, 40), (60, 12), (240, 40))]
    return MixedTables(tables, weights=[3.0, 1.0, 2.0], batch_size=batch_size, below=90, limit=limit)


def test_a_mixture_keeps_the_limit_that_its_plain_order_violates() -> None:
    mixed = _mixed(seed=1)
    for source in range(3):
        for epoch in range(3):
            mixed.order.check_limit(source, epoch)
    plain = [mixed.most(mixed.batch(None, [], index)) for index in range(90)]
    limited = [mixed.most(mixed.batch(mixed.order, [], index)) for index in range(90)]
    assert sum(most > 2 for most in plain) > 5
    assert max(limited) <= 2


AMENDMENTS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 2), st.sampled_from([0.0, 0.5, 2.0, 7.0])), max_size=3
)


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 50), amendments=AMENDMENTS, limit=st.integers(2, 3))
def test_reweighting_keeps_what_was_read_and_every_epoch_a_permutation(
    seed: int, amendments: list[tuple[int, int, float]], limit: int
) -> None:
    """Source 2 is never turned off, so that there is always one left."""
    mixed = _mixed(seed, limit=limit)
    changes = [
        Change(batch, {f"source{source}": weight if source < 2 or weight else 1.0})
        for batch, source, weight in amendments
    ]
    order, num_batches = mixed.amend(changes), 90
    for count, change in enumerate(changes):
        before, after = mixed.amend(changes[:count]), mixed.amend(changes[: count + 1])
        for index in range(change.from_batch):
            is_same = mixed.batch(after, changes[: count + 1], index) == mixed.batch(before, changes[:count], index)
            assert is_same, "the past does not change"
    read: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for index in range(num_batches):
        for source, sample in mixed.batch(order, changes, index):
            read[source].append(sample)
    for source, samples in read.items():
        size = len(mixed.tables[source])
        for epoch in range(len(samples) // size):
            visited = samples[epoch * size : (epoch + 1) * size]
            assert sorted(visited) == list(range(size)), "each sample is read once in an epoch"
    again = mixed.amend(changes)
    for index in reversed(range(0, num_batches, 7)):
        expected = mixed.batch(order, changes, index)
        assert mixed.batch(again, changes, index) == expected, "batches can be computed in any order"


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 50), batch=st.integers(5, 60), weight=st.sampled_from([0.5, 7.0]), limit=st.integers(2, 3))
def test_the_limit_holds_after_a_reweighting_where_it_can_be_kept(
    seed: int, batch: int, weight: float, limit: int
) -> None:
    mixed = _mixed(seed, limit=limit)
    changes = [Change(batch, {"source1": weight})]
    order = mixed.amend(changes)
    try:
        for source, turns in enumerate(mixed.recipe.mixture(changes).turns_before(90)):
            for epoch in range(-(-turns // len(mixed.tables[source]))):
                order.check_limit(source, epoch)
    except ConfigError:
        reject()
    assert max(mixed.most(mixed.batch(order, changes, index)) for index in range(90)) <= limit


def test_a_token_is_rare_if_all_sources_together_hold_few() -> None:
    tables = [np.array([[1, 1, 2], [3, 1, 1]]), np.array([[2, 2, 0], [4, 4, 0], [3, 0, 0]])]
    sources = [ScannedSource(TableCorpus(table), range(len(table))) for table in tables]
    first, second = find_rare(sources, below=3)
    assert (first.samples.tolist(), first.tokens.tolist(), first.counts.tolist()) == ([0, 1], [2, 3], [1, 1])
    assert (second.samples.tolist(), second.tokens.tolist()) == ([0, 0, 1, 1, 2, 2], [0, 2, 0, 4, 0, 3])


def test_the_index_of_several_sources_is_read_back(tmp_path: Path) -> None:
    tables = [_table(30, 5, 1), _table(20, 0, 2), _table(40, 9, 3)]
    sources = [ScannedSource(TableCorpus(table), range(len(table))) for table in tables]
    write_rare_index(tmp_path / "rare.npz", sources, below=30)
    key = "table 40 0..30 + table 40 0..20 + table 40 0..40 below 30"
    read = read_rare_index(tmp_path / "rare.npz", key)
    assert read is not None
    for found, expected in zip(read, find_rare(sources, below=30), strict=True):
        for parts in zip(found, expected, strict=True):
            np.testing.assert_array_equal(*parts)
    (one,) = find_rare(sources[:1], below=30)
    np.savez(tmp_path / "old.npz", key=np.array("table 40 0..30 below 30"), **one._asdict())
    old = read_rare_index(tmp_path / "old.npz", "table 40 0..30 below 30")
    assert old is not None
    np.testing.assert_array_equal(old[0].tokens, one.tokens)


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
