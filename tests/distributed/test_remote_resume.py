"""A run on data in an object store whose machine is lost: the same command elsewhere resumes it bit-identically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.checkpoint import catalog, store
from harness.core import events
from harness.core.events import RunStarted, StepRecord
from harness.core.rundir import RunDir
from launch.cli import checkpoint as checkpoint_command
from tests.data.token_files import write_pair
from tests.distributed import cases
from tests.forks import Launched
from tests.s3_server import BUCKET, S3Server, s3_server

# Clients of S3 close their connections when the interpreter ends.
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

URL = f"s3://{BUCKET}/runs"
NUM_STEPS = 12
LAST = catalog.name_of(NUM_STEPS, 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    directory = tmp_path_factory.mktemp("s3")
    with s3_server(directory) as server:
        tokens = np.random.default_rng(1).integers(0, 256, 200_000).tolist()
        write_pair(directory / "tokens", [tokens])
        for ending in (".bin", ".idx"):
            server.system().put_file(str(directory / f"tokens{ending}"), f"{BUCKET}/corpus/tokens{ending}")
        yield server


def set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def train(directory: Path, server: S3Server, *overrides: str) -> tuple[int, str]:
    """One launcher with two ranks; its local directories are below `directory`."""
    arguments = [
        *cases.TINY,
        "model.num_layers=1",
        "data=files",
        f"data.sources.main.paths=[s3://{BUCKET}/corpus/*.bin]",
        f"data.remote.cache_dir={directory}/cache",
        "data.remote.block_kb=64",
        f"train.num_steps={NUM_STEPS}",
        "checkpoint.every_steps=4",
        "launch.nproc=2",
        f"run.dir={directory}",
        "run.name=first",
        *overrides,
    ]
    directory.mkdir(exist_ok=True)
    environment = partial(set_environment, server.environment)
    with Launched("launch.train", *arguments, output=directory / "output", first=environment) as launched:
        code = launched.wait(timeout=200)
        return code, launched.stdout + launched.stderr


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    path = run.checkpoints / LAST
    return store.read_tensors(path, store.read_shapes(path))


def steps(run: RunDir) -> dict[int, tuple[float, float, int]]:
    records = [event for event in events.read(run.events) if isinstance(event, StepRecord)]
    return {record.step: (record.loss, record.grad_norm, record.cursor) for record in records}


def test_a_run_whose_machine_is_lost_resumes_from_the_store(
    server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = f"checkpoint.remote.url={URL}"
    code, output = train(tmp_path / "here", server, remote)
    assert code == 0, output
    here = RunDir(tmp_path / "here" / "first")
    upload_log = (here.logs / "upload.log").read_text()
    assert f"{LAST}: uploaded and verified" in upload_log

    system, place = server.system(), f"{BUCKET}/runs/first/checkpoints"
    system.rm(f"{place}/{LAST}", recursive=True)  # as if the machine had been lost before this upload
    shutil.move(here.path, tmp_path / "lost")
    lost = RunDir(tmp_path / "lost")
    code, output = train(tmp_path / "elsewhere", server, remote)
    assert code == 0, output
    assert f"downloading {URL}/first/checkpoints/{catalog.name_of(8, 0)}" in output

    run = RunDir(tmp_path / "elsewhere" / "first")
    started = [event for event in events.read(run.events) if isinstance(event, RunStarted)]
    assert started[-1].step == 8
    assert steps(run) == steps(lost)
    expected, found = weights(lost), weights(run)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert f"{place}/{LAST}/manifest.json" in system.find(place)

    for command in ("list", "verify"):
        assert checkpoint_command.main([command, f"{URL}/first"]) == 0
        assert LAST in capsys.readouterr().out
