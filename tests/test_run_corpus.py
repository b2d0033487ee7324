"""The data of a run at each start: recorded, accepted with its changes, or refused with an error of one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.build import build
from harness.checkpoint.store import STATE_FILE
from harness.config.data import DataKind, PhaseConfig, SourceConfig
from harness.config.errors import ConfigError, StorageError
from harness.config.schema import Config
from harness.control.stop_requests import StopRequest, signals_to
from harness.core import rundir
from harness.core.batch_sizes import BatchSize
from harness.data.corpus import remote_cache
from harness.data.corpus.corpus_record import DataRecord, read_record, render_record
from harness.data.order.ledger import Ledger
from harness.data.sources import RecordedData, open_data, read_recorded_data
from harness.distributed.world import connected
from harness.run_corpus import (
    RunData,
    check_local_data,
    plan_data,
    recorded_data,
    require_planned,
    require_same_windows,
    resolve_run_data,
    with_probes,
)
from harness.telemetry.event_log import prepare_run
from tests.composed import load
from tests.data.token_files import write_pair

CPU = torch.device("cpu")


def write_shard(path: Path, num_tokens: int = 1601) -> None:
    seed = int.from_bytes(path.name.encode(), "little") % 2**32
    np.random.default_rng(seed).integers(0, 250, num_tokens, dtype=np.uint16).tofile(path)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    directory = tmp_path / "shards"
    directory.mkdir()
    for name in ("b.bin", "c.bin"):
        write_shard(directory / name)
    return directory


def config(shards: Path, *overrides: str) -> Config:
    paths = ["data=files", f"data.sources.main.paths=[{shards}/*.bin]", "train.sequence_length=16"]
    return load([f"run.dir={shards.parent}", "run.name=a", "train.batch_size=8", *paths, *overrides])


def start_run(cfg: Config, *, cursor: int | None = None) -> rundir.RunDir:
    """Prepare a run as after its first start, with a checkpoint at batch `cursor` if given."""
    run = rundir.locate(cfg)
    rundir.prepare_run_dir(cfg, run, corpus=render_record(plan_data(cfg).record))
    run.events.touch()
    if cursor is not None:
        write_checkpoint(run, cursor)
    return run


def write_checkpoint(run: rundir.RunDir, cursor: int) -> None:
    checkpoint = run.checkpoints / f"step-{cursor:08d}-gen-0"
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE_FILE).write_text(json.dumps({"cursor": cursor}))


def restart_run(cfg: Config) -> RunData:
    """Start the run again, up to the point where training begins."""
    data = plan_data(cfg)
    rundir.prepare_run_dir(cfg, rundir.locate(cfg), corpus=render_record(data.record), data_changes=data.changes)
    return data


def windows(cfg: Config, recorded: RecordedData, batches: range) -> list[tuple[str, int]]:
    train, held_out = open_data(cfg, rank=0, world_size=1, device=CPU, ledger=Ledger(), recorded=recorded)
    train.close()
    held_out.close()
    return [origin[:2] for index in batches for origin in train.origins(index)]


def assert_refused(cfg: Config, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        plan_data(cfg)
    assert "\n" not in str(caught.value)


def test_a_launcher_leaves_data_in_a_store_to_the_ranks(shards: Path) -> None:
    check_local_data(config(shards))
    with pytest.raises(ConfigError, match=r"absent: no such file"):
        check_local_data(config(shards, f"data.sources.main.paths=[{shards}/absent]"))
    check_local_data(config(shards, f"data.sources.main.paths=[{shards}/b.bin,file://{shards}/absent]"))


def test_the_first_start_records_files_and_batch_size(shards: Path) -> None:
    cfg = config(shards)
    run = start_run(cfg)
    record = read_record(run.corpus)
    assert record is not None
    assert [file.path for file in record.sources["main"].files] == [f"{shards}/b.bin", f"{shards}/c.bin"]
    assert record.sizes == (BatchSize(0, 8),)
    assert plan_data(cfg) == RunData(record, {})


@pytest.mark.parametrize("name", ["a.bin", "d.bin"])
def test_an_added_file_is_read_after_the_current_pass(shards: Path, name: str) -> None:
    cfg = config(shards)
    run = start_run(cfg, cursor=10)
    before = windows(cfg, read_recorded_data(run), range(20))
    write_shard(shards / name)
    assert_refused(cfg, rf"data\.sources\.main\.paths: .*{name} was added; .*run\.resume=changed")
    grown = config(shards, "run.resume=changed")
    data = restart_run(grown)
    assert data.changes == {"data.sources.main.files": ["2 files", f"3 files: {shards}/{name} was added"]}
    assert plan_data(cfg) == RunData(data.record, {}), "the file is recorded in the run"
    num_train = 200 - round(200 * 0.05) - 1
    (addition,) = data.record.sources["main"].additions
    assert (addition.num_files, addition.from_turn) == (1, num_train)
    after = windows(cfg, read_recorded_data(run), range(36))
    assert after[: len(before)] == before
    assert len(set(after[: num_train + 99])) == num_train + 99
    train, held_out = open_data(
        cfg, rank=0, world_size=1, device=CPU, ledger=Ledger(), recorded=read_recorded_data(run)
    )
    begins = "source main begins "
    assert train.later_stretches() == [
        (num_train // 8, begins + "with its added files"),
        ((num_train + 99) // 8, begins + "a pass over old and added files"),
    ]
    train.close()
    held_out.close()
    assert {path for path, _ in after[num_train : num_train + 99]} == {f"{shards}/{name}"}


def test_a_second_addition_follows_the_first(shards: Path) -> None:
    cfg = config(shards, "run.resume=changed")
    run = start_run(cfg, cursor=10)
    for name, cursor in (("d.bin", 24), ("e.bin", 40), ("a.bin", 100)):
        write_shard(shards / name, 321)
        data = restart_run(cfg)
        write_checkpoint(run, cursor)
    additions = data.record.sources["main"].additions
    assert [addition.from_turn for addition in additions] == [189, 209, 229 + 229]
    paths = [Path(file.path).name for file in data.record.sources["main"].files]
    assert paths == ["b.bin", "c.bin", "d.bin", "e.bin", "a.bin"]


def test_a_copy_of_a_partly_held_out_file_is_refused(shards: Path) -> None:
    cfg = config(shards, "run.resume=changed")
    start_run(cfg, cursor=10)
    (shards / "d.bin").write_bytes((shards / "b.bin").read_bytes())
    source = plan_data(cfg).record.sources["main"]
    line = rf"^data\.sources\.main\.paths: {shards}/d\.bin was added but holds the same as {shards}/b\.bin"
    with pytest.raises(ConfigError, match=line):
        with_probes("main", source, ["1", "2", "1"])
    assert [file.probes for file in with_probes("main", source, ["1", "2", "3"]).files] == ["1", "2", "3"]


def test_moved_files_are_the_same_corpus(shards: Path) -> None:
    run = start_run(config(shards), cursor=10)
    before = windows(config(shards), read_recorded_data(run), range(5))
    moved = shards.rename(shards.with_name("moved"))
    data = restart_run(config(moved, "run.resume=changed"))
    assert [file.path for file in data.record.sources["main"].files] == [f"{moved}/b.bin", f"{moved}/c.bin"]
    after = windows(config(moved), read_recorded_data(run), range(5))
    assert [(Path(path).name, first) for path, first in after] == [(Path(path).name, first) for path, first in before]


@pytest.mark.parametrize(
    "override",
    [
        "train.sequence_length=32",
        "data.eval_fraction=0.1",
        "data.sources.main.dtype=uint16",
        "run.seed=7",
        "data.stratify.rare_below=2",
    ],
)
def test_settings_that_define_the_windows_cannot_change(shards: Path, override: str) -> None:
    start_run(config(shards), cursor=10)
    key, _, value = override.partition("=")
    old = {"train.sequence_length": "16", "data.eval_fraction": "0.05", "data.sources.main.dtype": "auto"}
    old |= {"run.seed": "0", "data.stratify.rare_below": "0"}
    assert_refused(
        config(shards, "run.resume=changed", override), rf"{key}: must stay {old[key]} in this run, got {value}"
    )


def test_a_run_without_a_checkpoint_may_change_its_data(shards: Path) -> None:
    start_run(config(shards))
    (shards / "b.bin").unlink()
    write_shard(shards / "d.bin", 4000)
    assert_refused(config(shards), r"data\.sources\.main\.paths: .*b\.bin was removed, .*d\.bin was added")
    data = plan_data(config(shards, "run.resume=changed", "train.sequence_length=8", "train.batch_size=4"))
    assert data.record.sizes == (BatchSize(0, 4),)
    assert [Path(file.path).name for file in data.record.sources["main"].files] == ["c.bin", "d.bin"]


def test_another_batch_size_continues_the_same_order(shards: Path) -> None:
    cfg = config(shards)
    run = start_run(cfg, cursor=5)
    before = windows(cfg, read_recorded_data(run), range(20))
    larger = config(shards, "train.batch_size=10", "run.resume=changed")
    assert restart_run(larger).record.sizes == (BatchSize(0, 8), BatchSize(5, 10))
    assert windows(larger, read_recorded_data(run), range(17)) == before, (
        "5 batches of 8 and 12 of 10, in the same order"
    )
    assert_refused(cfg, r"run\.name: .*train\.batch_size was 10, is 8")


@pytest.mark.parametrize("damage", ["missing", "cut", "older"])
def test_a_damaged_checkpoint_moves_no_batch(shards: Path, damage: str) -> None:
    """The load falls back from a damaged checkpoint to one that is further back, or further on."""
    run = start_run(config(shards), cursor=5)
    write_checkpoint(run, 9)
    newest = run.checkpoints / "step-00000009-gen-0" / STATE_FILE
    if damage == "missing":
        newest.unlink()
    elif damage == "cut":
        newest.write_text(newest.read_text()[:7])
    else:
        newest.parent.rename(newest.parent.with_name("step-00000009-gen-1"))
        write_checkpoint(run, 12)
    first = 12 if damage == "older" else 5
    larger = config(shards, "train.batch_size=16", "run.resume=changed")
    data = plan_data(larger)
    assert data.record.sizes == (BatchSize(0, 8), BatchSize(first, 16))
    require_planned(data, first)
    line = f"^run.resume: the run resumes at batch {first + 1}, but the order of the batches from {first} on changes"
    with pytest.raises(ConfigError, match=line):
        require_planned(data, first + 1)
    require_planned(plan_data(config(shards, "run.resume=changed", "optim.lr=1e-5")), first + 1)


def test_excluded_samples_stay_excluded_with_another_batch_size(shards: Path) -> None:
    cfg = config(shards)
    run = start_run(cfg, cursor=5)
    Ledger.load(run.ledger).exclude(3, 8, "spike")
    excluded = set(windows(cfg, read_recorded_data(run), range(3, 9)))
    larger = config(shards, "train.batch_size=10", "run.resume=changed")
    assert restart_run(larger).record.sizes == (BatchSize(0, 8), BatchSize(9, 10))
    ledger = Ledger.load(run.ledger)
    seen = [index for index in range(17) if not ledger.is_excluded(index)]
    trained = [window for index in seen for window in windows(larger, read_recorded_data(run), range(index, index + 1))]
    assert not excluded.intersection(trained)
    assert len(set(trained)) == len(trained) == 3 * 8 + 8 * 10


def test_an_exclusion_that_was_taken_back_fixes_no_batch(shards: Path) -> None:
    run = start_run(config(shards), cursor=5)
    ledger = Ledger.load(run.ledger)
    ledger.exclude(1000, 1009, "operator: typo")
    ledger.give_back([[1002, 1009]], 1010, "operator: undo")
    larger = config(shards, "run.resume=changed", "train.batch_size=16")
    assert plan_data(larger).record.sizes[-1] == BatchSize(1002, 16)
    ledger.give_back([[1000, 1001]], 1010, "operator: undo")
    assert plan_data(larger).record.sizes[-1] == BatchSize(5, 16)


def test_limits_on_rare_tokens_fix_the_batch_size_and_the_corpus(shards: Path) -> None:
    limits = ("data.stratify.rare_below=2", "data.stratify.max_per_batch=9")
    start_run(config(shards, *limits), cursor=5)
    changed = config(shards, *limits, "train.batch_size=10", "run.resume=changed")
    assert_refused(changed, r"train\.batch_size: was 8 .* is 10, but the limits of data\.stratify")
    write_shard(shards / "d.bin")
    assert_refused(
        config(shards, *limits, "run.resume=changed"), r"data\.sources\.main\.paths: .*d\.bin was added, but the limits"
    )


def test_limits_on_rare_tokens_fix_the_configured_weights(shards: Path) -> None:
    """They follow the weights of later batches, and the tokens of all sources. Only the ledger changes them."""
    write_shard(shards / "d.bin")
    limits = ("data.stratify.rare_below=9", "data.stratify.max_per_batch=9", "data.eval_fraction=0.01")
    run = start_run(mixture(shards, *limits, b=1, c=1), cursor=10)
    stays = "must stay, because data.stratify spreads rare tokens .*; keep it and .* harness ctl .* reweight"
    later = mixture(shards, *limits, b=1, c=1)
    later.data.phases = [PhaseConfig(from_batch=10, weights={"b": 9})]
    assert_refused(later, f"data.phases: {stays}")
    with pytest.raises(ConfigError, match=f"^data.phases: {stays}"):
        require_same_windows(later, run)
    later = mixture(shards, *limits, b=1, c=1, d=1)
    later.data.phases = [PhaseConfig(from_batch=0, weights={"d": 0})]
    assert_refused(later, f"data.(phases|sources.d.weight): {stays}")
    assert_refused(mixture(shards, *limits, b=1, c=2), f"data.sources.c.weight: {stays}")
    assert_refused(
        mixture(shards, *limits, "data.synthetic.zipf_exponent=2", b=1, c=1), "data.synthetic.zipf_exponent: "
    )
    moved = shards.rename(shards.with_name("moved"))
    assert plan_data(mixture(moved, *limits, b=1, c=1)).record.sizes == (BatchSize(0, 6),)


def test_without_a_record_the_batch_size_comes_from_the_config(shards: Path) -> None:
    run = start_run(config(shards), cursor=5)
    run.corpus.unlink()
    assert plan_data(config(shards)).record.sizes == (BatchSize(0, 8),)
    larger = config(shards, "train.batch_size=16", "run.resume=changed")
    assert plan_data(larger).record.sizes == (BatchSize(0, 8), BatchSize(5, 16))


def test_a_start_that_died_before_it_wrote_the_config_can_be_repeated(shards: Path) -> None:
    run = start_run(config(shards), cursor=5)
    larger = config(shards, "train.batch_size=16", "run.resume=changed")
    run.corpus.write_text(render_record(plan_data(larger).record))
    assert restart_run(larger).record.sizes == (BatchSize(0, 8), BatchSize(5, 16))


def test_a_different_embedded_text_is_refused(tmp_path: Path) -> None:
    cfg = load([f"run.dir={tmp_path}", "run.name=a"])
    run = start_run(cfg, cursor=5)
    content = run.corpus.read_text()
    record = read_record(run.corpus)
    assert record is not None
    run.corpus.write_text(content.replace(record.sources["main"].text, "f00d"))
    assert_refused(cfg, r"data\.sources\.main\.kind: the embedded text comes with Python")


def test_tools_read_the_recorded_files(shards: Path) -> None:
    cfg = config(shards)
    run = start_run(cfg)
    before = windows(cfg, read_recorded_data(run), range(3))
    write_shard(shards / "a.bin")
    assert windows(cfg, read_recorded_data(run), range(3)) == before
    assert [Path(file.path).name for file in recorded_data(cfg, run).sources["main"].files] == ["b.bin", "c.bin"]
    write_shard(shards / "b.bin", 1701)
    with pytest.raises(ConfigError, match=r"b\.bin: had 3202 bytes when the run recorded it, now 3402"):
        windows(cfg, read_recorded_data(run), range(3))


def test_a_source_without_a_record_is_read_from_the_config(shards: Path) -> None:
    run = start_run(config(shards))
    write_pair(shards.parent / "more", [list(range(100))] * 9)
    more = f"+data.sources={{more: {{kind: files, paths: [{shards.parent}/more]}}}}"
    record = recorded_data(config(shards, more), run)
    assert isinstance(record, DataRecord)
    assert list(record.sources) == ["main", "more"]


def test_a_batch_size_warmup_is_recorded_and_continues_the_same_order(shards: Path) -> None:
    stages = "train.batch_size_warmup=[{until_batch: 4, batch_size: 2}, {until_batch: 9, batch_size: 4}]"
    constant, cfg = config(shards), config(shards, stages)
    expected = windows(constant, RecordedData(None, None), range(10))
    assert windows(cfg, RecordedData(None, None), range(15)) == expected[: 4 * 2 + 5 * 4 + 6 * 8], "the same samples"
    run = start_run(cfg, cursor=5)
    sizes = (BatchSize(0, 2), BatchSize(4, 4), BatchSize(9, 8))
    assert plan_data(cfg).record.sizes == sizes
    later = config(shards, stages.replace("until_batch: 9", "until_batch: 7"), "run.resume=changed")
    assert restart_run(later).record.sizes == (BatchSize(0, 2), BatchSize(4, 4), BatchSize(7, 8))
    none = config(shards, "run.resume=changed")
    assert plan_data(none).record.sizes == (BatchSize(0, 2), BatchSize(4, 4), BatchSize(5, 8))
    assert windows(later, read_recorded_data(run), range(10)) == expected[: 4 * 2 + 3 * 4 + 3 * 8]


def test_a_warmup_that_a_launcher_has_accepted_is_applied_once(shards: Path) -> None:
    """The launcher of a job replaces the configuration of the run; the ranks then see no difference."""
    stages = "train.batch_size_warmup=[{until_batch: 6, batch_size: 2}, {until_batch: 20, batch_size: 4}]"
    run = start_run(config(shards, stages), cursor=8)
    later = config(shards, stages.replace("until_batch: 20", "until_batch: 12"), "run.resume=changed")
    prepare_run(later)
    assert rundir.differences(later, run) == {}
    sizes = (BatchSize(0, 2), BatchSize(6, 4), BatchSize(12, 8))
    assert restart_run(later).record.sizes == sizes
    (run.checkpoints / "step-00000008-gen-0").rename(run.checkpoints / "step-00000004-gen-0")
    (run.checkpoints / "step-00000004-gen-0" / STATE_FILE).write_text('{"cursor": 4}')
    assert restart_run(later).record.sizes == sizes, "a rollback does not move the changes"
    constant = config(shards, "run.resume=changed")
    prepare_run(constant)
    line = "train.batch_size: was 2, 4 from batch 6, 8 from batch 12 when the run was last started, is 8; run.resume"
    assert_refused(config(shards), line)
    assert restart_run(constant).record.sizes == (BatchSize(0, 2), BatchSize(4, 8))


def test_a_record_without_configured_sizes_is_compared_by_its_last_size(shards: Path) -> None:
    stages = "train.batch_size_warmup=[{until_batch: 4, batch_size: 2}]"
    run = start_run(config(shards, stages), cursor=2)
    content = json.loads(run.corpus.read_text())
    del content["configured_sizes"]
    run.corpus.write_text(json.dumps(content))
    same = plan_data(config(shards, stages)).record
    assert same.sizes == same.configured == (BatchSize(0, 2), BatchSize(4, 8))
    constant = plan_data(config(shards, "run.resume=changed")).record
    assert constant.sizes == (BatchSize(0, 2), BatchSize(2, 8))


def mixture(shards: Path, *overrides: str, **weights: float) -> Config:
    """A file of its own for each source, in the sequence of the weights; resumed with `run.resume=changed`."""
    cfg = config(shards, "run.resume=changed", "train.batch_size=6", "data.eval_fraction=0.3", *overrides)
    cfg.data.sources = {
        name: SourceConfig(kind=DataKind.files, paths=[f"{shards}/{name}.bin"], weight=weight)
        for name, weight in weights.items()
    }
    return cfg


def test_weights_may_change_from_the_resumed_batch_on(shards: Path) -> None:
    write_shard(shards / "d.bin")
    run = start_run(mixture(shards, b=1, c=1), cursor=10)
    before = windows(mixture(shards, b=1, c=1), read_recorded_data(run), range(10))
    off_first = [PhaseConfig(from_batch=0, weights={"d": 0}), PhaseConfig(from_batch=10, weights={"d": 4})]
    for later, weights in (([PhaseConfig(from_batch=10, weights={"b": 9})], {}), (off_first, {"d": 1})):
        cfg = mixture(shards, b=2, c=2, **weights)
        cfg.data.phases = later
        assert plan_data(cfg).changes == {}
        after = windows(cfg, read_recorded_data(run), range(12))
        assert sorted(after[: len(before)]) == sorted(before)
        assert len(set(after)) == len(after)


@pytest.mark.parametrize("cursor", [10, 11])
def test_weights_of_consumed_batches_cannot_change(shards: Path, cursor: int) -> None:
    write_shard(shards / "d.bin")
    run = start_run(mixture(shards, b=1, c=1), cursor=10)
    stays = f"the weights before batch {cursor}, where the run goes on, must stay"
    if cursor == 11:
        Ledger.load(run.ledger).exclude(10, 10, "spike")
    assert_refused(mixture(shards, b=1, c=3), rf"data\.sources\.c\.weight: {stays}")
    assert_refused(mixture(shards, b=1, c=1, d=1), rf"data\.sources\.d\.weight: {stays}")
    assert_refused(mixture(shards, b=1), rf"data\.sources\.c\.weight: {stays}")
    cfg = mixture(shards, b=1, c=1)
    cfg.data.phases = [PhaseConfig(from_batch=cursor - 1, weights={"b": 0})]
    assert_refused(cfg, rf"data\.phases: {stays}")


def test_the_order_of_a_source_cannot_change(shards: Path) -> None:
    start_run(mixture(shards, b=1, c=1), cursor=10)
    cfg = mixture(shards, b=1, c=1)
    cfg.data.sources["c"].seed = 3
    assert_refused(cfg, r"data\.sources\.c\.seed: must keep the order that the source has in this run")


def test_sources_keep_their_sequence(shards: Path) -> None:
    write_shard(shards / "d.bin")
    forward, backward = mixture(shards, b=1, c=1, d=5), mixture(shards, d=5, c=1, b=1)
    run = start_run(forward, cursor=10)
    recorded = read_recorded_data(run)
    assert set(windows(forward, recorded, range(10))) != set(windows(backward, recorded, range(10)))
    line = r"data\.sources: must be in the sequence of this run, b, c, d, got d, c, b"
    assert_refused(backward, line)
    assert_refused(mixture(shards, "run.resume=same", d=5, c=1, b=1), line)


def test_a_stop_request_ends_a_start_that_waits_for_its_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where the data is listed, and where it is opened."""
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        url = f"ftp://127.0.0.1:{refusing.getsockname()[1]}/corpus.bin"
        data = ["data=files", f"data.sources.main.paths=[{url}]", "data.remote.retry_s=60"]
        cfg = load([f"run.dir={tmp_path}", "run.name=a", "parallel.device=cpu", "model.num_layers=1", *data])
        stop, begun_s = StopRequest(), time.monotonic()
        with signals_to(stop), connected(cfg.parallel) as world:

            def ask() -> None:
                while "trying again in" not in capfd.readouterr().err:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)

            asking = threading.Thread(target=ask)
            asking.start()
            with pytest.raises(StorageError, match="the store does not answer") as caught:
                resolve_run_data(cfg, world=world, is_stopping=lambda: bool(stop))
            assert caught.value.is_shared
            asking.join()
            assert "trying again" not in capfd.readouterr().err
            with pytest.raises(StorageError, match="the store does not answer"):
                build(cfg, world, rundir.locate(cfg), is_stopping=lambda: bool(stop))
        assert time.monotonic() - begun_s < 50
        assert not remote_cache.stop_requested(), "training waits for `data.remote.retry_s`"
