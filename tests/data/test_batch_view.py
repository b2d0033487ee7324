"""How a batch is shown."""

from __future__ import annotations

import pytest

from harness.data.batch_view import quote_token
from harness.data.prepare.tokenizer import ByteTokenizer


@pytest.mark.parametrize(
    ("token", "shown"), [(0x98, r"'\x98'"), (0x0A, r"'\n'"), (ord("a"), "'a'"), (ord("'"), '"\'"'), (0x5C, "'\\'")]
)
def test_a_token_is_escaped_once(token: int, shown: str) -> None:
    assert quote_token(ByteTokenizer().spell(token)) == shown
