"""Text to tokens and back: with a tokenizer.json, with a byte-level BPE trained here, or with plain bytes.

Why: the tokenizer is stored beside the tokens, so that a batch can be decoded later.
How: a small protocol with two implementations. The only module that imports Hugging Face `tokenizers`, when a tokenizer
is opened. Worker processes must disable the threads of that library (TOKENIZERS_PARALLELISM).
Left out: templates and special tokens around a document; a document gets its end-of-document token, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from harness.config.errors import ConfigError, require

if TYPE_CHECKING:
    import tokenizers

Tokens = NDArray[np.integer[Any]]

NUM_BYTES = 256
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
EOD_TOKEN = "<|endoftext|>"
TEXTS_AT_ONCE = 256
"""Texts per call: the library's result is many times larger than the tokens."""
TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
"""In the directory of a Hugging Face model."""
MIN_PAIR_COUNT = 2
"""A merge that occurs once would be a token that occurs once in training."""


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """All ids of encoded texts are below it."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Tokens]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def spell(self, token: int) -> str:
        """The text of one token, or its name in the vocabulary if it is only part of a character."""
        ...

    def eod(self, name: str) -> int:
        """The id of the end-of-document token of that name."""
        ...


def open_tokenizer(path: Path | None, *, special_tokens: bool = False) -> Tokenizer:
    """Open a tokenizer.json, or the byte tokenizer if there is no path; `special_tokens`: see `JsonTokenizer`."""
    return ByteTokenizer() if path is None else JsonTokenizer(path, special_tokens=special_tokens)


def find_tokenizer_file(path: Path) -> Path:
    """The tokenizer.json that a path means: itself, or that of a model directory."""
    if not path.is_dir():
        return path
    file = path / TOKENIZER_FILE
    advice = "convert it with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    require(file.is_file(), str(path), f"has no {TOKENIZER_FILE}; {advice}")
    return file


def end_token_of(path: Path) -> str | None:
    """The end-of-text token that a model directory names; None if it names none, or for a file."""
    try:
        named = json.loads((path / TOKENIZER_CONFIG).read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None


@final
class ByteTokenizer:
    """One token per byte of UTF-8; the end-of-document token is id 256."""

    vocab_size = NUM_BYTES

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Invalid UTF-8, such as half a character, becomes U+FFFD."""
        parts = [bytes([token]) if token < NUM_BYTES else EOD_TOKEN.encode() for token in tokens]
        return b"".join(parts).decode(errors="replace")

    def spell(self, token: int) -> str:
        return self.decode([token]) if token < 128 or token == NUM_BYTES else f"\\x{token:02x}"

    def eod(self, name: str) -> int:
        require(name == EOD_TOKEN, "--eod-token", f"must be {EOD_TOKEN} if tokens are bytes, got {name}")
        return NUM_BYTES


@final
class JsonTokenizer:
    """A Hugging Face tokenizer; truncation and padding of its file are turned off.

    The name of a special token within a text is encoded as plain text unless `special_tokens` is set: otherwise any web
    page could forge the end of a document.
    """

    def __init__(self, path: Path, *, special_tokens: bool) -> None:
        self._path = path
        self._tokenizer = _load(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not special_tokens
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=0)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        tokens: list[Tokens] = []
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            encoded = self._tokenizer.encode_batch_fast(texts[first : first + TEXTS_AT_ONCE], add_special_tokens=False)
            tokens += [np.array(encoding.ids, dtype=np.int64) for encoding in encoded]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def spell(self, token: int) -> str:
        text = self.decode([token])
        return text if text and NO_CHARACTER not in text else str(self._tokenizer.id_to_token(token))

    def eod(self, name: str) -> int:
        token = self._tokenizer.token_to_id(name)
        if token is None:
            added = [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values()]
            listed = ", ".join(added[:8]) or "none"
            raise ConfigError("--eod-token", f"{self._path} has no token {name}; its special tokens are {listed}")
        return token


def train_bpe(texts: Iterable[str], *, vocab_size: int, eod_token: str) -> str:
    """Train a byte-level BPE and return its tokenizer.json; deterministic, whatever the number of threads.

    The vocabulary is smaller than `vocab_size` if the texts do not contain enough pairs to merge.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    message = f"must be at least {NUM_BYTES + 1}, for the bytes and {eod_token}, got {vocab_size}"
    require(vocab_size > NUM_BYTES, "--train-bpe", message)
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_PAIR_COUNT,
        special_tokens=[eod_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def _load(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except Exception as error:  # the library raises no narrower type
        raise ConfigError(str(path), f"is not a tokenizer.json: {error}") from None
