"""Where compiled kernels are kept. `tests/analysis/replay/test_rerun.py` finds those of a run there."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from harness.distributed.compile_cache import DIRECTORY, VARIABLES, compile_cache, compiles
from tests.composed import load


@pytest.fixture(autouse=True)
def _not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name)


def found() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def test_kernels_are_kept_beside_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with compile_cache(Path("runs"), enabled=True) as obstacle:
        assert obstacle == ""
        assert found() == {name: f"{tmp_path}/runs/{DIRECTORY}/{folder}" for name, folder in VARIABLES.items()}
    assert found() == {}


def test_a_directory_of_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    with compile_cache(tmp_path, enabled=True):
        assert found()["TRITON_CACHE_DIR"] == "/mine"
        assert found()["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    assert found() == {"TRITON_CACHE_DIR": "/mine"}


def test_a_run_that_compiles_nothing_creates_nothing(tmp_path: Path) -> None:
    with compile_cache(tmp_path, enabled=False) as obstacle:
        assert (obstacle, found()) == ("", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("compile_blocks", "device", "expected"),
    [("false", "cpu", False), ("true", "cpu", True), ("false", "cuda", True)],
)
def test_what_compiles(compile_blocks: str, device: str, expected: bool) -> None:
    cfg = load([f"parallel.compile={compile_blocks}"]).parallel
    assert compiles(cfg, torch.device(device)) is expected


def test_without_a_writable_directory_torch_chooses(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with compile_cache(tmp_path / "runs", enabled=True) as obstacle:
        assert obstacle == f"{tmp_path}/runs/{DIRECTORY}: Not a directory"
        assert found() == {}


def test_without_file_locks_torch_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor fails in a directory without locks."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    with compile_cache(tmp_path, enabled=True) as obstacle:
        assert obstacle == f"{tmp_path}/{DIRECTORY}: Function not implemented"
        assert found() == {}
