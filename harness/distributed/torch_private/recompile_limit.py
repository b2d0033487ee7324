"""How many graphs torch.compile may keep of one block before it raises.

Why: torch stops at 8 and, with `fullgraph=True`, raises. A block has a graph for each number of rows in fp8, for
training and evaluation, for fp8 and bf16, and one more where the first or last blocks are kept in bf16.
How: torch 2.13 has an argument of `torch.compile`, which holds in every thread. There a value of the global config
holds in the thread that sets it only, and recomputation may run in the thread of autograd. An older torch has the
config alone.
Private API: `torch._dynamo.config.recompile_limit`. Checked on torch 2.13.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

MOST_GRAPHS = 64
"""Far more than a run needs. The limit is kept, because graphs that never end would be compiled in silence."""


def compile_limit() -> dict[str, Any]:
    """The argument of `torch.compile` that raises the limit; empty, and the limit is raised globally, in a torch that
    has no such argument."""
    if "recompile_limit" in signature(torch.compile).parameters:
        return {"recompile_limit": MOST_GRAPHS}
    raise_global_limit()
    return {}


def raise_global_limit() -> None:
    """Raise the limit of everything that is compiled in this process, unless it is higher already."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
