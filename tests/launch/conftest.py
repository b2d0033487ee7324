"""Fixtures for the tests of the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def fake_slurm_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory for fake `scontrol`, `squeue`, `sbatch` and `scancel`; by default they fail."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scontrol", "squeue", "sbatch", "scancel"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return folder
