"""Tests of the alerts that events call for, and of their text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.alerts import AlertKind
from harness.core.events import Action, ActionKind, EndCause, Event, Incident, RunEnded, RunRestarted
from harness.telemetry.alerts.alert import HANG_TOPIC, Alert, alerts_of, postmortem_link, render_alert
from harness.telemetry.rank_progress import RankProgress
from tests.telemetry.alerts.test_stall_watch import BEAT

AT: dict[str, Any] = {"time": 5.0, "iteration": 7}


def action(kind: ActionKind, incident: int = 3) -> Action:
    return Action(**AT, kind=kind, step=7, incident=incident, reason="loss 9.1", onset=5)


def ended(exit_code: int, cause: str = "") -> RunEnded:
    return RunEnded(**AT, step=7, exit_code=exit_code, reason="because", cause=cause)


def kinds(event: Event, newest_incident: int = 2) -> list[AlertKind]:
    return [alert.kind for alert in alerts_of(event, newest_incident=newest_incident)]


def test_the_first_action_of_an_incident_opens_it() -> None:
    assert kinds(action(ActionKind.watch)) == [AlertKind.incident]
    assert kinds(action(ActionKind.watch), newest_incident=3) == []
    assert kinds(action(ActionKind.rewind)) == [AlertKind.incident, AlertKind.action]
    assert kinds(action(ActionKind.check), newest_incident=3) == []
    assert kinds(action(ActionKind.halt), newest_incident=3) == [AlertKind.halt]
    assert kinds(action(ActionKind.skip, incident=0)) == [AlertKind.action], "an operator opens no incident"
    (alert,) = alerts_of(action(ActionKind.cool, incident=0), newest_incident=3)
    assert alert.message == "lr for an operator: loss 9.1", "it may also raise the learning rate"


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (ended(0), [AlertKind.finished]),
        (ended(3), [AlertKind.halt]),
        (ended(75), [AlertKind.stopped]),
        (ended(1), [AlertKind.failed]),
        (ended(1, EndCause.hung_rank), [AlertKind.hang, AlertKind.failed]),
        (ended(1, EndCause.lost_node), [AlertKind.node_out, AlertKind.failed]),
    ],
)
def test_every_end_has_its_alert(event: RunEnded, expected: list[AlertKind]) -> None:
    assert kinds(event) == expected


def test_a_restart_is_an_alert_once_for_each_step() -> None:
    restart = RunRestarted(**AT, step=57, number=2, reason="rank 1 on n1 was killed by SIGKILL")
    (alert,) = alerts_of(restart, newest_incident=0)
    assert (alert.kind, alert.topic) == (AlertKind.restarted, "restart at step 57")
    assert alert.message == "restart 2 at step 57: rank 1 on n1 was killed by SIGKILL"


def test_a_machine_that_a_restart_leaves_out_is_one_alert() -> None:
    reason = "node 1 (n2) is gone"
    restart = RunRestarted(
        **AT, step=57, number=1, reason=reason, cause=EndCause.lost_node, out={"n2": reason}, replaced_by={"n2": "n5"}
    )
    out, restarted = alerts_of(restart, newest_incident=0)
    assert (out.kind, out.topic, restarted.kind) == (AlertKind.node_out, "node out: n2", AlertKind.restarted)
    assert out.message == f"machine n2 is out: {reason}; n5 replaces it"
    fewer, _ = alerts_of(replace(restart, replaced_by={}), newest_incident=0)
    assert (fewer.topic, fewer.message) == (out.topic, f"machine n2 is out: {reason}")


def test_the_end_of_an_incident_that_was_open_when_the_run_stopped_is_another_topic() -> None:
    """The resume may come within `repeat_minutes`."""
    at_stop = Incident(
        **AT, number=3, kinds=["loss_spike"], onset=5, onset_step=5, last=6, last_step=6, verdict="open", is_open=True
    )
    (stopped,), (ended,) = (
        alerts_of(event, newest_incident=3) for event in (at_stop, replace(at_stop, is_open=False, verdict="cured"))
    )
    assert stopped.topic != ended.topic


def test_a_halt_by_the_policy_and_its_end_are_one_topic() -> None:
    first, *_ = alerts_of(action(ActionKind.halt), newest_incident=3)
    last, *_ = alerts_of(ended(3), newest_incident=3)
    assert first.topic == last.topic


@pytest.mark.parametrize("rank", [1, 2])
def test_a_hang_is_one_topic_whichever_rank_is_named(rank: int) -> None:
    """The watch and the launcher may name different ranks: those that wait do not move either."""
    progress = RankProgress(replace(BEAT, rank=rank), stalled_s=30.0)
    hang, _ = alerts_of(replace(ended(1, EndCause.hung_rank), reason=progress.render()), newest_incident=0)
    assert hang.topic == HANG_TOPIC


def test_the_text_names_run_place_and_post_mortem() -> None:
    incident = Incident(
        **AT, number=3, kinds=["loss_spike"], onset=5, onset_step=5, last=6, last_step=6, verdict="cured"
    )
    (alert,) = alerts_of(incident, newest_incident=3)
    run_dir = Path("/data/runs/big")
    link = postmortem_link(3, run_dir=run_dir, base_url=None)
    assert render_alert(alert, run_dir=run_dir, host="n1", link=link, num_left_out=2).splitlines() == [
        "[big] incident 3 ended: loss_spike from iteration 5: cured",
        "iteration 7, n1:/data/runs/big",
        "post-mortem: /data/runs/big/incidents/003/postmortem.md",
        "2 earlier alerts about incidents and actions were not sent (limit per hour)",
    ]
    odd = replace(alert, message="größer: a\0b \udcff")
    assert render_alert(odd, run_dir=run_dir, host="n1", link=link).splitlines()[0] == "[big] größer: a?b ?"
    plain = Alert(kind=AlertKind.failed, **AT, message="gone", topic="gone")
    assert "post-mortem" not in render_alert(plain, run_dir=run_dir, host="n1", link=link)


@pytest.mark.parametrize(
    ("name", "in_sweep", "page"),
    [
        ("big", False, "big"),
        ("lr 3e-4 #2", False, "lr%203e-4%20%232"),
        ("many/lr=1", True, "many/lr%3D1"),
    ],
)
def test_a_link_is_the_address_of_the_post_mortem_below_the_served_directory(
    name: str, page: str, *, in_sweep: bool
) -> None:
    base_url = "https://files.example/runs/"
    link = postmortem_link(3, run_dir=Path("/data/runs") / name, base_url=base_url, in_sweep=in_sweep)
    assert link == f"https://files.example/runs/{page}/incidents/003/postmortem.html"
