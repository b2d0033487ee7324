"""The ablation: its preset, its table, and two real runs."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from harness.config import compose, conf_files
from tests.bench import ablation
from tests.bench.ablation import AblationRun, find_removed, render_table, replace_table, select_sets
from tests.bench.claims import ROOT
from tests.forked_launchers import ForkedPopen, fork_launchers
from tests.forks import Launched
from tests.slow_steps import slow_steps

SMALL = [
    "model.dim=32",
    "model.num_layers=1",
    "model.ffn_dim=48",
    "train.sequence_length=32",
    "train.batch_size=2",
    "optim.warmup_steps=2",
    "eval.every_steps=2",
]
LIMIT_S = 1.5
TABLE = """\
8 of 9 runs ended; 500 steps each; median over the seeds, range in brackets.

<!-- claims: ablation -->
| removed | runs | held-out loss (nats) | above base | spike score (%) | spikes | rejected updates | failed |
|---|---:|---|---:|---|---:|---:|---:|
| nothing | 3 | 1.500 (1.400 to 1.600) | +0.000 | 0.00 (0.00 to 0.00) | 0 | 0 | 0 |
| RMSNorm | 2 | 1.950 (1.700 to 2.200) | +0.450 | 0.25 (0.00 to 0.50) | 2 | 0 | 1 |
| QK-norm | 1 | 1.600 (1.600 to 1.600) | +0.100 | 0.00 (0.00 to 0.00) | 0 | 0 | 0 |
| QK-norm + warm-up | 2 | halted (2.500 to halted) | - | 12.50 (0.00 to 25.00) | 100 | 120 | 2 |

- Failed in at least one seed: one removed 1 of 2, two removed 1 of 1.
- Failed in every seed: one removed 0 of 2, two removed 1 of 1.
- Every seed ends above the worst run with all safeguards: one removed 1 of 2, two removed 1 of 1.
- Not ended, and in no row: QK-norm seed 1 (step 40)."""


def result(
    without: Sequence[str], seed: int, loss: float | None, *, spikes: int = 0, refused: int = 0, step: int = 500
) -> AblationRun:
    return AblationRun(
        without=tuple(without),
        seed=seed,
        step=step,
        num_steps=500,
        has_ended=step == 500 or loss is None,
        final_loss=loss,
        spike_score=spikes / 400,
        num_spikes=spikes,
        num_refused=refused,
    )


RUNS = [
    result(["qk_norm", "warmup"], 0, None, spikes=100, refused=100, step=200),
    result(["qk_norm", "warmup"], 1, 2.5, refused=20),
    result(["rms_norm"], 1, 2.2, spikes=2),
    result(["rms_norm"], 0, 1.7),
    result([], 0, 1.5),
    result([], 2, 1.6),
    result([], 1, 1.4),
    result(["qk_norm"], 1, 4.0, step=40),
    result(["qk_norm"], 0, 1.6),
]


def test_the_preset_removes_none_each_one_and_each_two() -> None:
    expected = [chosen for size in range(3) for chosen in combinations(ablation.NAMES, size)]
    assert ablation.list_sets() == expected
    assert set(conf_files.options_of("without")) == set(ablation.NAMES)


@pytest.mark.parametrize("without", [(), ("qk_norm", "warmup"), tuple(ablation.NAMES)], ids=str)
def test_an_option_replaces_the_value_of_the_preset(without: tuple[str, ...]) -> None:
    cfg = compose.load(["+sweep=ablation", f"without={ablation.as_override(without)}"])
    assert find_removed(compose.flat(compose.plain(cfg))) == without


def test_selection_by_pattern_keeps_the_run_with_all_safeguards() -> None:
    assert select_sets("qk_norm") == [(), ("qk_norm",)]
    assert select_sets("qk_norm+*") == [(), *((("qk_norm", other)) for other in ("warmup", "clipping", "bf16"))]
    assert len(select_sets("*")) == 22


def test_table() -> None:
    assert render_table(RUNS) == TABLE
    assert render_table(RUNS[:1]) == "No table: no run with all safeguards has ended."


def test_the_table_of_a_page_is_replaced_from_stored_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, stored, copied = tmp_path / "page.md", tmp_path / "in.json", tmp_path / "out.json"
    page.write_text("# A\n\n<!-- ablation table -->\n\nold\n\n<!-- end of ablation table -->\n\nB\n")
    stored.write_text(json.dumps([asdict(run) for run in RUNS]))
    arguments = ["--results", str(stored), "--out", str(copied), "--write", str(page)]
    assert ablation.main(arguments) == ablation.main(arguments) == 0
    assert page.read_text() == f"# A\n\n<!-- ablation table -->\n\n{TABLE}\n\n<!-- end of ablation table -->\n\nB\n"
    assert json.loads(copied.read_text()) == json.loads(stored.read_text())
    assert TABLE in capsys.readouterr().out


def test_the_page_has_a_place_for_the_table() -> None:
    page = (ROOT / "docs/ablation.md").read_text(encoding="utf-8")
    assert TABLE in replace_table(page, TABLE)
    with pytest.raises(SystemExit, match="the page has no line <!-- ablation table -->"):
        replace_table("# A\n", TABLE)


def train_small(directory: Path, *arguments: str, first: Callable[[], None] = fork_launchers) -> list[Any]:
    """Run the ablation on a tiny model, with forked launchers; returns what it wrote of its runs."""
    out = directory / "out.json"
    arguments = (*arguments, "--device", "cpu", "--runs", str(directory), "--out", str(out), *SMALL)
    with Launched("tests.bench.ablation", *arguments, output=directory / "printed", first=first) as process:
        assert process.wait(200) == 0, process.stderr
    runs: list[Any] = json.loads(out.read_text())
    return runs


def fork_launchers_and_wait_for_a_step(directory: Path) -> None:
    """Let a time limit begin when a run has written its first events: no machine is too slow for it."""

    class LimitedPopen(ForkedPopen):
        def wait(self, timeout: float | None = None) -> int:
            while timeout == LIMIT_S and not any(directory.glob(f"{ablation.SWEEP}/*/events.jsonl")):
                time.sleep(0.05)
            return super().wait(timeout)

    subprocess.Popen = LimitedPopen  # type: ignore[misc]
    slow_steps(0.1)


@pytest.mark.full
def test_two_real_runs(tmp_path: Path) -> None:
    runs = train_small(tmp_path, "--steps", "6", "--seeds", "3", "--only", "pre_norm+rms_norm")
    assert [(run["without"], run["seed"], run["step"], run["has_ended"]) for run in runs] == [
        ([], 3, 6, True),
        (["pre_norm", "rms_norm"], 3, 6, True),
    ]
    assert all(3 < run["final_loss"] < 7 for run in runs)
    assert runs[0]["final_loss"] != runs[1]["final_loss"]


@pytest.mark.full
def test_a_sweep_is_stopped_at_its_time_limit(tmp_path: Path) -> None:
    arguments = ("--steps", "1000000", "--seeds", "0", "--only", "warmup", "--jobs", "1", "--limit-s", str(LIMIT_S))
    runs = train_small(tmp_path, *arguments, first=partial(fork_launchers_and_wait_for_a_step, tmp_path))
    assert [run["has_ended"] for run in runs] == [False, False]


@pytest.mark.full
def test_a_time_limit_that_is_too_short_for_any_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^the sweep ended before it prepared a run$"):
        ablation.main(["--seeds", "0", "--runs", str(tmp_path), "--limit-s", "0"])
