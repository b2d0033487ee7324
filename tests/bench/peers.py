"""The loaders that `tests.bench.data` measures beside this harness, set up as their documentation does.

Each opens the same corpus and gives batches of int64 inputs and targets. The libraries are imported by name where they
are used, since none of them is a dependency.
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
    at: Callable[[int], Any]
    """The batch of a random number."""
    stream: Callable[[], Iterator[Any]]
    """Batches in the loader's own order."""


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """What most training scripts do: a memory map, a window, a conversion."""

    def __init__(self, path: Path) -> None:
        self.tokens: NDArray[np.uint16] = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQUENCE_LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = index * SEQUENCE_LENGTH
        window = torch.from_numpy(self.tokens[first : first + SEQUENCE_LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]


def over(dataset: Any, *, num_workers: int, device: torch.device) -> Loader:
    """A dataset behind torch's DataLoader; one that iterates shuffles by itself."""
    pin = device.type == "cuda"
    shuffle = None if isinstance(dataset, IterableDataset) else True
    rng = np.random.default_rng(1)

    def brought(batch: Any) -> Any:
        tensors = batch.values() if isinstance(batch, dict) else batch
        return [tensor.to(device, non_blocking=True) for tensor in tensors]

    def at(_: int) -> Any:
        return brought(default_collate([dataset[int(i)] for i in rng.integers(0, len(dataset), BATCH_SIZE)]))

    def stream() -> Iterator[Any]:
        loader = DataLoader(dataset, BATCH_SIZE, shuffle=shuffle, num_workers=num_workers, pin_memory=pin)
        while True:
            yield from map(brought, loader)

    return Loader(at=at, stream=stream)


def open_megatron(directory: Path, *, cache: Path) -> Any:
    gpt_dataset = import_module("megatron.core.datasets.gpt_dataset")
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE_LENGTH,
        blend=([str(directory / "corpus")], None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=Vocabulary(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dataset = gpt_dataset.GPTDataset
    indexed = dataset.build_low_level_dataset(str(directory / "corpus"), config)
    documents = np.arange(dataset.numel_low_level_dataset(indexed), dtype=np.int32)
    return dataset(indexed, str(directory / "corpus"), documents, None, gpt_dataset.Split.train, config)


class Vocabulary:
    """As much of a tokenizer as GPTDataset asks for."""

    vocab_size = VOCAB_SIZE
    eod = VOCAB_SIZE - 1
    pad = -1
    unique_identifiers: ClassVar[dict[str, str]] = {}


def import_streaming() -> ModuleType:
    """mosaicml-streaming; torchvision, which only its image datasets use, is stood in for where it is missing."""
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
    """The same windows as the others cut, as mosaicml-streaming stores them."""
    columns = {"tokens": f"ndarray:uint16:{SEQUENCE_LENGTH + 1}"}
    with import_streaming().MDSWriter(out=str(directory), columns=columns) as writer:
        for first in range(0, len(tokens) - SEQUENCE_LENGTH, SEQUENCE_LENGTH):
            writer.write({"tokens": np.asarray(tokens[first : first + SEQUENCE_LENGTH + 1])})


def open_streaming(directory: Path) -> Any:
    streaming = import_streaming()

    class Samples(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, at: Any) -> tuple[Tensor, Tensor]:
            window = torch.from_numpy(super().__getitem__(at)["tokens"].astype(np.int64))
            return window[:-1], window[1:]

    return Samples(local=str(directory / "shards"), remote=None, batch_size=BATCH_SIZE, shuffle=True)
