"""Output streams that cannot fail."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from harness.core.safe_stream import SafeStream

PRINT = """
import sys
from harness.core.safe_stream import safe_output
with safe_output():
    for stream in (sys.stdout, sys.stderr):
        print("caf\\xe9", file=stream, flush=True)
        print("more", file=stream)
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("ascii", "caf\\xe9 w\\ud800eb \\u2014"),
        ("utf-8", "caf\xe9 w\\ud800eb \u2014"),
        ("cp1252", "caf\xe9 w\\ud800eb \u2014"),
    ],
)
def test_characters_that_the_encoding_lacks_are_written_as_escapes(encoding: str, text: str) -> None:
    raw = io.BytesIO()
    stream = SafeStream(SafeStream(io.TextIOWrapper(raw, encoding=encoding)))  # type: ignore[arg-type]
    stream.write("caf\xe9 w\ud800eb \u2014")
    stream.flush()
    assert raw.getvalue().decode(encoding) == text


@pytest.mark.parametrize("redirection", [">/dev/full 2>&1", ">&- 2>&-"])
def test_a_process_without_output_keeps_its_exit_code(redirection: str) -> None:
    command = f'exec "$0" -c "$1" {redirection}'
    assert subprocess.run(["sh", "-c", command, sys.executable, PRINT], check=False).returncode == 75
