"""Finds documents that harm training: too long, degenerate, or badly encoded (`harness data prepare --filter`).

Why: batches of extremely long, repetitive or wrongly decoded text give outsized gradients, and the loss spikes that
follow cost more than the documents are worth.
How: each document is checked by itself, in the worker that tokenizes it. So the choice does not depend on the order of
the input or on the number of workers, and the memory is that of one document. The first check that fails is the reason.
Shares are of characters, because a long line weighs more than a short one. A document below `MIN_CHARS` is checked for
its encoding only: a short text repeats itself by chance.
Left out: near-duplicates of other documents, language and quality models.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import final

from harness.config.errors import require

MIN_CHARS = 200
RUN_CHARS = 10
"""A run of this many equal characters, white space aside, counts as repeated."""
PHRASE_WORDS = 5

BAD_CHARACTERS = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\N{REPLACEMENT CHARACTER}]")
"""Control characters except tab, newline, carriage return and form feed; and U+FFFD, which a failed decoding leaves."""
RUNS = re.compile(rf"(\S)\1{{{RUN_CHARS - 1},}}")
WORDS = re.compile(r"\S+")
BOILERPLATE = re.compile(
    r"lorem ipsum|all rights reserved|privacy policy|cookie policy|terms of (?:use|service)|uses cookies|accept cookies"
    r"|enable javascript|javascript is (?:disabled|required)|subscribe to our newsletter|click here to"
    r"|skip to (?:main )?content|access denied|page not found|powered by wordpress",
    re.IGNORECASE,
)


class DropReason(IntEnum):
    """Why a document is dropped, in the order of the checks. The numbers are stored in parts."""

    invalid_utf8 = 0
    too_long = 1
    bad_characters = 2
    repeated_characters = 3
    repeated_lines = 4
    repeated_phrases = 5
    boilerplate = 6

    def in_words(self) -> str:
        return "invalid UTF-8" if self is DropReason.invalid_utf8 else self.name.replace("_", " ")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFilter:
    """Thresholds; a document above one of them is dropped. A share of 1 turns a check off."""

    max_chars: int = 1_000_000
    """Characters of a document."""
    max_bad_chars: float = 0.001
    """Share of control and replacement characters."""
    max_repeated_chars: float = 0.5
    """Share of characters in runs of `RUN_CHARS` or more equal ones, white space aside."""
    max_repeated_lines: float = 0.5
    """Share of characters in lines that equal an earlier line of the document."""
    max_repeated_phrases: float = 0.5
    """Share of characters in phrases of `PHRASE_WORDS` words that occurred earlier in the document."""
    max_boilerplate: float = 0.5
    """Share of characters in lines with a phrase of navigation, cookie notices, placeholders or error pages."""

    def __post_init__(self) -> None:
        require(self.max_chars >= 1, "--max-chars", f"must be at least 1, got {self.max_chars}")
        for field in fields(self)[1:]:
            share = getattr(self, field.name)
            option = f"--{field.name.replace('_', '-')}"
            require(0 <= share <= 1 and math.isfinite(share), option, f"must be a share from 0 to 1, got {share}")

    def check(self, text: str) -> DropReason | None:
        """Why this document is dropped; None: it is kept."""
        num_chars = len(text)
        if num_chars > self.max_chars:
            return DropReason.too_long
        if num_chars and len(BAD_CHARACTERS.findall(text)) > self.max_bad_chars * num_chars:
            return DropReason.bad_characters
        if num_chars < MIN_CHARS:
            return None
        shares = (
            (DropReason.repeated_characters, self.max_repeated_chars, share_of_runs),
            (DropReason.repeated_lines, self.max_repeated_lines, share_of_repeated_lines),
            (DropReason.repeated_phrases, self.max_repeated_phrases, share_of_repeated_phrases),
            (DropReason.boilerplate, self.max_boilerplate, share_of_boilerplate),
        )
        return next((reason for reason, limit, measure in shares if limit < 1 and measure(text) > limit), None)


def share_of_runs(text: str) -> float:
    """Share of the visible characters that belong to long runs of one character."""
    num_visible = sum(map(len, WORDS.findall(text)))
    return _share(sum(match.end() - match.start() for match in RUNS.finditer(text)), num_visible)


def share_of_repeated_lines(text: str) -> float:
    """Share of the characters in lines that equal an earlier one; white space around lines and blank lines aside."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    seen: set[str] = set()
    num_repeated = 0
    for line in lines:
        num_repeated += len(line) if line in seen else 0
        seen.add(line)
    return _share(num_repeated, sum(map(len, lines)))


def share_of_repeated_phrases(text: str) -> float:
    """Share of the characters of words in phrases that occurred before; each word counts once."""
    words = WORDS.findall(text)
    seen: set[tuple[str, ...]] = set()
    num_repeated = counted = 0
    for end in range(PHRASE_WORDS, len(words) + 1):
        phrase = tuple(words[end - PHRASE_WORDS : end])
        if phrase in seen:
            num_repeated += sum(map(len, words[max(counted, end - PHRASE_WORDS) : end]))
            counted = end
        seen.add(phrase)
    return _share(num_repeated, sum(map(len, words)))


def share_of_boilerplate(text: str) -> float:
    """Share of the characters in lines that contain a phrase of `BOILERPLATE`."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    return _share(sum(len(line) for line in lines if BOILERPLATE.search(line)), sum(map(len, lines)))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
