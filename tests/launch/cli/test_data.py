"""`harness data` in real processes: exit codes, output, and files on disk."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.compose import to_yaml
from harness.core.rundir import locate
from harness.data.corpus.corpora import embedded_documents
from harness.data.order.ledger import Ledger
from harness.data.prepare.document_filter import DocumentFilter
from harness.data.prepare.parts import part_path
from harness.data.prepare.prepared_files import CorpusFiles
from harness.data.prepare.tokenizer import open_tokenizer
from launch.cli import data
from tests.composed import load

pytestmark = pytest.mark.usefixtures("composed_once")

ROOT = Path(__file__).parents[3]
SMALL = ["train.batch_size=4", "train.sequence_length=32"]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}


def build_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli.main", "data", *arguments]


def harness(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        build_command(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def inspect_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert data.main(["inspect", *SMALL, *arguments, "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert isinstance(view, dict)
    return view


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a corpus with one document per topic."""
    directory = tmp_path_factory.mktemp("corpus")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in embedded_documents())
    (directory / "in.jsonl").write_text(lines)
    arguments = ["in.jsonl", "--output", "made/topics", "--train-bpe", "500", "--append-eod", "--workers", "2"]
    result = harness("prepare", *arguments, cwd=directory)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for part in ("documents    79 of ", "rare tokens  ", "longest      ", "tokens/s", "output       made/topics"):
        assert part in result.stdout
    line = "next         harness train data=files 'data.sources.main.paths=[made/topics]' model.vocab_size=500\n"
    assert result.stdout.endswith(line)
    assert sorted(path.name for path in (directory / "made").iterdir()) == [
        "topics.bin",
        "topics.counts.npy",
        "topics.idx",
        "topics.meta.json",
        "topics.tokenizer.json",
    ]
    return directory / "made" / "topics"


def test_prepare_and_help_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("some text")
    script = (
        "import sys\n"
        "from launch.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    assert main(['data', '--help']) == 0\n"
        "    assert main(['data', 'prepare', 'in.txt', '--output', 'out', '--bytes', '--workers', '1']) == 0\n"
        "    assert main(['data', 'inspect', '--batch', '1', 'optim.lr=-1']) == 2\n"
        "    assert 'torch' not in sys.modules\n"
    )
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    subprocess.run(command, cwd=tmp_path, env=environment(), check=True, capture_output=True, timeout=200)


@pytest.mark.parametrize("name", ["plain", "with space", "it's, [odd]=$x", "名前"])
def test_the_next_command_composes_to_the_corpus(tmp_path: Path, name: str) -> None:
    """What a shell passes on from the printed line is a valid configuration that names the corpus."""
    harness_name, command, *overrides = shlex.split(data.next_command(tmp_path / name, 300))
    assert (harness_name, command) == ("harness", "train")
    cfg = load(overrides)
    assert cfg.data.sources["main"].paths == [str(tmp_path / name)]
    assert cfg.model.vocab_size == 300


def test_filter_options_set_every_threshold() -> None:
    arguments = ["in.txt", "--output", "out", "--filter", "--max-chars", "9", "--max-repeated-lines", "0.25"]
    options = data.parse_options(data.prepare_parser().parse_args(arguments))
    assert options.document_filter == DocumentFilter(max_chars=9, max_repeated_lines=0.25)
    options = data.parse_options(data.prepare_parser().parse_args(arguments[:3]))
    assert options.document_filter is None
    assert set(data.FILTER_HELP) == {field.name for field in fields(DocumentFilter)}
    shown = data.prepare_parser().format_help()
    assert "default: 1,000,000" in shown
    assert "default: 0.001" in shown


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "harness: data: missing command; choose prepare, inspect, or --help"),
        (["fly"], "harness: data: unknown command 'fly'; choose prepare, inspect, or --help"),
        (
            ["prepare", "in.txt"],
            "harness: data prepare: the following arguments are required: --output; see --help",
        ),
        (["prepare", "gone.txt", "--output", "new/out"], "harness: gone.txt: no such file"),
        (
            ["prepare", "in.doc", "--output", "new/out"],
            "harness: in.doc: has an unknown ending; allowed are .txt,",
        ),
        (
            ["prepare", "in.txt", "--output", "new/"],
            "harness: --output: must be the beginning of a file name, got 'new/'",
        ),
        (
            ["prepare", "in.txt", "--output", "new/out", "--workers", "0"],
            "harness: --workers: must be at least 1, got 0",
        ),
        (
            ["prepare", "in.txt", "--output", "in.doc/out"],
            "harness: --output: cannot create in.doc: File exists",
        ),
        (
            ["prepare", "in.txt", "--output", "new/out", "--bytes", "--train-bpe", "300"],
            "harness: data prepare: argument --train-bpe: not allowed with argument --bytes; see --help",
        ),
        (
            ["prepare", "in.txt", "--output", "new/out", "--max-chars", "9"],
            "harness: --max-chars: needs --filter",
        ),
        (
            ["prepare", "in.txt", "--output", "new/out", "--filter", "--max-boilerplate", "2"],
            "harness: --max-boilerplate: must be a share from 0 to 1, got 2.0",
        ),
        (
            ["prepare", "in.txt", "--output", "new/out", "--tokenizer", "in.doc"],
            "harness: in.doc: is not a tokenizer.json: ",
        ),
        (["inspect"], "harness: data inspect: the following arguments are required: --batch; see --help"),
        (["inspect", "--batch", "-1"], "harness: --batch: must be 0 or more, got -1"),
        (["inspect", "--batch", str(10**23)], f"harness: --batch: must be below 1099511627776, got {10**23}"),
        (["inspect", "--batch", "0", "model=9b"], "harness: model: no '9b'; choose one of "),
        (
            ["inspect", "--batch", "0", "data=files", "data.sources.main.paths=[gone]"],
            "harness: data.sources.main.paths: gone: no such file",
        ),
    ],
)
def test_usage_errors_are_one_line_and_leave_nothing(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in.txt", "in.doc"):
        (tmp_path / name).write_text("text")
    assert data.main(arguments) == 2
    output, stderr = capsys.readouterr()
    assert output == ""
    assert stderr.startswith(line)
    assert stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.doc", "in.txt"]


def test_a_broken_line_is_named_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": \n')
    result = harness("prepare", "in.jsonl", "--output", "out", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("harness: in.jsonl, line 2: is not JSON: ")
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_says_how_to_continue(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, which reaches all processes, and the death of a worker."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in embedded_documents() * 4)
    (tmp_path / "in.jsonl").write_text(lines)
    arguments = ["in.jsonl", "--output", "out", "--train-bpe", "400", "--workers", "1", "--shard-bytes", "9000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test suite in the background ignores SIGINT
    process = subprocess.Popen(
        build_command("prepare", *arguments),
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    end_s = time.monotonic() + 200
    while not part_path(tmp_path / "out", 3).exists():
        assert time.monotonic() < end_s
        time.sleep(0.002)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        os.kill(int(workers[0]), number)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 75, stderr
    assert "rerun the same command to continue" in stderr
    assert stderr.count("harness: ") == 1, "a slow machine prints progress too"
    second = harness("prepare", *arguments, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    meta = CorpusFiles(tmp_path / "out").read_meta()
    assert meta is not None
    assert meta["timing"]["tokens_per_s"] * meta["timing"]["seconds"] < meta["tokens"]


def test_one_output_has_one_writer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("text")
    with CorpusFiles(tmp_path / "out").lock():
        assert data.main(["prepare", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"harness: --output: {tmp_path / 'out'} is being written by another process\n"


@pytest.mark.full
def test_inspect_shows_the_text_of_a_prepared_corpus(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["data=files", f"data.sources.main.paths=[{corpus}]", "model.vocab_size=500"]
    view = inspect_json([*overrides, "--batch", "7"], capsys)
    assert view == inspect_json(["--batch", "7", *overrides, "launch.nproc=4"], capsys)
    assert view != inspect_json([*overrides, "--batch", "8"], capsys)
    assert view["rows_by_source"] == {"main": 4}
    assert not view["excluded"]
    total = sum(int(row["fingerprint"], 16) for row in view["rows"]) % 2**64
    assert view["fingerprint"] == f"{total:016x}"
    remote = [overrides[0], f"data.sources.main.paths=['file://{corpus}.bin']", overrides[2]]
    fetched = inspect_json([*remote, f"data.remote.cache_dir={tmp_path}", "--batch", "7"], capsys)
    assert [row.pop("file") for row in fetched["rows"]] == [f"file://{corpus}.bin"] * 4
    assert fetched == view | {"rows": [{key: row[key] for key in row if key != "file"} for row in view["rows"]]}
    texts = embedded_documents()
    counts = np.load(CorpusFiles(corpus).counts)
    tokenizer = open_tokenizer(CorpusFiles(corpus).tokenizer)
    for row in view["rows"]:
        assert row["file"] == f"{corpus}.bin"
        numbers = range(row["first_document"], row["last_document"] + 1)
        for number, text in zip(numbers, row["texts"], strict=True):
            assert text.removesuffix("<|endoftext|>").strip("\N{REPLACEMENT CHARACTER}") in texts[number]
    for rare in view["rarest"]:
        assert rare["num_in_corpus"] == counts[rare["token"]]
        assert rare["text"] == tokenizer.spell(rare["token"])
        assert all(rare["text"] in "".join(view["rows"][row]["texts"]) for row in rare["rows"])
    assert data.main(["inspect", *SMALL, *overrides, "--batch", "7", "--chars", "5"]) == 0
    shown = capsys.readouterr().out
    assert f"fingerprint  {view['fingerprint']}\n" in shown
    assert repr(view["rows"][0]["texts"][0][:5] + "…") in shown


def test_inspect_shows_bytes_ids_and_mixtures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row, *_) = inspect_json(["--batch", "0"], capsys)["rows"]
    assert all(any(text.strip("\n") in topic for topic in embedded_documents()) for text in row["texts"])
    assert len(inspect_json(["data=mixture", "--batch", str(data.BATCHES_END - 1)], capsys)["rows"]) == 4
    (row, *_) = inspect_json(["data=synthetic", "--batch", "0"], capsys)["rows"]
    assert [token.isdigit() for token in row["texts"][0].split()] == [True] * 33
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "flat.bin")
    overrides = [
        "data=files",
        f"data.sources.main.paths=[{tmp_path}/flat.bin]",
        "model.vocab_size=1000",
        "eval.every_steps=0",
    ]
    (row, *_) = inspect_json([*overrides, "--batch", "0"], capsys)["rows"]
    first = row["first_token"]
    assert row["texts"] == [" ".join(map(str, range(first, first + 33)))]
    assert set(inspect_json(["data=mixture", "--batch", "0"], capsys)["rows_by_source"]) == {"text", "synthetic"}


def test_inspect_says_what_stratify_limits(capsys: pytest.CaptureFixture[str]) -> None:
    rare = ["data.synthetic.num_samples=600", "data.synthetic.rare_tokens=2", "data.synthetic.rare_probability=0.003"]
    limited = ["data=synthetic", "data.synthetic.zipf_exponent=0", *rare, "data.stratify.rare_below=45", "--batch", "0"]
    assert data.main(["inspect", *SMALL, *limited]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stratify ")]
    assert re.fullmatch(r"stratify     2 rare tokens in \d+ sequences, at most 1 of each in a batch.*", line)
    assert inspect_json(["data=synthetic", "--batch", "0"], capsys)["stratify"] == ""


def test_inspect_applies_the_ledger_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = [f"run.dir={tmp_path}", "run.name=x"]
    path = locate(load(run)).ledger
    assert data.main(["inspect", *run, "--batch", "3"]) == 2
    line = f"harness: {tmp_path}/x: is not a run directory: it has no config.yaml; leave out run.name to show a batch"
    output, stderr = capsys.readouterr()
    assert output == ""
    assert stderr == f"{line} of a new run\n"
    path.parent.mkdir(parents=True)
    locate(load(run)).config.write_text(to_yaml(load([*SMALL, *run])))
    Ledger.load(path).exclude(3, 4, "poisoned")
    written = path.read_bytes()
    assert inspect_json([*run, "--batch", "3"], capsys)["excluded"]
    assert not inspect_json([*run, "--batch", "5"], capsys)["excluded"]
    assert not inspect_json([*run, "--batch", "3", "--held-out"], capsys)["excluded"]
    assert path.read_bytes() == written


def test_inspect_of_a_run_starts_from_the_config_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, options = [f"run.dir={tmp_path}", "run.name=x"], [*SMALL, "data=mixture", "run.seed=7"]
    locate(load(run)).path.mkdir()
    locate(load(run)).config.write_text(to_yaml(load([*options, *run])))
    assert data.main(["inspect", *options, "--batch", "3"]) == 0
    shown = capsys.readouterr().out
    for given in (run, [*run, *options], [*run, "train.num_steps=99", f"data.remote.cache_dir={tmp_path}"]):
        assert data.main(["inspect", *given, "--batch", "3"]) == 0
        assert capsys.readouterr().out == shown
    for given, line in (
        (["train.batch_size=8"], "train.batch_size: is 4 in RUN, got 8; leave it out to show the batch of the run"),
        (["run.seed=0"], "run.seed: is 7 in RUN, got 0; leave it out"),
        (["data=synthetic"], "data.phases: is [{'from_batch': 100, 'weights': {'text': 3.0}}] in RUN, got []; leave"),
    ):
        assert data.main(["inspect", *run, *given, "--batch", "3"]) == 2
        assert capsys.readouterr().err.startswith(f"harness: {line.replace('RUN', str(tmp_path / 'x'))}")
