"""A wall clock that jumps, as where a time server corrects a machine by an hour, and later corrects it back.

How: `time.time` of this process answers `factor` seconds off while the fault lasts; it is this process's view of the
clock that jumps, and nothing of the machine is changed. The monotonic clocks go on, as they do in the real case.
Left out: what other programs, the kernel and file systems read.
"""

from __future__ import annotations

import time
from typing import final

from harness.faults.site import Site

_true_time = time.time


@final
class ClockJump:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._is_off = False

    def before(self, iteration: int) -> None:
        if self._is_off:
            time.time = _true_time
        self._is_off = self._site.strikes(iteration)
        if self._is_off:
            off_s = self._site.fault.factor
            self._site.tell(f"its clock is {off_s:+g} s off")
            time.time = lambda: _true_time() + off_s

    def after(self, iteration: int) -> None:
        """The clock stays wrong until the next iteration that is not struck."""
