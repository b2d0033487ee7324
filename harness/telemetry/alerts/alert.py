"""The alerts that an event calls for, and their text; pure functions.

`topic` is what an alert is about: the outbox sends two alerts with one topic only if enough time has passed between
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness.config.alerts import AlertKind
from harness.config.errors import EXIT_DONE, EXIT_HALTED, EXIT_INTERRUPTED
from harness.core.events import BY_OPERATOR, Action, ActionKind, EndCause, Event, Incident, RunEnded, RunRestarted

SILENT_ACTIONS = (ActionKind.watch, ActionKind.check)
"""Actions that change nothing."""
HANG_TOPIC = "hang"
"""One for all ranks: the ranks that wait for the one that hangs do not move either."""
TOPICS_OF_A_START = ("halt", HANG_TOPIC, "finished")
"""How the topics begin that are new in each start: a run that halts, is resumed and halts again has halted twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that a person should know."""

    kind: AlertKind
    time: float
    """When it happened, in seconds since 1970."""
    iteration: int
    message: str
    """What happened, in one line."""
    topic: str
    incident: int = 0
    """Number of the incident; 0: none."""


def alerts_of(event: Event, *, newest_incident: int) -> Iterator[Alert]:
    """The alerts of an event. `newest_incident` is the highest number of the incidents known before it."""
    at: dict[str, Any] = {"time": event.time, "iteration": event.iteration}
    match event:
        case Action():
            number = event.incident
            if number > newest_incident:
                message = f"incident {number} opened: {event.reason}"
                yield Alert(**at, kind=AlertKind.incident, message=message, topic=f"incident {number}", incident=number)
            if event.kind is ActionKind.halt:
                message = f"the sentinel halts the run: {event.reason}"
                yield Alert(**at, kind=AlertKind.halt, message=message, topic="halt", incident=number)
            elif event.kind not in SILENT_ACTIONS:
                cause = "an operator" if number == BY_OPERATOR else f"incident {number}"
                topic = f"action {number} {event.label}"
                message = f"{event.label} for {cause}: {event.reason}"
                yield Alert(**at, kind=AlertKind.action, message=message, topic=topic, incident=number)
        case Incident():
            message = f"incident {event.number} ended: {', '.join(event.kinds)} from iteration {event.onset}: "
            message += "open when the run ended" if event.is_open else event.verdict
            topic = f"incident {event.number} is open" if event.is_open else f"end of incident {event.number}"
            yield Alert(**at, kind=AlertKind.incident_ended, message=message, topic=topic, incident=event.number)
        case RunRestarted():
            for machine, reason in event.out.items():
                after = event.replaced_by.get(machine, "")
                message = f"machine {machine} is out: {reason}" + (f"; {after} replaces it" if after else "")
                yield Alert(**at, kind=AlertKind.node_out, message=message, topic=f"node out: {machine}")
            message = f"restart {event.number} at step {event.step}: {event.reason}"
            yield Alert(**at, kind=AlertKind.restarted, message=message, topic=f"restart at step {event.step}")
        case RunEnded():
            yield from _alerts_of_end(event)
        case _:
            return


def _alerts_of_end(event: RunEnded) -> Iterator[Alert]:
    at: dict[str, Any] = {"time": event.time, "iteration": event.iteration}
    if event.cause == EndCause.hung_rank:
        yield Alert(**at, kind=AlertKind.hang, message=event.reason, topic=HANG_TOPIC)
    if event.cause == EndCause.lost_node:
        yield Alert(**at, kind=AlertKind.node_out, message=event.reason, topic=f"node out: {event.reason}")
    match event.exit_code:
        case code if code == EXIT_DONE:
            message = f"finished at step {event.step}: {event.reason}"
            yield Alert(**at, kind=AlertKind.finished, message=message, topic="finished")
        case code if code == EXIT_HALTED:
            message = f"the sentinel halted the run at step {event.step}: {event.reason}"
            yield Alert(**at, kind=AlertKind.halt, message=message, topic="halt")
        case code if code == EXIT_INTERRUPTED:
            message = f"stopped at step {event.step}, resumable: {event.reason}"
            yield Alert(**at, kind=AlertKind.stopped, message=message, topic=f"stopped at step {event.step}")
        case code:
            message = f"failed at step {event.step} with exit code {code}: {event.reason}"
            yield Alert(**at, kind=AlertKind.failed, message=message, topic=f"failed: {event.reason}")


def render_alert(alert: Alert, *, run_dir: Path, host: str, link: str, num_left_out: int = 0) -> str:
    """The text of an alert: run, what happened, where to look. `link`: to the post-mortem."""
    lines = [f"[{run_dir.name}] {alert.message}", f"iteration {alert.iteration}, {host}:{run_dir}"]
    if alert.incident:
        lines.append(f"post-mortem: {link}")
    if num_left_out:
        lines.append(f"{num_left_out} earlier alerts about incidents and actions were not sent (limit per hour)")
    return sendable("\n".join(lines))


def sendable(text: str) -> str:
    """The text without the characters that UTF-8 or an environment variable cannot hold."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def postmortem_link(incident: int, *, run_dir: Path, base_url: str | None, in_sweep: bool = False) -> str:
    """URL or path of the post-mortem of an incident. It is written a few steps after the first action.

    `base_url` is the address of the directory that holds the runs and, one level above their jobs, the sweeps.
    """
    page = f"incidents/{incident:03d}/postmortem"
    if base_url is None:
        return f"{run_dir / page}.md"
    names = run_dir.parts[-2 if in_sweep else -1 :]
    return "/".join([base_url.rstrip("/"), *(quote(name, safe="") for name in names), f"{page}.html"])
