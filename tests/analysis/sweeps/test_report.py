"""From event logs on disk to the exact text of the report."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from harness.analysis.dashboard.comparison import ComparedRun, final_numbers
from harness.analysis.dashboard.index import run_row
from harness.analysis.dashboard.story import Story
from harness.analysis.postmortem.overrides import computed_settings
from harness.analysis.sweeps import sweep_record
from harness.analysis.sweeps.job_result import read_job_result
from harness.analysis.sweeps.ranking import make_grid, rank
from harness.analysis.sweeps.sweep_picture import cell_text, curves, draw_all, heat_map
from harness.analysis.sweeps.sweep_record import Job, Sweep
from harness.analysis.sweeps.sweep_text import render_markdown, results_table, short_names, verdict
from harness.config.compose import to_yaml
from harness.config.errors import ConfigError
from harness.core.events import ActionKind
from harness.core.rundir import RunDir
from launch.cli import sweep as command
from tests.analysis.sweeps.job_logs import acted, ended, evaluated, finished, job, started, step, write_log
from tests.composed import load

BAD = Job(
    name="bad", overrides={"optim.lr": "-1", "optim.beta2": "0.9"}, problem="optim.lr: must be positive, got -1.0"
)

LEARNING_RATES = ("0.001", "0.002", "0.004")

TABLE = """\
lr     beta2    loss    best  spikes  incidents  rejected  skip/rew/roll  tokens/s  step  end
0.001  0.9    1.5000  1.5000       -   6.67e+03         1          1/1/0       200     3  done (0)
0.002  0.9    2.5000  2.5000       -          0         0          0/0/0       100     1  interrupted (75)
0.004  0.9         -       -       -          -         0          0/0/0         -     0  not started
-1     0.9         -       -       -          -         0          0/0/0         -     0  bad config (2)"""

VERDICT = "Only one job is finished: optim.lr=0.001 optim.beta2=0.9, held-out loss 1.5000."

BEST = "harness train model=tiny optim.lr=0.001 optim.beta2=0.9"

PAGE = f"""\
# Sweep some

{VERDICT}

    {BEST}

| lr | beta2 | loss | best | spikes | incidents | rejected | skip/rew/roll | tokens/s | step | end |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| 0.001 | 0.9 | 1.5000 | 1.5000 | - | 6.67e+03 | 1 | 1/1/0 | 200 | 3 | done (0) |
| 0.002 | 0.9 | 2.5000 | 2.5000 | - | 0 | 0 | 0/0/0 | 100 | 1 | interrupted (75) |
| 0.004 | 0.9 | - | - | - | - | 0 | 0/0/0 | - | 0 | not started |
| -1 | 0.9 | - | - | - | - | 0 | 0/0/0 | - | 0 | bad config (2) |

Spikes: share of steps whose loss is more than 7 sigma above the mean of the 1,000 steps before (at
least 100); incidents: incidents of the sentinel per 10,000 steps; rejected: updates that the gate rejected;
skip/rew/roll: skipped batches, rewinds, rollbacks.

Not started, invalid config:

- optim.lr=-1 optim.beta2=0.9: optim.lr: must be positive, got -1.0

![loss curves](curves.png)

Command of the sweep:

    harness train --multirun model=tiny optim.lr=0.001,0.002,0.004,-1 optim.beta2=0.9
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sweep with finished, interrupted, waiting and invalid jobs."""
    done, stopped, waiting = (replace(job(lr=lr, beta2="0.9"), fixed=["model=tiny"]) for lr in LEARNING_RATES)
    events = [started(3), step(0, 3.0), step(1, math.inf, refused=True), *acted(ActionKind.skip, 1)]
    events += [*acted(ActionKind.rewind, 2), *acted(ActionKind.rollback, 2, succeeded=False)]
    events += acted(ActionKind.cool, 0)  # by an operator
    write_log(tmp_path / done.name, [*events, step(2, 2.0), evaluated(2, 1.5), ended(3)])
    write_log(tmp_path / stopped.name, [started(3), step(0, 3.0), evaluated(0, 2.5), ended(1, 75)])
    sweep = Sweep(
        name="some",
        created=0.0,
        words=["--multirun", "model=tiny", "optim.lr=0.001,0.002,0.004,-1", "optim.beta2=0.9"],
        fixed=["model=tiny"],
        jobs=[done, stopped, waiting, BAD],
    )
    sweep_record.write(sweep, tmp_path)
    return tmp_path


def test_text_and_page(directory: Path) -> None:
    sweep = sweep_record.read(directory)
    ranking = rank([read_job_result(directory, each) for each in sweep.jobs])
    assert results_table(sweep, ranking) == TABLE
    assert verdict(ranking) == VERDICT
    assert render_markdown(sweep, ranking, [("loss curves", "curves.png")], best=BEST) == PAGE


def test_command(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["report", str(directory), "--json", "--output", str(directory / "page.md")]) == 0
    printed = capsys.readouterr().out
    assert TABLE in printed
    assert f"\n{BEST}\n" in printed
    found = json.loads(printed.splitlines()[-1])
    assert found["best"] == BEST
    assert [each["final_loss"] for each in found["jobs"]] == [1.5, 2.5, None, None]
    assert [each["exit_code"] for each in found["jobs"]] == [0, 75, None, 2]
    assert found["jobs"][0]["num_skips"] == found["jobs"][0]["num_rewinds"] == 1
    assert found["jobs"][0]["best_or_equal"]
    page = (directory / "page.md").read_text()
    assert "![loss curves of all jobs](page-curves.png)" in page
    assert "![held-out loss by lr](page-optim.lr.png)" in page
    for picture in ("page-curves.png", "page-optim.lr.png"):
        assert (directory / picture).read_bytes().startswith(b"\x89PNG")
    html = (directory / "page.html").read_text()
    assert "<title>Sweep some</title>" in html
    assert html.count("data:image/png;base64,") == 2
    assert f"report  {directory}/page.md\npage    {directory}/page.html\n" in printed
    assert not (directory / "report.md").exists()
    assert command.main(["report", str(directory), "--output", str(directory / "page.html")]) == 2
    assert "--output: names the Markdown report" in capsys.readouterr().err


def sweep_of(jobs: list[Job], *fixed: str) -> Sweep:
    """A sweep as its command gives it."""
    return Sweep(
        name="s",
        created=0.0,
        words=["--multirun"],
        fixed=[*fixed],
        jobs=[replace(each, fixed=[*fixed]) for each in jobs],
    )


def extended(earlier: Sweep | None, now: Sweep) -> Sweep:
    """The record after a command that starts all its jobs."""
    return sweep_record.extend_sweep(earlier, now, started=[each.name for each in now.jobs])


def command_of(sweep: Sweep, name: str) -> str:
    """The command that trains the job of this name again."""
    return sweep_record.train_command(Path(), sweep, next(each for each in sweep.jobs if each.name == name))


def test_a_job_keeps_the_fixed_overrides_of_its_own_sweep_command() -> None:
    first = sweep_of([job(beta2="0.95"), job(beta2="0.99")], "model=tiny", "optim.lr=1e-3", "launch.nproc=1")
    second = sweep_of([job(beta2="0.9"), job(beta2="0.8")], "model=tiny", "optim.lr=1e-7", "telemetry=plain")
    both = extended(extended(None, first), second)
    assert command_of(both, "optim.beta2=0.99") == (
        "harness train model=tiny launch.nproc=1 optim.beta2=0.99 optim.lr=1e-3"
    )
    assert command_of(both, "optim.beta2=0.8") == (
        "harness train model=tiny telemetry=plain optim.beta2=0.8 optim.lr=1e-7"
    )
    assert both.keys == ["optim.beta2", "optim.lr"], "what the jobs differ in is a column"
    assert both.values("optim.lr") == ["1e-7", "1e-3"]
    again = extended(both, first)
    assert sorted(map(repr, again.jobs)) == sorted(map(repr, both.jobs))


def test_a_job_that_is_not_started_keeps_its_entry() -> None:
    first = sweep_of([job(beta2="0.95"), job(beta2="0.99")], "optim.weight_decay=0.1")
    second = sweep_of([job(beta2="0.95"), job(beta2="0.99"), job(beta2="0.9")], "optim.weight_decay=0.3")
    both = sweep_record.extend_sweep(first, second, started=["optim.beta2=0.99"])
    assert [(each.overrides["optim.beta2"], each.overrides["optim.weight_decay"]) for each in both.jobs] == [
        ("0.9", "0.3"),
        ("0.95", "0.1"),
        ("0.99", "0.3"),
    ]


def test_a_key_that_one_command_sweeps_and_another_fixes_is_swept() -> None:
    first = sweep_of([job(beta2="0.95"), job(beta2="0.99")], "model=tiny")
    second = sweep_of([job(clip_norm="0.5"), job(clip_norm="1.0")], "model=tiny", "optim.beta2=0.9")
    both = extended(first, second)
    assert command_of(both, "optim.beta2=0.99") == "harness train model=tiny optim.beta2=0.99"
    assert command_of(both, "optim.clip_norm=0.5") == "harness train model=tiny optim.clip_norm=0.5 optim.beta2=0.9"
    assert both.values("optim.beta2") == ["0.9", "0.95", "0.99"]


def test_a_rejected_job_is_no_job_of_the_sweep_and_replaces_none() -> None:
    first = extended(None, sweep_of([job(lr="0.001"), BAD]))
    assert [each.name for each in first.jobs] == ["optim.lr=0.001"]
    rejected = replace(job(lr="0.001"), problem="run.name: has another configuration")
    assert extended(first, sweep_of([rejected, BAD, job(lr="0.002")])).jobs == [
        job(lr="0.001"),
        job(lr="0.002"),
    ]


def test_the_jobs_of_an_older_record_share_its_fixed_overrides(tmp_path: Path) -> None:
    tree = asdict(sweep_of([job(lr="0.001")], "model=tiny"))
    del tree["jobs"][0]["fixed"]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    assert sweep_record.read(tmp_path).jobs[0].fixed == ["model=tiny"]


def test_result_of_a_resumed_job(tmp_path: Path) -> None:
    each = job(lr="1")
    write_log(tmp_path / each.name, [started(2), step(0, 3.0), ended(1, 75), started(2, at=1), step(1, 2.0)])
    result = read_job_result(tmp_path, each)
    assert (result.exit_code, result.is_finished, result.step) == (None, False, 2)
    assert result.tokens_per_s == 150.0


def test_a_batch_without_a_token_to_predict_has_no_loss(tmp_path: Path) -> None:
    each, empty = job(lr="1"), replace(step(1, 0.0, refused=True), grad_norm=0.0)
    write_log(tmp_path / each.name, [started(3), step(0, 3.0), empty, step(2, 2.5)])
    result = read_job_result(tmp_path, each)
    assert (list(result.iterations), list(result.losses)) == ([0, 2], [3.0, 2.5])


def test_every_table_has_the_same_throughput_of_a_job(tmp_path: Path) -> None:
    """The median over its steps: the last step may lie in the pause of an evaluation."""
    each, rates = job(lr="1"), (100.0, 90.0, 110.0, 5.0)
    steps = [replace(step(at, 3.0), tokens_per_s=rate, mfu=rate / 1000) for at, rate in enumerate(rates)]
    write_log(tmp_path / each.name, [started(4), *steps])
    run, story = RunDir(tmp_path / each.name), Story()
    story.read_more(run)
    rows = final_numbers([ComparedRun(run, story, "job")], now_s=0.0)
    numbers = {row["label"]: row.get("numbers") for row in rows}
    assert read_job_result(tmp_path, each).tokens_per_s == 95.0
    assert run_row(run, story, root=tmp_path, now_s=0.0).tokens_per_s == 95.0
    assert (numbers["tokens per second"], numbers["MFU"]) == ([95.0], [pytest.approx(0.095)])


def test_verdicts() -> None:
    def of(*evaluations: list[float]) -> str:
        return verdict(rank([finished(job(lr=str(place)), each) for place, each in enumerate(evaluations, start=1)]))

    assert of() == "No winner: no job is finished with a finite loss."
    assert of([1.0], [1.5]) == (
        "optim.lr=1 is best with a held-out loss of 1.0000, 0.5000 below optim.lr=2. Not known whether this exceeds "
        "the noise: that takes 4 evaluations of each job."
    )
    assert of([4.0, 3.0, 2.0, 1.0], [4.5, 3.5, 2.5, 1.5]) == (
        "optim.lr=1 is best with a held-out loss of 1.0000, 0.5000 below optim.lr=2; noise explains 0.0000."
    )
    assert of([2.0, 1.0, 2.0, 1.0], [2.0, 1.0, 2.0, 1.1], [9.0, 9.0, 9.0, 9.0]) == (
        "No winner. optim.lr=1 has the lowest held-out loss, 1.0000, but within the noise of it is optim.lr=2 (the "
        "next is 0.1000 above; noise explains 1.7680)."
    )


def test_ambiguous_keys_are_shown_in_full() -> None:
    names = short_names(["optim.eps", "model.norm.eps", "optim.lr"])
    assert list(names.values()) == ["optim.eps", "model.norm.eps", "lr"]


def test_cells_of_a_heat_map() -> None:
    assert cell_text(1.23456, 0, is_lowest=False) == "1.2346"
    assert cell_text(1.23456, 2, is_lowest=True) == "1.2346 \N{BULLET}\n2 missing"
    assert cell_text(math.nan, 1, is_lowest=False) == "1 missing"
    assert cell_text(math.nan, 0, is_lowest=False) == ""


def test_a_heat_map_says_what_its_marks_and_colours_mean() -> None:
    places = [("1", "0.9", 1.0), ("2", "0.9", 2.0), ("1", "0.95", 3.0)]
    results = [finished(job(lr=lr, beta2=beta2), [loss], losses=[loss]) for lr, beta2, loss in places]
    ranking = rank(results)
    figure = heat_map(make_grid(ranking.scores, "optim.beta2", "optim.lr"), ranking)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["lowest of all", "lowest of its row", "no finished job"]
    _, bar = figure.axes
    assert bar.get_ylabel() == "held-out loss (nats per token)"
    whole = rank([*results, finished(job(lr="2", beta2="0.95"), [4.0], losses=[4.0])])
    (legend,) = heat_map(make_grid(whole.scores, "optim.beta2", "optim.lr"), whole).legends
    assert [text.get_text() for text in legend.get_texts()] == ["lowest of all", "lowest of its row"]


def test_curves_say_what_lines_and_points_are() -> None:
    figure = curves(rank([finished(job(lr="1"), [1.0], losses=[3.0, 2.0])]), "some")
    (axes,) = figure.axes
    assert axes.get_title(loc="right") == "lines: moving average of the training loss; points: held-out loss"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("iteration", "loss (nats per token)")


def test_one_picture_for_each_pair_of_numeric_keys(tmp_path: Path) -> None:
    results = [
        finished(job(lr=lr, beta2=beta2, eps=eps), [1.0], losses=[math.nan])
        for lr, beta2, eps in [("1", "0.9", "1"), ("2", "0.9", "1"), ("1", "0.95", "2"), ("2", "0.95", "2")]
    ]
    sweep = Sweep(name="s", created=0.0, words=[], fixed=[], jobs=[each.job for each in results])
    drawn = draw_all(sweep, rank(results), tmp_path, "report")
    assert [file for _, file in drawn] == [
        "report-curves.png",
        "report-optim.lr-optim.beta2.png",
        "report-optim.lr-optim.eps.png",
        "report-optim.beta2-optim.eps.png",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(file for _, file in drawn)
    assert draw_all(sweep, rank([]), tmp_path, "report") == []


def test_second_sweep_extends_the_first() -> None:
    def sweep(*jobs: Job, words: list[str], created: float) -> Sweep:
        return Sweep(name="s", created=created, words=words, fixed=[], jobs=list(jobs))

    first = sweep(job(lr="10"), job(lr="9"), BAD, words=["old"], created=1.0)
    now = sweep(job(lr="9"), job(lr="2"), words=["new"], created=2.0)
    both = extended(first, now)
    assert [each.overrides["optim.lr"] for each in both.jobs] == ["2", "9", "10"]
    assert (both.created, both.words) == (1.0, ["new"])
    assert extended(None, now) == now
    assert both.values("optim.lr") == ["2", "9", "10"]


def test_directory_of_runs_is_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr, seed in (("b", 1e-3, 0), ("a", 2e-3, 0)):
        config = {"run": {"name": name, "seed": seed}, "optim": {"lr": lr, "clip_norm": None}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
    sweep = sweep_record.read(tmp_path)
    assert [(each.name, each.overrides) for each in sweep.jobs] == [
        ("b", {"optim.lr": "0.001"}),
        ("a", {"optim.lr": "0.002"}),
    ]
    assert command.main(["report", str(tmp_path)]) == 0
    assert "no job is finished with a finite loss" in capsys.readouterr().out


def test_the_best_command_of_a_directory_of_runs_trains_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings that all runs share are part of it."""
    for lr, loss in (("0.001", 2.0), ("0.002", 1.0)):
        cfg = load(["model.dim=32", "train.num_steps=40", f"optim.lr={lr}"])
        write_log(tmp_path / f"lr={lr}", [started(1), step(0, 3.0), evaluated(0, loss), ended(1)])
        (tmp_path / f"lr={lr}" / "config.yaml").write_text(to_yaml(cfg))
    sweep = sweep_record.read(tmp_path)
    assert command.main(["report", str(tmp_path), "--json"]) == 0
    best = json.loads(capsys.readouterr().out.splitlines()[-1])["best"]
    assert computed_settings(load(shlex.split(best)[2:])) == computed_settings(cfg)
    (tmp_path / "lr=0.002" / "config.yaml").write_text(to_yaml(load([])))
    assert sweep_record.train_command(tmp_path, sweep, sweep.jobs[-1]) == "harness train", "the default configuration"
    (tmp_path / "lr=0.002" / "config.yaml").write_text("{}")
    assert sweep_record.train_command(tmp_path, sweep, sweep.jobs[-1]) == "", "its configuration is not known"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "harness: sweep: missing command; choose report, or --help\n"),
        (["fly"], "harness: sweep: unknown command 'fly'; choose report, or --help\n"),
        (["report"], "harness: sweep report: the following arguments are required: DIR; see --help\n"),
        (["report", "nowhere"], "harness: nowhere: is not a directory\n"),
        (["report", "."], "harness: .: has neither a sweep.yaml nor run directories\n"),
    ],
)
def test_invalid_arguments(
    args: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(args) == 2
    assert capsys.readouterr() == ("", line)


def test_invalid_record_is_an_error(tmp_path: Path) -> None:
    for text in ("jobs: 3\n", "[]\n", "{name: [\n"):
        (tmp_path / "sweep.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"sweep\.yaml: is not a valid sweep record"):
            sweep_record.read(tmp_path)
