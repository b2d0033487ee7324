"""Profiles of a few steps: files of the chosen ranks, the same answer on all ranks, and failures that are warnings."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from harness.config.errors import ConfigError
from harness.config.profile import ProfileConfig
from harness.config.schema import check_world
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.telemetry.step_profiler import StepProfiler
from tests.composed import load


def profiler_of(run: RunDir, cfg: ProfileConfig, rank: int) -> StepProfiler:
    return StepProfiler(run, cfg, rank=rank, world_size=4, device=torch.device("cpu"), last_step=50)


def iterate(profiler: StepProfiler, state: RunState, num_iterations: int) -> None:
    """Iterations whose work has a name of its own in the trace."""
    for _ in range(num_iterations):
        profiler.advance(state)
        with torch.profiler.record_function(f"iteration {state.iteration}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        state.advance(next_cursor=state.cursor + 1, given_back=0, tokens=1)


def profiled_iterations(folder: Path, rank: int) -> set[str]:
    with gzip.open(folder / f"rank-{rank}.trace.json.gz", "rt") as file:
        names = {str(event.get("name")) for event in json.load(file)["traceEvents"]}
    return {name for name in names if name.startswith("iteration ")}


def test_requested_steps_are_written_and_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, state = RunDir(tmp_path), RunState()
    with profiler_of(run, ProfileConfig(), 0) as profiler:
        iterate(profiler, state, 2)
        folder = profiler.request(state, num_steps=2, ranks=())
        iterate(profiler, state, 4)
    assert folder == run.profiles / "iteration-00000003"
    assert profiled_iterations(folder, 0) == {"iteration 2", "iteration 3"}
    assert "aten::mm" in (folder / "rank-0.kernels.txt").read_text()
    assert capsys.readouterr().out == f"profile: {folder}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.kernels.txt", "rank-0.trace.json.gz"]


def test_a_planned_profile_starts_at_its_step(tmp_path: Path) -> None:
    run, state = RunDir(tmp_path), RunState()
    with profiler_of(run, ProfileConfig(at_step=3, num_steps=1, ranks=[2]), 2) as profiler:
        profiler.plan(state)
        iterate(profiler, state, 5)
    assert profiled_iterations(run.profiles / "iteration-00000003", 2) == {"iteration 2"}
    with profiler_of(run, ProfileConfig(at_step=3), 2) as profiler:
        profiler.plan(state)
        iterate(profiler, state, 3)
    assert [path.name for path in run.profiles.iterdir()] == ["iteration-00000003"], "that step has passed"


def test_a_profile_that_the_run_does_not_finish_is_written(tmp_path: Path) -> None:
    state = RunState()
    with profiler_of(RunDir(tmp_path), ProfileConfig(), 1) as profiler:
        folder = profiler.request(state, num_steps=50, ranks=(1,))
        iterate(profiler, state, 1)
    assert profiled_iterations(folder, 1) == {"iteration 0"}


def test_a_profile_is_refused_once_the_last_step_has_begun(tmp_path: Path) -> None:
    state = RunState(step=49, iteration=60)
    with profiler_of(RunDir(tmp_path), ProfileConfig(), 1) as profiler:
        iterate(profiler, state, 1)
        with pytest.raises(ConfigError, match="the run ends with step 50, which has begun"):
            profiler.request(state, num_steps=3, ranks=())
        state.step -= 1  # that update was rejected
        assert profiler.request(state, num_steps=3, ranks=()).name == "iteration-00000062"


def test_all_ranks_give_the_same_answer_and_only_chosen_ones_write(tmp_path: Path) -> None:
    profilers = [profiler_of(RunDir(tmp_path), ProfileConfig(), rank) for rank in range(2)]
    states = [RunState(), RunState()]
    for profiler, state in zip(profilers, states, strict=True):
        folder = profiler.request(state, num_steps=2, ranks=(1,))
        iterate(profiler, state, 1)
        with pytest.raises(ConfigError, match="another profile is planned or not finished"):
            profiler.request(state, num_steps=1, ranks=())
        iterate(profiler, state, 2)
        with pytest.raises(ConfigError, match="no rank 4, 9; the run has ranks 0 to 3"):
            profiler.request(state, num_steps=1, ranks=(0, 4, 9))
        with profiler:
            pass
    assert {path.name for path in folder.iterdir()} == {"rank-1.kernels.txt", "rank-1.trace.json.gz"}
    profilers[0].request(states[0], num_steps=1, ranks=(1,))


def test_a_failure_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, state = RunDir(tmp_path), RunState()
    run.profiles.write_text("in the way")
    with profiler_of(run, ProfileConfig(), 0) as profiler:
        profiler.request(state, num_steps=1, ranks=())
        iterate(profiler, state, 3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("warning: rank 0: the profile failed: ")


def test_ranks_that_do_not_exist_are_rejected_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"profile\.ranks: no rank 2; the run has ranks 0 to 1"):
        check_world(load(["profile.ranks=[0,2]"]), 2)


def test_without_a_profile_nothing_is_created(tmp_path: Path) -> None:
    with profiler_of(RunDir(tmp_path), ProfileConfig(), 0) as profiler:
        profiler.plan(RunState())
        iterate(profiler, RunState(), 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"at_step": 0}, "profile.at_step"),
        ({"num_steps": 0}, "profile.num_steps"),
        ({"num_steps": 101}, "profile.num_steps"),
        ({"ranks": [-1]}, "profile.ranks"),
    ],
)
def test_invalid_values_name_their_key(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        ProfileConfig(**options)  # type: ignore[arg-type]
