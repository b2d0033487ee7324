"""A changed corpus is rejected before training, or accepted without moving a window."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.data.corpus.token_files import IndexedWriter
from harness.data.order.ledger import Ledger
from harness.data.sources import open_data
from tests.distributed import cases
from tests.distributed.pool import Pool
from tests.distributed.test_determinism import check_start_with_tree, choose_tree
from tests.forks import Launched

pytestmark = pytest.mark.full

SHARDS = ("model.num_layers=1", "train.sequence_length=32", "train.batch_size=4", "data=files", "run.name=a")
STEPS = (*SHARDS, "checkpoint.every_steps=5", "optim.schedule=constant")


def write_shard(path: Path, seed: int, num_tokens: int = 3201) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.random.default_rng(seed).integers(0, 250, num_tokens, dtype=np.uint16).tofile(path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in (1, 2):
        write_shard(tmp_path / "corpus" / f"shard-{number}.bin", number)
    return tmp_path / "corpus"


def start(ranks: Pool, corpus: Path, *overrides: str, size: int = 1) -> list[cases.StartResult]:
    """Start or resume the run; returns each rank's result."""
    paths = f"data.sources.main.paths=[{corpus}/*.bin]"
    return ranks.run(size, cases.start_run, str(corpus.parent), *STEPS, paths, *overrides)


def test_an_added_shard_is_rejected_before_training_and_changes_nothing(ranks: Pool, corpus: Path) -> None:
    (first,) = start(ranks, corpus, "train.num_steps=10")
    assert (first.code, len(first.cursors)) == (0, 10)
    run = corpus.parent / "a"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    write_shard(corpus / "shard-0.bin", 0)
    (second,) = start(ranks, corpus, "train.num_steps=10")
    line = f"data.sources.main.paths: the corpus of the run changed: {corpus}/shard-0.bin was added"
    assert second.problem.startswith(line)
    assert "run.resume=changed" in second.problem
    assert "\n" not in second.problem
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_an_eod_token_trains_bit_identically_to_an_index(ranks: Pool, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    documents = [np.append(draw.integers(8, 250, size=draw.integers(0, 60)), 7) for _ in range(200)]
    with IndexedWriter(tmp_path / "indexed", np.dtype("uint16")) as writer:
        for document in documents:
            writer.add(document)
    np.concatenate(documents).astype(np.uint16).tofile(tmp_path / "flat.bin")

    def train(name: str, *overrides: str) -> list[tuple[float, str]]:
        steps = ("data=files", "train.num_steps=4", f"run.name={name}", *overrides)
        ((code, records),) = ranks.run(1, cases.run, str(tmp_path), *steps)
        assert code == 0
        return [(record.loss, record.weight_digest) for record in records]

    masked = "data.document_mask=true"
    indexed = train("indexed-run", f"data.sources.main.paths=[{tmp_path}/indexed]", masked)
    flat = f"data.sources.main.paths=[{tmp_path}/flat.bin]"
    assert train("flat-run", flat, masked, "data.eod_token=7") == indexed
    assert all(digest for _, digest in indexed)
    assert train("plain-run", flat) != indexed


def test_a_node_with_another_file_is_named_with_its_rank_and_host(ranks: Pool, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for root in (here, there):
        write_shard(root / "corpus" / "shard-1.bin", 1)
        write_shard(root / "corpus" / "shard-2.bin", 2)
    overrides = (*STEPS, "data.sources.main.paths=[corpus/*.bin]", "train.num_steps=2")

    def problems() -> set[str]:
        places = [(str(here), "node-a"), (str(there), "node-b")]
        return {
            started.problem for started in ranks.run(2, cases.start_run_per_host, str(tmp_path), places, *overrides)
        }

    write_shard(there / "corpus" / "shard-2.bin", 3)
    path = "corpus/shard-2.bin"
    key = "data.sources.main.paths"
    assert problems() == {f"{key}: rank 1 (node-b): {path} has other content than on rank 0 (node-a)"}
    write_shard(there / "corpus" / "shard-2.bin", 2, num_tokens=3200)
    assert problems() == {f"{key}: rank 1 (node-b): {path} has 6400 bytes, rank 0 found 6402 bytes"}
    (there / "corpus" / "shard-2.bin").unlink()
    assert problems() == {f"{key}: rank 1 (node-b): {path}: cannot be read (No such file or directory)"}
    assert not (tmp_path / "a").exists()
    write_shard(there / "corpus" / "shard-2.bin", 2)
    assert problems() == {""}


@pytest.mark.parametrize(
    ("change", "message"),
    [("remove", "was removed"), ("grow", "grew from 6402 to 6404 bytes"), ("rewrite", "the content of")],
)
def test_a_change_that_moves_windows_is_rejected_even_with_resume_changed(
    ranks: Pool, corpus: Path, change: str, message: str
) -> None:
    start(ranks, corpus, "train.num_steps=5")
    shard = corpus / "shard-1.bin"
    if change == "remove":
        shard.unlink()
    else:
        write_shard(shard, 9, num_tokens=3202 if change == "grow" else 3201)
    config = (corpus.parent / "a" / "config.yaml").read_bytes()
    for policy in ("same", "changed"):
        (refused,) = start(ranks, corpus, "train.num_steps=5", f"run.resume={policy}")
        assert refused.problem.startswith("data.sources.main.paths: the corpus of the run changed: ")
        assert message in refused.problem
        assert str(shard) in refused.problem
        assert "choose another run.name" in refused.problem
        assert refused.cursors == list(range(5))
    assert (corpus.parent / "a" / "config.yaml").read_bytes() == config


def test_added_files_and_another_batch_size_repeat_nothing_and_skip_nothing(ranks: Pool, corpus: Path) -> None:
    """190 windows in the first pass, then the 100 of an added shard, at batch sizes 4, 4, 6 and 8."""
    starts = [("train.num_steps=10", "train.batch_size=4"), ("train.num_steps=15", "train.batch_size=4")]
    starts += [("train.num_steps=20", "train.batch_size=6"), ("train.num_steps=45", "train.batch_size=8")]
    seen: list[tuple[str, int]] = []
    for number, overrides in enumerate(starts):
        if number == 1:
            write_shard(corpus / "shard-0.bin", 0)
        (started,) = start(ranks, corpus, *overrides, "run.resume=changed")
        assert started.problem == ""
        seen += started.windows
        assert started.tokens[-1] == 32 * len(seen)
    assert started.cursors == list(range(45)), "batches keep their numbers"
    num_windows = 10 * 4 + 5 * 4 + 5 * 6 + 25 * 8
    assert len(seen) == num_windows == 290
    assert len(set(seen)) == 189 + 100, "one window of 290 begins the second pass"
    held_out = set(started.held_out)
    assert len(held_out) == 10
    assert not held_out.intersection(seen)
    log = (corpus.parent / "a" / "interventions.jsonl").read_text()
    changes = [json.loads(line)["changes"] for line in log.splitlines()]
    added = f"3 files: {corpus}/shard-0.bin was added"
    assert changes[0]["data.sources.main.files"] == ["2 files", added]
    assert changes[1]["train.batch_size"] == [4, 6]


@pytest.mark.parametrize("damaged", ["state.json", "__0_0.distcp"])
def test_another_batch_size_after_a_fallback_repeats_and_skips_nothing(ranks: Pool, corpus: Path, damaged: str) -> None:
    """The newest checkpoint is found damaged; the run resumes from the one before."""
    (first,) = start(ranks, corpus, "train.num_steps=10")
    newest = corpus.parent / "a" / "checkpoints" / "step-00000010-gen-0"
    (newest / damaged).write_bytes((newest / damaged).read_bytes()[:40])
    (second,) = start(ranks, corpus, "train.num_steps=15", "train.batch_size=8", "run.resume=changed")
    assert (second.problem, second.cursors) == ("", [*range(10), *range(5, 15)])
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    seen = first.windows[: 5 * 4] + second.windows
    assert seen[: 10 * 4] == first.windows, "the order of the samples stays, whatever the size of their batches"
    changes_at = 5 if damaged == "state.json" else 10
    assert len(seen) == len(set(seen)) == changes_at * 4 + (15 - changes_at) * 8


def test_a_checkpoint_that_another_process_has_saved_meanwhile_stops_a_start_that_changes_the_order(
    ranks: Pool, corpus: Path
) -> None:
    start(ranks, corpus, "train.num_steps=10")
    run = corpus.parent / "a"
    before = [path.read_bytes() for path in (run / "config.yaml", run / "corpus.json")]
    paths = f"data.sources.main.paths=[{corpus}/*.bin]"
    overrides = (*STEPS, paths, "train.num_steps=15", "train.batch_size=8", "run.resume=changed")
    (late,) = ranks.run(1, cases.start_run_beside, str(corpus.parent), "step-00000010-gen-0", *overrides)
    assert late.problem.startswith("run.resume: the run resumes at batch 10, but the order of the batches from 5 on")
    assert [path.read_bytes() for path in (run / "config.yaml", run / "corpus.json")] == before


def put_bad_id_into_batch(corpus: Path, number: int, *, row: int) -> str:
    """Write an id above the vocabulary into one row of a global batch; returns the error that names it."""
    cfg = cases.tiny(*STEPS, f"data.sources.main.paths=[{corpus}/*.bin]", directory=str(corpus.parent))
    batches, held_out = open_data(cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=Ledger())
    shard, first = batches.origins(number)[row][:2]
    path = corpus / Path(shard).name
    tokens = np.fromfile(path, np.uint16)
    tokens[first + 3] = 60000
    tokens.tofile(path)
    batches.close()
    held_out.close()
    return f"data.sources.main.paths: {path}: token {first + 3} is id 60000, must be in 0 .. 255 (model.vocab_size)"


def test_torchrun_prints_an_error_in_the_rows_of_one_rank(corpus: Path) -> None:
    """Ranks of torchrun import torch themselves, so this also shows that they set their own environment."""
    error = put_bad_id_into_batch(corpus, 6, row=3)
    rendezvous = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    overrides = [*cases.TINY, *STEPS, f"data.sources.main.paths=[{corpus}/*.bin]", "train.num_steps=20"]
    overrides += [f"run.dir={corpus.parent}", "run.deterministic=true", "launch.nproc=2"]
    command = ("torch.distributed.run", *rendezvous, "-m", "harness.train", *overrides)
    with Launched(*command, output=corpus.parent / "output", first=choose_tree) as done:
        assert done.wait(timeout=200) != 0
    lines = done.stderr.splitlines()
    assert lines.count(f"harness: rank 1: {error}") == 1
    assert re.search(r"rank +: 1 .*\n +exitcode +: 2 ", done.stderr)
    check_start_with_tree(corpus.parent / "a", done.stdout)
