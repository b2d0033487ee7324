"""Renders the terminal view of a run: progress, loss curve, health of the ranks, and the last events.

A pure function from a story and the ranks' heartbeats to lines of text, each with an optional style.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap
from typing import NamedTuple

import numpy as np

from harness.analysis.dashboard.page_data import count_noun, eta_s, short, spell_seconds, state_of, step_of
from harness.analysis.dashboard.series import thin
from harness.analysis.dashboard.story import Mark, MarkKind, Story
from harness.analysis.dashboard.system_load import mean, measured
from harness.telemetry.console import clock, with_prefix
from harness.telemetry.heartbeat import Beat

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = " "
NUM_RECENT = 8
MOST_RANKS = 6
LATE_AFTER = 5
"""Missed heartbeats after which a rank counts as silent."""
WIDE = 80
"""Columns of a terminal from which events are shown in columns."""
MOST_EVENT_LINES = 3
EVENT_NAMES = {
    MarkKind.refused: "gate",
    MarkKind.restored: "recovery",
    MarkKind.intervention: "operator",
    MarkKind.trouble: "checkpoint",
}
"""Names of marks that differ from their kind."""
QUIET_MARKS = (MarkKind.checkpoint, MarkKind.start, MarkKind.end)

STYLES = {
    "running": "cyan",
    "done": "green",
    "halted": "red",
    "crashed": "red",
    MarkKind.refused: "red",
    MarkKind.action: "red",
    MarkKind.trouble: "red",
    MarkKind.restart: "red",
    MarkKind.finding: "yellow",
    MarkKind.intervention: "yellow",
    MarkKind.fault: "magenta",
    MarkKind.restored: "cyan",
}


class Line(NamedTuple):
    text: str
    style: str = ""


def frame(name: str, story: Story, beats: Sequence[Beat], *, now_s: float, width: int) -> list[Line]:
    """All lines of the view, none wider than `width`."""
    state, more = state_of(story, now_s=now_s)
    reason = story.ended.reason if story.ended else ""
    started = story.started
    ranks = count_noun(started.world_size, "rank") if started else ""
    head = [part for part in (f"{name}: {state}", more, reason, ranks) if part]
    lines = [Line(text, f"bold {STYLES.get(state, 'yellow')}") for text in fit_parts(head, width, " · ")]
    if started is None:
        return truncate_lines(lines, width)
    lines.append(Line(progress_line(story, width)))
    if story.last:
        lines += [*map(Line, fit_parts(last_step_parts(story), width)), Line(loss_line(story, width))]
    lines += map(Line, fit_parts(goodput_parts(story), width))
    lines += map(Line, fit_parts(cause_parts(story), width))
    lines += map(Line, fit_parts(checkpoints_parts(story), width))
    lines += map(Line, fit_parts(system_parts(story), width))
    lines += rank_lines(beats, now_s=now_s)
    recent = [mark for mark in story.all_marks() if mark.kind not in QUIET_MARKS][-NUM_RECENT:]
    if recent:
        lines += [Line(""), Line("last events", "bold")]
    for mark in recent:
        lines += [Line(text, STYLES.get(mark.kind, "")) for text in event_lines(mark, width)]
    return truncate_lines(lines, width)


def fit_parts(parts: Sequence[str], width: int, separator: str = "  ") -> list[str]:
    """The parts joined, on as many lines as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(separator) + len(part) <= width:
            lines[-1] += separator + part
        else:
            lines.append(part)
    return lines


def event_lines(mark: Mark, width: int) -> list[str]:
    """One event in columns; on a narrow terminal without them. Long texts are wrapped to at most `MOST_EVENT_LINES`."""
    name, text = EVENT_NAMES.get(mark.kind, str(mark.kind)), " ".join(mark.text.split())
    wide = f"{mark.iteration:>9,}  {name:<12}  "
    label, indent = (wide, " " * len(wide)) if width >= WIDE else (f"{mark.iteration:,} {name}: ", "  ")
    return wrap(label + text, width, subsequent_indent=indent, max_lines=MOST_EVENT_LINES, placeholder=" …")


def progress_line(story: Story, width: int) -> str:
    assert story.started is not None
    step, num_steps, left_s = step_of(story), story.started.num_steps, eta_s(story)
    share = min(1.0, step / num_steps) if num_steps else 0.0
    before, after = (
        f"step {step:,}/{num_steps:,} ",
        f" {share:.1%}" + (f"  ETA {clock(left_s)}" if left_s is not None else ""),
    )
    bar_width = max(4, width - len(before) - len(after))
    filled = round(bar_width * share)
    return before + "━" * filled + "─" * (bar_width - filled) + after


def last_step_parts(story: Story) -> list[str]:
    last = story.last
    parts = [f"loss {short(last['loss'])}"]
    if story.eval_loss is not None:
        parts.append(f"held out {short(story.eval_loss)}")
    parts += [f"grad {float(last['grad_norm']):.3g}", f"lr {float(last['lr']):.1e}"]
    parts.append(with_prefix(float(last["tokens_per_s"]), "tok/s"))
    if last.get("mfu") is not None:
        parts.append(f"{last['mfu']:.1%} MFU")
    return parts


def loss_line(story: Story, width: int) -> str:
    """The loss of the whole run, its highest value in each column, cut at the highest loss after the first tenth."""
    curve_width = max(4, width - len("loss ") - 20)
    highs = thin(story.steps, most=curve_width).highs.get("loss")
    if highs is None:
        return "loss: no finite value"
    later = highs[len(highs) // 10 :]
    least, greatest = (
        float(np.nanmin(highs)),
        float(np.nanmax(later) if not np.isnan(later).all() else np.nanmax(highs)),
    )
    return f"loss {sparkline(highs.tolist(), least, greatest)} {least:.3g} to {greatest:.3g}"


def sparkline(values: Sequence[float], least: float, greatest: float) -> str:
    """One block character for each value between the limits; NaN is a gap."""
    scale = (len(BLOCKS) - 1) / (greatest - least) if greatest > least else 0.0
    places = [None if math.isnan(value) else round((min(value, greatest) - least) * scale) for value in values]
    return "".join(GAP if place is None else BLOCKS[max(0, place)] for place in places)


def goodput_parts(story: Story) -> list[str]:
    total = story.accounts.total()
    num_open = story.incidents.num_open
    return [
        f"goodput {total.of_time:.1%}",
        f"lost to recovery {total.lost_to_recovery:.2%}",
        count_noun(len(story.incidents), "incident") + (f" ({num_open} open)" if num_open else ""),
        f"{count_noun(total.num_refused, 'update')} rejected",
        f"{count_noun(total.num_undone, 'step')} undone",
    ]


def cause_parts(story: Story) -> list[str]:
    """The causes of most of the lost time; empty if nothing worth a line was lost."""
    causes = story.accounts.total().main_causes
    return [f"lost to {causes[0]}", *causes[1:]] if causes else []


def system_parts(story: Story) -> list[str]:
    """The newest load of the first machine: means over its GPUs, host memory, CPU load.

    Empty without samples, and after the end of the run.
    """
    sample = story.system.latest
    if sample is None or story.ended is not None:
        return []
    used, installed = sample.host_memory_bytes, sample.host_memory_total_bytes
    utilization, memory = measured(sample.gpu_utilization), measured(sample.gpu_memory_bytes)
    power, temperature = measured(sample.gpu_power_w), measured(sample.gpu_temperature_c)
    parts = [f"GPU {mean(utilization):.0%}"] if utilization else []
    parts += [f"GPU memory {with_prefix(mean(memory), 'B')}"] if memory else []
    parts += [f"{mean(power):.0f} W"] if power else []
    parts += [f"{max(temperature):.0f} °C"] if temperature else []
    is_known = used is not None and installed is not None
    parts += [f"host memory {with_prefix(used or 0, 'B')} of {with_prefix(installed or 0, 'B')}"] if is_known else []
    return [*parts, f"CPU load {sample.cpu_load:.0%} of the cores"]


def checkpoints_parts(story: Story) -> list[str]:
    marks = story.marks.get(MarkKind.checkpoint, ())
    if not marks:
        return ["checkpoints: none yet"]
    return [f"saved {count_noun(story.num_checkpoints, 'checkpoint')}", f"latest: {marks[-1].text}"]


def rank_lines(beats: Sequence[Beat], *, now_s: float) -> list[Line]:
    """How many ranks are alive, and those that are silent or lag behind; empty without heartbeats."""
    if not beats:
        return []
    ended = [beat for beat in beats if beat.exit_code is not None]
    silent = [beat for beat in beats if beat.exit_code is None and now_s - beat.time > LATE_AFTER * beat.every_s]
    furthest = max(beat.iteration for beat in beats)
    alive = len(beats) - len(ended) - len(silent)
    counts = [f"{alive} alive"] + [f"{len(ended)} ended"] * bool(ended) + [f"{len(silent)} silent"] * bool(silent)
    hosts = count_noun(len({beat.host for beat in beats}), "host")
    lines = [Line(f"ranks {', '.join(counts)}, on {hosts}", "red" if silent else "")]
    behind = [beat for beat in beats if beat not in silent and beat.iteration < furthest - 1]
    for beat in [*silent, *behind][:MOST_RANKS]:
        age = spell_seconds(max(0.0, now_s - beat.time))
        lines.append(
            Line(f"  rank {beat.rank} on {beat.host}: {beat.phase}, iteration {beat.iteration:,}, {age} ago", "yellow")
        )
    return lines


def truncate_lines(lines: list[Line], width: int) -> list[Line]:
    """Lines truncated to `width`, with control characters replaced by spaces."""
    printable = [Line("".join(char if char.isprintable() else " " for char in line.text), line.style) for line in lines]
    return [Line(text if len(text) <= width else f"{text[: width - 1]}…", style) for text, style in printable]
