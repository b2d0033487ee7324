"""Injects a wall clock jump, as when a time server corrects a machine by an hour and later corrects it back.

`time.time` of this process is `factor` seconds off while the fault lasts; the clock of the machine is unchanged. The
monotonic clocks continue, as they do in the real case.
Left out: clocks of other programs, the kernel and file systems.
"""

from __future__ import annotations

import time
from typing import final

from harness.faults.site import Site

_true_time = time.time


@final
class ClockJump:
    """clock_jump: shifts `time.time` of this process."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._is_off = False

    def before(self, iteration: int) -> None:
        if self._is_off:
            time.time = _true_time
        self._is_off = self._site.strikes(iteration)
        if self._is_off:
            off_s = self._site.fault.factor
            self._site.log_strike(f"its clock is {off_s:+g} s off")
            time.time = lambda: _true_time() + off_s

    def after(self, iteration: int) -> None:
        """The clock stays wrong until the next iteration that is not struck."""
