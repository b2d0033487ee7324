"""What several tests of the launcher use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test writes its own `scontrol`, `squeue` and `sbatch`; until then they fail."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scontrol", "squeue", "sbatch"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return folder
