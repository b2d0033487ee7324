"""Options of torch.compile that keep Inductor from choosing kernels by measured time.

Why: two starts may measure differently and choose kernels that sum in another order.
How: passed to `torch.compile(options=...)`, which applies them to the backward graph too. A patch of the global config
is thread-local in torch 2.13, and the autograd thread compiles the backward graph.
Private API: names of the options in `torch._inductor.config`. Checked on torch 2.11 and 2.13; an option
that a torch does not have is left out.
"""

from __future__ import annotations

from typing import Any

import torch

PINNED = {
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "benchmark_epilogue_fusion": False,
    "benchmark_combo_kernel": False,
    "triton.multi_kernel": 0,
}
"""Option -> its value in a deterministic run."""


def compile_options() -> dict[str, Any] | None:
    """The options for torch.compile; None, its defaults, unless deterministic algorithms are enabled."""
    if not torch.are_deterministic_algorithms_enabled():
        return None
    from torch._inductor import list_options

    known = set(list_options())
    return {name: value for name, value in PINNED.items() if name in known}
