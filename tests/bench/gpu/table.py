"""The table: rows as they were measured, and the columns that follow from them."""

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
class Measured:
    name: str
    rounds: tuple[Block, ...] = ()
    """Empty where there was nothing to measure."""
    beside: tuple[Block, ...] = ()
    """What the reference took in the same rounds; empty where it took no turns with this row."""
    losses: tuple[float, float] | None = None
    """Of the first step and of the last."""
    note: str = ""
    """Why there is nothing, or what to know of it."""

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, the median of the rounds."""
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
    def to_beside(self) -> Estimate | None:
        """How fast it is to the reference, over their rounds."""
        if not self.beside:
            return None
        pairs = zip(self.rounds, self.beside, strict=True)
        return estimate([other.step_s / own.step_s for own, other in pairs])

    @property
    def disturbed(self) -> str:
        """What happened while the clock ran and should not have."""
        compiled = sum(block.num_compiled for block in self.rounds)
        shortages = sum(block.num_shortages for block in self.rounds)
        told = (
            f"{compiled} frames compiled while it was timed" if compiled else "",
            f"the allocator ran short {shortages} times while it was timed" if shortages else "",
        )
        return ", ".join(filter(None, told))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    tokens: int
    """Of a step."""
    flops_per_token: int
    """Attention as if nothing were masked, as the field counts it."""
    causal_flops_per_token: int
    """Half of the attention: what a causal mask leaves to do."""
    peak_flops: float | None
    """By the datasheet; None where it is not known."""
    matmul_flops: tuple[float, ...]
    """Measured between the rows."""
    reference: str
    """Name of the row that the others are compared with."""
    rows: tuple[Measured, ...]
    remarks: tuple[str, ...] = ()


def values_of(table: Table, row: Measured) -> dict[str, Any]:
    """The columns of a row; None where there is nothing to say."""
    matmul = statistics.median(table.matmul_flops) if table.matmul_flops else None
    tokens_per_s = None if row.step_s is None else table.tokens / row.step_s
    flops = None if tokens_per_s is None else tokens_per_s * table.flops_per_token
    causal = None if tokens_per_s is None else tokens_per_s * table.causal_flops_per_token
    ratio = row.to_beside
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
        "note": ", ".join(filter(None, (row.note, row.disturbed))),
        "step_s": [block.step_s for block in row.rounds],
        "reference_step_s": [block.step_s for block in row.beside],
    }


def render(table: Table) -> str:
    """Markdown: the title, a line on the device's own rates, the rows, the remarks."""
    head = f"| {' | '.join(HEAD)} |".replace("|  |", "| |").format(reference=table.reference)
    lines = [f"## {table.title}", "", _rates(table), "", head, RULE]
    lines += [_line(values_of(table, row)) for row in table.rows]
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
        "rows": [values_of(table, row) for row in table.rows],
        "remarks": list(table.remarks),
    }


def _rates(table: Table) -> str:
    peak = "not known" if table.peak_flops is None else f"{table.peak_flops / 1e12:.0f} TFLOP/s"
    if not table.matmul_flops:
        return f"Peak by the datasheet {peak}; no matrix product was measured."
    rates = sorted(rate / 1e12 for rate in table.matmul_flops)
    return (
        f"Peak by the datasheet {peak}; bf16 matmul 8192^3 measured {len(rates)} times: "
        f"{statistics.median(rates):.0f} TFLOP/s ({rates[0]:.0f} to {rates[-1]:.0f})."
    )


def _line(values: dict[str, Any]) -> str:
    def told(key: str, form: str) -> str:
        return "-" if values[key] is None else format(values[key], form)

    losses = values["losses"]
    columns = (
        values["name"],
        told("tokens_per_s", ",.0f"),
        told("spread", ".1%"),
        _ratio(values),
        told("mfu", ".1%"),
        told("causal_mfu", ".1%"),
        told("of_matmul", ".1%"),
        told("peak_gib", ".1f"),
        "-" if losses is None else f"{losses[0]:.3f} -> {losses[1]:.3f}",
        values["note"],
    )
    return f"| {' | '.join(columns)} |".replace("|  |", "| |")


def _ratio(values: dict[str, Any]) -> str:
    """With its 90 % interval, or the range of too few rounds for one."""
    if values["to_reference"] is None:
        return "-"
    kind = f"{COVERAGE:.0%}" if values["has_interval"] else "range"
    low, high = values["to_reference_low"], values["to_reference_high"]
    return f"{values['to_reference']:.3f} ({kind}: {low:.3f} to {high:.3f})"
