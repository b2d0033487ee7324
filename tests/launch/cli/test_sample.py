"""`harness sample`: text from a checkpoint, the same for a seed, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.analysis.sampling import SamplingOptions, choose_token, generate, load_model
from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.core.rundir import RunDir
from harness.huggingface.convert import choose_checkpoint
from launch.cli.main import main
from tests.huggingface.test_convert import SEQUENCE_LENGTH, make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with checkpoints: `first` of text with steps 5 (good) and 10, `tokens` of synthetic tokens, `empty`."""
    directory = tmp_path_factory.mktemp("runs")
    run, _, _ = make_run(directory / "first", steps=(5, 10))
    catalog.mark(run.checkpoints / "step-00000005-gen-0", Health.good, "a test")
    make_run(directory / "tokens", "data=synthetic")
    empty = RunDir(directory / "empty")
    empty.checkpoints.mkdir(parents=True)
    empty.config.write_text(run.config.read_text())
    return directory


def sample(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    assert main(["sample", str(run), "--prompt", "def", "--device", "cpu", *arguments]) == 0
    shown = capsys.readouterr()
    assert "on cpu" in shown.err
    return shown.out


def test_a_seed_decides_the_text(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [sample(capsys, runs / "first", "--seed", seed, "--tokens", "12") for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("def")


def test_step_chooses_the_checkpoint(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ("--temperature", "0", "--tokens", "12")
    newest_good, fifth, tenth = (
        sample(capsys, runs / "first", *greedy, *step) for step in ((), ("--step", "5"), ("--step", "10"))
    )
    assert newest_good == fifth != tenth


def test_tokens_are_those_of_the_model(runs: Path) -> None:
    """Greedy tokens follow from the logits of the model that was saved, also beyond its context."""
    run, cfg, model = make_run(runs / "greedy")
    loaded = load_model(choose_checkpoint(run).path, cfg, device=torch.device("cpu"))
    options = SamplingOptions(num_tokens=SEQUENCE_LENGTH + 3, temperature=0.0, top_k=0, seed=0)
    tokens = [*b"def"]
    for token in generate(loaded, tokens, options):
        window = torch.tensor([tokens[-SEQUENCE_LENGTH:]])
        assert token == int(model.logits(window)[0, -1].argmax())
        tokens.append(token)
    assert len(tokens) == 3 + SEQUENCE_LENGTH + 3


def test_top_k_and_temperature_limit_the_choice() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, -1.0])
    random = torch.Generator().manual_seed(0)

    def drawn(temperature: float, top_k: int) -> set[int]:
        options = SamplingOptions(num_tokens=1, temperature=temperature, top_k=top_k, seed=0)
        return {choose_token(logits, options, random) for _ in range(300)}

    assert drawn(0.0, 0) == {1}
    assert drawn(1.0, 2) == {1, 2}
    assert drawn(5.0, 0) == {0, 1, 2, 3}
    assert drawn(0.01, 0) == {1}
    assert drawn(1e-40, 0) == drawn(1e-40, 2) == {1}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["gone", "--prompt", "x"], "gone: is not a run directory: it has no config.yaml"),
        (["empty", "--prompt", "x"], "empty: has no checkpoint yet"),
        (["first"], "sample: the following arguments are required: --prompt; see --help"),
        (["first", "--prompt", "x" * 20], f"--prompt: has 20 tokens; the context of this model is {SEQUENCE_LENGTH}"),
        (["first", "--prompt", "x", "--step", "7"], "--step: no checkpoint of step 7; there are step-00000005-gen-0, "),
        (["first", "--prompt", "x", "--tokens", "0"], "--tokens: must be at least 1, got 0"),
        (["first", "--prompt", "x", "--temperature", "-1"], "--temperature: must be 0 (most likely token) or more"),
        (["first", "--prompt", "x", "--top-k", "-1"], "--top-k: must be 0 (all tokens) or more, got -1"),
        (
            ["tokens", "--prompt", "x"],
            "data.sources: must hold text for a prompt; this run trained on synthetic tokens",
        ),
    ],
)
def test_a_mistake_is_one_line(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    monkeypatch.chdir(runs)
    assert main(["sample", "--device", "cpu", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith(f"harness: {line}")
    assert sum("on cpu" not in row for row in shown.err.splitlines()) == 1


def test_an_empty_prompt_is_rejected_before_a_checkpoint_is_chosen(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(runs / "first"), "--prompt", ""]) == 2
    assert capsys.readouterr().err == "harness: --prompt: must not be empty\n"


def test_weights_that_are_not_finite_are_named() -> None:
    options = SamplingOptions(num_tokens=1, temperature=1.0, top_k=0, seed=0)
    with pytest.raises(Exception, match="the weights of this checkpoint are damaged"):
        choose_token(torch.tensor([1.0, float("nan")]), options, torch.Generator())
