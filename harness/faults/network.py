"""Injects a network fault: the device over which the ranks talk is down for some seconds.

On one node that is the loopback device; on virtual hosts it is the network device of the rank's host, which is cut off
from the others. Connections stay open and carry nothing, as with a switch that restarts. The run must be in a network
namespace of its own: `harness drill` starts it in one, so the network of the machine is not touched. A helper process
takes the device down and up again, because the rank waits in a collective meanwhile.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import final

from harness.config.errors import require
from harness.faults.fault_plan import LINK_VARIABLE
from harness.faults.site import Site

DOWN_AND_UP = 'ip link set "$2" down && echo down && sleep "$1"; ip link set "$2" up'
LOOPBACK = "lo"


@final
class NetworkDown:
    """network_down: takes the network device of the run's, or the host's, network namespace down."""

    def __init__(self, site: Site) -> None:
        self._site = site
        if site.is_here:
            message = "the run must be in a network namespace of its own; start this drill with harness drill"
            require(is_own_network(), "network_down", message)

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            seconds = self._site.fault.factor
            device = os.environ.get(LINK_VARIABLE, LOOPBACK)
            self._site.log_strike(f"takes the network device {device} down for {seconds:g} s")
            helper = subprocess.Popen(
                ["sh", "-c", DOWN_AND_UP, "sh", str(seconds), device],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,  # it must end the fault even if this rank is killed
            )
            assert helper.stdout is not None
            helper.stdout.readline()

    def after(self, iteration: int) -> None:
        """Nothing to undo: the helper ends the fault."""


def is_own_network() -> bool:
    """Whether the namespace has only the devices that `harness drill` has created."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    expected = {LOOPBACK, os.environ.get(LINK_VARIABLE, LOOPBACK)}
    return {line.partition(":")[0].strip() for line in lines} == expected
