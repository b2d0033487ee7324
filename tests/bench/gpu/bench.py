"""The rows of one model: each in a process of its own, in turns with the reference.

Memory decides who runs beside whom. A row of 1.26B parameters takes 50 to 70 GiB while it steps, so two are alive at a
time: the reference, which stays, and one row, which is started, takes its turns and ends. Between turns a process keeps
weights and moments only (`tests.bench.gpu.contender`). All ratios are to the reference, in the same rounds; two other
rows never share a round. A row that finds no room beside the reference is measured alone, without a ratio; then the
reference starts again.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from harness.model.size import flops_per_token, num_parameters
from harness.telemetry.meters import peak_flops
from tests.bench.clock import Block, order
from tests.bench.gpu.contender import Spec
from tests.bench.gpu.process import Contender, ContenderError
from tests.bench.gpu.rows import ROWS
from tests.bench.gpu.setting import Setting
from tests.bench.gpu.table import Measured, Table

NUM_PRODUCTS = 3
"""Matrix products measured before each row."""
HEATED_S = 10.0
"""For how long the device is made to work before the first row: a cool one is faster, and would favour it."""
NO_ROOM = "no room beside the reference"
REFERENCE_FAILED = "the reference failed beside it"


@final
@dataclass(slots=True)
class Bench:
    setting: Setting
    names: tuple[str, ...]
    """Rows that were asked for."""
    root: Path
    paths: dict[str, Path] = field(default_factory=dict)
    """Package -> directory that holds it."""
    reference: str = "ours-bf16"
    """The row that takes turns with all others, where it is among them."""
    found: dict[str, tuple[Measured, ...]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    matmul_flops: list[float] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    device: str | None = None
    is_whole: bool = True
    """None of our own rows failed, but for a configuration that this machine does not allow."""
    _beside: Contender | None = None
    """The reference, while it is alive."""

    def measure(self) -> None:
        """All rows; each is printed as soon as it is known."""
        try:
            if self.reference in self.names:
                self.measure_row(self.reference)
            for name in self.names:
                if name != self.reference:
                    self.measure_row(name)
        finally:
            self.end_reference()

    def measure_row(self, name: str) -> None:
        """Beside the reference if it can be, else alone; what fails has a row that says why."""
        try:
            self.add(name, self.raced(name, self.reference_beside(name)))
        except ContenderError as failure:
            is_of_reference = failure.row == self.reference != name
            if is_of_reference or (self._beside is not None and failure.is_memory):
                self.end_reference()
                self.measure_alone(name, note=REFERENCE_FAILED if is_of_reference else NO_ROOM)
            else:
                self.add_failure(name, failure)

    def measure_alone(self, name: str, note: str) -> None:
        try:
            rows = self.raced(name, None)
        except ContenderError as failure:
            self.add_failure(name, failure)
        else:
            self.add(name, tuple(replace(row, note=", ".join(filter(None, (note, row.note)))) for row in rows))

    def reference_beside(self, name: str) -> Contender | None:
        """The reference, started again if need be; None for itself, and where it is not asked for or did not start."""
        rows = self.found.get(self.reference)
        if name == self.reference or not rows or not rows[0].rounds:
            return None
        if self._beside is None:
            self._beside = self.start(self.reference)
        return self._beside

    def start(self, name: str) -> Contender:
        packages = [str(self.paths[package]) for package in ROWS[name].packages if package in self.paths]
        root = self.root / name
        root.mkdir(parents=True, exist_ok=True)
        started = Contender.start(Spec(row=name, setting=self.setting, root=str(root), paths=tuple(packages)))
        self.versions[name], self.device = started.versions, started.device
        return started

    def raced(self, name: str, beside: Contender | None) -> tuple[Measured, ...]:
        """A row's sides, and the reference's first one where it is there, in turns."""
        row = self.start(name)
        sides = [(row, side) for side in row.sides]
        if beside is not None:
            sides.append((beside, beside.sides[0]))
        try:
            if not self.matmul_flops:
                row.ask(do="heat", seconds=HEATED_S)
            self.matmul_flops += row.ask(do="matmul", times=NUM_PRODUCTS)["flops"]
            rounds = [self.round_of(sides, number) for number in range(self.setting.rounds)]
            report = row.ask(do="report")
        except ContenderError:
            row.close()
            raise
        if name == self.reference:
            self._beside = row
        else:
            row.close()
        blocks = list(zip(*rounds, strict=True))
        if beside is not None:
            self.add_turns(blocks[-1])
        rows = tuple(
            Measured(
                name=side,
                rounds=blocks[index],
                beside=blocks[-1] if beside is not None else blocks[0] if name == self.reference and index else (),
                losses=None if index or report["losses"] is None else tuple(report["losses"]),
                note=report["note"],
            )
            for index, side in enumerate(row.sides)
        )
        if report["judging_s"]:
            self.remarks.append(told_cost(rows[0].name, blocks[0], blocks[1], report["judging_s"]))
        return rows

    def round_of(self, sides: list[tuple[Contender, str]], number: int) -> list[Block]:
        """A block of every side, in the order of the sides, however they ran."""
        blocks = {
            index: sides[index][0].turn(sides[index][1], self.setting.steps) for index in order(len(sides), number)
        }
        return [blocks[index] for index in range(len(sides))]

    def add_turns(self, blocks: tuple[Block, ...]) -> None:
        """The reference's row has all of its rounds, beside whomever."""
        first, *others = self.found[self.reference]
        self.found[self.reference] = (replace(first, rounds=first.rounds + blocks), *others)

    def end_reference(self) -> None:
        if self._beside is not None:
            self._beside.close()
            self._beside = None

    def add_failure(self, name: str, failure: ContenderError) -> None:
        self.is_whole = self.is_whole and (not ROWS[name].is_ours or failure.is_config)
        self.add(name, (Measured(name=name, note=str(failure)),))

    def add(self, name: str, rows: tuple[Measured, ...]) -> None:
        self.found[name] = rows
        for row in rows:
            rate = "" if row.step_s is None else f"{self.setting.tokens / row.step_s:,.0f} tokens/s"
            peak = "" if row.peak_gib is None else f"{row.peak_gib:.1f} GiB"
            ratio = "" if row.to_beside is None else f"{row.to_beside.median:.3f} to {self.reference}"
            print(f"{row.name}: {', '.join(filter(None, (rate, peak, ratio, row.note)))}", flush=True)

    @property
    def table(self) -> Table:
        setting, cfg = self.setting, self.setting.config()
        size = f"{num_parameters(cfg.model):,} parameters, {setting.batch_size} x {setting.sequence_length} tokens"
        how = f"{setting.rounds} rounds of {setting.steps} steps{'' if setting.is_compiled else ', not compiled'}"
        usual, unmasked = flops_per_token(cfg.model, setting.sequence_length), flops_per_token(cfg.model, 0)
        return Table(
            title=f"{setting.model}: {size}, {how}; {self.device or 'CPU'}",
            tokens=setting.tokens,
            flops_per_token=usual,
            causal_flops_per_token=(usual + unmasked) // 2,
            peak_flops=peak_flops(self.device, None),
            matmul_flops=tuple(self.matmul_flops),
            reference=self.found[self.reference][0].name if self.reference in self.found else "",
            rows=tuple(row for name in self.names for row in self.found.get(name, ())),
            remarks=(*self.remarks, *told_versions(self.versions)),
        )


def told_cost(name: str, on: tuple[Block, ...], off: tuple[Block, ...], judging_s: list[float]) -> str:
    costs = sorted(each.step_s / other.step_s - 1 for each, other in zip(on, off, strict=True))
    cost = f"{statistics.median(costs):+.2%} of a step ({costs[0]:+.2%} to {costs[-1]:+.2%} over {len(costs)} rounds)"
    return f"{name}: the sentinel costs {cost}, and {statistics.median(judging_s) * 1e6:.0f} us of the host beside it."


def told_versions(found: dict[str, dict[str, str]]) -> list[str]:
    """Rows with the same versions share a line."""
    lines: dict[str, list[str]] = {}
    for name, versions in found.items():
        lines.setdefault(", ".join(f"{package} {version}" for package, version in versions.items()), []).append(name)
    return [f"Versions of {', '.join(names)}: {versions}." for versions, names in lines.items()]
