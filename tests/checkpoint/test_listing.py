"""One row per checkpoint, from its name, manifest and files, and the rendered table."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import Health, name_of
from harness.checkpoint.integrity import MANIFEST, Manifest
from harness.checkpoint.listing import (
    CheckpointRow,
    age_text,
    bytes_of,
    checkpoint_row,
    checkpoint_rows,
    render,
    size_text,
)
from harness.config.errors import StorageError

SHARD = "__0_0.distcp"
SAVED_S = 1.5e9


def save(root: Path, step: int, generation: int = 0) -> Path:
    """A checkpoint with one file of 2,000 bytes."""
    path = root / name_of(step, generation)
    path.mkdir()
    (path / SHARD).write_bytes(bytes(2000))
    manifest = Manifest(
        step=step,
        generation=generation,
        iteration=step,
        tokens=1000 * step,
        time=SAVED_S,
        world_size=1,
        files=integrity.hash_files(path, [SHARD]),
    )
    integrity.write_checkpoint_manifest(path, manifest)
    return path


def test_row_combines_name_manifest_and_file_sizes(tmp_path: Path) -> None:
    newest, good, quarantined = save(tmp_path, 15, 1), save(tmp_path, 20), catalog.quarantine(save(tmp_path, 30))
    catalog.mark(good, Health.good, "a test")
    (newest / MANIFEST).unlink()
    os.utime(newest, (7.0, 7.0))
    assert checkpoint_rows(tmp_path) == [
        CheckpointRow(
            name=good.name,
            step=20,
            generation=0,
            health="good",
            time=SAVED_S,
            bytes=2000 + (good / MANIFEST).stat().st_size + (good / catalog.HEALTH).stat().st_size,
            tokens=20_000,
            problem=None,
        ),
        CheckpointRow(
            name=newest.name,
            step=15,
            generation=1,
            health="candidate",
            time=7.0,
            bytes=2000,
            tokens=None,
            problem="manifest.json: is missing",
        ),
        CheckpointRow(
            name=quarantined.name,
            step=30,
            generation=0,
            health="damaged",
            time=SAVED_S,
            bytes=2000 + (quarantined / MANIFEST).stat().st_size,
            tokens=30_000,
            problem=None,
        ),
    ]


def test_unreadable_checkpoint_has_a_row_and_deleted_one_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bytes_of(tmp_path / "gone") == 0
    assert checkpoint_row(tmp_path / name_of(10, 0), "good") is None
    path = save(tmp_path, 20)

    def broken(*_: object, **__: object) -> None:
        raise StorageError(errno.EIO, "cannot be read", str(path))

    monkeypatch.setattr(integrity, "read_manifest", broken)
    monkeypatch.setattr(Path, "stat", broken)
    row = checkpoint_row(path, "unread")
    assert row is not None
    assert (row.time, row.tokens, row.problem) == (0.0, None, f"{path}: cannot be read")


def test_rendered_table_is_unchanged() -> None:
    rows = [
        CheckpointRow(
            name="step-00000100-gen-0",
            step=100,
            generation=0,
            health="good",
            time=0,
            bytes=15_300_000_000,
            tokens=123_456,
            problem=None,
        ),
        CheckpointRow(
            name="step-00000200-gen-1.damaged",
            step=200,
            generation=1,
            health="damaged",
            time=7000,
            bytes=12,
            tokens=None,
            problem="manifest.json: is missing",
        ),
    ]
    assert render(rows, now_s=7200).splitlines() == [
        "name                         step  generation  health     age     size   tokens",
        "step-00000100-gen-0           100           0  good       2 h  15.3 GB  123,456",
        "step-00000200-gen-1.damaged   200           1  damaged  3 min     12 B        -  manifest.json: is missing",
    ]


def test_size_and_age_texts() -> None:
    texts = [size_text(number) for number in (0, 999, 1000, 1_949_999, 10**9, 10**12, 25 * 10**11)]
    assert texts == ["0 B", "999 B", "1.0 kB", "1.9 MB", "1.0 GB", "1.0 TB", "2.5 TB"]
    texts = [age_text(number) for number in (-5, 0, 119, 120, 7199, 7200, 172_799, 172_800)]
    assert texts == ["0 s", "0 s", "119 s", "2 min", "120 min", "2 h", "48 h", "2 d"]
