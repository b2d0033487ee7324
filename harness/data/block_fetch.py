"""Fetches what the next batches need from an object store, in a background thread.

Why: computing a batch then finds its blocks on disk, and the step waits only if the store is slower than training.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import final

from harness.config.errors import ConfigError, StorageError
from harness.data.batch_plan import BatchPlan, Ints, Source
from harness.data.corpus.remote_cache import RemoteRanges, close_cache, fetch_ranges
from harness.data.corpus.token_windows import FilesCorpus
from harness.data.order.mixture import Mixture


def has_remote_files(source: Source) -> bool:
    return isinstance(source.corpus, FilesCorpus) and source.corpus.is_remote


@final
class BlockFetcher:
    """Fetches the blocks of this rank's rows of the next `num_ahead` batches."""

    def __init__(
        self, sources: tuple[Source, ...], plan: BatchPlan, own_rows: Callable[[int], Ints], *, num_ahead: int
    ) -> None:
        self._sources = sources
        self._plan = plan
        self._own_rows = own_rows
        """Batch index -> rows of the global batch that this rank reads."""
        self._num_ahead = num_ahead
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fetch")
        self._fetched_until = 0
        self._is_closed = Event()

    def fetch_after(self, index: int) -> None:
        """Fetch for the batches after this one; returns at once."""
        if not index < self._fetched_until <= index + self._num_ahead + 1:
            self._fetched_until = index + 1
        last = index + 1 + self._num_ahead
        if self._fetched_until <= last - max(1, self._num_ahead // 2):
            self._thread.submit(self._fetch_range, self._fetched_until, last, self._plan.mixture)
            self._fetched_until = last

    def close(self) -> None:
        """Fetch nothing more, and let no thread of this process wait for a store that does not answer: the end of a
        process waits for its threads."""
        self._is_closed.set()
        close_cache()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fetch_range(self, first: int, end: int, mixture: Mixture) -> None:
        """Errors are left to the thread that reads the rows."""
        try:
            while first < end:
                planned = self._plan.plan_from(first, end - first, mixture)
                rows = zip(planned.sources, planned.samples, strict=True)
                for index, (sources, samples) in enumerate(rows, start=first):
                    if self._is_closed.is_set():
                        return
                    own = self._own_rows(index)
                    fetch_ranges(self._remote_ranges(sources[own], samples[own]))
                first += len(planned.samples)
        except (ConfigError, StorageError):
            return

    def _remote_ranges(self, sources: Ints, samples: Ints) -> list[RemoteRanges]:
        """What these rows need from object stores, of all sources."""
        wanted: list[RemoteRanges] = []
        for number, source in enumerate(self._sources):
            if isinstance(source.corpus, FilesCorpus):
                wanted += source.corpus.remote_ranges(samples[sources == number])
        return wanted
