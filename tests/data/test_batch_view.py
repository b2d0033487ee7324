"""How a batch is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.data.batch_view import quote_token, tokenizer_beside
from harness.data.prepare.tokenizer import ByteTokenizer


@pytest.mark.parametrize(
    ("token", "shown"), [(0x98, r"'\x98'"), (0x0A, r"'\n'"), (ord("a"), "'a'"), (ord("'"), '"\'"'), (0x5C, "'\\'")]
)
def test_a_token_is_escaped_once(token: int, shown: str) -> None:
    assert quote_token(ByteTokenizer().spell(token)) == shown


def test_a_report_of_another_program_gives_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.meta.json").write_text(json.dumps({"tokens": 9, "max_token": 3}))
    assert tokenizer_beside(tmp_path / "a.bin") is None
