"""The queue of alerts: deduplication, rate limit, and delivery with growing pauses; its state is plain data.

An alert enters the queue once per channel, unless its topic was queued there less than `repeat_minutes` ago, or the
channel has had its share of chatty alerts in the last hour; those are counted and mentioned in the next one. The state
is stored with the position in the log, so an event is queued once. An alert leaves the queue when its channel accepts
it. If the process dies between the two, it is delivered again: better twice than never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, final

from harness.config.alerts import AlertKind, AlertsConfig
from harness.telemetry.alerts.alert import Alert
from harness.telemetry.alerts.channels import ChannelKind, DeliveryError, channels_for
from harness.telemetry.sinks.sink import SinkState

HOUR_S = 3600.0
CHATTY = (AlertKind.incident, AlertKind.incident_ended, AlertKind.action)
"""Kinds with a limit per hour. All others are rare by nature."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0
EXPIRES_S = 24 * HOUR_S
"""An alert that no channel accepted for so long is dropped."""

Deliver = Callable[[ChannelKind, Alert, int], None]
"""Delivers an alert to a channel, with the number of those that were left out; raises DeliveryError."""


@dataclass(slots=True, kw_only=True)
class AlertState(SinkState):
    """Content of `alerts.json`."""

    is_new: bool = True
    """No start of this run had alerts before: older events of its log are not alerted."""
    newest_incident: int = 0
    """Highest number of the incidents that were alerted."""
    requeue_bytes: int = 0
    """Bytes of `requeues.jsonl` that were read."""
    queue: list[dict[str, Any]] = field(default_factory=list)
    """Alerts that wait: `channel`, `alert`, `num_failures`, `not_before` and `since` (seconds since 1970)."""
    topics: dict[str, float] = field(default_factory=dict)
    """Channel and topic -> when it was last queued."""
    chatty: dict[str, list[float]] = field(default_factory=dict)
    """Channel -> when chatty alerts were queued in the last hour."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Channel -> chatty alerts beyond the limit since the last one that was sent."""


@final
class Outbox:
    """Decides what is sent where and when."""

    def __init__(self, cfg: AlertsConfig, state: AlertState, deliver: Deliver) -> None:
        self._cfg, self._state, self._deliver = cfg, state, deliver

    def add(self, alert: Alert, now: float) -> None:
        """Queue an alert for the channels of its kind."""
        state, repeat_s = self._state, 60 * self._cfg.repeat_minutes
        state.topics = {topic: time for topic, time in state.topics.items() if abs(now - time) < repeat_s}
        for channel in channels_for(self._cfg, alert.kind):
            topic = f"{channel} {alert.topic}"
            if topic in state.topics:
                continue
            if alert.kind in CHATTY:
                recent = [time for time in state.chatty.get(channel, []) if abs(now - time) < HOUR_S]
                state.chatty[channel] = recent
                if len(recent) >= self._cfg.per_hour:
                    state.left_out[channel] = state.left_out.get(channel, 0) + 1
                    continue
                recent.append(now)
            state.topics[topic] = now
            item = {"channel": str(channel), "alert": asdict(alert), "num_failures": 0, "not_before": now, "since": now}
            state.queue.append(item)

    def deliver_due(self, now: float, *, save: Callable[[], None]) -> list[str]:
        """Deliver what is due, in order; returns a line for each channel that did not accept. `save` after each."""
        problems: list[str] = []
        blocked: set[str] = set()
        for item in [*self._state.queue]:
            channel = item["channel"]
            not_before = min(item["not_before"], now + LONGEST_PAUSE_S)  # the clock may have been set back
            if channel in blocked or now < not_before:
                blocked.add(channel)
                continue
            alert = Alert(**(item["alert"] | {"kind": AlertKind(item["alert"]["kind"])}))
            try:
                self._deliver(ChannelKind(channel), alert, self._state.left_out.get(channel, 0))
                self._state.left_out.pop(channel, None)
                self._state.queue.remove(item)
            except DeliveryError as error:
                blocked.add(channel)
                problems.append(f"{channel}: {error}; {self._postpone(item, now)}")
            save()
        return problems

    def _postpone(self, item: dict[str, Any], now: float) -> str:
        if now - item["since"] > EXPIRES_S:
            self._state.queue.remove(item)
            return "the alert is dropped"
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(item["num_failures"], 10), LONGEST_PAUSE_S)
        item["num_failures"] += 1
        item["not_before"] = now + pause_s
        return f"next try in {pause_s:g} s"
