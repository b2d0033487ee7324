"""Checks that all hosts read the same corpus: probes every file on every host and names a host that differs.

How: the ranks of a host share its files, so a rank probes `num_files / ranks on its host` of them, with
`READS_PER_FILE` reads each. The probes on the host of rank 0 are the reference; the other hosts compare theirs with it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from harness.config.errors import ConfigError
from harness.data.corpus.file_probe import ListedFile, probe, stat_file
from harness.data.corpus.remote_cache import local_path
from harness.distributed.collectives import gather_results
from harness.distributed.world import World


class KeyedFile(NamedTuple):
    """A file and the config key it comes from."""

    key: str
    file: ListedFile


def agree_on_files(files: Sequence[KeyedFile], *, world: World) -> list[str]:
    """The probe of each file, the same on every rank; raises on every rank if a host differs or cannot read a file."""
    hosts = gather_results(socket.gethostname)
    here, first = hosts[world.rank], hosts[0]
    place = f"rank {world.rank} ({here})"
    own = [rank for rank, host in enumerate(hosts) if host == here]
    share = slice(own.index(world.rank), None, len(own))
    found = gather_results(lambda: [_probe(file, place) for file in files[share]] if here == first else [])
    reference = [""] * len(files)
    for number, rank in enumerate(rank for rank, host in enumerate(hosts) if host == first):
        reference[number :: hosts.count(first)] = found[rank]
    if len(set(hosts)) > 1:
        others = f"rank 0 ({first})"
        gather_results(lambda: None if here == first else _compare(files[share], reference[share], place, others))
    return reference


def _probe(keyed: KeyedFile, place: str) -> str:
    """The probe of a file on this host; its sizes must be those that rank 0 found."""
    key, file = keyed
    try:
        now = stat_file(local_path(file.path, key=key), key=key)
        if now == file:
            return probe(file, key=key)
    except ConfigError as error:
        raise ConfigError(key, f"{place}: {str(error).removeprefix(f'{key}: ')}") from None
    sizes = " and ".join(f"{size} bytes" for size in now[1:] if size)
    expected = " and ".join(f"{size} bytes" for size in file[1:] if size)
    raise ConfigError(key, f"{place}: {file.path} has {sizes}, rank 0 found {expected}")


def _compare(files: Sequence[KeyedFile], reference: Sequence[str], place: str, others: str) -> None:
    for keyed, expected in zip(files, reference, strict=True):
        if _probe(keyed, place) != expected:
            raise ConfigError(keyed.key, f"{place}: {keyed.file.path} has other content than on {others}")
