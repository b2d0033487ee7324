"""Document boundaries of files without an index, from the token that ends each document (`data.eod_token`).

Why: nanoGPT, llm.c and OLMo write documents one after the other, with an end-of-document token between them. A mask of
documents must work on these files, without a scan of the corpus and without an index file.
How: a window contains all boundaries that matter to it, so its documents follow from its own tokens, when it is read.
The token belongs to the document that it ends. An id that does not occur would mask nothing, so a few blocks of each
file are searched for it when a source is opened. Nearly always the first block has it. If no block does, the files are
scanned from their beginning, up to `SCANNED_TOKENS` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.data.corpus.token_files import NUM_PROBES, TokenFile, Tokens, probes_per_file

PROBE_TOKENS = 4096
BLOCK_TOKENS = 2**22
SCANNED_TOKENS = 2**28
"""Tokens of a source that are read, in file order, before its end-of-document token counts as missing."""


def number_documents(tokens: Tokens, eod_token: int) -> NDArray[np.int32]:
    """For each token of a sample, which of the sample's documents it belongs to: 0, 0, ..., 1, 1, ..."""
    begins = np.zeros(len(tokens), dtype=np.int32)
    begins[1:] = tokens[:-1] == eod_token
    return np.cumsum(begins, dtype=np.int32)


def contains_token(files: Sequence[TokenFile], token: int) -> bool:
    """Whether the token occurs in one of the files, as far as they are searched."""
    return any((block == token).any() for block in _searched_blocks(files))


def num_searched(files: Sequence[TokenFile]) -> int:
    """Tokens that the search goes through in file order."""
    return min(SCANNED_TOKENS, sum(file.num_tokens for file in files))


def _searched_blocks(files: Sequence[TokenFile]) -> Iterator[Tokens]:
    """Blocks spread over all files, then all tokens from the first one on, up to the limit."""
    num_probes = probes_per_file(NUM_PROBES, len(files))
    for file in files:
        count = min(PROBE_TOKENS, file.num_tokens)
        for probe in range(num_probes):
            yield file.read((file.num_tokens - count) * probe // (num_probes - 1), count)
    num_left = SCANNED_TOKENS
    for file in files:
        for first in range(0, min(file.num_tokens, num_left), BLOCK_TOKENS):
            yield file.read(first, min(BLOCK_TOKENS, file.num_tokens - first, num_left - first))
        num_left -= min(file.num_tokens, num_left)
