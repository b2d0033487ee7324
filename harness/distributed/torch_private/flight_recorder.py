"""The flight recorder: the last collectives of this process, as torch records them.

Private API: `torch._C._distributed_c10d._dump_fr_trace_json` has the collectives of gloo, `_dump_nccl_trace_json` those
of NCCL; a process with both backends has two recorders. Checked on torch 2.13 with gloo and on torch 2.11 with both.
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
    """The recorded collectives of all backends; empty if this torch has no recorder. Any thread may call it."""
    module = getattr(torch._C, "_distributed_c10d", None)
    dumps = [dump for name in DUMPS if (dump := getattr(module, name, None)) is not None]
    found: list[dict[str, Any]] = [json.loads(dump(includeCollectives=True, onlyActive=False)) for dump in dumps]
    merged = {key: value for each in reversed(found) for key, value in each.items()}
    return merged | {"entries": [entry for each in found for entry in each.get("entries", [])]}
