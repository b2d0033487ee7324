"""The tensor index of a checkpoint: its tensors, and the file, offset and size of each of their chunks.

Why: torch.distributed.checkpoint stores it as a pickle (`.metadata`) with several Python objects per chunk: 2.2 million
chunks for 70B on 1,024 ranks. A pickle can run code, and that many objects on every rank cost memory and minutes.
How: one process reads it. It unpickles from an allow-list, rejects every file name that is not plain, and packs the
chunks of each tensor into one integer table. A table is small enough to broadcast. Each rank rebuilds torch's objects
only for the chunks that overlap its own shards.
"""

from __future__ import annotations

import gc
import pickle
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from harness.checkpoint.integrity import OtherVersion, is_plain_name, storage_error
from harness.distributed.torch_private.storage_info import StorageInfo

METADATA_FILE = ".metadata"
WEIGHTS = "model."
"""Beginning of the names of the weights among the tensors of a checkpoint."""
_DESCRIPTION = "torch.distributed.checkpoint.metadata"
_MAY_BE_UNPICKLED = frozenset(
    {
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        *((_DESCRIPTION, name) for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
        *((_DESCRIPTION, name) for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    }
)
"""The classes and functions in the metadata of sharded tensors; torch dtypes are allowed in addition."""


@final
@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """Shape, dtype and chunks of one tensor."""

    size: torch.Size
    dtype: torch.dtype
    parts: NDArray[np.int64]
    """One row per chunk: offsets and sizes in each dim, number of its file, offset and bytes in that file."""


@final
@dataclass(frozen=True, slots=True)
class TensorIndex:
    files: list[str]
    tensors: dict[str, IndexedTensor]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.size for name, tensor in self.tensors.items()}


def read(checkpoint: Path) -> TensorIndex:
    """Read the index of a verified checkpoint; `OtherVersion` if this version does not understand it."""
    path = checkpoint / METADATA_FILE
    with _no_collection():
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except OSError as error:
            raise storage_error(path, error) from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError) as error:
            raise OtherVersion(path, str(error)) from None
        try:
            return _pack(metadata)
        except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
            raise OtherVersion(path, str(error)) from None


def _pack(metadata: Metadata) -> TensorIndex:
    """Pack DCP's metadata into tables; ValueError for an entry that is no tensor or a file outside the checkpoint."""
    described: dict[str, TensorStorageMetadata] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor")
        described[name] = tensor
    numbers: dict[str, int] = {}
    rows = {name: array("q") for name in described}
    for index, info in metadata.storage_data.items():
        chunk = described[index.fqn].chunks[index.index]
        if chunk.offsets != index.offset or info.transform_descriptors:
            raise ValueError(f"{index.fqn} is not stored as this version stores tensors")
        number = numbers.setdefault(info.relative_path, len(numbers))
        rows[index.fqn].extend((*chunk.offsets, *chunk.sizes, number, info.offset, info.length))
    for file in numbers:
        if not is_plain_name(file):
            raise ValueError(f"it names {file!r}, which is outside the checkpoint")
    tensors = {
        name: IndexedTensor(tensor.size, tensor.properties.dtype, _table(rows[name], 2 * len(tensor.size) + 3))
        for name, tensor in described.items()
    }
    return TensorIndex(list(numbers), tensors)


def _table(row: array[int], num_columns: int) -> NDArray[np.int64]:
    return np.frombuffer(row, dtype=np.int64).reshape(-1, num_columns)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _MAY_BE_UNPICKLED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


def metadata_for(index: TensorIndex, tensors: Mapping[str, Tensor]) -> Metadata:
    """DCP metadata to fill these tensors on this rank: of each, the chunks that overlap its local shard."""
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, StorageInfo] = {}
    for name, tensor in tensors.items():
        saved = index.tensors[name]
        rank, chunks = len(saved.size), list[ChunkStorageMetadata]()
        for row in _overlapping(saved.parts, _local_boxes(tensor)).tolist():
            offsets, sizes, (file, offset, length) = row[:rank], row[rank : 2 * rank], row[2 * rank :]
            stored[MetadataIndex(name, offsets, len(chunks))] = StorageInfo(index.files[file], offset, length)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        described[name] = TensorStorageMetadata(TensorProperties(dtype=saved.dtype), saved.size, chunks)
    return Metadata(described, storage_data=stored)


def _local_boxes(tensor: Tensor) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
    """Offsets and sizes of this rank's shards of a tensor."""
    if isinstance(tensor, DTensor):
        return [(chunk.offsets, chunk.sizes) for chunk in tensor.__create_chunk_list__()]  # type: ignore[no-untyped-call]
    return [((0,) * tensor.dim(), tensor.shape)]


def _overlapping(parts: NDArray[np.int64], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> NDArray[np.int64]:
    """The rows whose chunk shares an element with any of the boxes."""
    rank = (parts.shape[1] - 3) // 2
    begin, end = parts[:, :rank], parts[:, :rank] + parts[:, rank : 2 * rank]
    is_needed = np.zeros(len(parts), dtype=bool)
    for offsets, sizes in boxes:
        first = np.array(offsets, dtype=np.int64)
        last = first + np.array(sizes, dtype=np.int64)
        is_needed |= (np.maximum(begin, first) < np.minimum(end, last)).all(axis=1)
    return parts[is_needed]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's garbage collector, which would scan millions of new live objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
