"""The loaders that `tests.bench.data` compares with this harness, configured as in their documentation.

Each opens the same corpus and returns batches of int64 inputs and targets. Libraries are imported by name inside the
functions that use them, because none of them is a dependency.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

BATCH_SIZE, SEQUENCE_LENGTH = 8, 4096
VOCAB_SIZE = 50_304


class Loader(NamedTuple):
    random_batch: Callable[[int], Any]
    """The batch of a random index."""
    stream: Callable[[], Iterator[Any]]
    """Batches in the loader's own order."""


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The usual dataset of training scripts: memory-map the file, slice a window, convert it to int64."""

    def __init__(self, path: Path) -> None:
        self.tokens: NDArray[np.uint16] = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQUENCE_LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = index * SEQUENCE_LENGTH
        window = torch.from_numpy(self.tokens[first : first + SEQUENCE_LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]


def wrap_in_data_loader(dataset: Any, *, num_workers: int, device: torch.device) -> Loader:
    """Put torch's DataLoader over a dataset; an `IterableDataset` shuffles itself."""
    pin = device.type == "cuda"
    shuffle = None if isinstance(dataset, IterableDataset) else True
    rng = np.random.default_rng(1)

    def to_device(batch: Any) -> Any:
        tensors = batch.values() if isinstance(batch, dict) else batch
        return [tensor.to(device, non_blocking=True) for tensor in tensors]

    def random_batch(_: int) -> Any:
        return to_device(default_collate([dataset[int(i)] for i in rng.integers(0, len(dataset), BATCH_SIZE)]))

    def stream() -> Iterator[Any]:
        loader = DataLoader(dataset, BATCH_SIZE, shuffle=shuffle, num_workers=num_workers, pin_memory=pin)
        while True:
            yield from map(to_device, loader)

    return Loader(random_batch=random_batch, stream=stream)


def open_megatron(directory: Path, *, cache: Path) -> Any:
    gpt_dataset = import_module("megatron.core.datasets.gpt_dataset")
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE_LENGTH,
        blend=([str(directory / "corpus")], None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=TokenizerStub(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dataset = gpt_dataset.GPTDataset
    indexed = dataset.build_low_level_dataset(str(directory / "corpus"), config)
    documents = np.arange(dataset.numel_low_level_dataset(indexed), dtype=np.int32)
    return dataset(indexed, str(directory / "corpus"), documents, None, gpt_dataset.Split.train, config)


class TokenizerStub:
    """The attributes of a tokenizer that GPTDataset reads."""

    vocab_size = VOCAB_SIZE
    eod = VOCAB_SIZE - 1
    pad = -1
    unique_identifiers: ClassVar[dict[str, str]] = {}


def import_streaming() -> ModuleType:
    """Import mosaicml-streaming; if torchvision is missing, which only image datasets use, register empty modules."""
    if importlib.util.find_spec("torchvision") is None:
        names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
        for name in names:
            module = ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__path__ = []
            sys.modules[name] = module
        vars(sys.modules["torchvision.transforms.functional"])["to_tensor"] = None
        vars(sys.modules["torchvision.datasets"])["VisionDataset"] = object
    return import_module("streaming")


def write_shards(directory: Path, tokens: NDArray[np.uint16]) -> None:
    """Write the windows of the other loaders in the format of mosaicml-streaming."""
    columns = {"tokens": f"ndarray:uint16:{SEQUENCE_LENGTH + 1}"}
    with import_streaming().MDSWriter(out=str(directory), columns=columns) as writer:
        for first in range(0, len(tokens) - SEQUENCE_LENGTH, SEQUENCE_LENGTH):
            writer.write({"tokens": np.asarray(tokens[first : first + SEQUENCE_LENGTH + 1])})


def open_streaming(directory: Path) -> Any:
    streaming = import_streaming()

    class Samples(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
            window = torch.from_numpy(super().__getitem__(index)["tokens"].astype(np.int64))
            return window[:-1], window[1:]

    return Samples(local=str(directory / "shards"), remote=None, batch_size=BATCH_SIZE, shuffle=True)
