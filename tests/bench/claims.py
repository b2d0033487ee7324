"""Every measured figure of the README and the docs, with the command that measures it.

    python -m tests.bench.claims            print all claims
    python -m tests.bench.claims --write    write docs/claims.md

The convention. `docs/claims.yaml` lists measurements: command, date, hardware, and where it was shown. On a page, a
comment in front of a paragraph, list or table names the measurements that its figures come from:

    <!-- claims: gpu-table-1b -->
    | | tokens/s | peak GiB |

A comment followed by an empty line applies to its section and the sections below. If numbers are limits, defaults or
arithmetic, the comment says so instead: `<!-- no claim: defaults of the lease -->`. `tests/bench/test_claims.py` fails
on a block that looks measured and has no comment, on a command that does not exist, and on two values for one quantity.
docs/lab-notes.md is excluded: it records experiments and claims nothing about the current code.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import yaml

ROOT = Path(__file__).parents[2]
SOURCE, PAGE = ROOT / "docs/claims.yaml", ROOT / "docs/claims.md"
EXCLUDED_PAGES = ("docs/claims.md", "docs/lab-notes.md")
SHOWN_ON = {
    "cpu": "CPU, one process",
    "gloo": "CPU ranks over gloo",
    "gpu": "one GPU",
    "nccl": "several NCCL ranks",
    "slurm": "a real Slurm",
    "model": "a model of the cost, not a measurement",
}
MARKER = re.compile(r"^<!-- (claims|no claim): (.+) -->$")
NO_COMMENT = ("", "")
MOST_LISTED = 12
"""Figures of a section that are repeated on the page of claims; more are only counted there."""
NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = r"(?:M?tokens/s|TFLOP/s|TB/s|GB/s|GiB|MiB|GB|MB|ms|us|s|seconds|minutes|nats|%|times)"
FIGURE = re.compile(rf"(?<![\w.^])(?:{NUMBER} ?{UNIT}(?![\w/])|{NUMBER}x(?!\w)|x{NUMBER}(?!\w)|{NUMBER}-fold)")
"""In prose: a number with a unit, or a ratio such as 3.3x."""
CELL = re.compile(rf"(?<![\w.^]){NUMBER}(?: ?{UNIT}(?![\w/])|x)?(?![\w]|\.\d)")
CODE = re.compile(r"`[^`]*`")


class Block(NamedTuple):
    """A paragraph, a list, or a table of a page."""

    page: str
    heading: str
    line: int
    text: str
    kind: str
    """Kind of its comment: "claims" or "no claim"; empty if it has no comment."""
    comment: str
    """Text of its comment."""

    @property
    def is_table(self) -> bool:
        return self.text.startswith("|")

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(self.comment.replace(",", " ").split()) if self.kind == "claims" else ()

    @property
    def figures(self) -> tuple[str, ...]:
        """All numbers of a table's body; in prose those with a unit, and ratios."""
        if not self.is_table:
            return tuple(FIGURE.findall(CODE.sub(" ", self.text)))
        cells = [CODE.sub(" ", cell) for line in self.text.splitlines()[2:] for cell in line.split("|")[2:-1]]
        return tuple(number for cell in cells for number in CELL.findall(cell))

    @property
    def looks_measured(self) -> bool:
        """False for a table of integers only, such as exit codes."""
        return any(not figure.lstrip("+-").isdigit() for figure in self.figures)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement."""

    name: str
    what: str
    shown_on: str
    hardware: str
    date: str
    commands: tuple[str, ...]
    quantities: dict[str, str]
    """Name -> value. A quantity must not have two values; each value appears in a block that names this run."""


def load_runs(path: Path = SOURCE) -> dict[str, Run]:
    listed = yaml.safe_load(path.read_text(encoding="utf-8"))["measurements"]
    return {
        name: Run(
            name=name,
            what=entry["what"],
            shown_on=entry["shown_on"],
            hardware=entry["hardware"],
            date=str(entry["date"]),
            commands=tuple(entry["commands"]),
            quantities={key: str(value) for key, value in entry.get("quantities", {}).items()},
        )
        for name, entry in listed.items()
    }


def list_pages(root: Path = ROOT) -> list[Path]:
    found = [root / "README.md", *sorted(root.glob("docs/*.md"))]
    return [path for path in found if path.relative_to(root).as_posix() not in EXCLUDED_PAGES]


def parse_blocks(page: str, text: str) -> list[Block]:
    """Split a page into blocks at empty lines, headings, pictures and comments; code is excluded.

    A comment directly before a block applies to that block. A comment followed by an empty line applies to all blocks
    of its section and of the sections below it that have no comment of their own.
    """
    blocks: list[Block] = []
    heading, of_block, is_fenced = "", NO_COMMENT, False
    of_sections = [(0, NO_COMMENT)]
    """Level of a heading and its comment, from the page down to this section."""
    lines = [*text.splitlines(), ""]
    start = 0
    for number, line in enumerate(lines):
        comment = MARKER.match(line)
        is_indented_code = line.startswith("    ") and start == number
        is_separator = (
            not line.strip() or comment is not None or line.startswith(("#", "```", "![")) or is_indented_code
        )
        if not is_separator and not is_fenced:
            continue
        if start < number:
            kind, content = of_block if of_block != NO_COMMENT else of_sections[-1][1]
            blocks.append(Block(page, heading, start + 1, "\n".join(lines[start:number]), kind, content))
            of_block = NO_COMMENT
        start = number + 1
        is_fenced ^= line.startswith("```")
        if comment is not None:
            kind, content = comment.groups()
            if lines[number + 1].strip():
                of_block = (kind, content)
            else:
                of_sections[-1] = (of_sections[-1][0], (kind, content))
        elif line.startswith("#") and not is_fenced:
            heading, of_block = line.lstrip("# "), NO_COMMENT
            level = len(line) - len(line.lstrip("#"))
            while of_sections[-1][0] >= level:
                of_sections.pop()
            of_sections.append((level, of_sections[-1][1]))
    return blocks


def all_blocks(root: Path = ROOT) -> list[Block]:
    return [
        block
        for path in list_pages(root)
        for block in parse_blocks(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    ]


def find_unmarked(blocks: list[Block]) -> list[str]:
    """Blocks with figures that name no measurement."""
    return [
        f"{block.page}:{block.line}: {', '.join(block.figures[:8])}: no measurement is named for these figures"
        for block in blocks
        if block.looks_measured and not block.kind
    ]


def find_contradictions(runs: dict[str, Run]) -> list[str]:
    """Quantities that have two values."""
    seen: dict[str, tuple[str, str]] = {}
    found = []
    for run in runs.values():
        for quantity, value in run.quantities.items():
            before, other = seen.setdefault(quantity, (value, run.name))
            if before != value:
                found.append(f"{quantity}: {before} in {other}, {value} in {run.name}")
    return found


def render(runs: dict[str, Run], blocks: list[Block]) -> str:
    lines = [
        "# Claims",
        "",
        "All measured figures of the README and the docs, with the command that measures them. Generated from",
        "`docs/claims.yaml` and the pages by `python -m tests.bench.claims --write`.",
    ]
    for shown_on, title in SHOWN_ON.items():
        chosen = [run for run in runs.values() if run.shown_on == shown_on]
        if chosen:
            lines += ["", f"## Shown on: {title}"]
        for run in chosen:
            lines += ["", *_render_section(run, [block for block in blocks if run.name in block.runs])]
    return "\n".join(lines) + "\n"


def _render_section(run: Run, blocks: list[Block]) -> Iterator[str]:
    yield f"### {run.name}: {run.what}"
    yield ""
    yield f"{run.hardware}; {run.date}."
    yield ""
    yield from (f"    {command}" for command in run.commands)
    yield ""
    if run.quantities:
        yield "| quantity | value |"
        yield "|---|---|"
        yield from (f"| {quantity} | {value} |" for quantity, value in run.quantities.items())
        yield ""
    figures: dict[tuple[str, str], list[str]] = {}
    for block in blocks:
        figures.setdefault((block.page, block.heading), []).extend(block.figures)
    for (page, heading), listed in figures.items():
        place = f"[{page}, {heading or 'top'}]({link(page, heading)})"
        text = "; ".join(listed) if len(listed) <= MOST_LISTED else f"{len(listed)} figures"
        yield f"- {place}{': ' if text else ''}{text}"


def link(page: str, heading: str) -> str:
    """From a page in docs/ to a heading, whose anchor is the one that GitHub gives it."""
    path = page.removeprefix("docs/") if page.startswith("docs/") else f"../{page}"
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return f"{path}#{anchor}" if anchor else path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.claims", description="Print all claims.")
    parser.add_argument("--write", action="store_true", help="write docs/claims.md instead")
    options = parser.parse_args()
    text = render(load_runs(), all_blocks())
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
