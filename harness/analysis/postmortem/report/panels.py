"""Draws the pictures (panels) of an incident, one file each. One without data is left out.

Pictures over time share one axis: the incident is shaded, actions are marked above, injected faults below. A non-finite
value is a gap with a cross at the top. Two pictures show a batch of the incident instead: its token losses and its
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.analysis.postmortem.evidence import Evidence, GuiltyBatch
from harness.analysis.postmortem.report.axes import (
    Series,
    bf16_stretches,
    draw_dots,
    draw_line,
    draw_two,
    finish_axes,
    series,
    style_axes,
    with_bf16_gaps,
)
from harness.analysis.postmortem.report.incident_text import FILES, NOT_MEASURED, TITLES, printable
from harness.analysis.postmortem.rules.causes import Panel
from harness.core.events import TOKEN_LOSS_EDGES
from harness.telemetry.run_picture import BLUE, GREY, GRID, INK, LIGHT_BLUE, ORANGE, RED, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES, DOTS_PER_INCH = (7.6, 2.7), 110
LEAST_SHARE = 1e-6
"""A share of zero is drawn as this value, because the axis is logarithmic."""
RANK_COLOURS = (BLUE, ORANGE, "#3f8f4e", "#8453a8", "#8a6d3b", "#2a8c9b")


def draw(evidence: Evidence, folder: Path) -> list[Panel]:
    """Write the pictures that have data, and remove the others of an earlier report; returns the panels drawn."""
    from matplotlib.figure import Figure

    drawn = []
    for panel, painter in PAINTERS.items():
        path = folder / FILES[panel]
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
        title = f"{panel.value}  {TITLES[panel]}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
        if not painter(figure, evidence):
            path.unlink(missing_ok=True)
            continue
        drawn.append(panel)
        scratch = path.with_name(f".{path.name}.tmp")
        figure.savefig(scratch, format="png")
        scratch.replace(path)
    return drawn


def _draw_loss(figure: Figure, evidence: Evidence) -> bool:
    axes = figure.subplots()
    applied = [record for record in evidence.records if not record.refused]
    refused = [record for record in evidence.records if record.refused and not record.is_empty]
    draw_line(axes, series(applied, lambda record: record.loss), BLUE, "applied")
    draw_dots(axes, series(refused, lambda record: record.loss), RED, "rejected, not applied")
    draw_line(axes, _bound(evidence, "loss"), GREY, "the gate's bound", dashed=True)
    return finish_axes(
        axes, evidence, "nats", gaps=[r.iteration for r in evidence.records if not math.isfinite(r.loss)]
    )


def _draw_rate(figure: Figure, evidence: Evidence) -> bool:
    axes = figure.subplots()
    draw_line(axes, series(evidence.records, lambda record: record.lr), BLUE, "learning rate")
    return finish_axes(axes, evidence, "learning rate", from_zero=True)


def _draw_gradient(figure: Figure, evidence: Evidence) -> bool:
    axes = figure.subplots()
    draw_line(
        axes,
        series(evidence.records, lambda record: math.nan if record.is_empty else record.grad_norm),
        BLUE,
        "before clipping",
    )
    draw_line(axes, _bound(evidence, "grad_norm"), GREY, "the gate's bound", dashed=True)
    clip = evidence.run.settings.get("optim.clip_norm")
    if isinstance(clip, int | float):
        axes.axhline(clip, color=ORANGE, linewidth=0.9, linestyle=":", label=f"clipped at {clip:g}")
    gaps = [record.iteration for record in evidence.records if not math.isfinite(record.grad_norm)]
    return finish_axes(axes, evidence, "norm", gaps=gaps)


def _bound(evidence: Evidence, name: str) -> Series:
    """The gate's bound over time. Values above twice its maximum from the onset on are dropped: at the start of a run
    the bound is so wide that it would hide the rest."""
    points = series(evidence.records, lambda record: record.bounds.get(name))
    late = [value for at, value in points if at >= evidence.onset] or [value for _, value in points[-1:]]
    highest = 2 * max((value for value in late if not math.isnan(value)), default=math.inf)
    return [(at, value if value <= highest else math.nan) for at, value in points]


def _draw_activations(figure: Figure, evidence: Evidence) -> bool:
    """Heat map: activation RMS of each sampled layer over time, as log10 of its ratio to the layer's median."""
    probed = [record for record in evidence.records if record.activation_rms]
    layers = list(dict.fromkeys(name for record in probed for name in record.activation_rms))
    if not layers:
        return False
    axes = figure.subplots()
    rows = [[_logarithm(record.activation_rms.get(name)) for record in probed] for name in layers]
    usual = [sorted(value for value in row if not math.isnan(value)) or [0.0] for row in rows]
    image = [[value - middle[len(middle) // 2] for value in row] for row, middle in zip(rows, usual, strict=True)]
    edges = [record.iteration for record in probed]
    step = max(1, edges[-1] - edges[-2]) if len(edges) > 1 else 1
    mesh = axes.pcolormesh(
        [*edges, edges[-1] + step], range(len(layers) + 1), image, cmap="RdBu_r", vmin=-1, vmax=1, shading="flat"
    )
    axes.set_yticks([place + 0.5 for place in range(len(layers))], layers)
    figure.colorbar(mesh, ax=axes, label="log10 of value / median", pad=0.01)
    broken = [r.iteration for r in probed if not all(math.isfinite(value) for value in r.activation_rms.values())]
    return finish_axes(axes, evidence, "layer", gaps=broken, is_map=True)


def _draw_moments(figure: Figure, evidence: Evidence) -> bool:
    return draw_two(
        figure,
        evidence,
        (series(evidence.records, lambda record: record.v_norm), "norm of Adam's v"),
        (series(evidence.records, lambda record: record.square_ratio), "gradient / sqrt(v)"),
    )


def _draw_weights(figure: Figure, evidence: Evidence) -> bool:
    return draw_two(
        figure,
        evidence,
        (series(evidence.records, lambda record: record.param_norm), "weight norm"),
        (series(evidence.records, lambda record: record.update_ratio), "update norm / weight norm"),
    )


def _draw_token_losses(figure: Figure, evidence: Evidence) -> bool:
    """Histogram of token losses: the incident's batch beside the last probed batch before it."""
    batch = next((each for each in evidence.batches if each.token_loss_counts), None)
    before = [r for r in evidence.records if r.token_loss_counts and r.iteration < evidence.onset]
    if batch is None and not before:
        return False
    axes = figure.subplots()
    labels = ["<" + f"{TOKEN_LOSS_EDGES[0]:g}", *(f"{edge:g}" for edge in TOKEN_LOSS_EDGES)]
    places = list(range(len(labels)))
    shown: list[tuple[list[int], str, str]] = []
    if before:
        shown.append((before[-1].token_loss_counts, LIGHT_BLUE, f"iteration {before[-1].iteration}, before"))
    if batch is not None:
        colour, rejected = (RED, ", rejected") if batch.refused else (ORANGE, "")
        shown.append((batch.token_loss_counts, colour, f"batch {batch.index}{rejected}"))
    for number, (counts, colour, label) in enumerate(shown):
        total = max(1, sum(counts))
        heights = [count / total for count in counts[: len(places)]]
        axes.bar([place + 0.4 * number for place in places[: len(heights)]], heights, 0.4, color=colour, label=label)
    axes.set_xticks(places, labels, fontsize=7.5)
    axes.set_xlabel("token loss, lower edge of the bin, nats", fontsize=8.5, color=INK)
    style_axes(axes, "share of tokens")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return True


def _draw_tokens(figure: Figure, evidence: Evidence) -> bool:
    """Left: token counts, most frequent first. Right: the rarest tokens by name."""
    batch = next((each for each in evidence.batches if each.num_counts or each.rarest), None)
    if batch is None:
        return False
    left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
    if batch.num_counts:
        left.plot(range(1, len(batch.num_counts) + 1), batch.num_counts, color=BLUE, linewidth=1.4)
        left.set_xscale("log")
        left.set_yscale("log")
        now = " (as on disk now)" if batch.is_changed else ""
        left.set_xlabel(f"tokens of batch {batch.index}{now}, most frequent first", fontsize=8.5, color=INK)
    else:
        left.text(0.5, 0.5, NOT_MEASURED, ha="center", va="center", color=GREY, transform=left.transAxes)
    style_axes(left, "occurrences")
    names = [_token_name(batch, place) for place in range(len(batch.rarest))]
    right.barh(names[::-1], [rare.num_in_batch for rare in batch.rarest][::-1], color=ORANGE)
    right.set_xlabel(f"rarest tokens of batch {batch.index}, occurrences", fontsize=8.5, color=INK)
    style_axes(right, "")
    return True


def _token_name(batch: GuiltyBatch, place: int) -> str:
    rare = batch.rarest[place]
    text = printable(rare.text)
    corpus = "" if rare.num_in_corpus is None else f" ({rare.num_in_corpus})"
    return plain_text(f"{rare.token} {text[:12]}{corpus}")


def _draw_ranks(figure: Figure, evidence: Evidence) -> bool:
    """Ranks that the records name: with many ranks, only those farthest from the median."""
    top, bottom = figure.subplots(2, 1, sharex=True)
    drawn = [_rank_lines(top, evidence, "grad_norm"), _rank_lines(bottom, evidence, "step_time_s")]
    guilty = sorted({rank for record in evidence.records for rank in record.nonfinite_ranks})
    for number, rank in enumerate(guilty[:4]):
        at = [record.iteration for record in evidence.records if rank in record.nonfinite_ranks]
        transform, height = top.get_xaxis_transform(), [0.92 - 0.16 * number] * len(at)
        top.scatter(at, height, marker="x", s=28, color=RED, transform=transform, label=f"rank {rank} not finite")
    is_any = bool(guilty) or any(drawn)
    finish_axes(top, evidence, "gradient norm")
    finish_axes(bottom, evidence, "step time, s", labels=False)
    return is_any


def _rank_lines(axes: Axes, evidence: Evidence, name: str) -> bool:
    named: dict[int, Series] = {}
    for record in evidence.records:
        for rank, value in record.ranks.get(name, {}).get("worst", []):
            if math.isfinite(number := float(value)):
                named.setdefault(int(rank), []).append((record.iteration, number))
    often = sorted(named, key=lambda rank: -len(named[rank]))[: len(RANK_COLOURS)]
    for colour, rank in zip(RANK_COLOURS, sorted(often), strict=False):
        draw_line(axes, named[rank], colour, f"rank {rank}")
    return bool(often)


def _draw_scale(figure: Figure, evidence: Evidence) -> bool:
    if any(record.in_fp8 is not None for record in evidence.records):
        return _draw_fp8(figure, evidence)
    scales = series(evidence.records, lambda record: record.loss_scale)
    if not scales:
        return False
    axes = figure.subplots()
    draw_line(axes, scales, BLUE, "loss scale")
    overflows = [r for r in evidence.records if r.loss_scale is not None and not math.isfinite(r.grad_norm)]
    draw_dots(axes, series(overflows, lambda record: record.loss_scale), RED, "overflow")
    axes.set_yscale("log", base=2)
    return finish_axes(axes, evidence, "loss scale")


def _draw_fp8(figure: Figure, evidence: Evidence) -> bool:
    """Top: shares of underflow and saturation. Bottom: range of the scales' exponents."""
    top, bottom = figure.subplots(2, 1, sharex=True)
    probed = [record for record in evidence.records if record.fp8 and record.fp8_underflow]
    underflow = series(probed, lambda record: max(LEAST_SHARE, *record.fp8_underflow.values()))
    draw_line(top, with_bf16_gaps(underflow, evidence), RED, "underflow, worst layer group")
    draw_dots(top, underflow, RED, "")
    saturated = series(probed, lambda record: max(float(role["saturated"]) for role in record.fp8.values()))
    if any(share > 0 for _, share in saturated):
        draw_dots(top, saturated, INK, "saturated, worst of activations, weights, gradients")
    bound = evidence.run.settings.get("sentinel.detect.fp8_underflow")
    if isinstance(bound, int | float):
        top.axhline(bound, color=GREY, linewidth=0.9, linestyle="--", label=f"finding above {bound:g}")
    for role, colour in zip(("activations", "weights", "gradients"), RANK_COLOURS, strict=False):
        scales = [(record.iteration, record.fp8[role]["scale_log2"]) for record in probed if role in record.fp8]
        if scales:
            at, ends = zip(*scales, strict=True)
            bottom.vlines(at, *zip(*ends, strict=True), color=colour, linewidth=4, alpha=0.45, label=role)
    for number, (first, last) in enumerate(bf16_stretches(evidence.records)):
        for axes in (top, bottom):
            label = "in bf16" if axes is top and number == 0 else None
            axes.axvspan(first - 0.5, last + 0.5, color=GRID, zorder=0.5, label=label)
    finish_axes(top, evidence, "share")
    finish_axes(bottom, evidence, "log2 of scale", labels=False)
    return bool(probed)


def _draw_throughput(figure: Figure, evidence: Evidence) -> bool:
    axes = figure.subplots()
    draw_line(axes, series(evidence.records, lambda record: record.tokens_per_s or None), BLUE, "tokens per second")
    return finish_axes(axes, evidence, "tokens/s", from_zero=True)


def _logarithm(value: float | None) -> float:
    return math.log10(value) if value is not None and 0 < value < math.inf else math.nan


PAINTERS: dict[Panel, Callable[[Any, Evidence], bool]] = {
    Panel.loss: _draw_loss,
    Panel.rate: _draw_rate,
    Panel.gradient: _draw_gradient,
    Panel.activations: _draw_activations,
    Panel.moments: _draw_moments,
    Panel.weights: _draw_weights,
    Panel.token_losses: _draw_token_losses,
    Panel.tokens: _draw_tokens,
    Panel.ranks: _draw_ranks,
    Panel.scale: _draw_scale,
    Panel.throughput: _draw_throughput,
}
