"""Enters Linux namespaces in this process, as `nsenter` does for a new one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence


def enter_namespaces(paths: Sequence[str]) -> None:
    """Enter the namespaces of these files in /proc/PID/ns.

    After a PID namespace a fork continues; this process waits for it and ends as it ended, by the same signal too.
    """
    spaces = [os.open(path, os.O_RDONLY) for path in paths]
    libc = ctypes.CDLL(None, use_errno=True)
    for space in spaces:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter a namespace")
        os.close(space)
    if any(path.endswith("/pid") for path in paths) and (inside := os.fork()):
        code = os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
