"""Tells detectors that run over a log which changes the run has made on purpose.

Why: in the records alone, a learning rate that an operator or the policy changed is a jump.
Left out: restores and accepted levels. The detectors judge the log by themselves.
"""

from __future__ import annotations

from harness.config.optim import SCHEDULE_KEYS
from harness.core.events import Action, Event, Intervention, RunStarted
from harness.sentinel.detect.detectors import Detectors


def tell_detectors(detectors: Detectors, event: Event) -> None:
    """Update detectors that run over a log with one of its events."""
    match event:
        case RunStarted():
            detectors.on_start(event.machines)
        case Action(lr_scale=float()):
            detectors.expect_lr_change()
        case Intervention() if any(key in event.changes for key in SCHEDULE_KEYS):
            detectors.expect_lr_change()
        case _:
            pass
