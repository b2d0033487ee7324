"""DCP metadata is packed into tables without loss, and each rank gets exactly the chunks that it needs."""

from __future__ import annotations

import gc
import os
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from harness.checkpoint import tensor_index
from harness.checkpoint.integrity import OtherVersion
from harness.config.errors import StorageError

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Offsets and sizes."""


def rows_of(num_rows: int, num_ranks: int, width: int) -> Boxes:
    """A matrix sharded by rows, as FSDP does; the last shards may be smaller or empty."""
    each = -(-num_rows // num_ranks)
    cuts = [min(rank * each, num_rows) for rank in range(num_ranks + 1)]
    return [((begin, 0), (end - begin, width)) for begin, end in pairwise(cuts)]


def metadata_of(name: str, size: tuple[int, ...], boxes: Boxes) -> Metadata:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    described = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size(size), chunks)
    stored = {
        MetadataIndex(name, chunk.offsets, number): _StorageInfo(f"__{number}_0.distcp", 1000 * number, 7 + number)
        for number, chunk in enumerate(chunks)
        if chunk.sizes.numel()
    }
    return Metadata({name: described}, storage_data=stored)


def written(directory: Path, metadata: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / tensor_index.METADATA_FILE).write_bytes(pickle.dumps(metadata))
    return directory


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.data())
def test_metadata_contains_exactly_the_chunks_a_rank_reads(
    num_rows: int, num_saved: int, num_ranks: int, data: st.DataObject
) -> None:
    """Compared with torch, which searches all chunks."""
    saved = metadata_of("w", (num_rows, 3), rows_of(num_rows, num_saved, 3))
    table = tensor_index._pack(saved).tensors["w"].parts
    offsets, sizes = data.draw(st.sampled_from(rows_of(num_rows, num_ranks, 3)))
    mine = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
    everything = saved.state_dict_metadata["w"]
    assert isinstance(everything, TensorStorageMetadata)
    read = create_read_items_for_chunk_list("w", everything, mine) if sizes[0] else []
    expected = sorted(saved.storage_data[item.storage_index].relative_path for item in read)
    found = tensor_index._overlapping(table, [(offsets, sizes)])
    assert sorted(f"__{number}_0.distcp" for number in (found[:, -2] // 1000).tolist()) == expected


def test_tables_match_the_pickle(tmp_path: Path) -> None:
    saved = metadata_of("w", (10, 3), rows_of(10, 4, 3))
    found = tensor_index.read(written(tmp_path, saved))
    assert found.files == [f"__{number}_0.distcp" for number in range(4)]
    assert found.shapes == {"w": torch.Size((10, 3))}
    tensor = torch.empty(10, 3)
    again = tensor_index.metadata_for(found, {"w": tensor})
    described = again.state_dict_metadata["w"]
    assert described == saved.state_dict_metadata["w"]
    assert again.storage_data == saved.storage_data
    assert [index.index for index in again.storage_data] == [0, 1, 2, 3]
    assert isinstance(described, TensorStorageMetadata)
    assert described.properties.dtype is torch.bfloat16
    np.testing.assert_array_equal(found.tensors["w"].parts[2], [6, 0, 3, 3, 2, 2000, 9])


def test_full_tensor_needs_its_first_and_last_chunk(tmp_path: Path) -> None:
    found = tensor_index.read(written(tmp_path, metadata_of("w", (4, 1), rows_of(4, 4, 1))))
    needed = tensor_index.metadata_for(found, {"w": torch.empty(4, 1)}).storage_data
    assert [info.relative_path for info in needed.values()] == found.files == [f"__{row}_0.distcp" for row in range(4)]


def test_scalar_has_one_chunk_that_every_rank_needs(tmp_path: Path) -> None:
    found = tensor_index.read(written(tmp_path, metadata_of("step", (), [((), ())])))
    assert tensor_index.metadata_for(found, {"step": torch.tensor(0)}).storage_data == {
        MetadataIndex("step", ()): _StorageInfo("__0_0.distcp", 0, 7)
    }


def test_unknown_metadata_is_rejected_in_one_line(tmp_path: Path) -> None:
    other = metadata_of("w", (10, 3), rows_of(10, 2, 3))
    compressed = metadata_of("w", (10, 3), rows_of(10, 2, 3))
    for info in compressed.storage_data.values():
        info.transform_descriptors = ["zstd"]
    other.state_dict_metadata["b"] = BytesStorageMetadata()
    moved = metadata_of("w", (10, 3), rows_of(10, 2, 3))
    first = next(iter(moved.storage_data))
    moved.storage_data[MetadataIndex("w", (1, 0), 0)] = moved.storage_data.pop(first)
    outside = metadata_of("w", (10, 3), rows_of(10, 2, 3))
    for info in outside.storage_data.values():
        info.relative_path = "../__0_0.distcp"
    for number, metadata in enumerate((None, 7, "text", other, compressed, moved, outside, Metadata({}))):
        with pytest.raises(OtherVersion) as caught:
            tensor_index.read(written(tmp_path / str(number), metadata))
        assert caught.value.path == tmp_path / str(number) / tensor_index.METADATA_FILE
        assert "\n" not in str(caught.value)
    with pytest.raises(StorageError, match="No such file"):
        tensor_index.read(tmp_path / "gone")


class Calls:
    """Unpickling this would call a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        (Calls(os.getpid), "posix.getpid"),
        (Calls(torch.device, "cpu"), "torch.device"),
        (Calls(float, "1"), "builtins.float"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_only_allowed_names_are_unpickled(tmp_path: Path, planted: Calls, name: str) -> None:
    """`float` is also the name of a dtype, but of torch's."""
    with pytest.raises(OtherVersion, match=f"{name} is not allowed in a checkpoint"):
        tensor_index.read(written(tmp_path, planted))


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collection_is_off_only_during_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_on: bool
) -> None:
    pack, seen = tensor_index._pack, list[bool]()

    def look(metadata: Metadata) -> tensor_index.TensorIndex:
        seen.append(gc.isenabled())
        return pack(metadata)

    monkeypatch.setattr(tensor_index, "_pack", look)
    written(tmp_path, metadata_of("w", (4, 1), rows_of(4, 4, 1)))
    gc.enable() if was_on else gc.disable()
    try:
        tensor_index.read(tmp_path)
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [False, was_on]
