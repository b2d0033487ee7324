"""A run on data in an object store whose machine is lost: the same command elsewhere resumes it bit-identically."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.checkpoint import catalog, store
from harness.config.errors import StorageError
from harness.core import event_json
from harness.core.events import RunStarted, StepRecord
from harness.core.rundir import RunDir
from harness.distributed.world import connected
from harness.remote_resume import restore_remote_run
from launch.cli import checkpoint as checkpoint_command
from tests.data.token_files import write_pair
from tests.distributed import cases
from tests.distributed.pool import Pool
from tests.forks import Launched
from tests.object_stores import BUCKET, StoreServer, ignore_open_connections, models_read_once, s3_only, server_fixture

pytestmark = [pytest.mark.full, ignore_open_connections]

NUM_STEPS = 6
LAST = catalog.name_of(NUM_STEPS, 0)


def upload_corpus(server: StoreServer, directory: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 256, 200_000).tolist()
    write_pair(directory / "tokens", [tokens])
    for ending in (".bin", ".idx"):
        server.system().put_file(str(directory / f"tokens{ending}"), f"{BUCKET}/corpus/tokens{ending}")


server = server_fixture(upload_corpus)


def prepare_launcher(variables: dict[str, str]) -> None:
    """Set the environment of a launcher, and import what its ranks would import each: they are forks of it."""
    os.environ.update(variables)
    import_module("s3fs")
    models_read_once().__enter__()


def train(directory: Path, server: StoreServer, *overrides: str) -> tuple[int, str]:
    """One launcher with two ranks; its local directories are below `directory`."""
    arguments = [
        *cases.TINY,
        "model.num_layers=1",
        "data=files",
        f"data.sources.main.paths=[{server.url('corpus/*.bin')}]",
        f"data.remote.cache_dir={directory}/cache",
        "data.remote.block_kb=64",
        f"train.num_steps={NUM_STEPS}",
        "checkpoint.every_steps=2",
        "launch.nproc=2",
        f"run.dir={directory}",
        "run.name=first",
        *overrides,
    ]
    directory.mkdir(exist_ok=True)
    environment = partial(prepare_launcher, server.environment)
    with Launched("launch.train", *arguments, output=directory / "output", first=environment) as launched:
        code = launched.wait(timeout=200)
        return code, launched.stdout + launched.stderr


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    path = run.checkpoints / LAST
    return store.read_tensors(path, store.read_shapes(path))


def steps(run: RunDir) -> dict[int, tuple[float, float, int]]:
    records = [event for event in event_json.read(run.events) if isinstance(event, StepRecord)]
    return {record.step: (record.loss, record.grad_norm, record.cursor) for record in records}


@s3_only
def test_a_run_whose_machine_is_lost_resumes_from_the_store(
    server: StoreServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url("runs")
    remote = f"checkpoint.remote.url={url}"
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
    assert f"downloading {url}/first/checkpoints/{catalog.name_of(4, 0)}" in output
    assert "no checkpoint of step 6 can be loaded; the run continues from step 4" in output

    run = RunDir(tmp_path / "elsewhere" / "first")
    started = [event for event in event_json.read(run.events) if isinstance(event, RunStarted)]
    assert started[-1].step == 4
    assert steps(run) == steps(lost)
    expected, found = weights(lost), weights(run)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert f"{place}/{LAST}/manifest.json" in system.find(place)

    for command in ("list", "verify"):
        assert checkpoint_command.main([command, f"{url}/first"]) == 0
        assert LAST in capsys.readouterr().out


def break_store(directory: Path) -> str:
    """The URL of a store whose requests fail, as if it did not answer: there is a directory in place of an object."""
    (directory / "store" / "first" / "run.json").mkdir(parents=True)
    return f"file://{directory}/store"


def stop_on_the_other_rank(directory: str, url: str) -> tuple[bool, str, bool]:
    """Rank 1 is asked to stop after two seconds; returns what the start raised on this rank."""
    cfg = cases.tiny("run.name=first", f"checkpoint.remote.url={url}", directory=directory)
    begun_s = time.monotonic()
    with connected(cfg.parallel) as world:
        try:
            restore_remote_run(cfg, is_stopping=lambda: world.rank == 1 and time.monotonic() > begun_s + 2)
        except StorageError as error:
            until_s = time.monotonic() + 60
            while (still := is_restoring()) and time.monotonic() < until_s:
                time.sleep(0.05)
            return error.is_shared, str(error), still
    raise AssertionError("restored")


def is_restoring() -> bool:
    return any(thread.name == "restore" for thread in threading.enumerate())


def test_a_stop_of_any_rank_ends_a_start_that_waits_for_the_store(ranks: Pool, tmp_path: Path) -> None:
    url = break_store(tmp_path)
    stopped = (True, f"{url}: a stop was requested before the run was read from the store", False)
    assert ranks.run(2, stop_on_the_other_rank, str(tmp_path), url) == [stopped, stopped]


def test_a_stop_while_a_start_waits_for_the_store_exits_with_75(tmp_path: Path) -> None:
    url = break_store(tmp_path)
    arguments = [*cases.TINY, "launch.nproc=2", f"checkpoint.remote.url={url}", f"run.dir={tmp_path}", "run.name=first"]
    errors = tmp_path / "output.stderr"
    with Launched("launch.train", *arguments, output=tmp_path / "output") as launched:
        until_s = time.monotonic() + 120
        while not errors.exists() or "trying again in" not in errors.read_text():
            assert time.monotonic() < until_s
            time.sleep(0.05)
        launched.send_signal(signal.SIGTERM)
        assert launched.wait(timeout=60) == 75
        assert launched.stderr.count("a stop was requested before the run was read from the store") == 1
