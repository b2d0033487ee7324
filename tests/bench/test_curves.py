"""The detector benchmark: labels, scores, planted spikes, and logs read from a clone."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from random import Random

import pytest

from tests.bench.curves import (
    LabelledLog,
    Score,
    group_alarms,
    plant,
    render_row,
    score,
    score_thinned,
    split_alarms,
    stride_of,
)
from tests.bench.loss_events import Labels, label
from tests.bench.peer_detectors import PEERS
from tests.bench.training_logs import (
    ADDED,
    BUILD_NANOGPT,
    HELD_OUT,
    LLMC_FILE,
    LLMC_STDOUT,
    MODDED_NANOGPT,
    TUNING,
    Source,
    TrainingLog,
    parse_lines,
    parse_megatron,
    parse_mlperf,
    read_log,
)


def falling_losses(num: int = 2000, *, noise: float = 0.01) -> list[float]:
    random = Random(0)
    return [(3 + 8 * math.exp(-row / 80)) * math.exp(random.gauss(0, noise)) for row in range(num)]


def test_a_normal_curve_has_no_event() -> None:
    assert label(falling_losses()) == Labels((), (), ())


def test_a_lasting_rise_is_one_event() -> None:
    losses = falling_losses()
    for row in range(900, 960):
        losses[row] *= 1.2
    assert label(losses) == Labels(((900, 959),), (), ())


def test_rises_a_few_rows_apart_are_one_event() -> None:
    losses = falling_losses()
    for row in (*range(900, 920), *range(930, 950)):
        losses[row] *= 1.2
    assert label(losses).events == ((900, 949),)


def test_a_rise_below_six_spreads_is_no_event() -> None:
    losses = [loss * 1.035 if 900 <= row < 960 else loss for row, loss in enumerate(falling_losses(noise=0.01))]
    assert label(losses).events == ()


def test_one_odd_batch_is_an_outlier() -> None:
    losses, norms = falling_losses(), [1 + row % 7 / 100 for row in range(2000)]
    losses[700] *= 1.3
    norms[1200] = 4.0
    assert label(losses, norms) == Labels((), (), (700, 1200))


def test_a_level_that_stays_is_no_event() -> None:
    losses = [loss * 1.3 if row >= 1000 else loss for row, loss in enumerate(falling_losses())]
    assert label(losses).events == ()


def test_nan_is_a_separate_event() -> None:
    losses = falling_losses()
    losses[10:13] = [math.nan, math.inf, math.nan]
    assert label(losses).events == ((10, 12),)
    assert label([1.0, *[math.nan] * 200]).events == ((1, 200),)


def test_rise_of_the_first_steps_is_not_scored() -> None:
    losses = falling_losses()
    for row in range(20, 40):
        losses[row] *= 1.5
    labels = label(losses)
    assert labels.events == ()
    assert [first for first, _ in labels.startup] == [20]
    assert split_alarms([15, 60, 200], labels, len(losses)) == ([200], 0)


def test_alarms_close_together_are_one() -> None:
    assert group_alarms([5, 6, 18, 31, 44]) == [5, 31, 44]
    assert group_alarms([]) == []


def test_alarms_on_outliers_are_counted_separately() -> None:
    labels = Labels(((100, 120),), (), (300,))
    alarms = [80, 95, 170, 171, 300, 302, 303]
    assert split_alarms(alarms, labels, 400) == ([80, 171, 303], 2)


def build_labelled_log(*, norms: bool = False) -> LabelledLog:
    steps = tuple(range(0, 2000, 5))
    log = TrainingLog("log", steps, (1.0,) * 400, (1.0,) * 400 if norms else ())
    return LabelledLog(log, Labels(((100, 120), (250, 260)), (), (200,)))


@pytest.mark.parametrize(
    ("rows", "delays", "num_false"),
    [
        ([102], [10], 0),
        ([90, 270], [-50, 100], 0),
        ([89, 131], [], 1),
        ([89, 104], [20], 1),
        ([50, 102, 200, 350], [10], 2),
    ],
)
def test_score(rows: list[int], delays: list[int], num_false: int) -> None:
    total = score([build_labelled_log()], lambda _: iter(rows))
    assert (total.num_events, total.delays, total.num_false) == (2, delays, num_false)
    assert total.num_clean_rows == 400 - 81 - 71


def test_a_rule_about_norms_is_scored_on_logs_with_norms_only() -> None:
    zclip = PEERS["ZClip"]
    assert score([build_labelled_log(), build_labelled_log(norms=True)], zclip) == Score(1, 2, [], 0, 0, 248)
    assert "n/a" in render_row("ZClip", score([build_labelled_log()], zclip))


def test_planted_spikes_have_the_height_they_state() -> None:
    log = TrainingLog("log", tuple(range(3000)), (2.0,) * 3000, (1.0,) * 3000)
    planted = plant(log, 0.1, ramp_rows=12, decay_rows=30)
    assert len(planted.labels.events) == 2
    for onset, end in planted.labels.events:
        assert planted.log.losses[onset - 1] == planted.log.losses[end + 1] == 2.0
        assert planted.log.losses[onset] == pytest.approx(2.0 * (1 + 0.1 / 12))
        assert max(planted.log.losses[onset : end + 1]) == planted.log.losses[onset + 11] == pytest.approx(2.2)
        assert planted.log.grad_norms[onset + 11] == pytest.approx(3.0)


def test_planted_nan_continues_to_the_end() -> None:
    log = TrainingLog("log", tuple(range(3000)), (2.0,) * 3000)
    planted = plant(log, math.nan, ramp_rows=1, decay_rows=1)
    ((onset, end),) = planted.labels.events
    assert end == 2999
    assert all(math.isnan(loss) for loss in planted.log.losses[onset:])
    assert set(planted.log.losses[:onset]) == {2.0}
    assert planted.log.grad_norms == ()


def test_log_formats() -> None:
    stats = '0: :::MLLOG {"value": {"reduced_train_loss": %s}, "metadata": {"step": %s.0}}\n'
    assert list(parse_mlperf(stats % (9.5, 64) + "text\n" + stats % (9.0, 128))) == [(1, 9.5, None), (2, 9.0, None)]
    golden = {"lm loss": {"values": {"1": 9.5, "6": 9.0, "11": "nan"}}}
    assert list(parse_megatron(json.dumps(golden))) == [(1, 9.5, None), (6, 9.0, None)]
    assert list(parse_lines(LLMC_FILE)("s:0 tel:9.9\ns:0 trl:9.5 lr:0.1 norm:2.5\n")) == [(0, 9.5, 2.5)]
    assert list(parse_lines(LLMC_FILE)("s:0 trl:9.5\n")) == [(0, 9.5, None)]
    stdout = "step    7/90 | loss 9.500000 (+nanz)| norm 2.5000 (+0.10z)| lr 8.57e-07 | 9 ms\n"
    assert list(parse_lines(LLMC_STDOUT)(stdout)) == [(7, 9.5, 2.5)]
    assert list(parse_lines(BUILD_NANOGPT)("step    7 | loss: 9.5 | lr 1e-5 | norm: 2.5 | dt: 9ms\n")) == [
        (7, 9.5, 2.5)
    ]
    assert list(parse_lines(MODDED_NANOGPT)("step:7/90 train_loss:9.5 train_time:1ms\n")) == [(7, 9.5, None)]


def test_a_log_is_read_at_its_commit(tmp_path: Path) -> None:
    clone = tmp_path / "owner" / "name"
    clone.mkdir(parents=True)

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(clone), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    (clone / "main.log").write_text("".join(f"s:{row} trl:3.5 lr:0.1 norm:0.5\n" for row in range(100)))
    git("add", "main.log")
    git("commit", "--quiet", "--message", "log")
    commit = git("rev-parse", "HEAD")
    (clone / "main.log").write_text("")
    git("commit", "--quiet", "--all", "--message", "gone")
    log = read_log(Source("owner/name", commit, parse_lines(LLMC_FILE), {"run": "main.log"}), "run", tmp_path)
    assert log == TrainingLog("run", tuple(range(100)), (3.5,) * 100, (0.5,) * 100)


def test_no_log_is_both_tuning_and_held_out() -> None:
    def paths(sources: tuple[Source, ...]) -> set[tuple[str, str]]:
        return {(source.repository, path) for source in sources for path in source.paths.values()}

    assert not paths(TUNING) & paths(HELD_OUT)
    assert not paths(ADDED) & (paths(TUNING) | paths(HELD_OUT))


def test_a_thinned_log_is_scored_by_the_labels_of_all_rows() -> None:
    """An alarm on every recorded row from 110 on: found from each first row, at the first recorded row."""
    log = TrainingLog("log", tuple(range(400)), (1.0,) * 400)
    labelled = LabelledLog(log, Labels(((110, 120),), (), ()))
    assert (stride_of(log, 1), stride_of(log, 5), stride_of(log, 10)) == (1, 5, 10)
    total = score_thinned([labelled], lambda thin: (row for row, step in enumerate(thin.steps) if step == 110), 5)
    assert (total.num_logs, total.num_events, total.delays, total.num_false) == (3, 3, [0], 0)
    late = score_thinned([labelled], lambda thin: (row for row, step in enumerate(thin.steps) if step >= 300), 5)
    assert (late.delays, late.num_false) == ([], 3)


def test_a_log_whose_rows_are_five_steps_apart_is_not_thinned_to_every_fifth_step() -> None:
    log = TrainingLog("log", (1, *range(5, 2000, 5)), (1.0,) * 400)
    assert (stride_of(log, 1), stride_of(log, 5), stride_of(log, 10)) == (1, 1, 2)
