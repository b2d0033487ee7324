"""`kill -9` at any instant: the run resumes bit-identically.

Each test case is one run of two ranks that is killed many times, at points drawn from a seed, and then runs to its
end. It is killed within and after every phase of a step and of a save, and before the first of them; further cases draw
from all phases and from the elapsed time. After each kill every committed checkpoint must be complete, the newest must
exist, and the killed attempt must have resumed from the one that was the newest. At the end every result of the run and
every bit of its state must equal those of a control run.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from harness import train
from harness.build import Parts, build
from harness.checkpoint import catalog, integrity
from harness.config.compose import read
from harness.config.run import ResumePolicy
from harness.config.schema import Config
from harness.core import event_json, rundir
from harness.core.events import Intervention, RunEnded, RunStarted, StepRecord
from harness.distributed.shards import local
from tests.composed import load
from tests.distributed import cases
from tests.distributed.killable_ranks import (
    KILLED,
    KillableRanks,
    KillAtCall,
    KillAtTime,
    KillPoint,
    Place,
    When,
    kill_in,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked from a process that imported torch")

SIZE = 2
OVERRIDES = (
    "model.num_layers=1",
    "train.num_steps=24",
    "checkpoint.every_steps=3",
    "checkpoint.keep=2",
    "checkpoint.good_after_steps=2",
    "checkpoint.ring.every_steps=2",
)
NUM_RANDOM_RUNS = 1
MAX_GRACE_S = 0.3
MAX_KILL_AFTER_S = 1.5


class Candidate(NamedTuple):
    """A place and its possible call numbers. They are so low that a run can be killed at several places in turn."""

    place: Place
    whens: tuple[When, ...]
    ranks: tuple[int, ...] = (0,)
    nth: range = range(1, 2)
    """Call numbers to draw from for the first kill."""
    later: range = range(1, 2)
    """The same for later kills at this place."""


def kill_in_write() -> None:
    kill_in(os, "write", lambda write, descriptor, line: write(descriptor, line[: len(line) // 2]))


def kill_in_fsync() -> None:
    def cut(_: Any, descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)

    kill_in(os, "fsync", cut)


def kill_in_unlink() -> None:
    kill_in(os, "unlink", lambda unlink, *arguments, **options: unlink(*arguments, **options))


def kill_in_rename() -> None:
    kill_in(Path, "rename", lambda rename, *arguments: rename(*arguments))


def kill_in_tensor_copy() -> None:
    kill_in(torch.Tensor, "copy_", lambda *_, **__: None)


def kill_in_hash_files() -> None:
    kill_in(integrity, "hash_files", lambda *_: None)


ALL = (When.before, When.within, When.after)
INSIDE = (When.within, When.after)
"""For steps of a save: before one is after the one that precedes it."""
AROUND = (When.before, When.after)
BOTH = (0, 1)
SAVES = range(1, 3)
WRITER = "torch.distributed.checkpoint.filesystem:FileSystemWriter"

FORWARD = Place("forward", "harness.train:forward_backward")
PHASES = (
    Candidate(
        Place("configuration", "harness.core.rundir:write_atomically", kill_in_fsync),
        ALL,
        (0,),
        range(1, 4),
        range(1, 4),
    ),
    Candidate(
        Place("log", "harness.telemetry.event_log:EventLog._append", kill_in_write), ALL, (0,), range(1, 5), range(1, 5)
    ),
    Candidate(FORWARD, AROUND, BOTH, range(1, 5), range(1, 5)),
    Candidate(Place("update", "harness.optim.update:Update.apply"), AROUND, BOTH, range(1, 5), range(1, 5)),
    Candidate(
        Place("snapshot", "harness.checkpoint.ring:Ring.take_snapshot", kill_in_tensor_copy),
        ALL,
        BOTH,
        range(1, 3),
        range(1, 3),
    ),
    Candidate(Place("staging", "harness.checkpoint.saver:write"), AROUND, BOTH, SAVES),
    Candidate(Place("shards", f"{WRITER}.write_data", kill_in_fsync), INSIDE, BOTH, SAVES),
    Candidate(Place("metadata", f"{WRITER}.finish", kill_in_fsync), INSIDE, (0,)),
    Candidate(Place("kept metadata", "harness.checkpoint.saver:write_metadata", kill_in_fsync), INSIDE, (0,)),
    Candidate(
        Place("manifest", "harness.checkpoint.integrity:write_checkpoint_manifest", kill_in_fsync), INSIDE, (0,), SAVES
    ),
    Candidate(Place("publish", "harness.checkpoint.catalog:publish", kill_in_rename), INSIDE, (0,), SAVES),
    Candidate(Place("health", "harness.checkpoint.catalog:mark", kill_in_fsync), ALL, (0,), SAVES),
    Candidate(Place("retention", "harness.checkpoint.catalog:delete", kill_in_unlink), ALL),
    Candidate(Place("resume", "harness.checkpoint.store:load_newest", kill_in_hash_files), ALL, BOTH),
)
CHAINS = {
    "start and step": ("configuration", "resume", "forward", "snapshot"),
    "log and update": ("log", "update"),
    "save": ("staging", "shards", "metadata", "kept metadata", "manifest"),
    "publish": ("publish",),
    "after a save": ("health", "retention"),
}
"""Phases at which one run is killed in turn. It makes progress between kills, but does not end before the last one."""
FIRST_KILL = KillAtCall(place=FORWARD, when=When.before, nth=7, rank=1, grace_s=0.0)
"""At that call only the checkpoint of step 3 is on disk: the snapshot of step 6 waits for its save."""


def run_rank(cfg: Config) -> tuple[int, str]:
    """Run one rank through `run_worker`: exit code, and digest of all tensors at the end."""
    built: list[Parts] = []

    def build_and_record(*arguments: Any, **options: Any) -> Parts:
        built.append(build(*arguments, **options))
        return built[-1]

    vars(train)["build"] = build_and_record
    code = train.run_worker(cfg)
    state = hashlib.sha256()
    for name, tensor in sorted(built[0].tensors().items()):
        state.update(name.encode() + local(tensor).detach().contiguous().numpy().tobytes())
    return code, state.hexdigest()


StepResults = dict[int, tuple[float, float, float, int]]


class Control(NamedTuple):
    step_results: StepResults
    digests: list[str]


def step_results(log: Path) -> StepResults:
    """The exact results of each step; of repeated steps, the later."""
    records = (event for event in event_json.read(log) if isinstance(event, StepRecord))
    return {record.step: (record.loss, record.grad_norm, record.lr, record.cursor) for record in records}


@cache
def composed() -> Config:
    return load([*cases.TINY, *OVERRIDES, "run.name=victim"])


def configure(directory: Path) -> Config:
    cfg = deepcopy(composed())
    cfg.run.dir = str(directory)
    return cfg


@pytest.fixture(scope="module")
def killable() -> Iterator[KillableRanks]:
    parent = KillableRanks(__name__, "torch._dynamo")
    yield parent
    parent.close()


@pytest.fixture(scope="module")
def control(killable: KillableRanks, tmp_path_factory: pytest.TempPathFactory) -> Control:
    """An undisturbed run."""
    cfg = configure(tmp_path_factory.mktemp("control"))
    outcome = killable.run(SIZE, run_rank, cfg)
    assert [code for code, _ in outcome.results] == [0] * SIZE
    found = step_results(rundir.locate(cfg).events)
    assert list(found) == list(range(1, 25))
    return Control(found, [digest for _, digest in outcome.results])


@pytest.fixture(scope="module")
def killed_once(killable: KillableRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed once, with one checkpoint."""
    directory = tmp_path_factory.mktemp("killed_once")
    assert killable.run(SIZE, run_rank, configure(directory), kill_point=FIRST_KILL).killed
    assert verified_checkpoints(rundir.locate(configure(directory)).checkpoints) == [3]
    return directory


def draw_kill(candidate: Candidate, when: When, rng: random.Random, *, nth: range) -> KillAtCall:
    return KillAtCall(
        place=candidate.place,
        when=when,
        nth=rng.choice(nth),
        rank=rng.choice(candidate.ranks),
        grace_s=rng.choice((0.0, rng.uniform(0.0, MAX_GRACE_S))),
    )


def draw_any_kill(rng: random.Random) -> KillPoint:
    if rng.random() < 0.5:
        grace_s = rng.uniform(0.0, MAX_GRACE_S)
        return KillAtTime(after_s=rng.uniform(0.0, MAX_KILL_AFTER_S), rank=rng.randrange(SIZE), grace_s=grace_s)
    candidate = rng.choice(PHASES)
    return draw_kill(candidate, rng.choice(candidate.whens), rng, nth=candidate.nth)


def verified_checkpoints(root: Path) -> list[int]:
    """Steps of the committed checkpoints, each verified."""
    found = catalog.list_checkpoints(root)
    for checkpoint in found:
        assert integrity.verify(checkpoint.path).step == checkpoint.step
    return [checkpoint.step for checkpoint in found]


def run_through_kills(killable: KillableRanks, cfg: Config, kill_points: Sequence[KillPoint]) -> list[bool]:
    """Start the run once per kill point; returns which kills happened. The newest checkpoint must never be lost, and
    each start that was logged must have resumed from it."""
    run = rundir.locate(cfg)
    was_killed: list[bool] = []
    newest, num_started = max(verified_checkpoints(run.checkpoints), default=0), len(starts(run))
    for kill_point in kill_points:
        outcome = killable.run(SIZE, run_rank, cfg, kill_point=kill_point)
        assert outcome.killed or outcome.exit_codes == [0] * SIZE
        was_killed.append(outcome.killed)
        started = starts(run)[num_started:]
        assert [event.step for event in started] == [newest] * len(started), kill_point
        num_started += len(started)
        steps = verified_checkpoints(run.checkpoints)
        assert max(steps, default=0) >= newest, f"step {newest} was saved and is missing after a kill {kill_point}"
        newest = max(steps, default=0)
    return was_killed


def starts(run: rundir.RunDir) -> list[RunStarted]:
    """The logged starts."""
    log = event_json.read(run.events) if run.events.exists() else ()
    return [event for event in log if isinstance(event, RunStarted)]


def check_end(killable: KillableRanks, cfg: Config, control: Control) -> None:
    """Without further kills, the run ends like the control run."""
    run = rundir.locate(cfg)
    newest = max((checkpoint.name for checkpoint in catalog.list_checkpoints(run.checkpoints)), default=None)
    outcome = killable.run(SIZE, run_rank, cfg)
    assert [code for code, _ in outcome.results] == [0] * SIZE
    assert step_results(run.events) == control.step_results
    assert [digest for _, digest in outcome.results] == control.digests
    log = list(event_json.read(run.events))
    assert [event.resumed_from for event in log if isinstance(event, RunStarted)][-1] == newest
    assert isinstance(log[-1], RunEnded)
    iterations = [event.iteration for event in log if isinstance(event, StepRecord)]
    assert iterations == sorted(set(iterations)), "iterations never go back"
    steps = verified_checkpoints(run.checkpoints)
    assert steps[-1] == 24
    assert len(steps) <= 3, "the newest two, and the newest good one"
    left = [path for path in run.path.rglob(".*") if path.name != ".metadata"]
    assert not left, "no unfinished files remain"
    assert not catalog.list_damaged(run.checkpoints)


@pytest.mark.parametrize(
    "chain", [pytest.param(chain, marks=() if chain == "publish" else pytest.mark.full) for chain in CHAINS]
)
def test_a_run_killed_in_any_phase_resumes_bit_identically(
    killable: KillableRanks, control: Control, killed_once: Path, tmp_path: Path, chain: str
) -> None:
    candidates = {candidate.place.phase: candidate for candidate in PHASES}
    assert sorted(candidates) == sorted(phase for phases in CHAINS.values() for phase in phases)
    kill_points: list[KillPoint] = []
    for phase in CHAINS[chain]:
        rng, candidate = random.Random(phase), candidates[phase]
        first, *others = rng.sample(candidate.whens, len(candidate.whens))
        kill_points.append(draw_kill(candidate, first, rng, nth=candidate.nth))
        kill_points += [draw_kill(candidate, when, rng, nth=candidate.later) for when in others]
    shutil.copytree(killed_once, tmp_path, dirs_exist_ok=True)
    cfg = configure(tmp_path)
    was_killed = run_through_kills(killable, cfg, kill_points)
    assert all(was_killed), f"a kill did not happen: {[*zip(map(str, kill_points), was_killed, strict=True)]}"
    check_end(killable, cfg, control)


@pytest.mark.full
def test_a_changed_config_is_accepted_once_the_state_is_loaded_whatever_is_killed(
    killable: KillableRanks, killed_once: Path, tmp_path: Path
) -> None:
    """Before that the run stays as it was, and the old command resumes it."""
    directories = [tmp_path / name for name in ("killed", "control")]
    configs = []
    for directory in directories:
        shutil.copytree(killed_once, directory)
        cfg = configure(directory)
        cfg.optim.lr, cfg.run.resume = 0.001, ResumePolicy.changed
        cfg.train.num_steps = 9
        configs.append(cfg)
    run = rundir.locate(configs[0])
    before = run.config.read_bytes()
    load = Place("load", "harness.resume:load_state")
    log = Place("intervention", "harness.core.rundir:append_line", kill_in_fsync)
    write = Place("configuration", "harness.core.rundir:write_atomically", kill_in_fsync)
    for place, when, nth in [
        (load, When.before, 1),
        (load, When.after, 1),
        (log, When.before, 1),
        (log, When.within, 1),
        (write, When.before, 2),
        (write, When.within, 3),
    ]:
        kill_point = KillAtCall(place=place, when=when, nth=nth, rank=0, grace_s=0.0)
        assert killable.run(SIZE, run_rank, configs[0], kill_point=kill_point).killed, kill_point
        assert run.config.read_bytes() == before
        assert place is write or when is When.within or not run.interventions.exists()
        rundir.check_resume(configure(directories[0]), run)
    outcomes = [killable.run(SIZE, run_rank, cfg) for cfg in configs]
    assert outcomes[0].results == outcomes[1].results
    assert read(run.config).optim.lr == 0.001
    logged = [event for event in event_json.read(run.events) if isinstance(event, Intervention)]
    assert [event.changes["optim.lr"] for event in logged] == [[0.003, 0.001]]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(NUM_RANDOM_RUNS))
def test_a_run_killed_at_random_resumes_bit_identically(
    killable: KillableRanks, control: Control, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    cfg = configure(tmp_path)
    was_killed = run_through_kills(killable, cfg, [draw_any_kill(rng) for _ in range(3)])
    assert any(was_killed), "no rank was killed"
    check_end(killable, cfg, control)


@pytest.mark.full
def test_only_the_chosen_rank_is_killed_and_only_at_the_chosen_call(killable: KillableRanks, tmp_path: Path) -> None:
    cfg = configure(tmp_path)
    cfg.train.num_steps = 6
    early, late = (KillAtCall(place=FORWARD, when=When.before, nth=nth, rank=1, grace_s=0.0) for nth in (3, 100))
    outcome = killable.run(SIZE, run_rank, cfg, kill_point=early)
    assert outcome.killed
    assert outcome.exit_codes[1] == KILLED
    assert len(step_results(rundir.locate(cfg).events)) < 3
    assert not killable.run(SIZE, run_rank, cfg, kill_point=late).killed
