"""Reads the samples of all machines of a run into one table of columns: utilisation, memory, power, temperature, load.

Samples of different machines are taken at different times. They are grouped by intervals of the longest sampling
interval; a row has mean, lowest and highest value over all GPUs and machines of its interval. The files are bounded
(`harness.telemetry.system_sampler`), so they are read whole whenever one of them has changed. Of a run on more than
`MOST_MACHINES` machines, evenly spaced ones are read, and the page says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import final

from harness.analysis.dashboard.series import NAN, ColumnTable
from harness.core.events import SystemSampled
from harness.core.rundir import RunDir
from harness.telemetry.system_sampler import read

MOST_MACHINES = 64

Stamp = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of each file."""

COLUMNS = (
    *("gpu_utilization_mean", "gpu_utilization_least", "gpu_memory_mean", "gpu_memory_most"),
    *("gpu_power_mean", "gpu_power_most", "gpu_temperature_mean", "gpu_temperature_most"),
    *("host_memory_most", "host_memory_total", "process_memory_most", "cpu_load_mean", "cpu_load_most"),
)


@final
@dataclass(slots=True)
class SystemLoad:
    """Load of the machines of one run over time."""

    table: ColumnTable = field(default_factory=ColumnTable)
    latest: SystemSampled | None = None
    """The newest sample of the first machine."""
    num_machines: int = 0
    stamp: Stamp = ()
    revision: int = 0
    """Number of times that the table was read."""

    def read_more(self, run: RunDir) -> bool:
        """Read the files again if one has changed; returns whether one had."""
        paths = sorted(run.system.glob("rank-*.jsonl"))
        self.num_machines = len(paths)
        paths = evenly_spaced(paths, MOST_MACHINES)
        stamp = tuple(stamp_of(path) for path in paths)
        if stamp == self.stamp:
            return False
        machines = [read(path) for path in paths]
        self.stamp, self.table, self.revision = stamp, load_table(machines), self.revision + 1
        self.latest = machines[0][-1] if machines and machines[0] else None
        return True

    @property
    def note(self) -> str:
        """How many machines the table covers, if not all."""
        num_read = len(self.stamp)
        return f"{num_read} of {self.num_machines:,} machines" if num_read < self.num_machines else ""


def stamp_of(path: Path) -> tuple[str, int, int]:
    try:
        status = path.stat()
    except OSError:
        return path.name, 0, 0
    return path.name, status.st_size, status.st_mtime_ns


def evenly_spaced(paths: Sequence[Path], most: int) -> list[Path]:
    """At most `most` of the paths, the first included."""
    return [paths[index * len(paths) // most] for index in range(most)] if len(paths) > most else list(paths)


def load_table(machines: Sequence[Sequence[SystemSampled]]) -> ColumnTable:
    """One row for each sampling interval, over the samples of all machines in it."""
    table = ColumnTable()
    samples = sorted((sample for machine in machines for sample in machine), key=lambda sample: sample.time)
    every_s = max((sample.every_s for sample in samples), default=1.0) if len(machines) > 1 else 0.0
    iteration = 0
    for number, (_, group) in enumerate(groupby(samples, interval_number(every_s))):
        together = list(group)
        iteration = max(iteration, *(sample.iteration for sample in together))
        assert number == len(table)
        table.add(iteration, together[0].time, COLUMNS, load_values(together))
    return table


def interval_number(every_s: float) -> Callable[[SystemSampled], float]:
    """The interval that a sample belongs to; with 0, every sample has its own."""
    return lambda sample: sample.time // every_s if every_s else sample.time


def load_values(samples: Sequence[SystemSampled]) -> list[float]:
    """Values of `COLUMNS` for the samples of one interval."""
    utilization = measured(value for sample in samples for value in sample.gpu_utilization)
    memory = measured(value for sample in samples for value in sample.gpu_memory_bytes)
    power = measured(value for sample in samples for value in sample.gpu_power_w)
    temperature = measured(value for sample in samples for value in sample.gpu_temperature_c)
    loads = measured(sample.cpu_load for sample in samples)
    return [
        *(mean(utilization), min(utilization, default=NAN), mean(memory), max(memory, default=NAN)),
        *(mean(power), max(power, default=NAN), mean(temperature), max(temperature, default=NAN)),
        max(measured(sample.host_memory_bytes for sample in samples), default=NAN),
        max(measured(sample.host_memory_total_bytes for sample in samples), default=NAN),
        max(measured(sample.process_memory_bytes for sample in samples), default=NAN),
        *(mean(loads), max(loads, default=NAN)),
    ]


def measured(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else NAN
