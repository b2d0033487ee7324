"""Explains a hang from what the ranks wrote when they were asked: their last collectives, and their stacks.

Each rank's oldest unfinished collective is what it waits for. The collective that most ranks wait for is the one that
hangs. The ranks that have not called it are missing: they wait for something else, run other code, or gave no answer.
Ranks that called different operations, or with different sizes, under the same number are a mismatch.
Pure functions of the files; no torch.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

FRAME = re.compile(r'File "(.+?)", line (\d+) in (\S+)')
OURS = re.compile(r"(?:^|/)((?:harness|launch)/.+\.py)$")
NCCL_BARRIER = "all_reduce_barrier"
"""NCCL has no barrier of its own."""
MOST_NAMED = 8
"""Ranks that a line names one by one."""
KEPT_FINISHED = 20
"""Finished collectives of each group that a dump keeps: a rank that has left the one that hangs is not far ahead."""


class Call(NamedTuple):
    """One collective as one rank called it."""

    group: str
    number: int
    """Counts the collectives of the group."""
    operation: str
    sizes: str
    is_finished: bool

    def describe(self) -> str:
        return f"{self.operation} {self.sizes}".rstrip()


@final
@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What a rank wrote."""

    calls: Sequence[Call] | None
    """In the order of the calls; None if it gave no answer."""
    place: str = ""
    """Where its main thread is, by its stacks."""

    @property
    def waits_for(self) -> Call | None:
        """Its oldest unfinished collective."""
        return next((call for call in self.calls or () if not call.is_finished), None)


def parse_dump(text: str) -> list[Call]:
    """The collectives of a dump of torch's flight recorder. Raises ValueError or KeyError if it is damaged."""
    entries = json.loads(text).get("entries", [])
    return [_call(entry) for entry in entries if not entry.get("is_p2p")]


def shorten_dump(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A dump with all unfinished collectives, and of each group the last finished ones.

    A whole dump has 2,000 collectives. With a thousand ranks, one launcher would need a minute to read them.
    """
    kept: list[Mapping[str, Any]] = []
    num_finished = Counter[tuple[str, ...]]()
    for entry in reversed(recorded.get("entries", [])):
        backend, _, _ = str(entry["profiling_name"]).rpartition(":")
        group = (backend, *entry["process_group"], str(entry.get("is_p2p")))
        num_finished[group] += _is_finished(entry)
        if not _is_finished(entry) or num_finished[group] <= KEPT_FINISHED:
            kept.append(entry)
    return {**recorded, "entries": kept[::-1]}


def _is_finished(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _call(entry: Mapping[str, Any]) -> Call:
    name, description = (*entry["process_group"], "")[:2]
    backend, _, operation = str(entry["profiling_name"]).rpartition(":")
    sizes = "".join(f"[{' x '.join(str(size) for size in shape)}]" for shape in entry.get("input_sizes", []))
    group = " ".join(word for word in (backend, description or "group", name) if word)  # each backend has its own count
    if operation == NCCL_BARRIER:
        operation, sizes = "barrier", ""
    name_of_api = operation.removeprefix("_").removesuffix("_base")
    return Call(group, int(entry["collective_seq_id"]), name_of_api, sizes, _is_finished(entry))


def main_thread_place(stacks: str) -> str:
    """Where the main thread is, by the newest stacks: the innermost line of this package, or the innermost at all."""
    _, _, newest = stacks.rpartition("Current thread")
    frames = FRAME.findall(newest or stacks)
    ours = [(found[1], line, name) for path, line, name in frames if (found := OURS.search(path))]
    if not frames:
        return ""
    path, line, name = ours[0] if ours else (Path(frames[0][0]).name, *frames[0][1:])
    return f"{path}:{line} ({name})"


def explain_hang(answers: Mapping[int, RankAnswer]) -> str:
    """One line: the collective that hangs, the ranks that called it, and the ones that did not; empty if none hangs."""
    waiting = {rank: call for rank, answer in answers.items() if (call := answer.waits_for) is not None}
    if not waiting:
        return ""
    group, number = Counter((call.group, call.number) for call in waiting.values()).most_common(1)[0][0]
    called = {rank: call for rank, answer in answers.items() if (call := _find(answer, group, number)) is not None}
    kinds = Counter((call.operation, call.sizes) for call in called.values())
    usual = next(call for call in called.values() if (call.operation, call.sizes) == kinds.most_common(1)[0][0])
    alike = [rank for rank, call in called.items() if (call.operation, call.sizes) == (usual.operation, usual.sizes)]
    parts = [f"{_ranks(alike)} called {usual.describe()}, number {number} of {group}"]
    parts += [f"rank {rank} called {call.describe()} instead" for rank, call in _first(called) if rank not in alike]
    missing = [rank for rank in sorted(answers) if rank not in called]
    parts += [f"rank {rank} {_describe_missing(answers[rank])}" for rank in missing[:MOST_NAMED]]
    if len(missing) > MOST_NAMED:
        parts.append(f"{len(missing) - MOST_NAMED} more ranks did not call it")
    return "; ".join(parts)


def _find(answer: RankAnswer, group: str, number: int) -> Call | None:
    return next((call for call in answer.calls or () if (call.group, call.number) == (group, number)), None)


def _first(called: Mapping[int, Call]) -> list[tuple[int, Call]]:
    return sorted(called.items())


def _describe_missing(answer: RankAnswer) -> str:
    place = f" at {answer.place}" if answer.place else ""
    if answer.calls is None:
        return f"gave no answer: it is{place}" if place else "gave no answer: its process is stopped"
    if (call := answer.waits_for) is not None:
        return f"did not: it waits for {call.describe()}, number {call.number} of {call.group},{place}".rstrip(",")
    return f"did not: it is{place}" if place else "did not, and waits for no collective"


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 2", "1,023 ranks"."""
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks):,} ranks"
    *first, last = (str(rank) for rank in sorted(ranks))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def read_answers(directory: Path, ranks: Sequence[int]) -> dict[int, RankAnswer]:
    """What the ranks wrote into the directory of their logs."""
    return {rank: _read_answer(directory, rank) for rank in ranks}


def _read_answer(directory: Path, rank: int) -> RankAnswer:
    calls, place = None, ""
    with suppress(OSError):
        place = main_thread_place(stacks_file(directory, rank).read_text(encoding="utf-8", errors="replace"))
    with suppress(OSError, ValueError, KeyError, TypeError):
        calls = parse_dump(dump_file(directory, rank).read_text(encoding="utf-8"))
    return RankAnswer(calls, place)


def dump_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.collectives.json"


def stacks_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.stacks"
