"""Types of a diagnosis: the questions asked, the answers, the exit code and the fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import final

NOT_LOGGED = "not in the log"
"""Answer to a question that the log cannot answer. It rules nothing out: the walk goes on."""


class Finds(IntEnum):
    """Exit codes of `harness diagnose`."""

    nothing = 0
    not_finite = 10
    spike = 20
    lasting_spike = 21
    overflow = 30
    divergence = 40
    plateau = 41
    """The loss no longer improves: not a divergence."""
    other = 50
    """Something outside the tree's questions: duplicate batches, lost moments, drifting weights."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One question, its answer, and the number behind the answer."""

    question: str
    """Such as Q2.1."""
    text: str
    answer: str
    number: str
    """With its unit and its step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    nodes: list[Node]
    finds: Finds
    conclusion: str
    overrides: list[str] = field(default_factory=list)
    """The fix as overrides of `harness train`; empty: no config key makes it."""
    restore_step: int | None = None
    """Step of the checkpoint to restore before the fix; None: none is needed, or none exists."""
    replay: list[str] = field(default_factory=list)
    """Arguments of the `harness replay` that answers an open question; empty: none is open."""


@final
class Answers:
    """The questions asked so far."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def ask(self, question: str, text: str, answer: str | bool, number: str) -> None:
        """Add a question with its answer; true and false become yes and no."""
        spelled = ("yes" if answer else "no") if isinstance(answer, bool) else answer
        self.nodes.append(Node(question=question, text=text, answer=spelled, number=number))
