"""From overrides to batches: any number of ranks, disjoint held-out data, limits, and errors that name a key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.data.batch import IGNORED
from harness.data.batches import Batches
from harness.data.corpus.token_files import IndexedWriter
from harness.data.order.ledger import Ledger
from harness.data.sources import HELD_OUT_SEED, describe_eod_token, open_data, source_seed
from tests.composed import load

CPU = torch.device("cpu")
MASKED = "data.document_mask=true"
EOD = 7
SMALL = ["train.sequence_length=64", "data.synthetic.num_samples=2000"]


@contextmanager
def _opened(cfg: Config, *, rank: int = 0, world_size: int = 1) -> Iterator[tuple[Batches, Batches]]:
    train, held_out = open_data(cfg, rank=rank, world_size=world_size, device=CPU, ledger=Ledger())
    with closing(train), closing(held_out):
        yield train, held_out


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "corpus", np.dtype("uint16")) as writer:
        for _ in range(300):
            writer.add(draw.integers(0, 256, size=draw.integers(1, 300)))
    return tmp_path / "corpus"


@pytest.mark.parametrize("data", ["embedded", "synthetic", "mixture", "files"])
def test_any_number_of_ranks_sees_the_same_global_batches(data: str, prefix: Path) -> None:
    paths = [f"data.sources.main.paths=[{prefix}]"] if data == "files" else []
    cfg = load([f"data={data}", *SMALL, *paths, "data.document_mask=true"])
    with _opened(cfg) as single_rank:
        for world_size in (2, 4):
            for rank in range(world_size):
                rows = slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)
                with _opened(cfg, rank=rank, world_size=world_size) as pair:
                    for part, index in ((0, 0), (0, 99), (0, 100), (0, 1000), (1, 0), (1, 3)):
                        share, full = pair[part][index], single_rank[part][index]
                        assert torch.equal(share.inputs, full.inputs[rows])
                        assert torch.equal(share.targets, full.targets[rows])
                        assert torch.equal(share.sources, full.sources[rows])


def test_bundled_mixture_changes_its_weights() -> None:
    with _opened(load(["data=mixture", *SMALL])) as (train, held_out):
        assert train.source_names == ("text", "synthetic")
        counts = [np.bincount(train.samples(index)[0], minlength=2).tolist() for index in (0, 99, 100, 500)]
        assert counts == [[4, 4], [4, 4], [6, 2], [6, 2]]
        assert np.bincount(held_out.samples(500)[0]).tolist() == [4, 4], "evaluation keeps the weights of the sources"


@pytest.mark.parametrize("data", ["embedded", "mixture"])
def test_train_and_held_out_share_no_token(data: str) -> None:
    with _opened(load([f"data={data}", *SMALL])) as (train, held_out):
        for number in range(len(train.sources)):
            trained, evaluated = (_samples(batches, number) for batches in (train, held_out))
            assert (trained.max() + 1) * 64 < evaluated.min() * 64, (
                "the last target comes before the first held-out input"
            )
            assert len(set(trained.tolist())) == len(trained)
            assert len(set(evaluated.tolist())) == len(evaluated)


def test_held_out_order_is_the_same_for_every_run_seed() -> None:
    with _opened(load(["run.seed=0"])) as first, _opened(load(["run.seed=1"])) as second:
        assert not np.array_equal(first[0].samples(0)[1], second[0].samples(0)[1])
        np.testing.assert_array_equal(first[1].samples(0)[1], second[1].samples(0)[1])
    assert HELD_OUT_SEED > 2**63 - 1


def test_each_source_has_its_own_seed() -> None:
    cfg = load(["data=mixture", "data.sources.text.seed=7"])
    seeds = [source_seed(cfg, "text"), source_seed(cfg, "synthetic"), source_seed(load(["data=mixture"]), "text")]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert source_seed(load(["data=mixture"]), "synthetic") == seeds[1]
    assert source_seed(load(["data=mixture", "run.seed=1"]), "synthetic") != seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_added_source_leaves_the_order_of_the_others() -> None:
    more = "+data.sources={more: {kind: synthetic}}"
    with _opened(load(["data=mixture", *SMALL])) as (one, _), _opened(load(["data=mixture", *SMALL, more])) as (two, _):
        for number in (0, 1):
            first, second = (_in_turn(batches, number, 20) for batches in (one, two))
            assert first[: len(second)] == second[: len(first)]


def test_rare_tokens_are_limited_in_every_batch() -> None:
    tail = ["rare_tokens=4", "rare_probability=0.005", "num_samples=600", "zipf_exponent=0"]
    data = ["data=synthetic", "train.sequence_length=64", *(f"data.synthetic.{item}" for item in tail)]
    plain = load(data)
    limited = load([*data, "data.stratify.rare_below=90", "data.stratify.max_per_batch=2"])
    with _opened(plain) as (one, _), _opened(limited) as (two, _):
        most = [
            [max((batches.rows(index) == token).sum() for token in range(252, 256)) for index in range(len(batches))]
            for batches in (one, two)
        ]
        assert max(most[0]) > 2
        assert max(most[1]) <= 2
        visited = [
            np.sort(np.concatenate([batches.samples(i)[1] for i in range(len(batches))])) for batches in (one, two)
        ]
        assert len(set(visited[1].tolist())) == len(visited[1]) == len(visited[0])


def test_rare_tokens_are_limited_in_every_batch_of_a_mixture_that_the_ledger_amends() -> None:
    tail = ["rare_tokens=4", "rare_probability=0.005", "num_samples=600", "zipf_exponent=0"]
    sources = "+data.sources={one: {kind: synthetic, weight: 0.7}, two: {kind: synthetic, weight: 0.3}}"
    data = ["data=base", sources, "train.sequence_length=64", *(f"data.synthetic.{item}" for item in tail)]
    data += ["data.phases=[{from_batch: 30, weights: {two: 1.0}}]", "train.num_steps=60"]
    limits = ["data.stratify.rare_below=200", "data.stratify.max_per_batch=2"]
    most: list[list[int]] = []
    for overrides in (data, [*data, *limits]):
        with _opened(load(overrides)) as (batches, _):
            before = [batches.samples(index)[1].tolist() for index in range(20)]
            batches._ledger.reweight(20, {"one": 0.2}, "by an operator")
            batches[0]
            assert [batches.samples(index)[1].tolist() for index in range(20)] == before
            tokens = [batches.rows(index) for index in range(60)]
            most.append([max((rows == token).sum() for token in range(252, 256)) for rows in tokens])
            report = batches.stratify_report()
    assert max(most[0]) > 2
    assert max(most[1]) <= 2
    assert report is not None
    assert report.num_tokens == 4


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["train.sequence_length=1000000"], r"train\.sequence_length: must be at most \d+"),
        (["train.batch_size=5000"], r"train\.batch_size: must be at most the \d+ sequences of training"),
        (
            ["train.batch_size=5000", "train.batch_size_warmup=[{until_batch: 2, batch_size: 8}]"],
            r"train\.batch_size: must be at most the \d+ sequences of training data, got 5000",
        ),
        (["data=mixture", "train.batch_size=20000"], r"train\.batch_size: must be at most the \d+ sequences of text"),
        (["data.eval_fraction=0.002"], r"data\.eval_fraction: holds out \d sequences, fewer than one batch of 8"),
        (["data=mixture", "data.eval_fraction=0.001"], r"data\.eval_fraction: holds out \d sequences of text, fewer"),
        (["data=synthetic", "data.synthetic.rare_probability=0.1"], r"data\.synthetic\.rare_tokens: must"),
        (
            ["data=synthetic", "data.synthetic.rare_tokens=255"],
            r"data\.synthetic\.rare_tokens: must be at most model\.vocab_size - 2",
        ),
        (["data=synthetic", "data.synthetic.num_samples=2"], r"data\.synthetic\.num_samples: must"),
        (["data.eval_fraction=0.99999"], r"data\.eval_fraction: must leave 2 of the \d+ sequences of main"),
        (["data=files", "data.sources.main.paths=[/no/such]"], r"data\.sources\.main\.paths: /no/such: no such file"),
        (
            ["data.stratify.rare_below=9999"],
            r"data\.stratify\.max_per_batch: must be above 1: no batch has room for 1 more of token \d+",
        ),
    ],
)
def test_invalid_data_config_names_the_key(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}") as caught, _opened(load(overrides)):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ["bin", "npy"])
def test_document_mask_needs_files_with_document_boundaries(ending: str, prefix: Path) -> None:
    flat = prefix.with_name(f"flat.{ending}")
    tokens = np.zeros(20_000, dtype=np.uint16)
    if ending == "npy":
        np.save(flat, tokens)
    else:
        tokens.tofile(flat)
    paths = f"data.sources.main.paths=[{prefix},{flat}]"
    line = rf"^data\.document_mask: {flat} has no document boundaries; set data\.eod_token .*\.idx.*set this to false"
    with pytest.raises(ConfigError, match=line) as caught, _opened(load(["data=files", *SMALL, paths, MASKED])):
        pass
    assert "\n" not in str(caught.value)
    with _opened(load(["data=files", *SMALL, paths])):
        pass


@pytest.mark.parametrize("ending", ["bin", "npy"])
def test_eod_token_gives_the_batches_and_masks_of_an_index(ending: str, tmp_path: Path) -> None:
    prefix, flat = write_twice(tmp_path, ending)
    indexed = load(["data=files", *SMALL, f"data.sources.main.paths=[{prefix}]", MASKED])
    ended = load(["data=files", *SMALL, f"data.sources.main.paths=[{flat}]", MASKED, f"data.eod_token={EOD}"])
    with _opened(indexed) as first, _opened(ended) as second:
        for part, index in ((0, 0), (0, 17), (0, 1000), (1, 0), (1, 2)):
            one, other = first[part][index], second[part][index]
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.targets, other.targets)
            assert one.documents is not None
            assert other.documents is not None
            assert torch.equal(one.documents, other.documents)
            assert (one.targets == IGNORED).any()
        assert describe_eod_token(indexed, first[0].sources) == ""
        assert describe_eod_token(ended, second[0].sources) == f"{EOD} ends the documents of main"


def test_an_index_wins_over_the_eod_token(tmp_path: Path, prefix: Path) -> None:
    flat = write_twice(tmp_path, "bin")[1]
    sources = f"+data.sources={{indexed: {{kind: files, paths: [{prefix}]}}, flat: {{kind: files, paths: [{flat}]}}}}"
    plain = ["data=base", *SMALL, sources]
    with (
        _opened(load(plain)) as (before, _),
        _opened(cfg := load([*plain, MASKED, f"data.eod_token={EOD}"])) as (now, _),
    ):
        for sample in range(100):
            one, other = (batches.sources[0].corpus.documents(sample) for batches in (before, now))
            np.testing.assert_array_equal(one, other)
        line = f"{EOD} ends the documents of flat; ignored in indexed, with document boundaries of its own"
        assert describe_eod_token(cfg, now.sources) == line


def test_an_eod_token_that_does_not_occur_is_an_error_only_with_a_mask(tmp_path: Path) -> None:
    flat = write_twice(tmp_path, "bin")[1]
    absent = ["data=files", *SMALL, f"data.sources.main.paths=[{flat}]", "data.eod_token=255"]
    with _opened(load(absent)):
        pass
    with pytest.raises(ConfigError) as caught, _opened(load([*absent, MASKED])):
        pass
    expected = f"id 255 does not occur in the first {flat.stat().st_size // 2} tokens of source main ({flat}), so "
    assert str(caught.value).startswith(f"data.eod_token: {expected}data.document_mask would keep no documents apart;")


def write_twice(directory: Path, ending: str) -> tuple[Path, Path]:
    """One corpus of documents that end with EOD: with an index, and as a flat file. The last document has no end."""
    draw = np.random.default_rng(1)
    documents = [np.append(draw.integers(EOD + 1, 200, size=draw.integers(0, 150)), EOD) for _ in range(600)]
    documents[-1] = documents[-1][:-1]
    with IndexedWriter(directory / "indexed", np.dtype("uint16")) as writer:
        for document in documents:
            writer.add(document)
    flat, tokens = directory / f"flat.{ending}", np.concatenate(documents).astype(np.uint16)
    if ending == "npy":
        np.save(flat, tokens)
    else:
        tokens.tofile(flat)
    return directory / "indexed", flat


def test_without_evaluation_too_little_held_out_data_is_allowed() -> None:
    with _opened(load(["eval.every_steps=0", "data.eval_fraction=0.002"])):
        pass


def test_removed_file_stops_the_run_and_is_named(prefix: Path) -> None:
    with _opened(load(["data=files", *SMALL, f"data.sources.main.paths=[{prefix}]"])) as (train, _):
        train[0]
        prefix.with_suffix(".bin").unlink()
        with pytest.raises(ConfigError, match=rf"^data\.sources\.main\.paths: {prefix}\.bin: was removed"):
            train[100]


def _samples(batches: Batches, number: int) -> np.ndarray:
    pairs = [batches.samples(index) for index in range(len(batches))]
    return np.concatenate([samples[sources == number] for sources, samples in pairs])


def _in_turn(batches: Batches, number: int, num_batches: int) -> list[int]:
    """The samples of a source in the order of their turns."""
    found = []
    for index in range(num_batches):
        sources, turns = batches.mixture.batch(index)
        own = np.flatnonzero(sources == number)
        found += batches.samples(index)[1][own[np.argsort(turns[own])]].tolist()
    return found
