"""The rows of one model, one after the other: who takes turns with the reference, who is measured alone, who failed.

The reference comes first and goes last, before the rows that found no room beside it; the table has all rows in the
order in which they were asked for. Without a reference, or with one that does not start, every row is measured alone.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import torch

from harness.config import ConfigError
from harness.model.size import flops_per_token, num_parameters
from harness.parallel import World
from harness.rundir import RunDir
from harness.telemetry.meters import peak_flops
from tests.bench.clock import Side, held_bytes, let_go, matmul_flops_per_s
from tests.bench.gpu import hugging_face, ours, peer, titan
from tests.bench.gpu.reference import Reference
from tests.bench.gpu.setting import Setting
from tests.bench.gpu.table import Row, Table

OURS = {
    "ours-bf16": ours.Way("bf16", ("precision=bf16",)),
    "ours-fp8": ours.Way("fp8", ("precision=fp8",)),
    "ours-fp8-delayed": ours.Way("fp8 delayed", ("precision=fp8", "precision.fp8.recipe=delayed")),
}
TITAN, SHIPPED = "torchtitan", "torchtitan-shipped"
ROWS = (*OURS, TITAN, SHIPPED, *hugging_face.PEERS)
NUM_PRODUCTS = 3
"""Matrix products measured before each row."""
NUM_LINES = 12
"""Frames of a traceback."""
LEFT_BYTES = 2**26
"""What a row may leave on the device unremarked: workspaces of libraries."""
NO_ROOM = "no room beside the reference"


@final
@dataclass(slots=True)
class Bench:
    setting: Setting
    world: World
    run: RunDir
    names: tuple[str, ...]
    """Rows that were asked for."""
    torchtitan: Path | None = None
    reference: str = TITAN
    """The peer that takes turns with all other rows, where it is among them."""
    found: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    matmul_flops: list[float] = field(default_factory=list)
    is_whole: bool = True
    """None of our own rows failed."""

    def measure(self) -> None:
        """All rows; each is told as soon as it is known."""
        alone = [name for name in self.names if name != self.reference]
        without_room: list[str] = []
        if self.reference in self.names:
            without_room, alone = self.measure_in_turns(alone)
        for name in alone:
            self.measure_row(name)
        for name in without_room:
            self.measure_row(name, note=NO_ROOM)

    def measure_in_turns(self, names: list[str]) -> tuple[list[str], list[str]]:
        """Rows beside the reference; returns those that found no room, and those it did not live to see."""
        without_room, waiting = [], list(names)
        reference = Reference(self.peer_of(self.reference), self.job, self.setting, self.run)
        try:
            with closing(reference):
                while waiting:
                    reference.make_ready()
                    if not self.measure_row(waiting[0], reference):
                        without_room.append(waiting[0])
                    del waiting[0]
                if not reference.rounds:
                    reference.make_ready()
                    reference.race_alone()
            row = reference.row
        except (Exception, SystemExit) as error:
            row = replace(reference.row, note=reason(error))
        self.remarks += told(reference.peer.name, sum(len(rows[0].beside) for rows in self.found.values()))
        self.add(self.reference, row)
        let_go()
        return without_room, waiting

    def measure_row(self, name: str, reference: Reference | None = None, note: str = "") -> bool:
        """One row, or the two of this harness; False where there was no room beside the reference."""
        rates = [matmul_flops_per_s() for _ in range(NUM_PRODUCTS)]
        self.matmul_flops += [rate for rate in rates if rate is not None]
        held = held_bytes(self.world.device)
        rows = self.tried(name, reference)
        let_go()
        if not rows:
            print(f"{name}: {NO_ROOM}", flush=True)
            return False
        if reference is not None:
            reference.learn(rows[0].beside)
        self.add(name, *(replace(row, note=", ".join(filter(None, (note, row.note)))) for row in rows))
        self.remarks += left_by(name, held_bytes(self.world.device) - held)
        return True

    def tried(self, name: str, reference: Reference | None) -> tuple[Row, ...]:
        """What was measured, or why nothing was; empty where memory ran out and the reference holds some of it."""
        try:
            return self.rows_of(name, () if reference is None else (reference.step,))
        except (Exception, SystemExit) as error:
            if reference is not None and isinstance(error, torch.OutOfMemoryError):
                return ()
            self.is_whole = self.is_whole and (name not in OURS or isinstance(error, ConfigError))
            return (Row(name=name, note=reason(error)),)

    def rows_of(self, name: str, beside: tuple[Side, ...]) -> tuple[Row, ...]:
        if name not in OURS:
            return (peer.measure(self.peer_of(name), self.job, self.setting, self.run, beside),)
        on, off, remark = ours.measure(OURS[name], self.world, self.setting, self.run, beside)
        self.remarks.append(remark)
        return on, off

    def peer_of(self, name: str) -> peer.Peer:
        if name in (TITAN, SHIPPED):
            return titan.peer(self.torchtitan, as_shipped=name == SHIPPED)
        return hugging_face.PEERS[name]

    @property
    def job(self) -> peer.Job:
        return peer.Job(self.setting.config("precision=bf16"), self.world, self.setting.is_compiled)

    def add(self, name: str, *rows: Row) -> None:
        self.found[name] = rows
        for row in rows:
            rate = "" if row.step_s is None else f"{self.setting.tokens / row.step_s:,.0f} tokens/s"
            peak = "" if row.peak_gib is None else f"{row.peak_gib:.1f} GiB"
            ratio = "" if row.to_beside is None else f"{row.to_beside:.3f} to {self.reference}"
            print(f"{row.name}: {', '.join(filter(None, (rate, peak, ratio, row.note)))}", flush=True)

    @property
    def table(self) -> Table:
        setting, cfg = self.setting, self.setting.config()
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        size = f"{num_parameters(cfg.model):,} parameters, {setting.batch_size} x {setting.sequence_length} tokens"
        how = f"{setting.rounds} rounds of {setting.steps} steps{'' if setting.is_compiled else ', not compiled'}"
        return Table(
            title=f"{setting.model}: {size}, {how}; {device or 'CPU'}, torch {torch.__version__}",
            tokens=setting.tokens,
            flops_per_token=flops_per_token(cfg.model, setting.sequence_length),
            peak_flops=peak_flops(device, None),
            matmul_flops=tuple(self.matmul_flops),
            reference=self.peer_of(self.reference).name,
            rows=tuple(row for name in self.names for row in self.found.get(name, ())),
            remarks=tuple(self.remarks),
        )


def told(name: str, num_turns: int) -> list[str]:
    """How often the reference took turns."""
    how = "one beside every round of the other rows, before it and after it in alternation"
    return [f"{name} took {num_turns} turns, {how}; to {name}: the median over a row's turns."] if num_turns else []


def left_by(name: str, num_bytes: int) -> list[str]:
    """Whether something of a row stayed on the device after it was taken down."""
    return [f"{name} left {num_bytes / 2**30:.1f} GiB on the device."] if num_bytes > LEFT_BYTES else []


def reason(error: BaseException) -> str:
    """One line for a table; what is not plain from it is told in full beside it."""
    said = (str(error).strip().splitlines() or [""])[0].replace("|", "/")
    if isinstance(error, ConfigError | ModuleNotFoundError):
        return said
    print("".join(traceback.format_exception(error)[-NUM_LINES:]), file=sys.stderr, flush=True)
    return f"{type(error).__name__}: {said}"
