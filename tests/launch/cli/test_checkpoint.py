"""`harness checkpoint`: output, exit codes, and files on disk."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import Health, name_of
from harness.checkpoint.integrity import MANIFEST, Manifest
from harness.core.rundir import RunDir
from launch.cli import checkpoint, main
from tests.checkpoint.storage import failing

ROOT = Path(__file__).parents[3]
SHARD = "__0_0.distcp"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """`runs/first` without checkpoints, as a relative path."""
    monkeypatch.chdir(tmp_path)
    run = RunDir(Path("runs") / "first")
    run.checkpoints.mkdir(parents=True)
    configure(run, {"keep": 2, "keep_every_steps": 0})
    return run


def configure(run: RunDir, section: object) -> None:
    run.config.write_text(yaml.safe_dump({"checkpoint": section}))


def save(run: RunDir, step: int, generation: int = 0, health: Health | None = None) -> Path:
    path = run.checkpoints / name_of(step, generation)
    path.mkdir()
    (path / SHARD).write_bytes(bytes(range(200)) * 10)
    manifest = Manifest(
        step=step,
        generation=generation,
        iteration=step,
        tokens=1000 * step,
        time=time.time() - 600,
        world_size=1,
        files=integrity.hash_files(path, [SHARD]),
    )
    integrity.write_checkpoint_manifest(path, manifest)
    if health is not None:
        catalog.mark(path, health, "a test")
    return path


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def contents(run: RunDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.path.rglob("*")) if path.is_file()}


def steps(run: RunDir) -> list[int]:
    return [path.step for path in catalog.list_checkpoints(run.checkpoints)]


def run_command(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> list[str]:
    """The lines that a command prints; stderr must be empty."""
    assert checkpoint.main(args) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def run_failing(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main.main(["checkpoint", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("harness: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("harness: ").rstrip("\n")


def test_real_processes_without_torch(run: RunDir) -> None:
    flip_bit(save(run, 10) / SHARD)
    script = (
        "import sys\n"
        "from launch.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not {'torch', 'hydra'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    for args, code in ((["--help"], 0), (["list", "runs/first"], 0), (["verify", "runs/first"], 1)):
        command = [sys.executable, "-c", script, "checkpoint", *args]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert (result.returncode, result.stderr) == (code, "")
        assert result.stdout


def test_list_shows_all_checkpoints(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 10, health=Health.good)
    save(run, 20)
    save(run, 15, generation=1, health=Health.tainted)
    (save(run, 20, generation=1) / MANIFEST).unlink()
    catalog.quarantine(save(run, 30))
    (run.checkpoints / ".step-00000040-gen-1.part").mkdir()
    before = contents(run)
    size = f"{sum(path.stat().st_size for path in (run.checkpoints / name_of(20, 0)).iterdir()) / 1e3:.1f} kB"
    lines = run_command(capsys, "list", "runs/first")
    assert [line.split()[:4] for line in lines] == [
        ["name", "step", "generation", "health"],
        ["step-00000010-gen-0", "10", "0", "good"],
        ["step-00000020-gen-0", "20", "0", "candidate"],
        ["step-00000015-gen-1", "15", "1", "tainted"],
        ["step-00000020-gen-1", "20", "1", "candidate"],
        ["step-00000030-gen-0.damaged", "30", "0", "damaged"],
    ]
    assert lines[2].endswith(f"10 min  {size}  20,000")
    assert lines[4].endswith("-  manifest.json: is missing")
    assert contents(run) == before


def test_list_as_json(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(run, 10, health=Health.good)
    catalog.quarantine(save(run, 20))
    (line,) = run_command(capsys, "list", "runs/first", "--json")
    listing = json.loads(line)
    good, aside = listing["checkpoints"]
    assert listing["run"] == "runs/first"
    assert good.pop("time") == integrity.read_manifest(path).time
    assert good == {
        "name": "step-00000010-gen-0",
        "step": 10,
        "generation": 0,
        "health": "good",
        "bytes": sum(path.stat().st_size for path in path.iterdir()),
        "tokens": 10_000,
        "problem": None,
    }
    assert (aside["name"], aside["health"]) == ("step-00000020-gen-0.damaged", "damaged")


def test_list_omits_a_checkpoint_that_is_deleted_meanwhile(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 10)
    going = save(run, 20)
    read = integrity.read_manifest

    def read_as_it_goes(path: Path) -> Manifest:
        if path == going:
            catalog.delete(path)
        return read(path)

    monkeypatch.setattr(integrity, "read_manifest", read_as_it_goes)
    assert [line.split()[0] for line in run_command(capsys, "list", "runs/first")] == ["name", name_of(10, 0)]


def test_verify_says_ok_and_changes_nothing(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 10)
    save(run, 20, generation=1, health=Health.tainted)
    before = contents(run)
    assert run_command(capsys, "verify", "runs/first") == ["step-00000010-gen-0  ok", "step-00000020-gen-1  ok"]
    assert contents(run) == before


def test_verify_names_the_damaged_file_and_continues(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(save(run, 10) / SHARD)
    (save(run, 20) / SHARD).unlink()
    save(run, 30)
    (save(run, 40) / MANIFEST).write_text("{}")
    os.truncate(save(run, 50) / SHARD, 7)
    before = contents(run)
    assert run_command(capsys, "verify", "runs/first", code=1) == [
        "step-00000010-gen-0  __0_0.distcp: its content is not what was saved (sha256 differs)",
        "step-00000020-gen-0  __0_0.distcp: is missing",
        "step-00000030-gen-0  ok",
        "step-00000040-gen-0  manifest.json: is not a manifest: it has no sha256",
        "step-00000050-gen-0  __0_0.distcp: has 7 bytes, 2,000 were saved",
    ]
    assert contents(run) == before


def test_verify_by_name(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(save(run, 10) / SHARD)
    save(run, 20)
    catalog.quarantine(save(run, 30))
    names = ["step-00000030-gen-0.damaged", "step-00000020-gen-0"]
    assert run_command(capsys, "verify", "runs/first", *names) == [f"{name}  ok" for name in names]
    run_command(capsys, "verify", "runs/first", "step-00000010-gen-0", code=1)
    message = run_failing(capsys, "verify", "runs/first", "step-00000099-gen-0")
    assert message == (
        "step-00000099-gen-0: no such checkpoint; runs/first has "
        "step-00000010-gen-0, step-00000020-gen-0, step-00000030-gen-0.damaged"
    )


def test_verify_ignores_what_the_run_deletes_meanwhile(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 10)
    save(run, 20)
    measure = integrity.hash_file

    def measure_as_it_goes(path: Path, progress: Callable[[int], object] | None = None) -> integrity.Entry:
        if path.parent.name == name_of(10, 0):
            catalog.delete(path.parent)
        return measure(path, progress)

    monkeypatch.setattr(integrity, "hash_file", measure_as_it_goes)
    assert run_command(capsys, "verify", "runs/first") == [
        "step-00000010-gen-0  deleted meanwhile",
        "step-00000020-gen-0  ok",
    ]


def test_verify_shows_progress(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 10)
    monkeypatch.setattr("launch.cli.progress_bar.PLAIN_EVERY_S", 0.0)
    assert checkpoint.main(["verify", "runs/first"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "step-00000010-gen-0  ok\n"
    assert printed.err == "step-00000010-gen-0 100% of 2,000 bytes\n"


def test_prune_keeps_what_the_run_keeps(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30, 40, 50, 60):
        save(run, step, health=Health.good if step <= 20 else None)
    size = sum(path.stat().st_size for path in (run.checkpoints / name_of(40, 0)).iterdir())
    lines = run_command(capsys, "prune", "runs/first")
    assert [line.split("  ")[:2] for line in lines[:-1]] == [
        ["step-00000010-gen-0", "good"],
        ["step-00000040-gen-0", "candidate"],
    ]
    assert lines[1].endswith(f"  {size / 1e3:.1f} kB")
    assert lines[-1].startswith("deleted 2, ")
    assert steps(run) == [20, 30, 50, 60]
    others = "beside the newest 2 kept step-00000020-gen-0 (newest good), step-00000030-gen-0 (next candidate)"
    assert lines[-1].endswith(f"; {others}")
    assert run_command(capsys, "prune", "runs/first") == [f"deleted 0, 0 B; {others}"]


def test_prune_says_why_more_than_the_newest_are_kept(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30, 40, 50, 60, 70):
        save(run, step, health=Health.good if step == 60 else None)
    catalog.request_hold(run.checkpoints, catalog.list_checkpoints(run.checkpoints)[4:5], now=time.time())
    args = ("--keep", "1", "--keep-every-steps", "20", "--keep-behind-steps", "30")
    reasons = ["step-00000060-gen-0 (newest good)", "2 (keep_every_steps)", "2 (keep_behind_steps)"]
    reasons.append("step-00000050-gen-0 (listed for a rollback)")
    others = f"; beside the newest 1 kept {', '.join(reasons)}"
    (line,) = run_command(capsys, "prune", "runs/first", *args, "--dry-run")
    assert line == f"would delete 0, 0 B{others}"


@pytest.mark.parametrize(
    ("section", "args", "kept"),
    [
        ({"keep": 3, "keep_every_steps": 0}, [], [10, 40, 50, 60]),
        ({"keep": 3, "keep_every_steps": 20}, [], [10, 20, 40, 50, 60]),
        ({"keep": 3, "keep_every_steps": 20}, ["--keep", "1"], [10, 20, 40, 60]),
        ({"keep": 3, "keep_every_steps": 20}, ["--keep-every-steps", "0"], [10, 40, 50, 60]),
        ({"keep": 3}, [], [10, 40, 50, 60]),
        ({}, ["--keep", "99"], [10, 20, 30, 40, 50, 60]),
        ({}, [], [10, 50, 60]),
        (None, [], [10, 50, 60]),
    ],
    ids=repr,
)
def test_retention_from_the_options_else_from_the_config(
    run: RunDir, section: object, args: list[str], kept: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    configure(run, section)
    if section is None:
        run.config.unlink()
    for step in (10, 20, 30, 40, 50, 60):
        save(run, step)
    run_command(capsys, "prune", "runs/first", *args)
    assert steps(run) == kept


def test_a_dry_run_deletes_nothing(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30, 40, 50):
        save(run, step)
    catalog.quarantine(save(run, 60))
    before = contents(run)
    lines = run_command(capsys, "prune", "runs/first", "--damaged", "--dry-run")
    assert contents(run) == before
    assert lines[-1].startswith("would delete 3, ")
    assert run_command(capsys, "prune", "runs/first", "--damaged")[:-1] == lines[:-1]


def test_damaged_checkpoints_are_deleted_only_on_request(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 10)
    catalog.quarantine(save(run, 20))
    catalog.quarantine(save(run, 20))
    assert run_command(capsys, "prune", "runs/first") == ["deleted 0, 0 B"]
    assert len(catalog.list_damaged(run.checkpoints)) == 2
    lines = run_command(capsys, "prune", "runs/first", "--damaged")
    assert [line.split("  ")[:2] for line in lines[:-1]] == [
        ["step-00000020-gen-0.damaged", "damaged"],
        ["step-00000020-gen-0.damaged-2", "damaged"],
    ]
    assert [path.name for path in run.checkpoints.iterdir()] == [name_of(10, 0)]


def test_prune_does_not_touch_what_is_being_written(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30, 40, 50):
        save(run, step)
    scratch = catalog.scratch_path(run.checkpoints, name_of(60, 0))
    scratch.mkdir()
    (scratch / SHARD).write_bytes(b"half")
    run_command(capsys, "prune", "runs/first", "--keep", "1", "--damaged")
    assert (scratch / SHARD).read_bytes() == b"half"
    assert steps(run) == [10, 50]


def test_prune_beside_the_runs_own_retention(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run deletes the checkpoint while it is measured: it is not counted."""
    for step in (10, 20, 30, 40, 50):
        save(run, step)
    monkeypatch.setattr(checkpoint, "bytes_of", lambda path: int(catalog.delete(path)))
    assert run_command(capsys, "prune", "runs/first") == [
        "deleted 0, 0 B; beside the newest 2 kept step-00000010-gen-0 (next candidate)"
    ]
    assert steps(run) == [10, 40, 50]


def test_prune_checks_again_before_every_deletion(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest good checkpoint becomes tainted during the first deletion: an older good one must stay."""
    for step in (10, 20, 30):
        save(run, step, health=Health.good)
    for step in (40, 50, 60):
        save(run, step)
    drop = catalog.delete

    def drop_as_health_changes(path: Path) -> bool:
        catalog.mark(run.checkpoints / name_of(30, 0), Health.tainted, "a test")
        return drop(path)

    monkeypatch.setattr(catalog, "delete", drop_as_health_changes)
    run_command(capsys, "prune", "runs/first")
    assert 20 in steps(run)


def test_no_run_directory_is_one_line(run: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for command in ("list", "verify", "prune"):
        for word in ("runs/second", "empty", "file", "file/x", ".", "a\0b"):
            assert run_failing(capsys, command, word).startswith(f"{word}: is not a run directory")
        assert "File name too long" in run_failing(capsys, command, "x" * 5000)
    run.checkpoints.rmdir()
    assert run_command(capsys, "list", "runs/first") == ["runs/first has no checkpoints"]
    assert run_command(capsys, "verify", "runs/first") == ["runs/first has no checkpoints"]
    assert run_command(capsys, "prune", "runs/first", "--damaged") == ["deleted 0, 0 B"]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "checkpoint: missing command; choose list, verify, prune, average, upload, export, import, or --help"),
        (
            ["fly"],
            "checkpoint: unknown command 'fly'; choose list, verify, prune, average, upload, export, import, or --help",
        ),
        (["list"], "checkpoint list: the following arguments are required: RUN; see --help"),
        (["prune", "runs/first", "--keep", "0"], "--keep: must be at least 1, got 0"),
        (["prune", "runs/first", "--keep-every-steps", "-1"], "--keep-every-steps: must be 0 or more, got -1"),
        (["prune", "runs/first", "--keep", "x"], "checkpoint prune: argument --keep: invalid int value: 'x'"),
    ],
)
def test_usage_errors_are_one_line(run: RunDir, args: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 10)
    assert run_failing(capsys, *args).startswith(line)
    assert steps(run) == [10]


@pytest.mark.parametrize("text", ["{", "[]", "checkpoint: 7", "", "\x00", "checkpoint: {keep: many}", "other: {}"])
def test_an_unreadable_config_deletes_nothing(run: RunDir, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30, 40, 50):
        save(run, step)
    run.config.write_text(text)
    assert run_failing(capsys, "prune", "runs/first").startswith(("runs/first/config.yaml: ", "--keep: "))
    assert steps(run) == [10, 20, 30, 40, 50]


def test_a_failed_deletion_is_one_line(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    for step in (10, 20, 30, 40):
        save(run, step)
    monkeypatch.setattr(catalog, "delete", refuse)
    assert run_failing(capsys, "prune", "runs/first") == f"runs/first/checkpoints/{name_of(20, 0)}: Permission denied"


def test_unreadable_files_and_damage_have_different_exit_codes(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    whole, other = save(run, 10), save(run, 20)
    with failing(f"{other.name}/{SHARD}"):
        assert checkpoint.main(["verify", str(run.path)]) == 75
        assert checkpoint.main(["verify", str(run.path), whole.name]) == 0
    listing = capsys.readouterr().out
    assert f"{other.name}  {other / SHARD}: cannot be read on " in listing
    content = json.loads((other / integrity.MANIFEST).read_text())
    del content["sha256"]
    content["version"] = 2
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (other / integrity.MANIFEST).write_text(json.dumps(content | {"sha256": digest}))
    assert checkpoint.main(["verify", str(run.path)]) == 2
    assert "it has version '2', this program reads 1" in capsys.readouterr().out
    assert checkpoint.main(["list", str(run.path)]) == 0
    assert "was written by another version" in capsys.readouterr().out
    (whole / SHARD).unlink()
    assert checkpoint.main(["verify", str(run.path)]) == 1, "damage takes precedence"


def test_nothing_is_pruned_while_a_health_is_unreadable(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [save(run, step) for step in (10, 20, 30)]
    (paths[1] / catalog.HEALTH).unlink(missing_ok=True)
    (paths[1] / catalog.HEALTH).mkdir()
    assert main.main(["checkpoint", "prune", str(run.path), "--keep", "1"]) == 75
    assert capsys.readouterr().err.count("\n") == 1
    assert all(path.is_dir() for path in paths)
