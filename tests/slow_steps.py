"""Training that sleeps in each iteration, for tests that wait for something beside it: a rank would take a core."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any


def slow_steps(seconds: float, loop: str = "harness.train") -> None:
    """From now on each iteration sleeps that long first, in this process and in those that it forks.

    loop: the module with the training loop.
    """
    module = vars(import_module(loop))
    compute = module["forward_backward"]

    def sleep_and_compute(*arguments: Any, **options: Any) -> None:
        time.sleep(seconds)
        compute(*arguments, **options)

    module["forward_backward"] = sleep_and_compute
