"""Open files of node 0."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from launch.local.file_limit import files_needed, warn_about_files

RAISED = """
import resource
from launch.local.file_limit import raise_file_limit
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
assert raise_file_limit(60) == 64
assert raise_file_limit(128) == 128
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (128, most)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
assert raise_file_limit(1000) == 256
"""


def test_the_soft_limit_is_raised_as_far_as_needed() -> None:
    subprocess.run([sys.executable, "-c", RAISED], check=True)


def test_a_limit_that_is_too_low_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert files_needed(2048, 8) == 2048 + 2048 + 16384 + 100
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        pytest.skip("open files are not limited here")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        warn_about_files(most, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    assert capsys.readouterr().err == (
        f"harness: warning: node 0 needs about {10 * most + 100} open files for {8 * most} ranks, and may have {most}; "
        "raise `ulimit -Hn`\n"
    )
    warn_about_files(2, 8)
    assert capsys.readouterr().err == ""
