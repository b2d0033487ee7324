"""Output streams that cannot fail."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core.safe_stream import SafeStream
from tests.full_disk import fill, may_mount, small_disk

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


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
@pytest.mark.parametrize("line_buffering", [False, True], ids=["stdout", "stderr"])
def test_output_goes_on_once_a_full_disk_has_room(tmp_path: Path, line_buffering: bool) -> None:
    """Each line whole, none twice, and a mark where some are missing."""
    with small_disk(tmp_path / "disk") as disk, (disk / "out").open("w", buffering=1 if line_buffering else -1) as out:
        stream = SafeStream(SafeStream(out))  # type: ignore[arg-type]
        stream.write("before\n")
        stream.flush()
        for first in (0, 9000):
            fill(disk)
            for number in range(first, first + 3000):
                stream.write(f"line {number}\n")
                stream.flush()
            (disk / "fill").unlink()
            stream.write(f"after {first}\n")
            stream.flush()
        lines = (disk / "out").read_text().splitlines()
    mark = "[output may be missing here: No space left on device]"
    assert [line for line in lines if not line.startswith("line")] == ["before", mark, "after 0", mark, "after 9000"]
    numbers = [int(line.removeprefix("line ")) for line in lines if line.startswith("line")]
    assert numbers == sorted(set(numbers))
    assert {0, 9000} <= set(numbers)
