"""Checkpoints are listed in order, unfinished ones are not listed, and the newest good one is never deleted."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Checkpoint, Health, name_of, select_for_deletion
from harness.checkpoint.integrity import OtherVersion
from harness.config.errors import StorageError
from harness.core.locking import run_lease

AGES = st.tuples(st.integers(0, 3), st.integers(0, 60))
KNOWN = [health for health in Health if health is not Health.unread]
HISTORIES = st.dictionaries(AGES, st.sampled_from(KNOWN), max_size=25).map(
    lambda ages: [checkpoint(step, generation, health) for (generation, step), health in ages.items()]
)
KEEP = st.integers(1, 6)
KEEP_EVERY_STEPS = st.sampled_from([0, 1, 7, 10, 100])


def checkpoint(step: int, generation: int, health: Health = Health.candidate) -> Checkpoint:
    path = Path("checkpoints") / name_of(step, generation)
    return Checkpoint(path=path, step=step, generation=generation, health=health)


def make(root: Path, name: str) -> Path:
    """Create a directory with a file in it."""
    (root / name).mkdir(parents=True)
    (root / name / "__0_0.distcp").write_bytes(b"shard")
    return root / name


def names(root: Path) -> list[str]:
    return [each.name for each in catalog.list_checkpoints(root)]


def prune(history: Sequence[Checkpoint], *, keep: int, keep_every_steps: int) -> list[Checkpoint]:
    deleted = select_for_deletion(history, keep=keep, keep_every_steps=keep_every_steps)
    assert len(deleted) == len({each.path for each in deleted})
    return [each for each in history if each not in deleted]


@given(HISTORIES, KEEP, KEEP_EVERY_STEPS)
def test_newest_are_kept_and_tainted_are_deleted(history: list[Checkpoint], keep: int, keep_every_steps: int) -> None:
    kept = prune(history, keep=keep, keep_every_steps=keep_every_steps)
    sound = sorted(
        (each for each in history if each.health is not Health.tainted), key=lambda checkpoint: checkpoint.age
    )
    assert set(kept) <= set(sound)
    assert set(sound[-keep:]) <= set(kept)
    if not keep_every_steps:
        assert len(kept) <= keep + 2


@given(HISTORIES, KEEP, KEEP_EVERY_STEPS, AGES)
def test_nothing_is_deleted_while_any_health_is_unread(
    history: list[Checkpoint], keep: int, keep_every_steps: int, age: tuple[int, int]
) -> None:
    unread = checkpoint(age[1], age[0], Health.unread)
    assert select_for_deletion([*history, unread], keep=keep, keep_every_steps=keep_every_steps) == []


@given(HISTORIES, KEEP, KEEP_EVERY_STEPS)
def test_newest_good_checkpoint_is_never_deleted(history: list[Checkpoint], keep: int, keep_every_steps: int) -> None:
    good = [each for each in history if each.health is Health.good]
    if good:
        kept = prune(history, keep=keep, keep_every_steps=keep_every_steps)
        assert max(good, key=lambda checkpoint: checkpoint.age) in kept


@given(HISTORIES, KEEP, st.sampled_from([1, 7, 10, 100]))
def test_every_interval_keeps_one_checkpoint(history: list[Checkpoint], keep: int, every: int) -> None:
    kept = prune(history, keep=keep, keep_every_steps=every)
    sound = [each for each in history if each.health is not Health.tainted]
    for interval in {each.step // every for each in sound} - {0}:
        members = [each for each in sound if each.step // every == interval]
        assert min(members, key=lambda checkpoint: checkpoint.age) in kept


@pytest.mark.parametrize(
    ("restored_step", "expected"), [(1300, [1000, 1900, 2200]), (1000, [1000, 1900, 2200]), (900, [1600, 1900, 2200])]
)
def test_a_rollback_replaces_a_milestone_only_if_it_undoes_it(restored_step: int, expected: list[int]) -> None:
    kept = [checkpoint(step, 0, Health.good if step <= restored_step else Health.tainted) for step in (900, 1000, 1300)]
    for step in (1600, 1900, 2200):
        kept = prune([*kept, checkpoint(step, 1, Health.good)], keep=2, keep_every_steps=1000)
    assert [each.step for each in kept] == expected


@given(HISTORIES, KEEP, KEEP_EVERY_STEPS, st.randoms())
def test_pruning_is_idempotent(history: list[Checkpoint], keep: int, keep_every_steps: int, random: Random) -> None:
    kept = prune(history, keep=keep, keep_every_steps=keep_every_steps)
    assert select_for_deletion(kept, keep=keep, keep_every_steps=keep_every_steps) == []
    shuffled = sorted(history, key=lambda _: random.random())
    assert set(prune(shuffled, keep=keep, keep_every_steps=keep_every_steps)) == set(kept)


@given(HISTORIES, KEEP, KEEP_EVERY_STEPS)
def test_deletions_are_listed_oldest_first(history: list[Checkpoint], keep: int, keep_every_steps: int) -> None:
    deleted = select_for_deletion(history, keep=keep, keep_every_steps=keep_every_steps)
    assert deleted == sorted(deleted, key=lambda checkpoint: checkpoint.age)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), KEEP, st.sampled_from([7, 10, 25]))
def test_pruning_after_every_save_keeps_the_same_milestones(gaps: list[int], keep: int, every: int) -> None:
    """Pruning after every save keeps the same checkpoints as pruning once at the end."""
    history: list[Checkpoint] = []
    kept: list[Checkpoint] = []
    for gap in gaps:
        new = checkpoint((history[-1].step if history else 0) + gap, 0)
        history.append(new)
        kept = prune([*kept, new], keep=keep, keep_every_steps=every)
    assert kept == prune(history, keep=keep, keep_every_steps=every)


@given(st.integers(1, 30), KEEP)
def test_run_that_stays_tainted_keeps_its_last_good_checkpoint(num_saves: int, keep: int) -> None:
    kept = [checkpoint(10, 0, Health.good)]
    for number in range(num_saves):
        sick = checkpoint(20 + 10 * number, 0, Health.tainted if number % 2 else Health.candidate)
        kept = prune([*kept, sick], keep=keep, keep_every_steps=0)
        assert checkpoint(10, 0, Health.good) in kept


@given(st.integers(1, 20), st.integers(1, 100), KEEP)
def test_some_candidate_survives_until_it_is_good(every: int, good_after: int, keep: int) -> None:
    """Saves are far more frequent than `good_after_steps`; one candidate must still survive until it is good."""
    kept: list[Checkpoint] = []
    for step in range(every, 1000, every):
        kept = [replace(each, health=Health.good) if step - each.step >= good_after else each for each in kept]
        kept = prune([*kept, checkpoint(step, 0)], keep=keep, keep_every_steps=0)
    newest = max(each.step for each in kept if each.health is Health.good)
    assert 1000 - newest <= 2 * (good_after + 2 * every)


def test_retention_by_example() -> None:
    history = [checkpoint(step, 0, Health.good) for step in range(0, 100, 10)]
    history[4:] = [replace(each, health=Health.candidate) for each in history[4:]]
    history[8] = replace(history[8], health=Health.tainted)
    kept = prune(history, keep=2, keep_every_steps=25)
    assert [each.step for each in kept] == [30, 40, 50, 70, 90]


def test_higher_generation_is_newer_whatever_the_step(tmp_path: Path) -> None:
    for step, generation in [(90, 0), (40, 1), (100, 0), (50, 1), (10, 2)]:
        make(tmp_path, name_of(step, generation))
    assert [(each.step, each.generation) for each in catalog.list_checkpoints(tmp_path)] == [
        (90, 0),
        (100, 0),
        (40, 1),
        (50, 1),
        (10, 2),
    ]


def test_names_are_sorted_as_numbers_beyond_their_width(tmp_path: Path) -> None:
    ages = [(9, 0), (99_999_999, 0), (100_000_000, 0), (1_000_000_000, 0), (5, 9), (5, 10)]
    for step, generation in reversed(ages):
        make(tmp_path, name_of(step, generation))
    assert [(each.step, each.generation) for each in catalog.list_checkpoints(tmp_path)] == ages
    assert names(tmp_path)[0] == "step-00000009-gen-0"
    assert names(tmp_path)[2] == "step-100000000-gen-0"
    assert [catalog.parse_name(name) for name in names(tmp_path)] == ages
    assert catalog.parse_name(f"{name_of(5, 9)}.damaged-2") == (5, 9)


def test_other_files_are_not_listed(tmp_path: Path) -> None:
    assert catalog.list_checkpoints(tmp_path / "nowhere") == []
    assert catalog.list_damaged(tmp_path / "nowhere") == []
    make(tmp_path, name_of(10, 0))
    make(tmp_path, catalog.scratch_path(tmp_path, name_of(20, 0)).name)
    for name in ("step-1-gen-0", "step-00000010-gen-", "xstep-00000010-gen-0", "step-00000030-gen-0.copy", "last"):
        make(tmp_path, name)
    (tmp_path / name_of(40, 0)).write_text("a file")
    assert names(tmp_path) == [name_of(10, 0)]
    assert catalog.list_damaged(tmp_path) == []


def test_a_checkpoint_exists_once_it_is_published(tmp_path: Path) -> None:
    target = tmp_path / name_of(10, 0)
    scratch = make(tmp_path, catalog.scratch_path(tmp_path, target.name).name)
    assert names(tmp_path) == []
    catalog.publish(scratch, target)
    assert names(tmp_path) == [target.name]
    assert not scratch.exists()
    assert (target / "__0_0.distcp").read_bytes() == b"shard"


def test_content_and_name_are_on_disk_when_publish_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / name_of(10, 0)
    scratch = make(tmp_path, catalog.scratch_path(tmp_path, target.name).name)
    descriptors, synced = Path("/proc/self/fd"), list[tuple[Path, bool]]()

    def record(descriptor: int) -> None:
        synced.append(((descriptors / str(descriptor)).readlink(), target.exists()))

    monkeypatch.setattr(os, "fsync", record)
    num_open = len(list(descriptors.iterdir()))
    catalog.publish(scratch, target)
    assert synced == [(scratch, False), (tmp_path, True)], "the content before the rename, the name after it"
    assert len(list(descriptors.iterdir())) == num_open


def test_a_mark_is_on_disk_when_mark_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = make(tmp_path, name_of(10, 0)), list[tuple[Path, bool]]()

    def record(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), (path / catalog.HEALTH).exists()))

    monkeypatch.setattr(os, "fsync", record)
    catalog.mark(path, Health.tainted, "a test")
    assert synced[0][0].parent == path, "the content before the rename"
    assert synced[1:] == [(path, True)], "the name after it"


def test_run_without_its_lease_publishes_and_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise SystemExit(2)

    monkeypatch.setattr(run_lease, "guard", lost)
    path = make(tmp_path, name_of(10, 0))
    scratch = make(tmp_path, catalog.scratch_path(tmp_path, name_of(20, 0)).name)
    with pytest.raises(SystemExit):
        catalog.publish(scratch, tmp_path / name_of(20, 0))
    with pytest.raises(SystemExit):
        catalog.delete(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, scratch])


def test_health_round_trip(tmp_path: Path) -> None:
    path = make(tmp_path, name_of(10, 0))
    assert catalog.health_of(path) is Health.candidate
    for health in (Health.good, Health.tainted, Health.candidate):
        catalog.mark(path, health, "a test")
        assert catalog.health_of(path) is health
        assert [each.health for each in catalog.list_checkpoints(tmp_path)] == [health]
    assert sorted(each.name for each in path.iterdir()) == ["__0_0.distcp", catalog.HEALTH]


@pytest.mark.parametrize("stated", ["archived", "unread"])
def test_health_of_a_newer_version_is_rejected_and_blocks_deletion(tmp_path: Path, stated: str) -> None:
    path = make(tmp_path, name_of(10, 0))
    (path / catalog.HEALTH).write_text(json.dumps({"health": stated}))
    assert catalog.health_of(path) is Health.unread
    with pytest.raises(OtherVersion, match="allowed are candidate, good, tainted"):
        catalog.read_health(path)


def test_unreadable_health_is_unread_and_missing_health_is_candidate(tmp_path: Path) -> None:
    path = make(tmp_path, name_of(10, 0))
    assert catalog.health_of(path) is Health.candidate
    (path / catalog.HEALTH).mkdir()
    assert [each.health for each in catalog.list_checkpoints(tmp_path)] == [Health.unread]
    with pytest.raises(StorageError, match=r"health\.json: cannot be read on .*: Is a directory"):
        catalog.read_health(path)
    assert catalog.health_of(tmp_path / "gone") is Health.unread, "the mount may be gone"


def test_a_state_without_a_cursor_is_damage_and_one_that_cannot_be_read_is_not(tmp_path: Path) -> None:
    path = make(tmp_path, name_of(10, 0))
    state = path / catalog.STATE_FILE
    content = b'{"step": 10, "cursor": 12}'
    state.write_bytes(content)
    assert catalog.cursor_of(path) == 12
    for odd in (content[:20], b"", bytes(26), b"[]", b'{"step": 10}', b'{"cursor": "12"}', b"\xff", b"[" * 100_000):
        state.write_bytes(odd)
        assert catalog.cursor_of(path) is None
    state.unlink()
    assert catalog.cursor_of(path) is None
    state.mkdir()
    for unread in (path, tmp_path / "gone"):
        with pytest.raises(StorageError, match=r"state\.json: cannot be read on "):
            catalog.cursor_of(unread)


def test_directory_that_cannot_be_listed_raises(tmp_path: Path) -> None:
    assert not catalog.list_checkpoints(tmp_path / "nowhere")
    assert not catalog.list_damaged(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    for root in (tmp_path / "file", tmp_path / "link"):
        for look in (catalog.list_checkpoints, catalog.list_damaged):
            with pytest.raises(StorageError):
                look(root)


def test_malformed_health_file_means_candidate(tmp_path: Path) -> None:
    path = make(tmp_path, name_of(10, 0))
    catalog.mark(path, Health.good, "a test")
    content = (path / catalog.HEALTH).read_bytes()
    odd = [b"[]", b"7", b"null", b'"good"', b'{"health": []}', b"\xff", b"[" * 100_000]
    for torn in [*(content[:length] for length in range(len(content))), *odd]:
        (path / catalog.HEALTH).write_bytes(torn)
        assert catalog.health_of(path) is Health.candidate
    (path / catalog.HEALTH).unlink()
    (path / catalog.HEALTH).mkdir()
    assert catalog.health_of(path) is Health.unread, "an unreadable file has no health"


def test_remove_unfinished_removes_only_unfinished_directories(tmp_path: Path) -> None:
    half = [catalog.scratch_path(tmp_path, name_of(20, 0)).name, catalog.scratch_path(tmp_path, name_of(10**8, 3)).name]
    whole = [name_of(10, 0), name_of(5, 1), f"{name_of(10, 0)}.damaged", f"{name_of(10, 0)}.damaged-2"]
    foreign = [".step-notes", ".step-00000010-gen-0", ".git", "notes.part", ".step-00000010-gen-0.party"]
    for name in [*half, *whole, *foreign]:
        make(tmp_path, name)
    catalog.remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*whole, *foreign}
    (tmp_path / half[0]).write_text("a file cannot be deleted as a directory")
    make(tmp_path, half[1])
    catalog.remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*whole, *foreign, half[0]}
    catalog.remove_unfinished(tmp_path / "nowhere")


def test_quarantine_of_the_same_name_twice_keeps_both(tmp_path: Path) -> None:
    for number in range(3):
        path = make(tmp_path, name_of(10, 0))
        (path / "number").write_text(str(number))
        quarantined = catalog.quarantine(path)
        assert not path.exists()
        assert (quarantined / "number").read_text() == str(number)
    assert names(tmp_path) == []
    name = name_of(10, 0)
    listed = [path.name for path in catalog.list_damaged(tmp_path)]
    assert listed == [f"{name}.damaged", f"{name}.damaged-2", f"{name}.damaged-3"]


@pytest.mark.parametrize("quarantined", [False, True])
def test_delete_leaves_nothing(tmp_path: Path, quarantined: bool) -> None:
    path, other = make(tmp_path, name_of(10, 0)), make(tmp_path, name_of(20, 0))
    path = catalog.quarantine(path) if quarantined else path
    assert catalog.delete(path)
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("quarantined", [False, True])
def test_delete_of_a_link_keeps_what_it_points_to(tmp_path: Path, quarantined: bool) -> None:
    elsewhere = make(tmp_path, "elsewhere")
    path = tmp_path / "run" / name_of(10, 0)
    path.parent.mkdir()
    path.symlink_to(elsewhere)
    path = catalog.quarantine(path) if quarantined else path
    assert catalog.delete(path)
    assert not list(path.parent.iterdir())
    path.with_name(f".{name_of(10, 0)}.gone-0123abcd").symlink_to(elsewhere)
    catalog.remove_unfinished(path.parent)
    assert not list(path.parent.iterdir())
    assert (elsewhere / "__0_0.distcp").is_file()


@pytest.mark.parametrize("quarantined", [False, True])
def test_killed_delete_leaves_no_checkpoint(tmp_path: Path, quarantined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    path = make(tmp_path, name_of(10, 0))
    path = catalog.quarantine(path) if quarantined else path
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            catalog.delete(path)
    assert names(tmp_path) == []
    assert catalog.list_damaged(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 1
    make(tmp_path, path.name)
    assert catalog.delete(path)
    catalog.remove_unfinished(tmp_path)
    assert not list(tmp_path.iterdir())


def test_delete_of_a_deleted_checkpoint_is_no_error(tmp_path: Path) -> None:
    path = make(tmp_path, name_of(10, 0))
    assert catalog.delete(path)
    assert not catalog.delete(path)


def test_concurrent_deletes_of_one_checkpoint_are_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second delete starts in the middle of the first."""
    path = make(tmp_path, name_of(10, 0))
    delete = shutil.rmtree
    begun, other_is_done = threading.Event(), threading.Event()

    def slow(victim: Path) -> None:
        begun.set()
        assert other_is_done.wait(10)
        delete(victim)

    results: list[bool] = []
    first = threading.Thread(target=lambda: results.append(catalog.delete(path)))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", slow)
        first.start()
        assert begun.wait(10)
        patch.setattr(shutil, "rmtree", delete)
        assert not catalog.delete(path)
        other_is_done.set()
        first.join()
    assert results == [True]
    assert not list(tmp_path.iterdir())


def test_remove_unfinished_during_a_delete_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, name_of(10, 0))
    delete = shutil.rmtree

    def swept(victim: Path) -> None:
        monkeypatch.setattr(shutil, "rmtree", delete)
        catalog.remove_unfinished(tmp_path)
        delete(victim)

    monkeypatch.setattr(shutil, "rmtree", swept)
    assert catalog.delete(path)
    assert not list(tmp_path.iterdir())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), KEEP, st.sampled_from([7, 10, 25]))
def test_one_checkpoint_stays_well_behind_the_newest(gaps: list[int], keep: int, behind: int) -> None:
    """After every save one is old enough, as long as there was one; and at most three are kept for it."""
    kept: list[Checkpoint] = []
    saved: list[int] = []
    for step in accumulate(gaps):
        saved.append(step)
        kept.append(checkpoint(step, 0, Health.good))
        expendable = select_for_deletion(kept, keep=keep, keep_every_steps=0, keep_behind_steps=behind)
        kept = [each for each in kept if each not in expendable]
        if any(earlier <= step - behind for earlier in saved):
            ages = [step - each.step for each in kept]
            assert any(behind <= age <= 3 * behind + max(gaps) for age in ages)
        assert len(kept) <= keep + 3 + 2


def test_what_an_operator_was_shown_stays_for_a_while(tmp_path: Path) -> None:
    history = [checkpoint(step, 0, Health.good) for step in (10, 20, 30, 40)]
    history[1] = replace(history[1], health=Health.tainted)
    assert catalog.held_names(tmp_path, now=100.0) == frozenset(), "no request"
    catalog.request_hold(tmp_path, history[:2], now=100.0)
    for now, names_held in ((100.0, 2), (100.0 + catalog.HOLD_S - 1, 2), (100.0 + catalog.HOLD_S, 0), (70.0, 2)):
        assert len(catalog.held_names(tmp_path, now=now)) == names_held
    held = catalog.held_names(tmp_path, now=101.0)
    deleted = select_for_deletion(history, keep=1, keep_every_steps=0, held=held)
    assert [each.step for each in deleted] == [20, 30], "a tainted one is not held"
    (tmp_path / catalog.HOLDS).write_text("{broken")
    assert catalog.held_names(tmp_path, now=101.0) == frozenset()
    assert catalog.list_checkpoints(tmp_path) == [], "the request is no checkpoint"
