"""torch.compile without the kernels of Inductor, which a C++ compiler would take seconds for, each.

Graphs are captured, differentiated and partitioned as with Inductor: what is saved and what is recomputed is decided
before kernels are generated. Each operator then runs as it does without torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

BACKEND = "aot_eager_decomp_partition"


@contextmanager
def without_kernels() -> Iterator[None]:
    """Use this backend for everything that is compiled in the block."""
    with patch.object(torch, "compile", partial(torch.compile, backend=BACKEND)):
        yield


def run_without_kernels(case: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a case that a rank runs."""
    with without_kernels():
        return case(*arguments)
