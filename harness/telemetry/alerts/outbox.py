"""The queue of alerts: deduplication, rate limit, and delivery with growing pauses; its state is plain data.

An alert enters the queue once per channel, unless its topic was queued there less than `repeat_minutes` ago, or the
channel has had its share of chatty alerts in the last hour; those are counted and mentioned in the next one. The state
is stored with the position in the log, so an event is queued once. An alert leaves the queue when its channel accepts
it. If the process dies between the two, it is delivered again: better twice than never.
Each channel delivers in a thread of its own, one alert at a time and in order. One that takes long delays no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, final

from harness.config.alerts import AlertKind, AlertsConfig
from harness.telemetry.alerts.alert import TOPICS_OF_A_START, Alert
from harness.telemetry.alerts.channels import ChannelKind, DeliveryError, RejectedError, channels_for
from harness.telemetry.sinks.sink import SinkState

HOUR_S = 3600.0
CHATTY = (AlertKind.incident, AlertKind.incident_ended, AlertKind.action)
"""Kinds with a limit per hour. All others are rare by nature."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0
EXPIRES_S = 24 * HOUR_S
"""An alert that no channel accepted for so long is dropped."""

WAIT_S = 1.0
"""How long a call waits for deliveries. Those that take longer go on, and a later call takes up their results."""

Deliver = Callable[[ChannelKind, Alert, int], None]
"""Delivers an alert to a channel, with the number of those that were left out; raises DeliveryError. Called in a thread
of the channel."""


@dataclass(slots=True, kw_only=True)
class AlertState(SinkState):
    """Content of `alerts.json`."""

    is_new: bool = True
    """No start of this run had alerts before: older events of its log are not alerted."""
    newest_incident: int = 0
    """Highest number of the incidents that were alerted; -1: to be read from the log."""
    requeue_bytes: int = 0
    """Bytes of `requeues.jsonl` that were read."""
    queue: list[dict[str, Any]] = field(default_factory=list)
    """Alerts that wait: `channel`, `alert`, `num_failures`, `not_before` and `since` (seconds since 1970). With
    `is_rejected` the channel does not accept this one, and the later ones do not wait for it."""
    topics: dict[str, float] = field(default_factory=dict)
    """Channel and topic -> when it was last queued."""
    chatty: dict[str, list[float]] = field(default_factory=dict)
    """Channel -> when chatty alerts were queued in the last hour."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Channel -> chatty alerts beyond the limit since the last one that was sent."""

    def rewind(self, offset: int) -> None:
        """Continue at this byte of a log that has lost its end: new incidents get the numbers of those it has lost."""
        SinkState.rewind(self, offset)
        self.newest_incident, self.topics = -1, {}


class Delivery(NamedTuple):
    """A delivery in its thread."""

    item: dict[str, Any]
    """The alert in the queue."""
    num_left_out: int
    """Alerts that it says were left out."""
    future: Future[None]


@final
class Outbox:
    """Decides what is sent where and when."""

    def __init__(self, cfg: AlertsConfig, state: AlertState, deliver: Deliver) -> None:
        self._cfg, self._state, self._deliver = cfg, state, deliver
        self._threads = ThreadPoolExecutor(len(ChannelKind), thread_name_prefix="alerts")
        self._running: dict[str, Delivery] = {}

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

    def forget_start(self) -> None:
        """A new start: what can happen once in a start may be alerted again."""
        self._state.topics = {
            key: time
            for key, time in self._state.topics.items()
            if not key.partition(" ")[2].startswith(TOPICS_OF_A_START)
        }

    def deliver_due(self, now: float, *, save: Callable[[], None], wait_s: float = WAIT_S) -> list[str]:
        """Deliver what is due; returns a line for each attempt that failed. `save` after each attempt."""
        problems: list[str] = []
        until_s = time.monotonic() + wait_s
        self._start_due(now)
        while self._running:
            futures = [delivery.future for delivery in self._running.values()]
            wait(futures, timeout=max(0.0, until_s - time.monotonic()), return_when=FIRST_COMPLETED)
            done = [channel for channel, delivery in self._running.items() if delivery.future.done()]
            if not done:
                break
            for channel in done:
                problems += self._finish(channel, now)
                save()
            self._start_due(now)
        return problems

    def _start_due(self, now: float) -> None:
        """Start to deliver the first alert of each channel if it is due."""
        busy = set(self._running)
        for item in self._state.queue:
            channel = item["channel"]
            if channel in busy:
                continue
            pause_s = item["not_before"] - now
            if not 0 < pause_s <= LONGEST_PAUSE_S:  # a longer pause than the longest: the clock was set back
                num_left_out = self._state.left_out.get(channel, 0)
                future = self._threads.submit(self._deliver_item, item["alert"], channel, num_left_out)
                self._running[channel] = Delivery(item, num_left_out, future)
                busy.add(channel)
            elif not item.get("is_rejected", False):
                busy.add(channel)

    def _deliver_item(self, values: dict[str, Any], channel: str, num_left_out: int) -> None:
        self._deliver(ChannelKind(channel), Alert(**(values | {"kind": AlertKind(values["kind"])})), num_left_out)

    def _finish(self, channel: str, now: float) -> Iterator[str]:
        """Remove an alert that its channel has accepted; keep one that failed for a later attempt."""
        item, num_left_out, future = self._running.pop(channel)
        match future.exception():
            case None:
                self._state.queue.remove(item)
                left = self._state.left_out.pop(channel, 0) - num_left_out
                if left > 0:
                    self._state.left_out[channel] = left
            case DeliveryError() as error:
                item["is_rejected"] = isinstance(error, RejectedError)
                yield f"{channel}: {error}; {self._postpone(item, now)}"
            case error:  # the alert is damaged, of another version, or contains what the channel cannot express
                item["is_rejected"] = True
                yield f"{channel}: {type(error).__name__}: {error}; {self._postpone(item, now)}"

    def _postpone(self, item: dict[str, Any], now: float) -> str:
        if now - item["since"] > EXPIRES_S:
            self._state.queue.remove(item)
            return "the alert is dropped"
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(item["num_failures"], 10), LONGEST_PAUSE_S)
        item["num_failures"] += 1
        item["not_before"] = now + pause_s
        return f"next try in {pause_s:g} s"
