"""Tests of the Prometheus endpoint: scraped over HTTP, parsed by Prometheus' own parser, counters over restarts."""

from __future__ import annotations

import json
import math
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import Config
from harness.core.event_json import to_json
from harness.core.events import (
    Action,
    ActionKind,
    CheckpointSaved,
    EvalRecord,
    Event,
    Finding,
    FindingKind,
    Incident,
    RunEnded,
    RunStarted,
    StepRecord,
    SystemSampled,
)
from harness.core.rundir import RunDir
from harness.telemetry.event_log import read_chunk
from harness.telemetry.sinks.prometheus_sink import (
    PrometheusSink,
    render_metrics,
    series_of,
    target_file,
    update_values,
)

MakeRun = Callable[..., tuple[RunDir, Config]]
MakeStep = Callable[..., StepRecord]
ON = {"mlflow": "false", "prometheus.enabled": "true"}
DASHBOARD = Path(__file__).parents[3] / "docs/grafana-dashboard.json"


def append(run: RunDir, *events: Event) -> None:
    with run.events.open("a") as file:
        file.writelines(f"{to_json(event)}\n" for event in events)


@contextmanager
def serving(run: RunDir, cfg: Config) -> Iterator[PrometheusSink]:
    """A sink that has read the whole log and serves it."""
    sink = PrometheusSink(run, cfg.telemetry.prometheus)
    sink.connect()
    try:
        send_all(run, sink)
        yield sink
    finally:
        sink.end(has_ended=True)


def send_all(run: RunDir, sink: PrometheusSink) -> None:
    while chunk := read_chunk(run.events, sink.state.offset):
        sink.send(chunk)
        sink.state.offset = chunk.end
        sink.save()


def scrape(run: RunDir) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name -> labels without `run` -> value, from the address in the target file, by Prometheus' own parser."""
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    ((target,),) = (entry["targets"] for entry in json.loads(target_file(run).read_text()))
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = reply.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == run.path.name
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
            assert family.type == ("counter" if sample.name.endswith("_total") else "gauge")
    return found


def incident(number: int, **facts: Any) -> Incident:
    at: dict[str, Any] = {"time": 0.0, "iteration": 3}
    return Incident(**at, number=number, kinds=["nonfinite"], onset=2, onset_step=2, last=2, last_step=2, **facts)


def events_of_a_run(make_step: MakeStep, started: RunStarted) -> list[Event]:
    at: dict[str, Any] = {"time": started.time, "iteration": 3}
    rich = make_step(
        4, mfu=0.5, memory_bytes=10**9, group_grad_norms={'head "x"\\': 0.25}, source_losses={"web": 1.5, "code": 2.5}
    )
    return [
        started,
        *(make_step(iteration) for iteration in range(3)),
        make_step(3, loss=math.nan, refused=True),
        Finding(**at, kind=FindingKind.nonfinite, step=3, onset=3, value=1.0, bound=0.0, message="m"),
        Action(**at, kind=ActionKind.skip, step=3, incident=1, reason="r", onset=3),
        incident(1, verdict="cured"),
        CheckpointSaved(**at, step=3, directory="d", seconds=1.5, bytes=10**9),
        EvalRecord(**at, step=3, loss=2.5, tokens=10),
        rich,
    ]


def test_a_scrape_has_the_newest_values_and_counters(
    make_run: MakeRun, make_step: MakeStep, started: RunStarted, ended: RunEnded
) -> None:
    run, cfg = make_run("my run", **ON)
    append(run, *events_of_a_run(make_step, started))
    with serving(run, cfg) as sink:
        sink.send_samples(
            [
                SystemSampled(
                    time=1.0, iteration=4, rank=8, host="h", every_s=10.0, cpu_load=0.5, gpu_temperature_c=[61.0, 62.0]
                )
            ]
        )
        seen = scrape(run)
        assert seen["harness_loss"] == {(): make_step(4).loss}
        assert seen["harness_grad_norm_by_group"] == {(("group", "head _x__"),): 0.25}
        assert seen["harness_loss_by_source"] == {(("source", "web"),): 1.5, (("source", "code"),): 2.5}
        assert seen["harness_gpu_temperature_c"] == {
            (("gpu", "0"), ("rank", "8")): 61.0,
            (("gpu", "1"), ("rank", "8")): 62.0,
        }
        assert seen["harness_cpu_load"] == {(("rank", "8"),): 0.5}
        assert seen["harness_actions_total"] == {(("kind", "skip"),): 1.0}
        assert seen["harness_rejected_updates_total"] == {(): 1.0}
        assert (seen["harness_iteration"], seen["harness_step"]) == ({(): 4.0}, {(): 5.0})
        assert (seen["harness_running"], seen["harness_starts_total"]) == ({(): 1.0}, {(): 1.0})

        append(run, make_step(5, loss=math.inf), ended)
        send_all(run, sink)
        seen = scrape(run)
        assert math.isnan(seen["harness_loss"][()])
        assert (seen["harness_running"], seen["harness_exit_code"]) == ({(): 0.0}, {(): 0.0})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{sink.address}/", timeout=10)
        assert sink.address.startswith("127.0.0.1:")
    assert not target_file(run).exists()


def test_a_learning_rate_that_is_restored_is_no_cooling() -> None:
    """Both end a `cool` action with another factor: the sentinel after clean steps, an operator with `ctl RUN lr`."""
    at: dict[str, Any] = {"time": 0.0, "iteration": 3, "step": 3, "reason": "r", "onset": 3}
    values: dict[str, float | str] = {}
    for incident_number, lr_scale in ((1, 0.5), (1, 0.25), (1, 0.5), (0, 0.25), (0, 0.5), (1, 1.0), (2, 0.5)):
        update_values(values, Action(**at, kind=ActionKind.cool, incident=incident_number, lr_scale=lr_scale))
    counted = {series: value for series, value in values.items() if series.startswith("harness_actions_total")}
    kinds = {"cool": 3.0, "restore_lr": 2.0, "lr": 2.0}
    assert counted == {f'harness_actions_total{{kind="{kind}"}}': count for kind, count in kinds.items()}


def test_an_incident_that_was_open_at_restarts_counts_once(make_run: MakeRun, started: RunStarted) -> None:
    run, cfg = make_run(**ON)
    append(run, started, incident(1, verdict="open", is_open=True), started, incident(1, verdict="open", is_open=True))
    with serving(run, cfg) as sink:
        assert scrape(run)["harness_incidents_total"] == {(): 1.0}
        append(run, started, incident(1, verdict="cured"))
        send_all(run, sink)
        assert scrape(run)["harness_incidents_total"] == {(): 1.0}
        append(run, incident(3, verdict="cured"), incident(2, verdict="cured"))
        send_all(run, sink)
        assert scrape(run)["harness_incidents_total"] == {(): 3.0}


def test_counters_continue_after_a_restart(make_run: MakeRun, make_step: MakeStep, started: RunStarted) -> None:
    run, cfg = make_run(**ON)
    append(run, started, make_step(0, refused=True))
    with serving(run, cfg):
        pass
    append(run, started, make_step(1, refused=True))
    with serving(run, cfg):
        seen = scrape(run)
    assert seen["harness_rejected_updates_total"] == {(): 2.0}
    assert seen["harness_starts_total"] == {(): 2.0}


def test_a_port_in_use_is_named(make_run: MakeRun) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run, cfg = make_run(**ON, **{"prometheus.port": port})
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            PrometheusSink(run, cfg.telemetry.prometheus).connect()


def test_names_are_valid_in_prometheus() -> None:
    assert series_of("drill/a-b c") == "harness_drill_a_b_c"
    assert series_of("system/rank-3/gpu-1/power_w") == 'harness_gpu_power_w{rank="3",gpu="1"}'
    assert render_metrics({"harness_a": 1.0}, run_name='a"b\\c').splitlines()[1] == r'harness_a{run="a\"b\\c"} 1.0'


def test_the_grafana_dashboard_shows_metrics_that_exist(
    make_run: MakeRun, make_step: MakeStep, started: RunStarted, ended: RunEnded
) -> None:
    run, cfg = make_run(**ON)
    append(run, *events_of_a_run(make_step, started), ended)
    machine: dict[str, Any] = {"host_memory_bytes": 1, "host_memory_total_bytes": 2, "process_memory_bytes": 1}
    gpus: dict[str, Any] = {"gpu_utilization": [0.5], "gpu_memory_bytes": [1], "gpu_power_w": [1.0]}
    at: dict[str, Any] = {"time": 1.0, "iteration": 1, "rank": 0, "host": "h", "every_s": 1.0, "cpu_load": 0.5}
    with serving(run, cfg) as sink:
        sink.send_samples([SystemSampled(**at, **machine, **gpus, gpu_temperature_c=[50.0])])
        exported = set(scrape(run))
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    used = {name for expression in expressions for name in re.findall(r"\bharness_\w+", expression)}
    assert len(expressions) > 10
    assert used <= exported, used - exported
    assert {name for name in exported if name.startswith("harness_gpu_")} <= used, "every GPU metric has a panel"
