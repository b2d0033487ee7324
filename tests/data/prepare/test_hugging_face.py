"""Hugging Face datasets and model directories as inputs: real `datasets`, offline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as arrow  # type: ignore[import-untyped]
import pytest
from pyarrow import ipc, parquet

from harness.config.errors import ConfigError
from harness.data.prepare.documents import Reader, find_inputs, text_of
from harness.data.prepare.prepared_files import CorpusFiles
from harness.data.prepare.streamed import StreamedDataset
from harness.data.prepare.tokenizer import train_bpe
from launch.cli import data as command
from tests.data.prepare.test_prepare import TEXTS, documents, make, write_jsonl

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def texts_in(paths: list[Path], key: str = "text") -> list[str]:
    return [text_of(record, paths[record.file], key) for record in Reader(paths, text_key=key)]


def write_arrow(path: Path, texts: list[str | None], *, as_file: bool, key: str = "text") -> None:
    table = arrow.table({"id": list(range(len(texts))), key: texts})
    opener = ipc.new_file if as_file else ipc.new_stream
    with arrow.OSFile(str(path), "wb") as sink, opener(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("as_file", [False, True])
def test_arrow_files_of_both_formats_are_read(tmp_path: Path, as_file: bool) -> None:
    path = tmp_path / "rows.arrow"
    write_arrow(path, [*TEXTS, None], as_file=as_file)
    assert texts_in(find_inputs([str(path)])) == [*TEXTS, ""]
    with pytest.raises(ConfigError, match="has no column 'body' but id, text"):
        texts_in([path], "body")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read as Arrow"):
        texts_in([path])


def test_an_arrow_stream_that_was_cut_between_batches_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    write_arrow(path, [*TEXTS], as_file=False)
    whole = path.read_bytes()
    assert whole.endswith(END_OF_STREAM)
    path.write_bytes(whole.removesuffix(END_OF_STREAM))
    with pytest.raises(ConfigError, match=r"rows\.arrow: is truncated Arrow data: the stream has no end marker"):
        texts_in([path])


def save_by_hand(directory: Path, texts: list[list[str]]) -> None:
    """The layout of `Dataset.save_to_disk`."""
    directory.mkdir()
    names = [f"data-{number:05}-of-{len(texts):05}.arrow" for number in range(len(texts))]
    for name, part in zip(names, texts, strict=True):
        write_arrow(directory / name, list(part), as_file=False)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (directory / "dataset_info.json").write_text("{}")
    (directory / "cache-0123.arrow").write_bytes(b"left by map")


def test_a_saved_dataset_is_its_arrow_files_in_order(tmp_path: Path) -> None:
    save_by_hand(tmp_path / "saved", [TEXTS[:2], TEXTS[2:]])
    assert texts_in(find_inputs([str(tmp_path / "saved")])) == TEXTS
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data-00001-of-00002\.arrow: is missing from the dataset"):
        find_inputs([str(tmp_path / "saved")])
    both = tmp_path / "both"
    both.mkdir()
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=f"name one: {both}/train, {both}/test"):
        find_inputs([str(both)])


@pytest.mark.full
def test_what_datasets_saves_and_streams_gives_the_same_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    make([write_jsonl(tmp_path / "plain.jsonl")], tmp_path / "plain")
    expected = documents(tmp_path / "plain")

    dataset = datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    code = command.main(["prepare", str(tmp_path / "saved"), "--output", str(tmp_path / "a"), "--workers", "1"])
    assert code == 0, capsys.readouterr().err
    assert documents(tmp_path / "a") == expected

    for kind in ("parquet", "jsonl"):
        source = tmp_path / kind
        source.mkdir()
        if kind == "parquet":
            parquet.write_table(arrow.table({"text": TEXTS[:3]}), source / "train-0.parquet")
            parquet.write_table(arrow.table({"text": TEXTS[3:]}), source / "train-1.parquet")
        else:
            write_jsonl(source / "train.jsonl")
        arguments = ["prepare", "--dataset", str(source), "--output", str(tmp_path / f"{kind}-out"), "--workers", "1"]
        assert command.main(arguments) == 0, capsys.readouterr().err
        assert documents(tmp_path / f"{kind}-out") == expected
        before = CorpusFiles(tmp_path / f"{kind}-out").data.stat().st_mtime_ns
        assert command.main(arguments) == 0
        assert CorpusFiles(tmp_path / f"{kind}-out").data.stat().st_mtime_ns == before, "nothing to do"

    write_jsonl(tmp_path / "jsonl" / "train.jsonl", ["other"])
    capsys.readouterr()
    assert command.main(arguments) == 2
    assert "inputs" in capsys.readouterr().err
    for wrong, message in (
        (["--dataset", str(tmp_path / "jsonl"), "--split", "none"], "cannot be read"),
        (["--dataset", str(tmp_path / "jsonl"), "--text-key", "body"], "has no column 'body'"),
        (["--dataset", "some/name"], "--revision"),
        (["--dataset", str(tmp_path / "jsonl"), str(tmp_path)], "replaces INPUT"),
        ([], "needs INPUT... or --dataset"),
    ):
        assert command.main(["prepare", *wrong, "--output", str(tmp_path / "wrong"), "--workers", "1"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_the_description_of_a_dataset_replaces_nothing(tmp_path: Path) -> None:
    files = CorpusFiles(tmp_path / "out")
    dataset = StreamedDataset(path="some/name", split="train", revision="1")
    path = files.write_description(dataset)
    before = path.read_bytes()
    finished = {"version": 1, "options": {}, "inputs": [], "report": {}, "max_token": 0}
    files.meta.write_text(json.dumps(finished))
    assert files.write_description(dataset) == path
    with pytest.raises(ConfigError, match=r"out\.meta\.json: exists and differs in inputs; choose another --output"):
        files.write_description(replace(dataset, revision="2"))
    assert path.read_bytes() == before
    files.meta.unlink()
    files.data.write_bytes(b"precious")
    with pytest.raises(ConfigError, match=r"out\.bin: exists, and no out\.meta\.json says"):
        files.write_description(replace(dataset, revision="2"))
    assert path.read_bytes() == before


def test_an_output_within_the_dataset_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "in.jsonl")
    assert command.main(["prepare", "--dataset", str(tmp_path), "--output", str(tmp_path / "new" / "out")]) == 2
    assert capsys.readouterr().err.startswith(
        f"harness: --output: must be outside of the dataset {tmp_path}, all files"
    )
    assert list(tmp_path.iterdir()) == [source]


def test_a_model_directory_gives_tokenizer_and_end_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    source = write_jsonl(tmp_path / "plain.jsonl")
    arguments = ["prepare", str(source), "--output", str(tmp_path / "a"), "--tokenizer", str(model), "--append-eod"]
    assert command.main([*arguments, "--workers", "1"]) == 2
    assert f"{model}: has no tokenizer.json" in capsys.readouterr().err
    (model / "tokenizer.json").write_text(train_bpe(TEXTS, vocab_size=300, eod_token="</s>"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert command.main([*arguments, "--workers", "1"]) == 0, capsys.readouterr().err
    ends = {document[-1] for document in documents(tmp_path / "a")}
    assert len(ends) == 1
    meta = CorpusFiles(tmp_path / "a").read_meta()
    assert meta is not None
    assert meta["options"]["append_eod"] == "</s>"
