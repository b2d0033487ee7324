"""`harness verify`: one line for each criterion, exit code 0 or 1, and one line for bad input."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.postmortem.verification import Verification, kept_steps
from harness.config import compose
from harness.control import stop_requests
from harness.control.inbox import append_intervention
from harness.core.events import ActionKind, Event, RunStarted, StepRecord
from harness.core.rundir import RunDir
from launch import train
from launch.cli import verify
from launch.cli.main import main
from tests.analysis.postmortem import stories
from tests.analysis.postmortem.stories import ONSET, SETTINGS, write

THROUGH = 250
LOWER_CLIP = SETTINGS.replace("clip_norm: 1.0", "clip_norm: 0.5")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with a rejected batch of rare tokens; its log ends before the check would."""
    return write(tmp_path / "run", stories.poisoned())


def repetition(tmp_path: Path, settings: str = LOWER_CLIP, **changes: object) -> RunDir:
    """A healthy repetition of the run, with changes at the guilty step."""
    rows: list[Event] = [stories.healthy(at) for at in range(THROUGH + 1)]
    guilty = rows[ONSET]
    assert isinstance(guilty, StepRecord)
    rows[ONSET] = replace(guilty, **changes)  # type: ignore[arg-type]
    return write(tmp_path / "again", rows, settings)


def test_all_criteria_hold(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = repetition(tmp_path)
    assert main(["verify", str(run.path), "--incident", "1", "--log", str(again.path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"{again.path}, incident 1 of {run.path}:"
    assert [line.split()[0] for line in lines] == 5 * ["pass"]
    assert lines[2] == "  pass  loss at step 150 is 2.516, expected below 2.698"
    assert lines[4] == "  pass  largest gradient norm after clipping is 0.5, expected at most 0.5"


@pytest.mark.parametrize(
    ("changes", "settings", "failed"),
    [
        ({"loss": 2.9}, LOWER_CLIP, "loss at step 150 is 2.9, expected below 2.698"),
        ({"grad_norm": 9.0}, LOWER_CLIP, "largest gradient norm before clipping in steps 138 to 238 is 9"),
        ({}, SETTINGS, "largest gradient norm after clipping is 0.85, expected at most 0.5"),
    ],
)
def test_one_criterion_fails(
    run: RunDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, float],
    settings: str,
    failed: str,
) -> None:
    again = repetition(tmp_path, settings, **changes)
    assert main(["verify", str(run.path), "--incident", "1", "--log", str(again.path)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  FAIL")]
    assert failed in line


def test_raised_loss_fails_through_the_last_step(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Event] = [stories.healthy(at) for at in range(THROUGH + 1)]
    rows = [replace(row, loss=row.loss + 0.1 * (row.iteration > 200)) for row in rows if isinstance(row, StepRecord)]
    again = write(tmp_path / "again", rows, LOWER_CLIP)
    assert main(["verify", str(run.path), "--incident", "1", "--log", str(again.path)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "FAIL" in line]
    assert "smoothed loss is at most" in line


def test_log_that_ends_too_early_fails(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run.path), "--incident", "1", "--log", str(run.path)]) == 1
    assert "  FAIL  reached step 229 of 250\n" in capsys.readouterr().out


def test_run_that_continued_is_checked_without_a_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps that the run kept count: the rejected update and undone steps do not."""
    monkeypatch.setattr(verify, "train_again", lambda *_: pytest.fail("must not train"))
    more: list[Event] = [stories.healthy(at) for at in range(stories.NUM_ROWS, THROUGH + 1)]
    again: list[Event] = [replace(stories.healthy(at), iteration=at + 101) for at in range(ONSET, THROUGH + 1)]
    spiked = write(tmp_path / "spiked", [*stories.poisoned(), *more])
    assert main(["verify", str(spiked.path), "--incident", "1"]) == 1, "step 150 was never applied"
    run = write(tmp_path / "run", [*stories.poisoned(), *more, *again])
    assert main(["verify", str(run.path), "--incident", "1"]) == 0, "after a rollback it was"
    assert f"{run.path}, incident 1 of {run.path}:\n  pass  reached step 250 of 250" in capsys.readouterr().out


def test_a_run_that_continued_is_checked_with_its_own_clip_threshold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume after the incident has raised it."""
    again = [replace(stories.healthy(at), iteration=at + 101) for at in range(ONSET, THROUGH + 1)]
    again[5] = replace(again[5], grad_norm=1.5)
    raised = SETTINGS.replace("clip_norm: 1.0", "clip_norm: 2.0")
    run = write(tmp_path / "run", [*stories.poisoned(), *again], raised)
    append_intervention(run, stories.changed_config(stories.NUM_ROWS, optim__clip_norm=[1.0, 2.0]))
    assert main(["verify", str(run.path), "--incident", "1"]) == 0
    assert "largest gradient norm after clipping is 1.5, expected at most 2" in capsys.readouterr().out


def test_steps_that_a_rollback_undid_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollback to step 20 is before the steps that the criteria need, and the last that the log has."""
    monkeypatch.setattr(verify, "train_again", lambda *_: 75)
    steps: list[Event] = [stories.healthy(at) for at in range(stories.NUM_ROWS, 2 * THROUGH)]
    run = write(tmp_path / "run", [*stories.poisoned(), *steps, UNDONE])
    assert main(["verify", str(run.path), "--incident", "1"]) == 75


UNDONE = stories.outcome(ActionKind.rollback, 2 * THROUGH - 1, step=20, target="step-00000020-gen-0", steps_lost=479)
RESTART = RunStarted(time=1.9e9, iteration=2 * THROUGH - 1, world_size=2, num_steps=400, step=20)


@pytest.mark.parametrize(
    ("event", "last"),
    [
        (UNDONE, 20),
        (RESTART, 20),
        (replace(UNDONE, succeeded=False), 499),
        (stories.outcome(ActionKind.cool, 499), 499),
    ],
)
def test_a_restore_or_a_start_undoes_the_steps_behind_its_own(event: Event, last: int) -> None:
    steps = [stories.healthy(at) for at in range(2 * THROUGH)]
    assert max(kept_steps(steps, [event])) == last
    again = [replace(stories.healthy(at), iteration=2 * THROUGH + at) for at in range(last + 1, last + 20)]
    assert len(kept_steps([*steps, *again], [event])) == last + 20, "steps follow it"


def test_otherwise_the_run_is_trained_again_with_its_remedy(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def train(wanted: Verification, _evidence: object) -> int:
        asked.append(wanted)
        repetition(tmp_path).path.rename(wanted.folder)
        return 0

    monkeypatch.setattr(verify, "train_again", train)
    assert main(["verify", str(run.path), "--incident", "1"]) == 0
    (wanted,) = asked
    assert wanted.folder == f"{tmp_path}/verify-run-001"
    assert capsys.readouterr().out.startswith(f"{wanted.folder}, incident 1 of {run.path}:")


def test_a_run_with_the_default_configuration_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def interrupted(arguments: list[str]) -> int:
        asked.append(arguments)
        return 75

    monkeypatch.setattr(train, "main", interrupted)
    run = write(tmp_path / "run", stories.poisoned(), compose.to_yaml(compose.load(["run.name=run"])))
    assert main(["verify", str(run.path), "--incident", "1", "--rerun"]) == 75
    ((remedy, *arguments),) = asked
    assert remedy == "optim.clip_norm=0.5"
    assert arguments == [f"run.dir={tmp_path}", "run.name=verify-run-001", "launch.nproc=2"], "the same schedule"


def test_a_run_of_slurm_is_not_trained_again_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "main", lambda _: pytest.fail("must not train"))
    settings = compose.to_yaml(compose.load(["run.name=run", "launch=slurm"]))
    run = write(tmp_path / "run", stories.poisoned(), settings)
    assert main(["verify", str(run.path), "--incident", "1", "--rerun"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"harness: {run.path}: it was not trained on this machine; run `harness train optim.clip_")
    assert error.endswith(" launch=slurm` with its other keys of launch through step 200, and pass --log\n")


def test_the_log_of_a_rejected_repetition_is_not_judged(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another terminal trains the repetition, and its log is not complete."""
    write(tmp_path / "verify-run-001", [stories.healthy(at) for at in range(60)], LOWER_CLIP)
    monkeypatch.setattr(verify, "train_again", lambda *_: 2)
    assert main(["verify", str(run.path), "--incident", "1", "--rerun"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("reached", "code"), [(THROUGH, 0), (THROUGH - 1, 75)])
def test_the_repetition_is_stopped_after_the_last_step_of_the_check(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: int, code: int
) -> None:
    again = repetition(tmp_path)
    steps = again.events.read_text().splitlines(keepends=True)
    again.events.unlink()
    asked = []

    def trained(_wanted: Verification, _evidence: object) -> int:
        with verify.stopping_after(again, THROUGH):
            with again.events.open("a") as log:
                log.writelines(steps[: reached + 1])
            deadline = time.monotonic() + (10 if code == 0 else 0.1)
            while not again.stop.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        asked.append(stop_requests.read(again))
        again.path.rename(tmp_path / "verify-run-001")
        return 75

    monkeypatch.setattr(verify, "POLL_S", 0.01)
    monkeypatch.setattr(verify, "train_again", trained)
    assert main(["verify", str(run.path), "--incident", "1", "--rerun"]) == code
    assert [None if each is None else each.reason for each in asked] == [
        "harness verify needs no step after 250" if code == 0 else None
    ]


def test_a_request_to_stop_waits_until_the_repetition_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start removes the request of the last one, and the log of that one may have the step."""
    monkeypatch.setattr(verify, "POLL_S", 0.01)
    again = repetition(tmp_path)
    with verify.stopping_after(again, THROUGH):
        time.sleep(0.1)
        assert not again.stop.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--incident", "7"], "--incident: RUN has no incident 7; incidents of this run: 1"),
        (["RUN/none", "--incident", "1"], "RUN/none: is not a run directory: it has no events.jsonl"),
        (["RUN", "--incident", "1", "--log", "RUN/x"], "RUN/x: is not a run directory: it has no events.jsonl"),
        (["RUN"], "verify: the following arguments are required: --incident; see --help"),
        (["RUN", "--incident", "1"], "RUN: its configuration cannot be written as overrides; train it again by hand"),
    ],
)
def test_bad_input_is_one_line(
    run: RunDir, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["verify", *(each.replace("RUN", str(run.path)) for each in arguments)]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"harness: {message.replace('RUN', str(run.path))}")
    assert line.count("\n") == 1


def test_a_run_that_began_with_imported_weights_is_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = stories.poisoned()
    imported = [
        replace(each, resumed_from="step-00000000-gen-0") if isinstance(each, RunStarted) else each for each in log
    ]
    run = write(tmp_path / "run", imported)
    assert main(["verify", str(run.path), "--incident", "1"]) == 2
    reason = (
        "it began with step-00000000-gen-0, not with the weights of its seed; train it again by hand and pass --log"
    )
    assert capsys.readouterr().err == f"harness: {run.path}: {reason}\n"
