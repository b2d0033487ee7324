"""A manifest detects every kind of damage and names the file.

I/O errors and other versions are not damage. No input leads to a traceback.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checkpoint import integrity
from harness.checkpoint.integrity import (
    MANIFEST,
    VERSION,
    Damaged,
    Entry,
    Manifest,
    OtherVersion,
    hash_file,
    hash_files,
    read_manifest,
    verify,
    write_checkpoint_manifest,
)
from harness.config.errors import ConfigError, StorageError

CONTENTS = {
    ".metadata": b"not really a pickle",
    "__0_0.distcp": bytes(range(256)) * 64,
    "__1_0.distcp": b"\x7f" * 9000,
    "__2_0.distcp": b"",
    "state.json": b'{"step": 7}',
}
DATA = "__0_0.distcp"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def intact(tmp_path: Path) -> Path:
    """An intact checkpoint."""
    return make(tmp_path / "step-00000007-gen-1")


def make(directory: Path) -> Path:
    directory.mkdir()
    for name, content in CONTENTS.items():
        (directory / name).write_bytes(content)
    write_checkpoint_manifest(directory, manifest_of(hash_files(directory, CONTENTS)))
    return directory


def manifest_of(files: dict[str, Entry]) -> Manifest:
    return Manifest(
        step=7,
        generation=1,
        iteration=9,
        tokens=1234,
        time=1.5e9,
        world_size=3,
        files=files,
        rollback={"steps_at_most": 20.5, "minutes_at_most": None},
    )


def forge(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and recompute its own hash, as a bug or an attacker might."""
    content = json.loads((directory / MANIFEST).read_text())
    del content["sha256"]
    change(content)
    sign(directory, content)


def sign(directory: Path, content: dict[str, Any]) -> None:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (directory / MANIFEST).write_text(json.dumps(content | {"sha256": digest}))


def damage_of(directory: Path) -> Damaged:
    with pytest.raises(Damaged) as caught:
        verify(directory)
    assert str(caught.value) == f"{caught.value.path}: {caught.value.problem}"
    assert "\n" not in str(caught.value)
    assert caught.value.path.parent == directory
    return caught.value


def rejection_of(directory: Path) -> OtherVersion:
    """The error for a checkpoint whose hash matches: one line, and not damage."""
    with pytest.raises(OtherVersion) as caught:
        verify(directory)
    assert "\n" not in str(caught.value)
    assert "nothing was changed" in str(caught.value)
    assert caught.value.path == directory / MANIFEST
    return caught.value


def damage_in(read: Callable[[], Manifest]) -> Damaged | None:
    try:
        read()
    except Damaged as damage:
        return damage
    return None


def test_intact_checkpoint_verifies(intact: Path) -> None:
    manifest = verify(intact)
    assert manifest == manifest_of(manifest.files)
    assert manifest.bytes == sum(len(content) for content in CONTENTS.values())
    assert manifest.files == {
        name: Entry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in CONTENTS.items()
    }


def test_files_written_later_are_not_damage(intact: Path) -> None:
    (intact / "health.json").write_text("{}")
    verify(intact)


@pytest.mark.parametrize("name", [name for name, content in CONTENTS.items() if content])
def test_flipped_bit_is_found_anywhere(intact: Path, name: str) -> None:
    content = CONTENTS[name]
    for position in {0, len(content) // 2, len(content) - 1}:
        for bit in (0, 7):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            (intact / name).write_bytes(flipped)
            assert damage_of(intact).path == intact / name
            assert "sha256 differs" in damage_of(intact).problem
    (intact / name).write_bytes(content)
    verify(intact)


def test_a_hole_of_zeros_is_found(intact: Path) -> None:
    with (intact / DATA).open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))
    assert damage_of(intact).path == intact / DATA


@pytest.mark.parametrize("num_bytes", [0, 1, len(CONTENTS[DATA]) - 1, len(CONTENTS[DATA]) + 1, 10**6])
def test_truncated_or_longer_file_is_found(intact: Path, num_bytes: int) -> None:
    os.truncate(intact / DATA, num_bytes)
    damage = damage_of(intact)
    assert damage.path == intact / DATA
    assert damage.problem == f"has {num_bytes:,} bytes, {len(CONTENTS[DATA]):,} were saved"


@pytest.mark.parametrize("name", CONTENTS)
def test_a_missing_file_is_found(intact: Path, name: str) -> None:
    (intact / name).unlink()
    assert str(damage_of(intact)) == f"{intact / name}: is missing"


def test_a_directory_in_the_place_of_a_file_is_found(intact: Path) -> None:
    (intact / DATA).unlink()
    (intact / DATA).mkdir()
    assert damage_of(intact).path == intact / DATA


@pytest.mark.parametrize("name", [*CONTENTS, MANIFEST])
def test_link_is_damage_even_if_its_target_matches(intact: Path, name: str, tmp_path: Path) -> None:
    (intact / name).rename(tmp_path / "elsewhere")
    (intact / name).symlink_to(tmp_path / "elsewhere")
    assert str(damage_of(intact)) == f"{intact / name}: is a link; a checkpoint contains regular files only"


@pytest.mark.parametrize("name", [DATA, MANIFEST])
@pytest.mark.timeout(20)
def test_named_pipe_does_not_block(intact: Path, name: str) -> None:
    (intact / name).unlink()
    os.mkfifo(intact / name)
    assert damage_of(intact).path == intact / name


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
def test_io_error_is_not_damage_and_names_file_and_host(
    intact: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Entry:
        raise OSError(code, os.strerror(code))

    monkeypatch.chdir(intact.parent)
    monkeypatch.setattr(integrity, "hash_file", broken)
    with pytest.raises(StorageError) as caught:
        verify(Path(intact.name))
    assert str(caught.value) == (
        f"{intact.name}/.metadata: cannot be read on {socket.gethostname()}: {os.strerror(code)}"
    )
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.errno, str(copy)) == (StorageError, code, str(caught.value))


def broken_read(*_: object) -> Entry:
    raise OSError(5, os.strerror(5))


@pytest.mark.parametrize("name", [MANIFEST, DATA])
def test_permission_error_is_not_damage(intact: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def deny(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == name:
            raise PermissionError(13, os.strerror(13), str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(StorageError, match=rf"{name}: cannot be read on .*: Permission denied"):
        verify(intact)


def test_hash_that_matches_on_the_second_read_is_not_damage(intact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that flipped during the read is not flipped on disk."""
    looks: list[Path] = []

    def garbled_once(path: Path, _progress: object = None) -> Entry:
        looks.append(path)
        return replace(hash_file(path), sha256="0" * 64) if looks.count(path) == 1 else hash_file(path)

    monkeypatch.setattr(integrity, "hash_file", garbled_once)
    verify(intact)
    assert sorted(looks) == sorted([intact / name for name in CONTENTS] * 2)


def test_manifest_that_is_valid_on_the_second_read_is_not_damage(intact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, texts = Path.read_text, ["{", None]

    def garbled_once(self: Path, *arguments: Any, **options: Any) -> str:
        return texts.pop(0) or read(self, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", garbled_once)
    assert read_manifest(intact).step == 7
    assert not texts


def test_second_read_bypasses_the_page_cache(intact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, ...]] = []
    descriptors = Path("/proc/self/fd")
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, *arguments: advised.append(arguments))
    num_open = len(list(descriptors.iterdir()))
    verify(intact)
    assert not advised
    for name in (DATA, MANIFEST):
        (intact / name).write_bytes(bytes((intact / name).stat().st_size))
        assert damage_of(intact).path == intact / name
        assert advised == [(0, 0, os.POSIX_FADV_DONTNEED)], "once, and the whole file"
        advised.clear()
    assert len(list(descriptors.iterdir())) == num_open


def test_error_without_errno_becomes_eio() -> None:
    error = integrity.storage_error(Path("a"), OSError("it broke"))
    assert (error.errno, str(error)) == (errno.EIO, f"a: cannot be read on {socket.gethostname()}: it broke")


def test_a_file_is_missing_only_beside_others_without_it(tmp_path: Path) -> None:
    def kind(path: Path) -> type[Exception]:
        return type(integrity._missing(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))))

    (tmp_path / "empty").mkdir()
    (tmp_path / "here").touch()
    kinds = [kind(tmp_path / name) for name in ("lost", "here", "empty/lost", "gone/lost")]
    assert kinds == [Damaged, StorageError, StorageError, StorageError], "the storage may have been away for a moment"


def test_file_removed_during_verification_is_missing(intact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(path: Path, _progress: object = None) -> Entry:
        path.unlink(missing_ok=True)
        return hash_file(path)

    monkeypatch.setattr(integrity, "hash_file", vanish)
    assert damage_of(intact).problem == "is missing"


def test_given_manifest_is_not_read_again(intact: Path) -> None:
    manifest = read_manifest(intact)
    (intact / MANIFEST).unlink()
    assert verify(intact, manifest=manifest) is manifest


def test_a_missing_manifest_is_damage(intact: Path) -> None:
    (intact / MANIFEST).unlink()
    assert str(damage_of(intact)) == f"{intact / MANIFEST}: is missing"
    (intact / MANIFEST).mkdir()
    assert damage_of(intact).path == intact / MANIFEST


def test_missing_or_empty_directory_is_a_storage_error(intact: Path) -> None:
    manifest = read_manifest(intact)
    intact.rename(intact.with_name("elsewhere"))
    for _ in range(2):
        for known in (None, manifest):
            with pytest.raises(StorageError):
                verify(intact, manifest=known)
        intact.mkdir(exist_ok=True)
    shutil.rmtree(intact)


def test_every_flipped_byte_of_a_manifest_is_found_or_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    write_checkpoint_manifest(tmp_path, manifest_of(hash_files(tmp_path, ["a"])))
    path, original = tmp_path / MANIFEST, read_manifest(tmp_path)
    content = path.read_bytes()
    num_damaged, num_tried = 0, 0
    for position, byte in enumerate(content):
        for other in {byte ^ 1 << position % 8, byte ^ 0xFF, 0, ord("0"), ord(" ")} - {byte}:
            with path.open("r+b") as file:  # a file that is cut and written again may wait for the disk
                file.write(content[:position] + bytes([other]) + content[position + 1 :])
            damage = damage_in(partial(read_manifest, tmp_path))
            assert path == damage.path if damage else read_manifest(tmp_path) == original
            num_damaged, num_tried = num_damaged + (damage is not None), num_tried + 1
    assert num_damaged > 0.9 * num_tried
    path.write_bytes(content)
    for length in reversed(range(len(content))):
        os.truncate(path, length)
        assert damage_in(partial(read_manifest, tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "a\0b",
        "a\n",
        " a",
        "..a",
        "-rf",
        "\ud800",
        "manifest.json",
        "x" * 300,
    ],
)
def test_file_name_outside_the_directory_is_rejected(intact: Path, name: str) -> None:
    outside = intact.parent / "x"
    outside.write_bytes(b"outside")
    forge(intact, lambda content: content["files"].update({name: {"bytes": 7, "sha256": hash_file(outside).sha256}}))
    with pytest.raises((OtherVersion, StorageError, Damaged)) as caught:  # a name may be too long for the file system
        verify(intact)
    assert name == "x" * 300 or caught.type is OtherVersion


@pytest.mark.parametrize("version", [0, 2, None, "1", True, 1.0, [1], {"1": 1}, 10**400])
def test_other_version_is_rejected_and_is_not_damage(intact: Path, version: Any) -> None:
    forge(intact, lambda content: content.update(version=version))
    assert f"it has version {str(version)[:20]!r}, this program reads 1" in str(rejection_of(intact))


def test_unknown_field_is_rejected_by_name(intact: Path) -> None:
    forge(intact, lambda content: content.update(compression="zstd"))
    rejection = rejection_of(intact)
    assert "compression" in str(rejection)
    assert isinstance(rejection, ConfigError), "which a command answers with one line and exit code 2"
    copy = pickle.loads(pickle.dumps(rejection))
    assert (type(copy), str(copy)) == (OtherVersion, str(rejection))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "7",
        '"manifest"',
        "[]",
        "{}",
        '{"sha256": null}',
        "NaN",
        "{" * 10,
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 10_000,
        '{"sha256": "' + "0" * 64 + '"}',
        "\x00" * 4096,
        "\ufeff{}",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_invalid_manifest_is_damage(intact: Path, text: str) -> None:
    (intact / MANIFEST).write_text(text)
    assert damage_of(intact).path == intact / MANIFEST


def test_manifest_that_is_not_utf8_is_damage(intact: Path) -> None:
    (intact / MANIFEST).write_bytes(b"\xff\xfe" * 100)
    assert damage_of(intact).path == intact / MANIFEST


ODD: list[Any] = [None, True, "7", -1, 7.5, [], {}, 10**30, "x\ny"]


@pytest.mark.parametrize("key", ["step", "generation", "iteration", "tokens", "world_size"])
@pytest.mark.parametrize("value", [value for value in ODD if value != 10**30], ids=repr)
def test_invalid_numbers_in_a_manifest_are_rejected(intact: Path, key: str, value: Any) -> None:
    forge(intact, lambda content: content.update({key: value}))
    rejection_of(intact)


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_invalid_files_table_is_rejected(intact: Path, value: Any) -> None:
    for change in (
        {"files": {"a": value}},
        {"files": {"a": {"bytes": value, "sha256": "0" * 64}}},
        {"files": {"a": {"bytes": 7, "sha256": value}}},
        {"files": {"a": {"bytes": 7, "sha256": "0" * 64, "x\ny": value}}},
        {"x\ny": value},
    ):
        (intact / "a").write_bytes(b"1234567")
        forge(intact, methodcaller("update", change))
        with pytest.raises((OtherVersion, Damaged)) as caught:
            verify(intact)
        assert str(intact / MANIFEST if caught.type is OtherVersion else intact / "a") in str(caught.value)
    if value != {}:
        forge(intact, lambda content: content.update(files=value, **{"x\ny": 0}))
        rejection_of(intact)


@pytest.mark.parametrize("value", ["soon", True, [], {}, "1"], ids=repr)
def test_invalid_time_or_cost_is_rejected(intact: Path, value: Any) -> None:
    content = (intact / MANIFEST).read_text()
    for change in (
        {"time": value},
        {"rollback": {"steps": value}},
        {"rollback": {"steps": 1, "minutes": value}},
        {"rollback": [value]},
    ):
        (intact / MANIFEST).write_text(content)
        forge(intact, methodcaller("update", change))
        rejection_of(intact)


@pytest.mark.parametrize(
    ("time", "is_valid"),
    [(0, True), (0.5, True), (10**12 - 1, True), (10**12, False), (-0.5, False), (math.nan, False), (math.inf, False)],
)
def test_time_must_be_between_the_epoch_and_the_latest_allowed(intact: Path, time: float, is_valid: bool) -> None:
    forge(intact, lambda content: content.update(time=time))
    if is_valid:
        assert read_manifest(intact).time == time
    else:
        assert "time cannot be" in str(rejection_of(intact))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_manifest_with_a_matching_hash_gives_no_traceback(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = make(tmp_path_factory.mktemp("any") / "step-00000007-gen-1")
    content = json.loads((directory / MANIFEST).read_text())
    del content["sha256"]
    key = data.draw(st.sampled_from([*content, "other"]))
    sign(directory, content | {key: data.draw(JSON)})
    problem, manifest = None, None
    try:
        manifest = verify(directory)
    except (Damaged, OtherVersion) as error:
        problem = error.path
    except StorageError as error:  # of a name that the file system does not take
        problem = Path(error.filename)
    assert problem is None or problem.parent == directory
    if manifest is not None:
        assert isinstance(manifest.bytes, int)
        assert all(isinstance(number, int | float | None) for number in manifest.rollback.values())


def test_missing_key_is_named(intact: Path) -> None:
    forge(intact, lambda content: content.pop("tokens"))
    assert "tokens" in str(rejection_of(intact))


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_damage_is_found_by_exactly_the_part_that_has_the_file(intact: Path, parts: int) -> None:
    for name, content in CONTENTS.items():
        (intact / name).write_bytes(content + b"!")
        found = [damage_in(partial(verify, intact, part=part, parts=parts)) for part in range(parts)]
        mine = sorted(CONTENTS).index(name) % parts
        assert [damage and damage.path for damage in found] == [
            intact / name if part == mine else None for part in range(parts)
        ]
        (intact / name).write_bytes(content)
    assert [verify(intact, part=part, parts=parts) for part in range(parts)] == [verify(intact)] * parts


def test_every_part_reads_the_manifest(intact: Path) -> None:
    (intact / MANIFEST).write_text("{}")
    for part in range(8):
        damage = damage_in(partial(verify, intact, part=part, parts=8))
        assert damage is not None
        assert damage.path == intact / MANIFEST


def test_first_damaged_file_is_named(intact: Path) -> None:
    for name in ("state.json", "__1_0.distcp"):
        (intact / name).write_bytes(bytes(len(CONTENTS[name])))
    assert damage_of(intact).path == intact / "__1_0.distcp"


def test_progress_counts_every_byte(intact: Path) -> None:
    counts: list[int] = []
    manifest = verify(intact, progress=counts.append)
    assert sum(counts) == manifest.bytes


def test_damaged_error_can_be_pickled(intact: Path) -> None:
    damage = Damaged(intact / DATA, "is missing")
    copy = pickle.loads(pickle.dumps(damage))
    assert (copy.path, copy.problem, str(copy)) == (damage.path, damage.problem, str(damage))


def test_interrupted_manifest_write_keeps_the_old_one(intact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = read_manifest(intact)
    monkeypatch.setattr(os, "fsync", broken_read)
    with pytest.raises(OSError, match="Input/output"):
        write_checkpoint_manifest(intact, replace(original, step=8))
    assert verify(intact) == original


def test_manifest_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    for files in ({"../x": Entry(3, "0" * 64)}, {"a": Entry(3, "short")}, {"a": Entry(-1, "0" * 64)}):
        with pytest.raises(ValueError, match=r"files|plain file name"):
            write_checkpoint_manifest(tmp_path, manifest_of(files))
        assert not list(tmp_path.iterdir())


def test_format_of_version_1_is_unchanged(tmp_path: Path) -> None:
    assert VERSION == 1
    (tmp_path / "a").write_bytes(b"abc")
    write_checkpoint_manifest(tmp_path, replace(manifest_of(hash_files(tmp_path, ["a"])), rollback={}))
    text = (tmp_path / MANIFEST).read_text()
    assert text.startswith('{\n "version": 1,\n "step": 7,\n'), "one key a line"
    content = json.loads(text)
    assert content.pop("sha256") == "3dbb008109ed9a2811057a0d227bd88dde9f7b76121b197fc8e320c6531392b6"
    assert content == {
        "version": 1,
        "step": 7,
        "generation": 1,
        "iteration": 9,
        "tokens": 1234,
        "time": 1.5e9,
        "world_size": 3,
        "files": {"a": {"bytes": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}},
        "rollback": {},
    }
