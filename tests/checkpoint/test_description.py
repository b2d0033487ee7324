"""A description is packed into tables without loss, and each rank gets the parts that it needs, and no others."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

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

from harness.checkpoint import description
from harness.checkpoint.integrity import OtherVersion
from harness.config import StorageError

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Offsets and sizes."""


def rows_of(num_rows: int, num_ranks: int, width: int) -> Boxes:
    """A matrix in shards of whole rows, as FSDP cuts it: the last ones may be smaller or empty."""
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
    (directory / description.METADATA_FILE).write_bytes(pickle.dumps(metadata))
    return directory


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_rank_is_told_of_all_parts_that_it_reads_and_of_no_others(
    num_rows: int, num_saved: int, num_ranks: int, data: st.DataObject
) -> None:
    """Held against torch, which looks through all parts."""
    saved = metadata_of("w", (num_rows, 3), rows_of(num_rows, num_saved, 3))
    table = description._pack(saved).tensors["w"].parts
    offsets, sizes = data.draw(st.sampled_from(rows_of(num_rows, num_ranks, 3)))
    mine = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
    everything = saved.state_dict_metadata["w"]
    assert isinstance(everything, TensorStorageMetadata)
    read = create_read_items_for_chunk_list("w", everything, mine) if sizes[0] else []
    expected = sorted(saved.storage_data[item.storage_index].relative_path for item in read)
    found = description._overlapping(table, [(offsets, sizes)])
    assert sorted(f"__{number}_0.distcp" for number in (found[:, -2] // 1000).tolist()) == expected


def test_tables_say_what_the_pickle_said(tmp_path: Path) -> None:
    saved = metadata_of("w", (10, 3), rows_of(10, 4, 3))
    found = description.read(written(tmp_path, saved))
    assert found.files == [f"__{number}_0.distcp" for number in range(4)]
    assert found.shapes == {"w": torch.Size((10, 3))}
    tensor = torch.empty(10, 3)
    again = description.metadata_for(found, {"w": tensor})
    described = again.state_dict_metadata["w"]
    assert described == saved.state_dict_metadata["w"]
    assert again.storage_data == saved.storage_data
    assert [index.index for index in again.storage_data] == [0, 1, 2, 3]
    assert isinstance(described, TensorStorageMetadata)
    assert described.properties.dtype is torch.bfloat16
    np.testing.assert_array_equal(found.tensors["w"].parts[2], [6, 0, 3, 3, 2, 2000, 9])


def test_a_number_has_one_part_and_everybody_needs_it(tmp_path: Path) -> None:
    found = description.read(written(tmp_path, metadata_of("step", (), [((), ())])))
    assert description.metadata_for(found, {"step": torch.tensor(0)}).storage_data == {
        MetadataIndex("step", ()): _StorageInfo("__0_0.distcp", 0, 7)
    }


def test_what_this_version_does_not_understand_is_refused_in_one_line(tmp_path: Path) -> None:
    other = metadata_of("w", (10, 3), rows_of(10, 2, 3))
    compressed = metadata_of("w", (10, 3), rows_of(10, 2, 3))
    for info in compressed.storage_data.values():
        info.transform_descriptors = ["zstd"]
    other.state_dict_metadata["b"] = BytesStorageMetadata()
    for number, metadata in enumerate((None, 7, "text", other, compressed, Metadata({}))):
        with pytest.raises(OtherVersion) as caught:
            description.read(written(tmp_path / str(number), metadata))
        assert caught.value.path == tmp_path / str(number) / description.METADATA_FILE
        assert "\n" not in str(caught.value)
    with pytest.raises(StorageError, match="No such file"):
        description.read(tmp_path / "gone")
