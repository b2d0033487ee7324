"""The flight recorder: the last collectives of this process, as torch records them.

Private API: `torch._C._distributed_c10d._dump_fr_trace_json`, or `_dump_nccl_trace_json` where only that exists.
Checked on torch 2.13 with gloo; torch 2.11 with NCCL is not checked yet.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""Environment variable: the number of collectives that torch keeps, for each process."""
NUM_COLLECTIVES = 2000
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def record_collectives() -> None:
    """Switch the recorder on, unless the user chose a size; before the process group is created."""
    os.environ.setdefault(BUFFER_SIZE, str(NUM_COLLECTIVES))


def recorded_collectives() -> dict[str, Any]:
    """The recorded collectives and process groups; empty if this torch has no recorder. Any thread may call it."""
    module = getattr(torch._C, "_distributed_c10d", None)
    for name in DUMPS:
        if (dump := getattr(module, name, None)) is not None:
            found: dict[str, Any] = json.loads(dump(includeCollectives=True, onlyActive=False))
            return found
    return {}
