"""Tests of the sink process with a real sqlite store: every event arrives once, under one run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from harness.config.errors import EXIT_INTERRUPTED
from harness.config.schema import Config
from harness.core.events import (
    DrillScored,
    EvalRecord,
    Event,
    Incident,
    RunEnded,
    RunRestarted,
    RunStarted,
    StepRecord,
)
from harness.core.locking.file_lock import exclusive
from harness.core.rundir import RunDir
from harness.telemetry.event_log import EventLog
from harness.telemetry.sinks.__main__ import main
from harness.telemetry.sinks.feeder import SinkFeeder, pause_s, send_until_end
from harness.telemetry.sinks.log_tail import LogTail
from harness.telemetry.sinks.mlflow_progress import MlflowProgress, load_progress
from harness.telemetry.sinks.mlflow_run import create_run, open_client
from harness.telemetry.sinks.mlflow_sink import MlflowSink
from harness.telemetry.sinks.sink import SinkKind
from harness.telemetry.sinks.store_uri import tracking_uri
from harness.telemetry.sinks.trainer_watch import Trainer
from tests.forks import forks

MakeRun = Callable[..., tuple[RunDir, Config]]
MakeStep = Callable[..., StepRecord]

# Deprecations inside MLflow are not ours to fix.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("ready_store")]


def append(run: RunDir, *events: Event) -> None:
    log = EventLog(run.events)
    for event in events:
        log.write(event)
    log.close()


def read_stored(cfg: Config, run: RunDir) -> tuple[Any, Any]:
    """MLflow's client and its view of the run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracking_uri(cfg))
    run_id = load_progress(run, None).run_id
    assert run_id is not None
    return client, client.get_run(run_id)


def history(client: Any, run: Any, name: str) -> list[tuple[int, float, int]]:
    return [(row.step, row.value, row.timestamp) for row in client.get_metric_history(run.info.run_id, name)]


@pytest.mark.full
def test_a_whole_run_is_sent(make_run: MakeRun, make_step: MakeStep, started: RunStarted, ended: RunEnded) -> None:
    run, cfg = make_run("whole", experiment="tests")
    run.picture.write_bytes(b"png")
    run.manifest.write_text(json.dumps({"commit": "a" * 40, "starts": [{"commit": "b" * 40}]}))
    steps = [make_step(iteration) for iteration in range(150)]
    steps[7] = make_step(7, loss=math.nan, grad_norm=math.inf, refused=True)
    evaluated = EvalRecord(time=1_700_000_149.5, iteration=149, step=150, loss=2.5, tokens=8)
    append(run, started, *steps, evaluated, ended)
    assert send_until_end(run, None) == 0

    client, seen = read_stored(cfg, run)
    assert (seen.info.run_name, seen.info.status, seen.info.end_time) == ("whole", "FINISHED", 1_700_001_000_000)
    assert seen.info.start_time == 1_700_000_000_000
    assert client.get_experiment(seen.info.experiment_id).name == "tests"
    clean = [(record.iteration, record.loss, round(record.time * 1000)) for record in steps if not record.refused]
    assert history(client, seen, "loss") == clean
    assert history(client, seen, "loss_nonfinite") == [(7, 1.0, 1_700_000_007_000)]
    assert history(client, seen, "grad_norm_nonfinite") == [(7, 1.0, 1_700_000_007_000)]
    assert history(client, seen, "eval/loss") == [(149, 2.5, 1_700_000_149_500)]
    assert len(history(client, seen, "lr")) == 150
    assert seen.data.params["optim.lr"] == "0.003"
    assert seen.data.params["train.batch_tokens"] == "None"
    assert seen.data.tags["run_dir"] == str(run.path)
    assert seen.data.tags["commit"] == "b" * 40
    assert [artifact.path for artifact in client.list_artifacts(seen.info.run_id)] == ["loss.png"]
    assert (run.path.parent / "mlartifacts").is_dir()


@pytest.mark.full
def test_a_drill_score_is_sent_after_the_run_ended(make_run: MakeRun, started: RunStarted, ended: RunEnded) -> None:
    run, cfg = make_run("drill-nan_grad")
    append(run, started, ended)
    run.score_card.write_text("# passed")
    scored = DrillScored(time=ended.time + 9, iteration=100, scenario="nan_grad", passed=True, scores={"seconds": 2.5})
    append(run, scored)
    assert send_until_end(run, None) == 0
    client, seen = read_stored(cfg, run)
    assert (seen.info.status, seen.info.end_time) == ("FINISHED", 1_700_001_000_000)
    assert (seen.data.metrics["drill/passed"], seen.data.metrics["drill/seconds"]) == (1.0, 2.5)
    assert seen.data.tags["drill.nan_grad"] == "passed"
    assert [artifact.path for artifact in client.list_artifacts(seen.info.run_id)] == ["score.md"]


def test_an_incident_is_a_tag_and_its_post_mortem_an_artifact(
    make_run: MakeRun, started: RunStarted, ended: RunEnded
) -> None:
    run, cfg = make_run("spiked")
    folder = run.incidents / "001"
    folder.mkdir(parents=True)
    (folder / "postmortem.md").write_text("# Incident 001")
    (folder / "1-loss.png").write_bytes(b"png")
    incident = Incident(
        time=ended.time,
        iteration=90,
        number=1,
        kinds=["grad_spike", "loss_spike"],
        onset=70,
        onset_step=70,
        last=75,
        last_step=74,
        verdict="cured",
    )
    append(run, started, incident, ended)
    assert send_until_end(run, None) == 0
    client, seen = read_stored(cfg, run)
    assert seen.data.tags["incident.001"] == "grad_spike, loss_spike from iteration 70: cured"
    sent = [artifact.path for artifact in client.list_artifacts(seen.info.run_id, "incidents/001")]
    assert sent == ["incidents/001/1-loss.png", "incidents/001/postmortem.md"]


def test_a_resumed_run_keeps_its_id(
    make_run: MakeRun, make_step: MakeStep, started: RunStarted, ended: RunEnded
) -> None:
    run, cfg = make_run()
    append(run, started, make_step(0), replace(ended, exit_code=EXIT_INTERRUPTED))
    assert send_until_end(run, None) == 0
    client, first = read_stored(cfg, run)
    assert first.info.status == "KILLED"

    settings = yaml.safe_load(run.config.read_text())
    settings["optim"]["lr"] = 1e-3
    settings["new"] = {"key": "x" * 9000}
    run.config.write_text(yaml.safe_dump(settings))
    append(run, replace(started, resumed_from="step-1"), make_step(1))
    trainer = Trainer(os.getppid(), run.events.stat().st_size)
    feeder = SinkFeeder(SinkKind.mlflow, run, cfg.telemetry, LogTail(run), trainer)
    sink = MlflowSink(run, load_progress(run, None))
    feeder._send_rest(sink)
    client, second = read_stored(cfg, run)
    assert (second.info.run_id, second.info.status) == (first.info.run_id, "RUNNING")
    assert second.data.params["optim.lr"] == "0.003"
    assert second.data.tags["changed.optim.lr"] == "0.001"
    assert len(second.data.params["new.key"]) == 500
    assert {name for name in second.data.tags if name.startswith("changed.")} == {"changed.optim.lr"}

    append(run, replace(ended, exit_code=3))
    feeder._send_rest(sink)
    client, third = read_stored(cfg, run)
    assert third.info.status == "FAILED"
    assert [row[0] for row in history(client, third, "loss")] == [0, 1]


def test_a_changed_value_that_is_changed_back_has_no_tag(make_run: MakeRun, ended: RunEnded) -> None:
    run, cfg = make_run()
    append(run, ended)
    for lr, tag in [(0.003, None), (0.001, "0.001"), (0.003, None)]:
        settings = yaml.safe_load(run.config.read_text())
        settings["optim"]["lr"] = lr
        run.config.write_text(yaml.safe_dump(settings))
        assert send_until_end(run, None) == 0
        _, seen = read_stored(cfg, run)
        assert (seen.data.params["optim.lr"], seen.data.tags.get("changed.optim.lr")) == ("0.003", tag)


def test_a_run_that_trains_does_not_fail_when_its_rest_is_sent_by_hand(
    make_run: MakeRun, make_step: MakeStep, started: RunStarted
) -> None:
    run, cfg = make_run()
    append(run, started, make_step(0))
    script = "import sys; from pathlib import Path; from harness.core.locking import run_lease; "
    script += "run_lease.hold(Path(sys.argv[1]), 60.0); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "held\n"
        assert send_until_end(run, None) == 0
        assert read_stored(cfg, run)[1].info.status == "RUNNING"
        trainer.kill()
    assert send_until_end(run, None) == 0
    assert read_stored(cfg, run)[1].info.status == "FAILED"


def test_a_run_that_restarts_inside_its_job_goes_on(
    make_run: MakeRun, make_step: MakeStep, started: RunStarted
) -> None:
    run, cfg = make_run()
    reason = "rank 1 on n1 was killed by SIGKILL"
    append(run, started, make_step(0), RunRestarted(time=started.time, iteration=0, step=1, number=1, reason=reason))
    assert send_until_end(run, Trainer(-1, 0)) == 0
    _, seen = read_stored(cfg, run)
    assert (seen.info.status, seen.info.end_time) == ("RUNNING", None)


def test_a_batch_sent_twice_is_stored_once(make_run: MakeRun, make_step: MakeStep, ended: RunEnded) -> None:
    run, cfg = make_run()
    steps = [make_step(iteration) for iteration in range(100)]
    append(run, *steps)
    assert send_until_end(run, None) == 0
    progress = load_progress(run, None)
    assert progress.offset == run.events.stat().st_size
    progress.offset = 0
    progress.save(run)
    append(run, make_step(100), ended)
    assert send_until_end(run, None) == 0
    client, seen = read_stored(cfg, run)
    assert [row[0] for row in history(client, seen, "loss")] == list(range(101))
    assert len(client.search_runs([seen.info.experiment_id])) == 1


@pytest.mark.parametrize("content", ['{"tracking_uri": "sqli', "[]", '{"offset": 7}'])
def test_damaged_progress_sends_everything_again_to_a_new_run(
    make_run: MakeRun, make_step: MakeStep, ended: RunEnded, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, cfg = make_run()
    append(run, make_step(0), ended)
    run.mlflow.write_text(content)
    assert send_until_end(run, None) == 0
    assert f"{run.mlflow} is damaged" in capsys.readouterr().err
    client, seen = read_stored(cfg, run)
    assert [row[0] for row in history(client, seen, "loss")] == [0]


def test_progress_of_a_later_version_is_continued(make_run: MakeRun, make_step: MakeStep) -> None:
    run, cfg = make_run()
    append(run, make_step(0))
    assert send_until_end(run, None) == 0
    _, first = read_stored(cfg, run)
    run.mlflow.write_text(json.dumps(json.loads(run.mlflow.read_text()) | {"later": 1}))
    append(run, make_step(1))
    assert send_until_end(run, None) == 0
    client, second = read_stored(cfg, run)
    assert second.info.run_id == first.info.run_id
    assert [row[0] for row in history(client, second, "loss")] == [0, 1]


def test_a_torn_line_is_skipped(make_run: MakeRun, make_step: MakeStep, ended: RunEnded) -> None:
    run, cfg = make_run()
    append(run, make_step(0))
    with run.events.open("a") as file:
        file.write('{"event":"step","iteration":1,"lo')
    assert send_until_end(run, None) == 0
    client, seen = read_stored(cfg, run)
    assert seen.info.status == "FAILED"
    append(run, make_step(2), ended)
    assert send_until_end(run, None) == 0
    client, seen = read_stored(cfg, run)
    assert [row[0] for row in history(client, seen, "loss")] == [0, 2]
    assert seen.info.status == "FINISHED"


def test_a_run_whose_creation_was_not_confirmed_is_found(make_run: MakeRun, make_step: MakeStep) -> None:
    run, cfg = make_run()
    append(run, make_step(0))
    progress = load_progress(run, None)
    client = open_client(progress.tracking_uri)
    create_run(client, run, progress, cfg.telemetry.experiment)
    unconfirmed = MlflowProgress(tracking_uri=progress.tracking_uri, key=progress.key)
    create_run(client, run, unconfirmed, cfg.telemetry.experiment)
    assert unconfirmed == progress
    assert len(client.search_runs([progress.experiment_id])) == 1


def test_a_run_is_sent_from_the_start_after_deletion_or_to_another_store(
    make_run: MakeRun, make_step: MakeStep, ended: RunEnded
) -> None:
    run, cfg = make_run()
    append(run, make_step(0), make_step(1), ended)
    assert send_until_end(run, None) == 0
    client, seen = read_stored(cfg, run)
    client.delete_run(seen.info.run_id)
    assert send_until_end(run, None) == 0
    client, again = read_stored(cfg, run)
    assert again.info.run_id != seen.info.run_id
    assert [row[0] for row in history(client, again, "loss")] == [0, 1]

    moved = load_progress(run, f"sqlite:///{run.path / 'other.db'}")
    assert (moved.run_id, moved.offset) == (None, 0)


def test_a_store_that_accepts_half_a_batch_loses_nothing(
    make_run: MakeRun, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    run, cfg = make_run()
    append(run, *(make_step(iteration) for iteration in range(150)))
    real, calls = MlflowClient.log_batch, []

    def fails_once(client: Any, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        calls.append(len(metrics))
        if len(metrics) and sum(map(bool, calls)) == 2:
            raise ConnectionError("the wire was cut")
        real(client, run_id, metrics=metrics, params=params, tags=tags)

    monkeypatch.setattr(MlflowClient, "log_batch", fails_once)
    assert send_until_end(run, None) == 1
    assert load_progress(run, None).offset == 0
    assert send_until_end(run, None) == 0
    client, seen = read_stored(cfg, run)
    assert [row[0] for row in history(client, seen, "loss")] == list(range(150))
    assert max(calls) == 1000


def send_together(runs: Sequence[str]) -> None:
    """Send each run from a process of its own, forked from this one, which has imported MLflow for all of them."""
    import_module("mlflow.tracking")
    senders = [forked_sender(run) for run in runs]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(sender, 0)[1]) for sender in senders))


def forked_sender(run: str) -> int:
    """The pid of a process that is what `python -m harness.telemetry.sinks RUN` is."""
    pid = os.fork()
    if pid == 0:
        os._exit(main([run]))
    return pid


@pytest.mark.full
def test_runs_that_start_together_share_one_new_database(
    ready_store: Path, make_run: MakeRun, make_step: MakeStep, ended: RunEnded
) -> None:
    ready_store.unlink()
    runs = [make_run(f"run-{index}") for index in range(2)]
    for run, _ in runs:
        append(run, make_step(0), ended)
    senders = forks().Process(target=send_together, args=([str(run.path) for run, _ in runs],))
    senders.start()
    senders.join(200)
    assert senders.exitcode == 0
    seen = [read_stored(cfg, run)[1] for run, cfg in runs]
    assert len({view.info.run_id for view in seen}) == 2
    assert len({view.info.experiment_id for view in seen}) == 1
    assert {view.info.status for view in seen} == {"FINISHED"}


def lock_of(run: RunDir) -> AbstractContextManager[IO[str] | None]:
    return exclusive(run.path / ".mlflow.lock", keep_trying=lambda: False)


def test_a_second_sink_process_started_by_hand_exits(
    make_run: MakeRun, ended: RunEnded, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run()
    append(run, ended)
    with lock_of(run):
        assert send_until_end(run, None) == 1
    assert "is being sent by another process" in capsys.readouterr().err
    assert send_until_end(run, None) == 0
    assert main([str(run.path / "nothing")]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_the_sink_process_of_a_living_trainer_waits_for_the_previous_one(make_run: MakeRun, ended: RunEnded) -> None:
    run, _ = make_run()
    append(run, ended)
    living, gone = Trainer(os.getppid(), 0), Trainer(-1, 0)
    with ThreadPoolExecutor(2) as pool:
        with lock_of(run):
            waiting = pool.submit(send_until_end, run, living)
            assert pool.submit(send_until_end, run, gone).result(timeout=200) == 1
            assert not waiting.done()
        assert waiting.result(timeout=200) == 0


def test_an_invalid_uri_differs_from_a_silent_server(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    hopeless, _ = make_run("hopeless", tracking_uri="bogus://nowhere")
    assert send_until_end(hopeless, None) == 2
    assert "telemetry.tracking_uri" in capsys.readouterr().err
    silent, _ = make_run("silent", tracking_uri="http://127.0.0.1:9")
    assert send_until_end(silent, None) == 1
    assert "gave up; sent 0 bytes of events.jsonl" in capsys.readouterr().err


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [pause_s(num_failures) for num_failures in range(2000)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[1], pauses[-1]) == (1.0, 2.0, 15.0)
