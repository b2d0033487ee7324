"""Uploads and resumes with a directory as the store: marks that outlive their checkpoints, names that come again,
access that is denied for a while, and what cannot be read."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.checkpoint.remote import upload_process
from harness.checkpoint.remote.__main__ import LOCK, upload_until_end
from harness.checkpoint.remote.__main__ import main as upload_main
from harness.checkpoint.remote.remote_run import RemoteRun
from harness.checkpoint.remote.uploader import Uploader
from harness.checkpoint.taint_log import Taint, record_taint
from harness.config.compose import read
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, StorageError
from harness.core.locking.file_lock import exclusive
from harness.core.rundir import RunDir
from tests.checkpoint.remote_runs import make_run, remote_of, restore, save, settings, stored, upload
from tests.checkpoint.storage import failing

SMALL = 100
"""Bytes of a file of a checkpoint."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "first", f"file://{tmp_path}/store")


def save_small(run: RunDir, step: int, *, generation: int = 0) -> str:
    """A checkpoint; the run is 30 iterations further after each restore."""
    return save(run, step, generation=generation, iteration=step + 30 * generation, num_files=1, num_bytes=SMALL)


def mark(run: RunDir, name: str, health: Health) -> None:
    catalog.mark(run.checkpoints / name, health, "a test")


def roll_back(run: RunDir, iteration: int, *tainted: str) -> None:
    """What `CheckpointManager.taint_since` leaves, and the log of the rollback."""
    for name in tainted:
        mark(run, name, Health.tainted)
    record_taint(run.checkpoints, Taint(iteration=iteration, generation=0, reason="a test", time=time.time()))
    run.events.write_text('{"event":"run_started"}\n{"event":"outcome"}\n')


def prune(run: RunDir) -> None:
    """What the run does after a save."""
    for each in catalog.select_for_deletion(catalog.list_checkpoints(run.checkpoints), keep=2, keep_every_steps=0):
        catalog.delete(each.path)


def resumed_elsewhere(run: RunDir, tmp_path: Path) -> list[str]:
    """The checkpoints that a resume on another machine has downloaded."""
    elsewhere = RunDir(tmp_path / "elsewhere" / run.path.name)
    restore(elsewhere, settings(run).remote)
    return [each.name for each in catalog.list_checkpoints(elsewhere.checkpoints)]


def while_reading_back(run: RunDir, file: str, action: Callable[[], None]) -> Uploader:
    """An uploader during which something happens once, while it reads a file back."""
    remote, is_done = remote_of(run), list[bool]()
    genuine = remote.store.look_up

    def look_up(path: str) -> object:
        if path.endswith(file) and not is_done:
            is_done.append(True)
            action()
        return genuine(path)

    remote.store.look_up = look_up  # type: ignore[method-assign, assignment]
    return Uploader(run, remote, settings(run))


def test_a_checkpoint_tainted_and_deleted_while_it_is_uploaded_is_never_in_the_store(
    run: RunDir, tmp_path: Path
) -> None:
    good = save_small(run, 10)
    mark(run, good, Health.good)
    upload(run)
    bad = save_small(run, 20)

    def undo() -> None:
        roll_back(run, 10, bad)
        save_small(run, 12, generation=1)
        prune(run)

    lines = while_reading_back(run, f"{bad}/state.json", undo).upload_due()
    assert next(lines) == f"{bad}: tainted while it was uploaded"
    assert resumed_elsewhere(run, tmp_path) == [good], "the machine is lost before the next upload"
    list(lines)
    assert [name for name, _ in stored(run)] == [good, "step-00000012-gen-1"]
    assert list(remote_of(run).list_directories()) == [good, "step-00000012-gen-1"], "what was uploaded is deleted"


def test_a_rollback_during_an_outage_taints_what_the_run_has_deleted_since(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the rollback tainted, and one that the run had deleted before and the store still has."""
    good = save_small(run, 10)
    mark(run, good, Health.good)
    pruned = save_small(run, 20)
    upload(run)
    catalog.delete(run.checkpoints / pruned)
    bad = save_small(run, 25)
    upload(run)
    assert [name for name, _ in stored(run)] == [good, pruned, bad]
    roll_back(run, 10, bad)
    sound = save_small(run, 12, generation=1)
    prune(run)
    assert [each.name for each in catalog.list_checkpoints(run.checkpoints)] == [good, sound]
    monkeypatch.setattr(RemoteRun, "delete_checkpoint", lambda *_: None)  # the machine is lost before
    upload(run)
    tainted = {(pruned, "tainted"), (bad, "tainted")}
    assert {*stored(run)} == {(good, "good"), (sound, "candidate"), *tainted}
    monkeypatch.undo()
    upload(run)
    assert stored(run) == [(good, "good"), (sound, "candidate")]


def test_the_log_of_a_rollback_is_uploaded_after_its_marks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollback happens while the next checkpoint is uploaded."""
    bad = save_small(run, 10)
    upload(run)
    next_one = save_small(run, 20)
    seen: list[list[tuple[str, str]]] = []
    uploader = while_reading_back(run, f"{next_one}/state.json", lambda: roll_back(run, 5, bad, next_one))
    genuine = uploader._remote.store.write

    def write(path: str, content: bytes) -> None:
        genuine(path, content)
        if path == "run.json":
            seen.append(stored(run))

    monkeypatch.setattr(uploader._remote.store, "write", write)
    list(uploader.upload_due())
    assert seen == [[(bad, "tainted")]]


def test_a_sound_checkpoint_with_the_name_of_a_tainted_one_is_not_tainted(run: RunDir, tmp_path: Path) -> None:
    """A run that is killed after a rollback and before its next save reaches the same step in the same generation."""
    good, bad = save_small(run, 10), save_small(run, 20)
    mark(run, good, Health.good)
    upload(run)
    roll_back(run, 10, bad)
    uploader = Uploader(run, remote_of(run), settings(run))
    list(uploader.upload_due(last=True))
    assert stored(run) == [(good, "good")]
    assert list(remote_of(run).list_directories()) == [good], "the mark is deleted with its checkpoint"
    catalog.delete(run.checkpoints / bad)
    save_small(run, 20)
    list(uploader.upload_due(last=True))
    assert stored(run) == [(good, "good"), (bad, "candidate")]
    catalog.delete(run.checkpoints / bad)
    list(uploader.upload_due(last=True))
    assert stored(run) == [(good, "good"), (bad, "candidate")], "it was saved after the rollback"
    assert resumed_elsewhere(run, tmp_path) == [bad]


@pytest.mark.parametrize("health", [Health.good, None])
def test_the_mark_of_a_checkpoint_is_not_sent_to_an_older_one_of_its_name(run: RunDir, health: Health | None) -> None:
    bad = save_small(run, 20)
    mark(run, bad, Health.tainted)
    uploader = Uploader(run, remote_of(run), settings(run))
    shutil.copytree(run.checkpoints / bad, run.path / "copy")
    (run.checkpoints / bad / catalog.HEALTH).unlink()
    list(uploader.upload_due(last=True))
    mark(run, bad, Health.tainted)
    list(uploader._send_healths(remote_of(run).list_directories()))
    assert stored(run) == [(bad, "tainted")], "not deleted yet"
    catalog.delete(run.checkpoints / bad)
    save_small(run, 20)
    if health is not None:
        mark(run, bad, health)
    list(uploader._send_healths(remote_of(run).list_directories()))
    assert stored(run) == [(bad, "tainted")], "the old one is"
    list(uploader.upload_due(last=True))
    assert stored(run) == [(bad, "candidate" if health is None else "good")]


class NoCredentialsError(Exception):
    """As of botocore: "Unable to locate credentials"."""


def deny(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the store deny access."""

    def fail(*_: object, **__: object) -> None:
        raise error

    for name in ("find", "cat_file", "info"):
        monkeypatch.setattr(LocalFileSystem, name, fail)


@pytest.mark.parametrize("error", [PermissionError("The token has expired."), NoCredentialsError("No credentials")])
def test_denied_access_ends_a_first_start_and_is_a_warning_with_a_local_run(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    deny(monkeypatch, error)
    with pytest.raises(ConfigError, match=f"^checkpoint.remote.url: file://.*/first/run.json: .*{error}"):
        restore(RunDir(tmp_path / "elsewhere" / "first"), settings(run).remote)
    restore(run, settings(run).remote)
    (line,) = capsys.readouterr().err.splitlines()
    assert str(error) in line
    assert line.endswith(f"; resuming from {run.path}, uploads wait")


def test_without_a_trainer_denied_access_is_one_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deny(monkeypatch, PermissionError("The token has expired."))
    assert upload_main([str(run.path)]) == EXIT_BAD_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("access denied (The token has expired.)")


def test_denied_access_is_tried_again_once_the_trainer_is_gone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.checkpoint.remote.__main__.FIRST_PAUSE_S", 0.01)
    name, genuine, errors = save_small(run, 10), LocalFileSystem.find, [PermissionError("The token has expired.")]

    def find(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return genuine(*arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "find", find)
    assert upload_until_end(run, read(run.config), trainer=-1) == 0
    assert stored(run) == [(name, "candidate")]


@pytest.mark.full
def test_denied_access_is_a_warning_and_the_upload_process_tries_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(upload_process, "UPLOAD_MODULE", "tests.checkpoint.denied_upload")
    name = save_small(run, 10)
    (run.path / "denied").touch()
    process = upload_process.UploadProcess(run, poll_s=0.1)
    try:
        until_s = time.monotonic() + 60
        warnings = ""
        while warnings.count("trying again in") < 2:
            assert time.monotonic() < until_s, warnings
            time.sleep(0.1)
            warnings += capsys.readouterr().err
        assert "warning: uploads wait: " in warnings
        assert "access denied (The provided token has expired.); trying again in 0 s" in warnings
        assert stored(run) == []
    finally:
        (run.path / "denied").unlink()
        assert process.finish(wait_s=60), (run.logs / upload_process.UPLOAD_LOG).read_text()
    assert stored(run) == [(name, "candidate")]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_failed_read_of_its_id_does_not_make_it_another_run(
    run: RunDir, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    upload(run)
    identity = (run.path / "remote.json").read_bytes()
    name = save_small(run, 10)
    uploader = Uploader(run, remote_of(run), settings(run))
    with failing("remote.json", times=2, code=code):
        with pytest.raises(StorageError, match=r"remote\.json: cannot be read on .*"):
            list(uploader.upload_due())
        restore(run, settings(run).remote)
    assert f"{os.strerror(code)}; resuming from {run.path}" in capsys.readouterr().err
    list(uploader.upload_due())
    assert stored(run) == [(name, "candidate")]
    assert (run.path / "remote.json").read_bytes() == identity
    (run.path / "remote.json").write_text("{")
    with pytest.raises(StorageError, match=r"remote\.json: is damaged; write"):
        upload(run)
    assert (run.path / "remote.json").read_text() == "{"


def test_a_damaged_manifest_in_the_store_does_not_stop_a_local_run(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.events.write_text('{"event":"run_started","time":0,"iteration":20,"world_size":1,"num_steps":9,"step":20}\n')
    older, newer = save_small(run, 10), save_small(run, 20)
    upload(run)
    manifest = tmp_path / "store" / "first" / "checkpoints" / newer / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    restore(run, settings(run).remote)
    assert f"{newer}/manifest.json: is not a manifest" in capsys.readouterr().err
    run.events.write_text('{"event":"run_started","time":0,"iteration":5,"world_size":1,"num_steps":9,"step":5}\n')
    with pytest.raises(ConfigError, match="is at iteration 10"):
        restore(run, settings(run).remote)
    assert resumed_elsewhere(run, tmp_path) == [older]
    upload(run)
    remote_of(run).verify_checkpoint(newer)


def test_a_download_is_on_disk_before_it_is_published(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save_small(run, 10)
    mark(run, name, Health.good)
    upload(run)
    target, synced, fsync = tmp_path / "elsewhere" / "first" / "checkpoints" / name, set[str](), os.fsync

    def record(descriptor: int) -> None:
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not target.exists() and file.is_file():
            synced.add(file.name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    assert resumed_elsewhere(run, tmp_path) == [name]
    assert {file.name for file in target.iterdir()} <= synced


def test_an_upload_that_waits_for_another_says_so_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    name, printed = save_small(run, 10), ""
    with ThreadPoolExecutor(1) as pool:
        with exclusive(run.path / LOCK, keep_trying=lambda: False) as lock:
            assert lock is not None
            code = pool.submit(upload_main, [str(run.path)])
            until_s = time.monotonic() + 60
            while "waiting for the process that uploads" not in printed:
                assert time.monotonic() < until_s
                time.sleep(0.05)
                printed += capsys.readouterr().err
            assert printed.rstrip().endswith(str(run.logs / upload_process.UPLOAD_LOG))
            time.sleep(1.1)  # two more attempts
            assert stored(run) == []
        assert code.result(timeout=60) == EXIT_DONE
    assert "waiting" not in capsys.readouterr().err
    assert stored(run) == [(name, "candidate")]


@pytest.mark.parametrize("is_link", [True, False])
def test_a_renamed_directory_or_a_link_to_it_is_uploaded_to_the_place_of_its_run(run: RunDir, is_link: bool) -> None:
    first, remote = save_small(run, 10), remote_of(run)
    assert upload_main([str(run.path)]) == EXIT_DONE
    second = save_small(run, 20)
    other = run.path.with_name("other")
    if is_link:
        other.symlink_to(run.path)
    else:
        run.path.rename(other)
    assert upload_main([str(other)]) == EXIT_DONE
    assert [each.name for each in remote.list_checkpoints()] == [first, second]
    assert [path.name for path in (run.path.parents[1] / "store").iterdir()] == ["first"]
