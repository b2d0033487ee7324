"""The `Corpus` protocol: random access to samples as a pure function, with their documents and origin."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]

MIN_SAMPLES = 3
"""One to train on, one held out, one unused between them."""


class SampleShape(NamedTuple):
    sequence_length: int
    vocab_size: int
    """All token ids must be below it."""


class SampleOrigin(NamedTuple):
    """Where a sample comes from."""

    file: str
    first_token: int
    """Position in the file of the sample's first token."""
    first_document: int
    """Number in the file; 0 if `data.eod_token` ends documents: then they are counted from the sample's first one."""
    last_document: int
    """Inclusive."""


class Corpus(Protocol):
    @property
    def num_samples(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """All token ids are below it."""
        ...

    def sample(self, index: int) -> Tokens:
        """The `sequence_length + 1` tokens of one sample; pure, and safe to call from several threads."""
        ...

    def rows(self, indices: NDArray[np.int64]) -> Tokens:
        """The tokens of several samples, one row each."""
        ...

    def documents(self, index: int) -> NDArray[np.int32]:
        """For each token of a sample, which of the sample's documents it belongs to: 0, 0, ..., 1, 1, ..."""
        ...

    def origin(self, index: int) -> SampleOrigin: ...

    def token_counts(self) -> NDArray[np.int64] | None:
        """How often each token id occurs in the whole corpus; None if that needs a scan."""
        ...

    def fingerprint(self) -> str:
        """Short hexadecimal hash, equal for equal corpora."""
        ...


def digest(content: bytes, *parameters: int) -> str:
    """Short hexadecimal hash of content and parameters."""
    return blake2b(content + repr(parameters).encode(), digest_size=8).hexdigest()
