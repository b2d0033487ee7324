"""A scenario: what is broken, what is expected of the run, and within which bounds; types for `conf/drill/*.yaml`.

How: `conf/drill/base.yaml` holds what all share, a scenario's own file what is different; its `train` follows that of
the base. Overrides of the command line that begin with `drill.` change the scenario, all others the training.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from harness.config import compose
from harness.config.errors import ConfigError, require
from harness.core.events import ActionKind, FindingKind
from harness.faults.plan import Fault, FaultPlan

GROUP = "drill"
"""The folder of `conf/`, and what the overrides of a scenario begin with."""


@final
@dataclass(slots=True, kw_only=True)
class Expected:
    """What a run should find and do."""

    findings: list[FindingKind] = field(default_factory=list)
    """Any of them counts as detected; empty: the sentinel is to find nothing, as when a process is killed."""
    notices: list[str] = field(default_factory=list)
    """What the launcher or the run must have said, in these words, each of them; {rank} is the rank that was struck."""
    names_rank: bool = False
    """A finding, or else a notice, names the rank that was struck."""
    groups: list[str] = field(default_factory=list)
    """Layer groups that a finding must name, these and no others; empty: none."""
    actions: list[ActionKind] = field(default_factory=list)
    """Those taken, watching and checking left out, must be among these, and the first of them must be the first; empty:
    none may be taken."""
    starts: int = 1
    """How often the run is started until it is done."""
    exit_code: int = 0
    """Of the last start."""

    def __post_init__(self) -> None:
        require(self.starts >= 1, "drill.expected.starts", f"must be at least 1, got {self.starts}")
        valid = not self.names_rank or bool(self.findings or self.notices)
        require(valid, "drill.expected.names_rank", "needs drill.expected.findings or notices that could name it")


@final
@dataclass(slots=True, kw_only=True)
class Bounds:
    """Where a number must stay; null: anywhere."""

    latency_steps: float | None = None
    """Iterations from the strike to the first expected finding."""
    steps_lost: float | None = None
    """Steps trained again or refused."""
    seconds: float | None = None
    """Spent on recovery: in restores, or from the end of one start to the first new step of the next."""
    loss_gap: float | None = None
    """Nats of held-out loss at the end above the twin's."""
    identical: bool = False
    """The last loss equals the twin's, bit for bit."""
    false_alarms: int = 0
    """Findings in the twin."""
    excluded: int | None = None
    """Batches that are excluded for good."""

    def __post_init__(self) -> None:
        for name in ("latency_steps", "steps_lost", "seconds", "loss_gap"):
            value = getattr(self, name)
            valid = value is None or (value >= 0 and math.isfinite(value))
            require(valid, f"drill.bounds.{name}", f"must be 0 or more, or null, got {value}")


@final
@dataclass(slots=True, kw_only=True)
class Scenario:
    summary: str
    """One line for `harness drill list`."""
    fault: Fault
    expected: Expected
    bounds: Bounds
    train: list[str]
    """Overrides of the training that the fault needs; the command line has the last word."""
    seed: int = 0
    """Of what the fault leaves to chance."""
    limit_s: float = 600.0
    """How long one start may take before it is killed."""

    def __post_init__(self) -> None:
        require(0 < self.limit_s < math.inf, "drill.limit_s", f"must be positive, got {self.limit_s}")

    @property
    def plan(self) -> FaultPlan:
        return FaultPlan(seed=self.seed, faults=[self.fault])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def names() -> tuple[str, ...]:
    """All scenarios there are."""
    return compose.options_of(GROUP)


def load(name: str, overrides: Sequence[str] = ()) -> Scenario:
    """A scenario by its name, changed by those overrides that begin with `drill.`."""
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(GROUP, f"no {name!r}; choose among {', '.join(names())}, or all{hint}")
    folder = compose.conf_dir() / GROUP
    base, own = (compose.read_tree(folder / f"{each}.yaml") for each in (compose.BASE, name))
    own["train"] = [*base.get("train", []), *own.get("train", [])]
    return compose.typed(Scenario, GROUP, [base, own], [each for each in overrides if is_of_scenario(each)])


def is_of_scenario(override: str) -> bool:
    """Whether an override changes the scenario, and not the training."""
    return override.lstrip("+~").startswith(f"{GROUP}.")


def from_tree(tree: Mapping[str, Any]) -> Scenario:
    """A scenario as it lies in `drill.json`."""
    return compose.typed(Scenario, GROUP, [tree], [])
