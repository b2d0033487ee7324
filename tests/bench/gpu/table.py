"""The result table: measured rows, and the columns computed from them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, final

from tests.bench.clock import Block
from tests.bench.intervals import COVERAGE, Estimate, estimate

HEAD = ("", "tokens/s", "spread", "speed to {reference}", "MFU", "causal MFU", "of matmul", "peak GiB", "loss", "")
RULE = "|---|---:|---:|---:|---:|---:|---:|---:|---|---|"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    name: str
    rounds: tuple[Block, ...] = ()
    """Empty if the row failed."""
    reference_rounds: tuple[Block, ...] = ()
    """Blocks of the reference in the same rounds; empty if it did not run beside this row."""
    losses: tuple[float, float] | None = None
    """Mean loss of the first and of the last step."""
    note: str = ""
    """The error message, or a remark."""

    @property
    def step_s(self) -> float | None:
        """Median seconds per step over the rounds."""
        return statistics.median(block.step_s for block in self.rounds) if self.rounds else None

    @property
    def spread(self) -> float | None:
        """(slowest - fastest) / median of the rounds."""
        if self.step_s is None:
            return None
        seconds = [block.step_s for block in self.rounds]
        return (max(seconds) - min(seconds)) / self.step_s

    @property
    def peak_gib(self) -> float | None:
        return max(block.peak_bytes for block in self.rounds) / 2**30 if self.rounds else None

    @property
    def speed_to_reference(self) -> Estimate | None:
        """Speed relative to the reference, over the common rounds."""
        if not self.reference_rounds:
            return None
        pairs = zip(self.rounds, self.reference_rounds, strict=True)
        return estimate([other.step_s / own.step_s for own, other in pairs])

    @property
    def disturbances(self) -> str:
        """Compilations and allocator retries in timed blocks, which distort the measurement."""
        compiled = sum(block.num_compiled for block in self.rounds)
        retries = sum(block.num_alloc_retries for block in self.rounds)
        messages = (
            f"{compiled} frames compiled while it was timed" if compiled else "",
            f"{retries} allocator retries while it was timed" if retries else "",
        )
        return ", ".join(filter(None, messages))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    tokens: int
    """Tokens per step."""
    flops_per_token: int
    """With unmasked attention, the usual convention."""
    causal_flops_per_token: int
    """With half of the attention, because the mask is causal."""
    peak_flops: float | None
    """From the datasheet; None if unknown."""
    matmul_flops: tuple[float, ...]
    """Measured between the rows."""
    reference: str
    """Name of the row that the others are compared with."""
    rows: tuple[MeasuredRow, ...]
    remarks: tuple[str, ...] = ()


def column_values(table: Table, row: MeasuredRow) -> dict[str, Any]:
    """The columns of a row; None if there is no value."""
    matmul = statistics.median(table.matmul_flops) if table.matmul_flops else None
    tokens_per_s = None if row.step_s is None else table.tokens / row.step_s
    flops = None if tokens_per_s is None else tokens_per_s * table.flops_per_token
    causal = None if tokens_per_s is None else tokens_per_s * table.causal_flops_per_token
    ratio = row.speed_to_reference
    return {
        "name": row.name,
        "tokens_per_s": tokens_per_s,
        "spread": row.spread,
        "to_reference": None if ratio is None else ratio.median,
        "to_reference_low": None if ratio is None else ratio.low,
        "to_reference_high": None if ratio is None else ratio.high,
        "has_interval": ratio is not None and ratio.has_interval,
        "mfu": None if flops is None or table.peak_flops is None else flops / table.peak_flops,
        "causal_mfu": None if causal is None or table.peak_flops is None else causal / table.peak_flops,
        "of_matmul": None if flops is None or matmul is None else flops / matmul,
        "peak_gib": row.peak_gib,
        "losses": row.losses,
        "note": ", ".join(filter(None, (row.note, row.disturbances))),
        "step_s": [block.step_s for block in row.rounds],
        "reference_step_s": [block.step_s for block in row.reference_rounds],
    }


def render(table: Table) -> str:
    """Markdown: the title, a line on the device's own rates, the rows, the remarks."""
    head = f"| {' | '.join(HEAD)} |".replace("|  |", "| |").format(reference=table.reference)
    lines = [f"## {table.title}", "", _render_rates(table), "", head, RULE]
    lines += [_render_row(column_values(table, row)) for row in table.rows]
    return "\n".join([*lines, "", *table.remarks])


def as_json(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "tokens_per_step": table.tokens,
        "flops_per_token": table.flops_per_token,
        "causal_flops_per_token": table.causal_flops_per_token,
        "peak_flops": table.peak_flops,
        "matmul_flops": list(table.matmul_flops),
        "reference": table.reference,
        "rows": [column_values(table, row) for row in table.rows],
        "remarks": list(table.remarks),
    }


def _render_rates(table: Table) -> str:
    peak = "not known" if table.peak_flops is None else f"{table.peak_flops / 1e12:.0f} TFLOP/s"
    if not table.matmul_flops:
        return f"Peak by the datasheet {peak}; no matmul was measured."
    rates = sorted(rate / 1e12 for rate in table.matmul_flops)
    return (
        f"Peak by the datasheet {peak}; bf16 matmul 8192^3 measured {len(rates)} times: "
        f"{statistics.median(rates):.0f} TFLOP/s ({rates[0]:.0f} to {rates[-1]:.0f})."
    )


def _render_row(values: dict[str, Any]) -> str:
    def cell(key: str, format_spec: str) -> str:
        return "-" if values[key] is None else format(values[key], format_spec)

    losses = values["losses"]
    columns = (
        values["name"],
        cell("tokens_per_s", ",.0f"),
        cell("spread", ".1%"),
        _render_ratio(values),
        cell("mfu", ".1%"),
        cell("causal_mfu", ".1%"),
        cell("of_matmul", ".1%"),
        cell("peak_gib", ".1f"),
        "-" if losses is None else f"{losses[0]:.3f} -> {losses[1]:.3f}",
        values["note"],
    )
    return f"| {' | '.join(columns)} |".replace("|  |", "| |")


def _render_ratio(values: dict[str, Any]) -> str:
    """The median with its 90 % interval; with the range if there are too few rounds for an interval."""
    if values["to_reference"] is None:
        return "-"
    kind = f"{COVERAGE:.0%}" if values["has_interval"] else "range"
    low, high = values["to_reference_low"], values["to_reference_high"]
    return f"{values['to_reference']:.3f} ({kind}: {low:.3f} to {high:.3f})"
