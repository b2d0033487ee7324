"""The corpora: English text, Zipf tokens with a successor rule, and a tail of the configured rarity."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.data import DataKind, SourceConfig, SyntheticConfig
from harness.config.errors import ConfigError
from harness.data.corpus.corpora import EmbeddedCorpus, SyntheticCorpus, build_corpus, embedded_documents, split
from harness.data.corpus.corpus import SampleShape, Tokens

PLAIN = SyntheticConfig(
    num_samples=1000, zipf_exponent=1.0, repeat_probability=0.0, rare_tokens=0, rare_probability=0.0
)


def _synthetic(
    cfg: SyntheticConfig, *, vocab_size: int = 64, sequence_length: int = 512, seed: int = 0
) -> SyntheticCorpus:
    return SyntheticCorpus(cfg, vocab_size=vocab_size, sequence_length=sequence_length, seed=seed)


def _tokens(corpus: SyntheticCorpus, num_samples: int = 200) -> Tokens:
    return np.stack([corpus.sample(index) for index in range(num_samples)])


def test_embedded_text_is_english() -> None:
    corpus = EmbeddedCorpus(256)
    text = b"".join(corpus.sample(index)[:-1].tobytes() for index in range(corpus.num_samples)).decode(errors="ignore")
    assert len(text) > 100_000
    for word in ("the", "statement", "expression", "exception", "is"):
        assert text.count(f" {word} ") > 50, word


def test_embedded_windows_share_one_token_and_cover_the_text() -> None:
    corpus, whole = EmbeddedCorpus(100), EmbeddedCorpus(30_000)
    for index in range(299):
        assert len(corpus.sample(index)) == 101
        assert corpus.sample(index)[-1] == corpus.sample(index + 1)[0]
    joined = np.concatenate([corpus.sample(index)[:-1] for index in range(300)])
    np.testing.assert_array_equal(joined, whole.sample(0)[:-1])
    assert len(corpus.sample(corpus.num_samples - 1)) == 101


def test_embedded_text_is_unchanged() -> None:
    """The data order of a run and the corpus in its manifest depend on these bytes."""
    text = "".join(f"{document}\n\n" for document in embedded_documents()).encode()
    assert len(text) == 466_275
    assert hashlib.sha256(text).hexdigest() == "8a86af5ff945d882e88601ed87c8b51caf1ac2cbd9ab6d857dbdf0b9d90d44f7"
    assert EmbeddedCorpus(256).fingerprint() == "abcb5e2e2b7f535d"


def test_embedded_rejects_a_sequence_length_without_three_windows() -> None:
    with pytest.raises(ConfigError, match=r"^train\.sequence_length: must be at most (\d+)") as caught:
        EmbeddedCorpus(10**7)
    longest = int(str(caught.value).split("at most ")[1].split()[0])
    assert EmbeddedCorpus(longest).num_samples == 3
    with pytest.raises(ConfigError):
        EmbeddedCorpus(longest + 1)


def test_synthetic_samples_are_pure_and_independent_of_order() -> None:
    cfg = replace(PLAIN, repeat_probability=0.5, rare_tokens=8, rare_probability=0.05)
    one, other = _synthetic(cfg), _synthetic(cfg)
    forward = {index: one.sample(index) for index in range(20)}
    for index in (19, 3, 3, 0, 11, 999, 7):
        if index in forward:
            np.testing.assert_array_equal(other.sample(index), forward[index])
    assert forward[0].shape == (513,)
    assert len({tokens.tobytes() for tokens in forward.values()}) == 20
    assert not np.array_equal(_synthetic(cfg, seed=1).sample(0), forward[0])


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5])
def test_frequencies_follow_zipf(exponent: float) -> None:
    tokens = _tokens(_synthetic(replace(PLAIN, zipf_exponent=exponent)))
    weights = np.arange(1, 65, dtype=np.float64) ** -exponent
    expected = tokens.size * weights / weights.sum()
    chi_square = ((np.bincount(tokens.ravel(), minlength=64) - expected) ** 2 / expected).sum()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5


def test_each_token_has_one_successor_with_the_set_probability() -> None:
    tokens = _tokens(_synthetic(replace(PLAIN, repeat_probability=0.6)))
    pairs = np.zeros((64, 64), dtype=np.int64)
    np.add.at(pairs, (tokens[:, :-1].ravel(), tokens[:, 1:].ravel()), 1)
    successor = pairs.argmax(axis=1)
    assert sorted(successor) == list(range(64)), "a permutation of the bulk"
    follows = pairs[np.arange(64), successor].sum() / pairs.sum()
    weights = 1 / np.arange(1, 65)
    by_chance = (pairs.sum(axis=1) / pairs.sum() * (weights / weights.sum())[successor]).sum()
    assert follows == pytest.approx(0.6 + 0.4 * by_chance, abs=0.01)


def test_successors_follow_to_the_end_of_a_run() -> None:
    """With probability 1 a sample is one walk through the whole bulk, repeated."""
    tokens = _synthetic(replace(PLAIN, repeat_probability=1.0), sequence_length=200).sample(5)
    assert sorted(tokens[:64]) == list(range(64))
    np.testing.assert_array_equal(tokens[64:], tokens[:-64])


def test_tail_tokens_occur_at_the_set_rate() -> None:
    with_tail = replace(PLAIN, repeat_probability=0.5, rare_tokens=10, rare_probability=0.01)
    tokens = _tokens(_synthetic(with_tail), num_samples=400)
    is_rare = tokens >= 54
    deviation = (0.01 * 0.99 / tokens.size) ** 0.5
    assert is_rare.mean() == pytest.approx(0.01, abs=5 * deviation)
    counts = np.bincount(tokens[is_rare] - 54, minlength=10)
    expected = is_rare.sum() / 10
    assert ((counts - expected) ** 2 / expected).sum() < 9 + 5 * 18**0.5
    without = _tokens(_synthetic(replace(with_tail, rare_probability=0.0)), num_samples=400)
    assert without.max() == 53
    np.testing.assert_array_equal(tokens[~is_rare], without[~is_rare])


def test_all_positions_can_be_rare() -> None:
    tokens = _synthetic(replace(PLAIN, rare_tokens=3, rare_probability=1.0)).sample(0)
    assert set(tokens.tolist()) == {61, 62, 63}


def test_samples_of_released_versions_are_unchanged() -> None:
    cfg = replace(PLAIN, repeat_probability=0.5, rare_tokens=100, rare_probability=0.1)
    tokens = _synthetic(cfg, vocab_size=1000, sequence_length=11, seed=3).sample(7)
    assert tokens.tolist() == [1, 243, 124, 127, 379, 0, 4, 524, 9, 712, 7, 646]


def test_different_corpora_have_different_fingerprints() -> None:
    corpora = [
        _synthetic(PLAIN),
        _synthetic(PLAIN, seed=1),
        _synthetic(PLAIN, vocab_size=65),
        _synthetic(PLAIN, sequence_length=511),
        _synthetic(replace(PLAIN, zipf_exponent=1.1)),
    ]
    fingerprints = {corpus.fingerprint() for corpus in corpora} | {EmbeddedCorpus(s).fingerprint() for s in (64, 65)}
    assert len(fingerprints) == 7
    assert _synthetic(PLAIN).fingerprint() in fingerprints


@pytest.mark.parametrize(("kind", "expected"), [("embedded", EmbeddedCorpus), ("synthetic", SyntheticCorpus)])
def test_build_follows_the_kind(kind: str, expected: type) -> None:
    source = SourceConfig(kind=DataKind(kind))
    corpus = build_corpus("main", source, shape=SampleShape(32, 300), synthetic=PLAIN, seed=0)
    assert isinstance(corpus, expected)
    sampled = np.concatenate([corpus.sample(index) for index in range(100)])
    assert sampled.min() >= 0
    assert sampled.max() < corpus.vocab_size <= 300


def test_documents_of_the_embedded_text_are_its_topics() -> None:
    corpus = EmbeddedCorpus(1000)
    joined = np.concatenate([corpus.sample(index)[:-1] for index in range(corpus.num_samples)]).tobytes()
    ends = set()
    for index in range(corpus.num_samples):
        documents, origin = corpus.documents(index), corpus.origin(index)
        assert documents.dtype == np.int32
        assert documents.shape == (1001,)
        assert documents[0] == 0
        assert set(np.diff(documents)) <= {0, 1}
        assert origin.last_document - origin.first_document == documents[-1]
        assert origin.first_token == index * 1000
        ends |= {index * 1000 + place for place in np.flatnonzero(np.diff(documents))}
    assert len(ends) > 50
    for end in ends:
        assert joined[end - 1 : end + 1] == b"\n\n"
    assert corpus.origin(0).first_document == 0


def test_counts_are_of_the_whole_text() -> None:
    corpus = EmbeddedCorpus(1000)
    counts = corpus.token_counts()
    assert counts.shape == (256,)
    joined = np.concatenate([corpus.sample(index)[:-1] for index in range(corpus.num_samples)])
    assert 0 <= counts[ord("e")] - (joined == ord("e")).sum() < 1000


def test_a_synthetic_sample_is_one_document() -> None:
    corpus = _synthetic(PLAIN)
    assert corpus.documents(5).tolist() == [0] * 513
    assert corpus.origin(5).first_document == corpus.origin(5).last_document == 5
    assert corpus.token_counts() is None


@settings(deadline=None)
@given(num_samples=st.integers(3, 5000), eval_fraction=st.floats(0.001, 0.999))
def test_split_shares_no_token(num_samples: int, eval_fraction: float) -> None:
    if round(num_samples * eval_fraction) >= num_samples - 1:
        with pytest.raises(ConfigError, match=r"^data\.eval_fraction: must"):
            split(num_samples, eval_fraction, source="main")
        return
    train, held_out = split(num_samples, eval_fraction, source="main")
    sequence_length = 8
    last_train_token = train[-1] * sequence_length + sequence_length
    assert train.start == 0
    assert held_out.stop == num_samples
    assert last_train_token < held_out[0] * sequence_length
    assert len(train) + len(held_out) == num_samples - 1
    assert abs(len(held_out) - num_samples * eval_fraction) <= 1


@pytest.mark.parametrize("num_samples", [1, 2])
def test_split_rejects_a_corpus_that_is_too_small(num_samples: int) -> None:
    with pytest.raises(ConfigError, match=r"^data\.eval_fraction: must leave 2"):
        split(num_samples, 0.1, source="main")
