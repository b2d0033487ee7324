"""Measures the rows of one model: each in its own process, alternating with the reference.

Memory limits how many rows run at the same time. A row of 1.26B parameters needs 50 to 70 GiB during a step, so two are
alive at a time: the reference, which stays, and one row, which is started, runs its rounds and exits. Between blocks a
process keeps weights and moments only (`tests.bench.gpu.contender`). All ratios are to the reference, in the same
rounds; two other rows never share a round. A row that runs out of memory beside the reference is measured alone,
without a ratio; then the reference starts again.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from harness.model.size import flops_per_token, num_parameters
from harness.telemetry.meters import peak_flops
from tests.bench.clock import Block, round_order
from tests.bench.gpu.contender import Spec
from tests.bench.gpu.process import Contender, ContenderError
from tests.bench.gpu.rows import ROWS
from tests.bench.gpu.setting import Setting
from tests.bench.gpu.table import MeasuredRow, Table

NUM_MATMULS = 3
"""Matmuls measured before each row."""
HEAT_UP_S = 10.0
"""How long matmuls run before the first row: a cool device is faster, which would favour that row."""
NO_MEMORY = "out of memory beside the reference"
REFERENCE_FAILED = "the reference failed in the same round"


@final
@dataclass(slots=True)
class Bench:
    setting: Setting
    names: tuple[str, ...]
    """Requested rows."""
    root: Path
    paths: dict[str, Path] = field(default_factory=dict)
    """Package -> directory that holds it."""
    reference: str = "ours-bf16"
    """The row that alternates with all others, if it is requested."""
    measured_rows: dict[str, tuple[MeasuredRow, ...]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    matmul_flops: list[float] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    device: str | None = None
    is_complete: bool = True
    """No row of this harness failed, except for a configuration that this machine does not support."""
    _reference_process: Contender | None = None
    """The reference, while it is alive."""

    def measure(self) -> None:
        """Measure all rows; print each when it is done."""
        try:
            if self.reference in self.names:
                self.measure_row(self.reference)
            for name in self.names:
                if name != self.reference:
                    self.measure_row(name)
        finally:
            self.end_reference()

    def measure_row(self, name: str) -> None:
        """Measure a row beside the reference if possible, else alone; a failure becomes a row with its message."""
        try:
            self.add(name, self.run_rounds(name, self.get_reference(name)))
        except ContenderError as failure:
            reference_failed = failure.row == self.reference != name
            if reference_failed or (self._reference_process is not None and failure.is_memory):
                self.end_reference()
                self.measure_alone(name, note=REFERENCE_FAILED if reference_failed else NO_MEMORY)
            else:
                self.add_failure(name, failure)

    def measure_alone(self, name: str, note: str) -> None:
        try:
            rows = self.run_rounds(name, None)
        except ContenderError as failure:
            self.add_failure(name, failure)
        else:
            self.add(name, tuple(replace(row, note=", ".join(filter(None, (note, row.note)))) for row in rows))

    def get_reference(self, name: str) -> Contender | None:
        """The reference, restarted if needed; None for the reference itself, or if it is not requested or failed."""
        rows = self.measured_rows.get(self.reference)
        if name == self.reference or not rows or not rows[0].rounds:
            return None
        if self._reference_process is None:
            self._reference_process = self.start(self.reference)
        return self._reference_process

    def start(self, name: str) -> Contender:
        packages = [str(self.paths[package]) for package in ROWS[name].packages if package in self.paths]
        root = self.root / name
        root.mkdir(parents=True, exist_ok=True)
        contender = Contender.start(Spec(row=name, setting=self.setting, root=str(root), paths=tuple(packages)))
        self.versions[name], self.device = contender.versions, contender.device
        return contender

    def run_rounds(self, name: str, reference: Contender | None) -> tuple[MeasuredRow, ...]:
        """Run the rounds: the sides of a row, and the first side of the reference if there is one."""
        row = self.start(name)
        sides = [(row, side) for side in row.sides]
        if reference is not None:
            sides.append((reference, reference.sides[0]))
        try:
            if not self.matmul_flops:
                row.send_request(do="heat", seconds=HEAT_UP_S)
            self.matmul_flops += row.send_request(do="matmul", times=NUM_MATMULS)["flops"]
            rounds = [self.run_round(sides, number) for number in range(self.setting.rounds)]
            report = row.send_request(do="report")
        except ContenderError:
            row.close()
            raise
        if name == self.reference:
            self._reference_process = row
        else:
            row.close()
        blocks = list(zip(*rounds, strict=True))
        if reference is not None:
            self.add_reference_rounds(blocks[-1])
        rows = tuple(
            MeasuredRow(
                name=side,
                rounds=blocks[index],
                reference_rounds=blocks[-1]
                if reference is not None
                else blocks[0]
                if name == self.reference and index
                else (),
                losses=None if index or report["losses"] is None else tuple(report["losses"]),
                note=report["note"],
            )
            for index, side in enumerate(row.sides)
        )
        if report["report_s"]:
            self.remarks.append(render_sentinel_cost(rows[0].name, blocks[0], blocks[1], report["report_s"]))
        return rows

    def run_round(self, sides: list[tuple[Contender, str]], number: int) -> list[Block]:
        """Run a block of every side; returns them in the order of `sides`."""
        blocks = {
            index: sides[index][0].run_block(sides[index][1], self.setting.steps)
            for index in round_order(len(sides), number)
        }
        return [blocks[index] for index in range(len(sides))]

    def add_reference_rounds(self, blocks: tuple[Block, ...]) -> None:
        """Add rounds to the row of the reference, which has all of its rounds."""
        first, *others = self.measured_rows[self.reference]
        self.measured_rows[self.reference] = (replace(first, rounds=first.rounds + blocks), *others)

    def end_reference(self) -> None:
        if self._reference_process is not None:
            self._reference_process.close()
            self._reference_process = None

    def add_failure(self, name: str, failure: ContenderError) -> None:
        self.is_complete = self.is_complete and (not ROWS[name].is_ours or failure.is_config)
        self.add(name, (MeasuredRow(name=name, note=str(failure)),))

    def add(self, name: str, rows: tuple[MeasuredRow, ...]) -> None:
        self.measured_rows[name] = rows
        for row in rows:
            rate = "" if row.step_s is None else f"{self.setting.tokens / row.step_s:,.0f} tokens/s"
            peak = "" if row.peak_gib is None else f"{row.peak_gib:.1f} GiB"
            ratio = "" if row.speed_to_reference is None else f"{row.speed_to_reference.median:.3f} to {self.reference}"
            print(f"{row.name}: {', '.join(filter(None, (rate, peak, ratio, row.note)))}", flush=True)

    @property
    def table(self) -> Table:
        setting, cfg = self.setting, self.setting.config()
        size = f"{num_parameters(cfg.model):,} parameters, {setting.batch_size} x {setting.sequence_length} tokens"
        rounds = f"{setting.rounds} rounds of {setting.steps} steps{'' if setting.is_compiled else ', not compiled'}"
        full, without_attention = flops_per_token(cfg.model, setting.sequence_length), flops_per_token(cfg.model, 0)
        return Table(
            title=f"{setting.model}: {size}, {rounds}; {self.device or 'CPU'}",
            tokens=setting.tokens,
            flops_per_token=full,
            causal_flops_per_token=(full + without_attention) // 2,
            peak_flops=peak_flops(self.device, None),
            matmul_flops=tuple(self.matmul_flops),
            reference=self.measured_rows[self.reference][0].name if self.reference in self.measured_rows else "",
            rows=tuple(row for name in self.names for row in self.measured_rows.get(name, ())),
            remarks=(*self.remarks, *render_versions(self.versions)),
        )


def render_sentinel_cost(name: str, on: tuple[Block, ...], off: tuple[Block, ...], report_s: list[float]) -> str:
    costs = sorted(each.step_s / other.step_s - 1 for each, other in zip(on, off, strict=True))
    cost = f"{statistics.median(costs):+.2%} of a step ({costs[0]:+.2%} to {costs[-1]:+.2%} over {len(costs)} rounds)"
    return f"{name}: the sentinel costs {cost}, and {statistics.median(report_s) * 1e6:.0f} us on the host in parallel."


def render_versions(versions_by_row: dict[str, dict[str, str]]) -> list[str]:
    """Rows with the same versions share a line."""
    lines: dict[str, list[str]] = {}
    for name, versions in versions_by_row.items():
        lines.setdefault(", ".join(f"{package} {version}" for package, version in versions.items()), []).append(name)
    return [f"Versions of {', '.join(names)}: {versions}." for versions, names in lines.items()]
