"""`kill -9` at any instant: the run resumes, bit-identical to an undisturbed run.

Each test case is one run of two ranks that is killed several times, at places drawn from a seed, and then runs to its
end. Every phase of a step and of a save has its own case, which dies before, within and after it; further cases draw
from all places and from the clock. After each death every committed checkpoint must be complete and the newest must
exist; at the end every number of the run and every bit of its state must equal those of an undisturbed run.
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
from harness.config.compose import load
from harness.config.schema import Config
from harness.core import events, rundir
from harness.core.events import RunEnded, RunStarted, StepRecord
from harness.distributed.shards import local
from tests.distributed import cases
from tests.distributed.killable_ranks import KILLED, AtPlace, AtTime, Death, Mortals, Place, When, die_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked from a process that imported torch")

SIZE = 2
OVERRIDES = (
    "model.num_layers=1",
    "train.num_steps=24",
    "checkpoint.every_steps=5",
    "checkpoint.keep=2",
    "checkpoint.good_after_steps=3",
    "checkpoint.ring.every_steps=3",
)
NUM_RANDOM_STORIES = 4
LONGEST_GRACE_S = 0.3
LONGEST_LIFE_S = 1.5


class Drawn(NamedTuple):
    """A place and its possible call numbers, chosen so that a run that died there three times still reaches it."""

    place: Place
    whens: tuple[When, ...]
    ranks: tuple[int, ...] = (0,)
    nth: range = range(1, 2)
    """Possible numbers of the fatal call, the first time."""
    later: range = range(1, 2)
    """The same for a run that has already died there."""


def half_a_line() -> None:
    die_in(os, "write", lambda write, descriptor, line: write(descriptor, line[: len(line) // 2]))


def half_a_file() -> None:
    def cut(_: Any, descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)

    die_in(os, "fsync", cut)


def half_a_deletion() -> None:
    die_in(os, "unlink", lambda unlink, *arguments, **options: unlink(*arguments, **options))


def half_a_rename() -> None:
    die_in(Path, "rename", lambda rename, *arguments: rename(*arguments))


def half_a_copy() -> None:
    die_in(torch.Tensor, "copy_", lambda *_, **__: None)


def half_a_load() -> None:
    die_in(integrity, "hash_files", lambda *_: None)


ALL = (When.before, When.within, When.after)
AROUND = (When.before, When.after)
BOTH = (0, 1)
SAVES = range(1, 3)
WRITER = "torch.distributed.checkpoint.filesystem:FileSystemWriter"

FORWARD = Place("forward", "harness.train:forward_backward")
PHASES = (
    Drawn(Place("configuration", "harness.core.rundir:write_atomically", half_a_file), ALL),
    Drawn(
        Place("log", "harness.telemetry.event_log:EventLog._append", half_a_line), ALL, (0,), range(1, 7), range(1, 7)
    ),
    Drawn(FORWARD, AROUND, BOTH, range(1, 9), range(1, 9)),
    Drawn(Place("update", "harness.optim.update:Update.apply"), AROUND, BOTH, range(1, 9), range(1, 9)),
    Drawn(
        Place("snapshot", "harness.checkpoint.ring:Ring.take_snapshot", half_a_copy),
        ALL,
        BOTH,
        range(1, 4),
        range(1, 4),
    ),
    Drawn(Place("staging", "harness.checkpoint.store:write"), AROUND, BOTH, SAVES),
    Drawn(Place("shards", f"{WRITER}.write_data", half_a_file), ALL, BOTH, SAVES),
    Drawn(Place("metadata", f"{WRITER}.finish", half_a_file), ALL, (0,)),
    Drawn(Place("kept metadata", "harness.checkpoint.store:write_metadata", half_a_file), ALL, (0,)),
    Drawn(Place("manifest", "harness.checkpoint.integrity:write_manifest", half_a_file), ALL, (0,), SAVES),
    Drawn(Place("publish", "harness.checkpoint.catalog:publish", half_a_rename), ALL, (0,), SAVES),
    Drawn(Place("health", "harness.checkpoint.catalog:mark", half_a_file), ALL, (0,), SAVES),
    Drawn(Place("retention", "harness.checkpoint.catalog:delete", half_a_deletion), ALL),
    Drawn(Place("resume", "harness.checkpoint.store:load_newest", half_a_load), ALL, BOTH),
)
FIRST_DEATH = AtPlace(place=FORWARD, when=When.before, nth=11, rank=1, grace_s=0.0)
"""By then the checkpoint of step 5 lies on disk, because the snapshot of step 10 has waited for it; no other does."""


def live(cfg: Config) -> tuple[int, str]:
    """Run one rank through `run_worker`: exit code, and digest of all tensors at the end."""
    built: list[Parts] = []

    def remember(*arguments: Any) -> Parts:
        built.append(build(*arguments))
        return built[-1]

    vars(train)["build"] = remember
    code = train.run_worker(cfg)
    state = hashlib.sha256()
    for name, tensor in sorted(built[0].tensors().items()):
        state.update(name.encode() + local(tensor).detach().contiguous().numpy().tobytes())
    return code, state.hexdigest()


Numbers = dict[int, tuple[float, float, float, int]]


class Control(NamedTuple):
    numbers: Numbers
    digests: list[str]


def numbers(log: Path) -> Numbers:
    """The exact results of each step; of repeated steps, the later."""
    records = (event for event in events.read(log) if isinstance(event, StepRecord))
    return {record.step: (record.loss, record.grad_norm, record.lr, record.cursor) for record in records}


@cache
def composed() -> Config:
    return load([*cases.TINY, *OVERRIDES, "run.name=mortal"])


def configure(directory: Path) -> Config:
    cfg = deepcopy(composed())
    cfg.run.dir = str(directory)
    return cfg


@pytest.fixture(scope="module")
def mortals() -> Iterator[Mortals]:
    mother = Mortals(__name__, "torch._dynamo")
    yield mother
    mother.close()


@pytest.fixture(scope="module")
def control(mortals: Mortals, tmp_path_factory: pytest.TempPathFactory) -> Control:
    """An undisturbed run."""
    cfg = configure(tmp_path_factory.mktemp("control"))
    outcome = mortals.run(SIZE, live, cfg)
    assert [code for code, _ in outcome.results] == [0] * SIZE
    found = numbers(rundir.locate(cfg).events)
    assert list(found) == list(range(1, 25))
    return Control(found, [digest for _, digest in outcome.results])


@pytest.fixture(scope="module")
def begun(mortals: Mortals, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that died once, with one checkpoint."""
    directory = tmp_path_factory.mktemp("begun")
    assert mortals.run(SIZE, live, configure(directory), death=FIRST_DEATH).killed
    assert whole_checkpoints(rundir.locate(configure(directory)).checkpoints) == [5]
    return directory


def draw(drawn: Drawn, when: When, rng: random.Random, *, nth: range) -> AtPlace:
    return AtPlace(
        place=drawn.place,
        when=when,
        nth=rng.choice(nth),
        rank=rng.choice(drawn.ranks),
        grace_s=rng.choice((0.0, rng.uniform(0.0, LONGEST_GRACE_S))),
    )


def draw_any(rng: random.Random) -> Death:
    if rng.random() < 0.5:
        grace_s = rng.uniform(0.0, LONGEST_GRACE_S)
        return AtTime(after_s=rng.uniform(0.0, LONGEST_LIFE_S), rank=rng.randrange(SIZE), grace_s=grace_s)
    drawn = rng.choice(PHASES)
    return draw(drawn, rng.choice(drawn.whens), rng, nth=drawn.nth)


def whole_checkpoints(root: Path) -> list[int]:
    """Steps of the committed checkpoints, each verified."""
    found = catalog.list_checkpoints(root)
    for checkpoint in found:
        assert integrity.verify(checkpoint.path).step == checkpoint.step
    return [checkpoint.step for checkpoint in found]


def suffer(mortals: Mortals, cfg: Config, deaths: Sequence[Death]) -> list[bool]:
    """Run through the deaths one by one; returns which of them happened. The newest checkpoint is never lost."""
    root = rundir.locate(cfg).checkpoints
    came: list[bool] = []
    newest = max(whole_checkpoints(root), default=0)
    for death in deaths:
        outcome = mortals.run(SIZE, live, cfg, death=death)
        assert outcome.killed or outcome.exit_codes == [0] * SIZE
        came.append(outcome.killed)
        steps = whole_checkpoints(root)
        assert max(steps, default=0) >= newest, f"step {newest} was saved and is gone after a death {death}"
        newest = max(steps, default=0)
    return came


def check_end(mortals: Mortals, cfg: Config, control: Control) -> None:
    """Without further deaths, the run ends like the undisturbed one."""
    run = rundir.locate(cfg)
    newest = max((checkpoint.name for checkpoint in catalog.list_checkpoints(run.checkpoints)), default=None)
    outcome = mortals.run(SIZE, live, cfg)
    assert [code for code, _ in outcome.results] == [0] * SIZE
    assert numbers(run.events) == control.numbers
    assert [digest for _, digest in outcome.results] == control.digests
    log = list(events.read(run.events))
    assert [event.resumed_from for event in log if isinstance(event, RunStarted)][-1] == newest
    assert isinstance(log[-1], RunEnded)
    iterations = [event.iteration for event in log if isinstance(event, StepRecord)]
    assert iterations == sorted(set(iterations)), "iterations never go back"
    steps = whole_checkpoints(run.checkpoints)
    assert steps[-1] == 24
    assert len(steps) <= 3, "the newest two, and the newest good one"
    left = [path for path in run.path.rglob(".*") if path.name != ".metadata"]
    assert not left, "no unfinished files remain"
    assert not catalog.list_damaged(run.checkpoints)


@pytest.mark.parametrize(
    "drawn",
    [
        pytest.param(drawn, id=drawn.place.phase, marks=() if drawn.place.phase == "publish" else pytest.mark.full)
        for drawn in PHASES
    ],
)
def test_a_run_killed_in_any_phase_resumes_bit_identically(
    mortals: Mortals, control: Control, begun: Path, tmp_path: Path, drawn: Drawn
) -> None:
    rng = random.Random(drawn.place.phase)
    first, *others = rng.sample(drawn.whens, len(drawn.whens))
    deaths = [draw(drawn, first, rng, nth=drawn.nth), *(draw(drawn, when, rng, nth=drawn.later) for when in others)]
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    cfg = configure(tmp_path)
    came = suffer(mortals, cfg, deaths)
    assert all(came), f"not every death came: {[*zip(map(str, deaths), came, strict=True)]}"
    check_end(mortals, cfg, control)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(NUM_RANDOM_STORIES))
def test_a_run_killed_at_random_resumes_bit_identically(
    mortals: Mortals, control: Control, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    cfg = configure(tmp_path)
    came = suffer(mortals, cfg, [draw_any(rng) for _ in range(3)])
    assert any(came), "no rank was killed"
    check_end(mortals, cfg, control)


def test_only_the_chosen_rank_dies_and_only_at_the_chosen_place(mortals: Mortals, tmp_path: Path) -> None:
    cfg = configure(tmp_path)
    early, late = (AtPlace(place=FORWARD, when=When.before, nth=nth, rank=1, grace_s=0.0) for nth in (3, 100))
    outcome = mortals.run(SIZE, live, cfg, death=early)
    assert outcome.killed
    assert outcome.exit_codes[1] == KILLED
    assert len(numbers(rundir.locate(cfg).events)) < 3
    assert not mortals.run(SIZE, live, cfg, death=late).killed
