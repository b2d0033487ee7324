"""Progress of a long command: a bar on a terminal, an occasional line elsewhere.

`ProgressBar.show` may be called often; it draws at most ten times a second. Output goes to stderr, so that stdout holds
only the result.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, final

PLAIN_EVERY_S = 10.0
REFRESH_EVERY_S = 0.1


@final
class ProgressBar:
    """Progress in bytes."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            expand=True,
            disable=not self._live,
            transient=True,
        )
        self._stage = ""
        self._task = self._progress.add_task("", total=None)
        self._next_s = 0.0

    def show(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if stage != self._stage:
            self._stage, self._next_s = stage, now_s if self._live else now_s + PLAIN_EVERY_S
            self._progress.reset(self._task, description=stage, total=total)
        if now_s < self._next_s:
            return
        if self._live:
            self._progress.update(self._task, completed=done)
            self._progress.refresh()
        else:
            print(f"{stage} {done / max(1, total):.0%} of {total:,} bytes", file=sys.stderr, flush=True)
        self._next_s = now_s + (REFRESH_EVERY_S if self._live else PLAIN_EVERY_S)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
