"""A tokenizer.json for models that were trained on bytes: token N is byte N.

How: a byte-level BPE without merges. Its alphabet maps each byte to one printable character, as GPT-2's does.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness.data.prepare.tokenizer import NUM_BYTES


def byte_characters() -> list[str]:
    """The character that stands for each byte: itself if it is printable, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def write_byte_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json beside the weights of an exported model."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    zero = byte_characters()[0]  # no text contains byte 0
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": zero, "pad_token": zero}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
