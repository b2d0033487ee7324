"""Reads the files that W&B writes in offline mode.

Such a file is a log of LevelDB, with seven bytes before it: blocks of 32 KiB with records, each after a checksum, a
length and a type. A record that does not fit into its block is split. The content is W&B's own message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from harness.core.rundir import RunDir

HEADER_BYTES, BLOCK_BYTES = 7, 32768
FULL, LAST = 1, 4


def read_records(content: bytes) -> Iterator[bytes]:
    """The records of a file."""
    assert content.startswith(b":W&B")
    position, record = HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:  # the end of a block that has no room for a header
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + HEADER_BYTES : position + HEADER_BYTES + length]
        position += HEADER_BYTES + length
        if kind in (FULL, LAST):
            yield record
            record = b""


def exit_codes(run: RunDir) -> list[int]:
    """How each start of the run has ended."""
    record_type: Any = import_module("wandb.proto.wandb_internal_pb2").Record
    paths = sorted(run.path.glob("wandb/offline-run-*/*.wandb"))
    records = [record_type.FromString(data) for path in paths for data in read_records(path.read_bytes())]
    return [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]


def read_back(run: RunDir) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    """The rows, the ids of the W&B runs and the summary, from all files that W&B wrote."""
    record_type: Any = import_module("wandb.proto.wandb_internal_pb2").Record
    rows: list[dict[str, Any]] = []
    ids: list[str] = []
    summary: dict[str, Any] = {}
    for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        for data in read_records(path.read_bytes()):
            record = record_type()
            record.ParseFromString(data)
            match record.WhichOneof("record_type"):
                case "history":
                    items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                    rows.append({key: json.loads(value) for key, value in items.items()})
                case "run":
                    ids.append(record.run.run_id)
                case "summary":
                    pairs = ((".".join(item.nested_key) or item.key, item) for item in record.summary.update)
                    summary |= {key: json.loads(item.value_json) for key, item in pairs}
    return rows, ids, summary
