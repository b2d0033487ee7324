"""Checkpoints in real S3 and GCS servers: verified, complete or absent, pruned, caught up after a server has failed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.checkpoint.integrity import Damaged
from harness.checkpoint.remote.__main__ import upload_until_end
from harness.checkpoint.remote.upload_process import UPLOAD_LOG, UploadProcess
from harness.checkpoint.remote.uploader import PINNED, Uploader
from harness.config.compose import read
from harness.config.errors import ConfigError, StorageError
from harness.core import processes
from harness.core.object_store import ObjectStore
from harness.core.rundir import RunDir
from tests.checkpoint.remote_runs import (
    FILE_BYTES,
    make_run,
    remote_of,
    restore,
    save,
    settings,
    stored,
    upload,
)
from tests.object_stores import BUCKET, StoreServer, ignore_open_connections, s3_only, server_fixture

pytestmark = [pytest.mark.full, ignore_open_connections]

server = server_fixture()


@pytest.fixture
def run(server: StoreServer, tmp_path: Path) -> RunDir:
    """Its name is unique, and so is its place in the store."""
    return make_run(tmp_path / tmp_path.name, server.url("runs"))


def test_what_is_uploaded_comes_back_bit_for_bit(server: StoreServer, run: RunDir, tmp_path: Path) -> None:
    first, second = save(run, 10), save(run, 20)
    catalog.mark(run.checkpoints / first, Health.good, "clean")
    lines = upload(run)
    assert stored(run) == [(first, "good"), (second, "candidate")]
    assert [line.partition(":")[0] for line in lines] == [second, first], "the newest comes first"
    assert not list(run.checkpoints.glob(f"{PINNED}*"))

    elsewhere = RunDir(tmp_path / "elsewhere" / run.path.name)
    restore(elsewhere, settings(run).remote)
    assert [each.name for each in catalog.list_checkpoints(elsewhere.checkpoints)] == [second]
    for file in (run.checkpoints / second).iterdir():
        assert (elsewhere.checkpoints / second / file.name).read_bytes() == file.read_bytes()
    assert elsewhere.config.read_bytes() == run.config.read_bytes()
    assert elsewhere.events.read_text() == '{"event":"run_started"}\n{"event":"step"}\n', "without the incomplete line"
    system = server.system()
    assert upload(run) == []
    assert len(system.find(f"{BUCKET}/runs/{run.path.name}/files")) == len(
        set(map(Path.read_bytes, files_of(elsewhere)))
    )


def files_of(run: RunDir) -> list[Path]:
    return [
        path for path in run.path.iterdir() if path.is_file() and path.name != "remote.json" and path.stat().st_size
    ]


def test_retention_and_health_follow_the_run(run: RunDir) -> None:
    names = [save(run, 10)]
    upload(run)
    names += [save(run, step) for step in (20, 30, 40)]
    catalog.mark(run.checkpoints / names[1], Health.good, "clean")
    upload(run)
    assert stored(run) == [(names[1], "good"), (names[2], "candidate"), (names[3], "candidate")]
    catalog.mark(run.checkpoints / names[3], Health.tainted, "incident")
    shutil.rmtree(run.checkpoints / names[2])  # pruned by the run; the store keeps its copy
    upload(run)
    assert stored(run) == [(names[1], "good"), (names[2], "candidate")]


@s3_only
def test_a_tainted_checkpoint_is_not_what_a_resume_takes(run: RunDir, tmp_path: Path) -> None:
    first, second = save(run, 10), save(run, 20)
    upload(run)
    catalog.mark(run.checkpoints / second, Health.tainted, "incident")
    list(Uploader(run, remote_of(run), settings(run))._send_healths(remote_of(run).list_directories()))
    elsewhere = RunDir(tmp_path / "elsewhere" / run.path.name)
    restore(elsewhere, settings(run).remote)
    assert [each.name for each in catalog.list_checkpoints(elsewhere.checkpoints)] == [first]


def test_damage_in_the_store_is_found_and_an_older_checkpoint_is_taken(
    server: StoreServer, run: RunDir, tmp_path: Path
) -> None:
    first, second = save(run, 10), save(run, 20)
    upload(run)
    place = f"{BUCKET}/runs/{run.path.name}/checkpoints/{second}/__1_0.distcp"
    content = bytearray(server.system().cat_file(place))
    content[12345] ^= 1
    server.system().pipe_file(place, bytes(content))
    with pytest.raises(Damaged, match=r"__1_0\.distcp: its content is not what was saved"):
        remote_of(run).verify_checkpoint(second)
    remote_of(run).verify_checkpoint(first)
    elsewhere = RunDir(tmp_path / "elsewhere" / run.path.name)
    restore(elsewhere, settings(run).remote)
    assert [each.name for each in catalog.list_checkpoints(elsewhere.checkpoints)] == [first]


@s3_only
def test_a_download_that_was_cut_off_is_continued(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every request: the next start takes what is there and whole, and ends with the same files."""
    name = save(run, 10, num_files=1)
    upload(run)
    elsewhere = RunDir(tmp_path / "elsewhere" / run.path.name)
    genuine, left = ObjectStore._repeat, [0]

    def repeat(store: ObjectStore, attempt: Callable[[], Any], path: str) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise StorageError(errno.EIO, "does not answer", store.url)
        return genuine(store, attempt, path)

    monkeypatch.setattr(ObjectStore, "_repeat", repeat)
    num_after_checkpoint = 0
    for number in count():
        left[0] = number
        try:
            restore(elsewhere, settings(run).remote)
        except StorageError:
            if (elsewhere.checkpoints / name).exists():
                num_after_checkpoint += 1
                damaged = elsewhere.checkpoints / name / "state.json"
                damaged.write_bytes(damaged.read_bytes()[:-1] + b"x" * (num_after_checkpoint % 2))
        else:
            break
    assert num_after_checkpoint > 1
    monkeypatch.undo()
    assert {path.name for path in elsewhere.checkpoints.iterdir()} == {name}
    for file in (run.checkpoints / name).iterdir():
        assert (elsewhere.checkpoints / name / file.name).read_bytes() == file.read_bytes()
    assert elsewhere.config.read_bytes() == run.config.read_bytes()


@s3_only
def test_two_starts_do_not_download_at_once(run: RunDir, tmp_path: Path) -> None:
    save(run, 10)
    upload(run)
    elsewhere = RunDir(tmp_path / "elsewhere" / run.path.name)
    script = "import sys; from pathlib import Path; from harness.core.locking import run_lease\n"
    script += "run_lease.hold(Path(sys.argv[1]), 60.0); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(elsewhere.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ConfigError, match=f"in use by .*pid {other.pid}"):
                restore(elsewhere, settings(run).remote)
            assert not elsewhere.checkpoints.exists()
        finally:
            other.stdin.close()
    restore(elsewhere, settings(run).remote)
    assert elsewhere.config.read_bytes() == run.config.read_bytes()


def test_a_run_lost_before_its_first_upload_starts_over_and_is_uploaded(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(run)
    elsewhere = RunDir(tmp_path / "elsewhere" / run.path.name)
    restore(elsewhere, settings(run).remote)
    assert "has no usable checkpoint; the run starts over" in capsys.readouterr().err
    shutil.copytree(run.path, elsewhere.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("remote.json"))
    name = save(elsewhere, 10)
    upload(elsewhere)
    assert stored(elsewhere) == [(name, "candidate")]
    with pytest.raises(ConfigError, match="holds another run"):
        upload(run)


def pid_of(process: UploadProcess) -> int | None:
    return None if process._process is None else process._process.pid


@s3_only
def test_an_upload_process_that_dies_starts_again_and_one_with_wrong_settings_does_not(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run.logs / UPLOAD_LOG
    process = UploadProcess(run, poll_s=0.1)
    try:
        first = pid_of(process)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: pid_of(process) not in (None, first), log)
        name = save(run, 10)
        wait_for(lambda: stored(run) == [(name, "candidate")], log)
    finally:
        assert process.finish(wait_s=120), log.read_text()
    assert "the upload process ended with -9, it starts again" in capsys.readouterr().err
    (run.path / "remote.json").write_text('{"id": "0123"}')
    process = UploadProcess(run, poll_s=0.1)
    wait_for(lambda: not process._watcher.is_alive(), log)
    assert not process.finish(wait_s=120)
    assert "checkpoints are not uploaded: " in (warnings := capsys.readouterr().err)
    assert "holds another run" in warnings


@s3_only
def test_a_damaged_local_checkpoint_is_not_uploaded(run: RunDir) -> None:
    name = save(run, 10)
    file = run.checkpoints / name / "__0_0.distcp"
    file.write_bytes(bytes(FILE_BYTES))
    (line,) = upload(run)
    assert f"{name}: not uploaded" in line
    assert stored(run) == []


def start_process(run: RunDir, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            processes.command("harness.checkpoint.remote", str(run.path)),
            env=processes.child_environment(),
            stdout=output,
            stderr=output,
        )


def test_an_uploader_killed_in_the_middle_leaves_no_checkpoint(
    server: StoreServer, run: RunDir, tmp_path: Path
) -> None:
    name = save(run, 10, num_files=8)
    log = tmp_path / "upload.log"
    server.relay.cut_after = server.relay.num_bytes + 5 * FILE_BYTES
    process = start_process(run, log)
    try:
        wait_for(lambda: "does not answer" in log.read_text(), log)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        server.relay.up()
    directories = remote_of(run).list_directories()
    assert 0 < len(directories[name]) < 10, "some files of the checkpoint are in the store"
    assert stored(run) == []
    elsewhere = RunDir(tmp_path / "elsewhere" / run.path.name)
    restore(elsewhere, settings(run).remote)
    assert not elsewhere.path.exists()

    catalog.delete(run.checkpoints / name)
    newer = save(run, 20)
    process = start_process(run, log)
    assert process.wait(timeout=120) == 0, log.read_text()
    assert list(remote_of(run).list_directories()) == [newer], "the incomplete one is deleted"
    remote_of(run).verify_checkpoint(newer)


def wait_for(condition: object, log: Path) -> None:
    assert callable(condition)
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)


def test_a_failure_of_the_store_is_survived_and_caught_up(server: StoreServer, run: RunDir, tmp_path: Path) -> None:
    save(run, 10)
    log = tmp_path / "upload.log"
    server.relay.down()
    process = start_process(run, log)
    try:
        wait_for(lambda: "does not answer" in log.read_text(), log)
        newest = save(run, 20)
    finally:
        server.relay.up()
    assert process.wait(timeout=120) == 0, log.read_text()
    assert stored(run)[-1] == (newest, "candidate")
    assert "the store answers again" in log.read_text()


@s3_only
def test_an_upload_survives_that_the_run_deletes_the_checkpoint(run: RunDir) -> None:
    name = save(run, 10)
    remote = remote_of(run)
    genuine, deleted = remote.store.upload, list[bool]()

    def delete_first(local: Path, path: str) -> None:
        deleted.append(catalog.delete(run.checkpoints / name))
        genuine(local, path)

    remote.store.upload = delete_first  # type: ignore[method-assign]
    list(Uploader(run, remote, settings(run)).upload_due(last=True))
    assert sum(deleted) == 1
    remote_of(run).verify_checkpoint(name)


@s3_only
def test_a_store_that_has_gone_on_elsewhere_or_holds_another_run_is_rejected(run: RunDir, tmp_path: Path) -> None:
    save(run, 10)
    upload(run)
    run.events.write_text('{"event":"run_started","time":0,"iteration":5,"world_size":1,"num_steps":9}\n')
    with pytest.raises(ConfigError, match="is at iteration 10"):
        restore(run, settings(run).remote)
    other = RunDir(tmp_path / "other" / run.path.name)
    shutil.copytree(run.path, other.path)
    (other.path / "remote.json").write_text('{"id": "0123"}')
    with pytest.raises(ConfigError, match="hold different runs"):
        restore(other, settings(run).remote)
    with pytest.raises(ConfigError, match="holds another run"):
        upload(other)


def test_a_bucket_that_does_not_exist_is_one_line(
    server: StoreServer, run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start of a run, and if it was deleted since."""
    save(run, 10)
    cfg = read(run.config)
    remote = cfg.checkpoint.remote
    remote.url = f"{server.protocol}://no-such-bucket/runs"
    message = f"{remote.url}/{run.path.name}: there is no bucket no-such-bucket; create it, or choose another"
    for directory in (run, RunDir(tmp_path / "none" / run.path.name)):
        with pytest.raises(ConfigError, match=message):
            restore(directory, remote)
    with pytest.raises(ConfigError, match=message):
        upload_until_end(run, cfg, trainer=None)
    assert "deleted before it was uploaded" not in capsys.readouterr().err


def test_without_the_store_a_local_run_goes_on_and_a_new_machine_waits(
    server: StoreServer, run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = settings(run).remote
    cfg.retry_s = 1.0
    server.relay.down()
    try:
        restore(run, cfg)
        assert "uploads wait" in capsys.readouterr().err
        with pytest.raises(StorageError, match="does not answer"):
            restore(RunDir(tmp_path / "none" / run.path.name), cfg)
        fast = read(run.config)
        fast.checkpoint.remote.exit_wait_s = 1.0
        assert upload_until_end(run, fast, trainer=None) == 75
    finally:
        server.relay.up()
