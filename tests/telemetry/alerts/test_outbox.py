"""Tests of the queue of alerts: deduplication, rate limit, pauses, and that nothing is lost over a restart."""

from __future__ import annotations

import json
from dataclasses import asdict
from threading import Event as Flag
from typing import Any

import pytest

from harness.config.alerts import AlertCommandConfig, AlertKind, AlertsConfig, WebhookConfig
from harness.telemetry.alerts.alert import Alert
from harness.telemetry.alerts.channels import ChannelKind, DeliveryError, RejectedError
from harness.telemetry.alerts.outbox import EXPIRES_S, AlertState, Outbox

HOUR_S = 3600.0


def alert(topic: str, kind: AlertKind = AlertKind.action) -> Alert:
    return Alert(kind=kind, time=0.0, iteration=1, message=topic, topic=topic)


class Receiver:
    """Channels that accept or not, and a clock."""

    def __init__(self, cfg: AlertsConfig, state: AlertState | None = None) -> None:
        self.down: set[ChannelKind] = set()
        self.held: dict[ChannelKind, Flag] = {}
        self.hated: dict[str, Exception] = {}
        self.got: list[tuple[str, str, int]] = []
        self.state = state or AlertState()
        self.outbox = Outbox(cfg, self.state, self.deliver)
        self.saved = ""

    def deliver(self, channel: ChannelKind, alert: Alert, num_left_out: int) -> None:
        if channel in self.down:
            raise DeliveryError("down")
        if channel in self.held:
            self.held[channel].wait()
        if alert.topic in self.hated:
            raise self.hated[alert.topic]
        self.got.append((channel, alert.topic, num_left_out))

    def save(self) -> None:
        self.saved = json.dumps(asdict(self.state))

    def poll(self, now: float, wait_s: float = 60) -> list[str]:
        return self.outbox.deliver_due(now, save=self.save, wait_s=wait_s)


def two_channels(**settings: Any) -> AlertsConfig:
    webhook = WebhookConfig(url="env:X", events=[AlertKind.halt, AlertKind.failed])
    return AlertsConfig(webhook=webhook, command=AlertCommandConfig(run=["pager"]), **settings)


def test_kinds_go_where_they_are_wanted_and_topics_are_not_repeated() -> None:
    receiver = Receiver(two_channels(repeat_minutes=60))
    for now in (0.0, 10.0, HOUR_S - 1):
        receiver.outbox.add(alert("halt", AlertKind.halt), now)
        receiver.outbox.add(alert("skip 1"), now)
        receiver.poll(now)
    assert receiver.got == [("webhook", "halt", 0), ("command", "halt", 0), ("command", "skip 1", 0)]
    receiver.outbox.add(alert("halt", AlertKind.halt), HOUR_S + 1)
    receiver.poll(HOUR_S + 1)
    assert len(receiver.got) == 5


def test_chatty_alerts_are_limited_and_counted_and_others_are_not() -> None:
    receiver = Receiver(two_channels(per_hour=2))
    for number in range(5):
        receiver.outbox.add(alert(f"skip {number}"), float(number))
    receiver.outbox.add(alert("failed", AlertKind.failed), 5.0)
    receiver.poll(6.0)
    to_command = [(topic, left_out) for channel, topic, left_out in receiver.got if channel == "command"]
    assert to_command == [("skip 0", 3), ("skip 1", 0), ("failed", 0)]
    receiver.outbox.add(alert("skip 9"), HOUR_S + 1.5)
    receiver.poll(HOUR_S + 1.5)
    assert receiver.got[-1] == ("command", "skip 9", 0)


def test_a_channel_that_is_down_is_retried_in_order_and_delays_no_other() -> None:
    receiver = Receiver(two_channels())
    receiver.down = {ChannelKind.webhook}
    receiver.outbox.add(alert("halt", AlertKind.halt), 0.0)
    receiver.outbox.add(alert("failed", AlertKind.failed), 0.0)
    tries = [now for now in range(100) if receiver.poll(float(now))]
    assert tries == [0, 2, 6, 14, 30, 62], "the pauses double"
    assert receiver.got == [("command", "halt", 0), ("command", "failed", 0)]
    assert receiver.poll(10_000.0) == ["webhook: down; next try in 128 s"]

    stored = json.loads(receiver.saved)
    restarted = Receiver(two_channels(), AlertState(**stored))
    assert restarted.poll(10_001.0) == []
    restarted.poll(10_128.0)
    assert restarted.got == [("webhook", "halt", 0), ("webhook", "failed", 0)]
    assert restarted.state.queue == []
    restarted.outbox.add(alert("halt", AlertKind.halt), 3000.0)
    assert restarted.state.queue == [], "the topics survive the restart too"


def test_an_alert_that_waits_is_due_after_the_clock_was_set_back() -> None:
    receiver = Receiver(AlertsConfig(webhook=WebhookConfig(url="env:X")))
    receiver.down = {ChannelKind.webhook}
    receiver.outbox.add(alert("failed", AlertKind.failed), 2 * HOUR_S)
    assert receiver.poll(2 * HOUR_S) == ["webhook: down; next try in 2 s"]
    assert receiver.poll(HOUR_S) == ["webhook: down; next try in 4 s"]
    assert receiver.poll(HOUR_S + 3.9) == [], "the pauses are kept"
    receiver.down = set()
    receiver.poll(HOUR_S + 4)
    assert receiver.got == [("webhook", "failed", 0)]


def test_a_channel_that_takes_long_delays_no_other_and_delivers_once_and_in_order() -> None:
    receiver = Receiver(two_channels())
    slow = receiver.held[ChannelKind.webhook] = Flag()
    for topic in ("halt", "failed"):
        receiver.outbox.add(alert(topic, AlertKind.halt), 0.0)
    for now in (0.0, 5.0):
        assert receiver.poll(now, wait_s=0.2) == []
    assert receiver.got == [("command", "halt", 0), ("command", "failed", 0)]
    assert [item["channel"] for item in receiver.state.queue] == ["webhook", "webhook"]
    slow.set()
    receiver.poll(6.0)
    assert receiver.got[2:] == [("webhook", "halt", 0), ("webhook", "failed", 0)]
    assert receiver.state.queue == json.loads(receiver.saved)["queue"] == []


@pytest.mark.parametrize("error", [RejectedError("HTTP status 400"), ValueError("embedded null byte")], ids=str)
def test_an_alert_that_its_channel_never_accepts_holds_up_no_later_one(error: Exception) -> None:
    receiver = Receiver(AlertsConfig(command=AlertCommandConfig(run=["pager"])))
    receiver.hated = {"hated": error}
    for topic in ("hated", "halt", "failed"):
        receiver.outbox.add(alert(topic), 0.0)
    (problem,) = receiver.poll(0.0)
    assert problem.endswith(f"{error}; next try in 2 s")
    assert receiver.got == [("command", "halt", 0), ("command", "failed", 0)]
    receiver.outbox.add(alert("later"), 1.0)
    assert receiver.poll(1.0) == []
    assert receiver.got[2:] == [("command", "later", 0)]
    receiver.hated = {}
    restarted = Receiver(two_channels(), AlertState(**json.loads(receiver.saved)))
    restarted.poll(2.0)
    assert restarted.got == [("command", "hated", 0)]


def test_an_alert_of_a_later_version_stops_no_other() -> None:
    receiver = Receiver(two_channels())
    for topic in ("later", "halt"):
        receiver.outbox.add(alert(topic), 0.0)
    receiver.state.queue[0]["alert"]["kind"] = "unknown"
    assert len(receiver.poll(0.0)) == 1
    assert receiver.got == [("command", "halt", 0)]


def test_pauses_are_bounded_and_an_old_alert_is_dropped() -> None:
    receiver = Receiver(two_channels())
    receiver.down = {ChannelKind.webhook, ChannelKind.command}
    receiver.outbox.add(alert("halt", AlertKind.halt), 0.0)
    now = 0.0
    while receiver.state.queue and now < 2 * EXPIRES_S:
        problems = receiver.poll(now)
        now += 300.0
    assert problems == ["webhook: down; the alert is dropped", "command: down; the alert is dropped"]
    assert EXPIRES_S < now < EXPIRES_S + 1200
