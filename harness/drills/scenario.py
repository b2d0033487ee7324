"""Drill scenarios, the types of `conf/drill/*.yaml`: fault, expected reaction, bounds.

`conf/drill/base.yaml` holds the common values, each scenario file its own; the `train` overrides of a scenario follow
those of the base. Overrides of the command line that start with `drill.` change the scenario, all others the training.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from harness.config import compose, conf_files
from harness.config.errors import ConfigError, require
from harness.config.schema import Config
from harness.core.events import ActionKind, FindingKind
from harness.faults.fault_plan import Fault, FaultPlan

GROUP = "drill"
"""The folder in `conf/`, and the prefix of scenario overrides."""


@final
@dataclass(slots=True, kw_only=True)
class Expected:
    """The expected reaction of a run."""

    findings: list[FindingKind] = field(default_factory=list)
    """Any of these counts as detected; empty: no finding is expected, as when a process is killed."""
    notices: list[str] = field(default_factory=list)
    """Texts that must all occur in the output of the launcher or the run; {rank} is the affected rank."""
    names_rank: bool = False
    """A finding, or else a notice, must name the affected rank."""
    groups: list[str] = field(default_factory=list)
    """Layer groups that a finding must name, exactly these; empty: not checked."""
    actions: list[ActionKind] = field(default_factory=list)
    """Allowed actions, watch and check aside; the first action must be the first of these. Empty: no action is
    allowed."""
    starts: int = 1
    """Number of starts until the run is done, restarts inside the job included."""
    exit_code: int = 0
    """Exit code of the last start."""

    def __post_init__(self) -> None:
        require(self.starts >= 1, "drill.expected.starts", f"must be at least 1, got {self.starts}")
        valid = not self.names_rank or bool(self.findings or self.notices)
        message = "must be false without drill.expected.findings or drill.expected.notices"
        require(valid, "drill.expected.names_rank", message)

    def describe(self) -> str:
        """The expected reaction in words."""
        parts = [f"finding {' or '.join(self.findings)}"] if self.findings else ["no finding"]
        parts += ["the rank is named"] * self.names_rank
        parts += [f"layer group {', '.join(self.groups)}"] * bool(self.groups)
        parts.append(f"action {', then perhaps '.join(self.actions)}" if self.actions else "no action")
        parts += [f"{self.starts} starts"] * (self.starts > 1)
        parts += [f"exit code {self.exit_code}"] * (self.exit_code != 0)
        return ", ".join(parts)


@final
@dataclass(slots=True, kw_only=True)
class Bounds:
    """Upper limits of the measurements; null: no limit."""

    latency_steps: float | None = None
    """Iterations from the first strike to the first expected finding."""
    steps_lost: float | None = None
    """Steps that were trained again or rejected."""
    seconds: float | None = None
    """Recovery time: restores, and from the end of one start to the first step of the next."""
    loss_gap: float | None = None
    """Held-out loss at the end minus that of the twin, in nats per token."""
    identical: bool = False
    """The last losses must equal those of the twin bit for bit."""
    false_alarms: int = 0
    """Findings in the twin."""
    excluded: int | None = None
    """Batches that the ledger excludes."""

    def __post_init__(self) -> None:
        for name in ("latency_steps", "steps_lost", "seconds", "loss_gap"):
            value = getattr(self, name)
            valid = value is None or (value >= 0 and math.isfinite(value))
            require(valid, f"drill.bounds.{name}", f"must be 0 or more, or null, got {value}")

    def describe(self) -> str:
        """The limits in words; empty if there is none."""
        limits = {
            "found within {:g} iterations": self.latency_steps,
            "at most {:g} steps lost": self.steps_lost,
            "at most {:g} s to recover": self.seconds,
            "at most {:g} batches excluded": self.excluded,
            "held-out loss within {:g} nats of a run without the fault": self.loss_gap,
        }
        parts = [text.format(limit) for text, limit in limits.items() if limit is not None]
        parts += ["last losses equal to those of a run without the fault"] * self.identical
        return ", ".join(parts)


@final
@dataclass(slots=True, kw_only=True)
class Scenario:
    """One drill: the fault, the expected reaction and its bounds."""

    summary: str
    """One line for `harness drill list`."""
    fault: Fault
    expected: Expected
    bounds: Bounds
    train: list[str]
    """Training overrides that the fault needs; overrides of the command line come after them."""
    needs: dict[str, Any] = field(default_factory=dict)
    """Config key -> the value without which the drill cannot have the expected reaction; of a number, the least."""
    min_ranks: int = 1
    """The fewest ranks with which it can."""
    seed: int = 0
    """Seed of the random choices of the fault."""
    limit_s: float = 600.0
    """Seconds after which a start is killed."""

    def __post_init__(self) -> None:
        require(0 < self.limit_s < math.inf, "drill.limit_s", f"must be positive, got {self.limit_s}")

    def find_unmet(self, cfg: Config) -> tuple[str, str] | None:
        """The first key of `needs` whose value does not allow the expected reaction, and what it must be."""
        values = compose.flat(compose.plain(cfg))
        for key, needed in self.needs.items():
            is_number, value = type(needed) is int, values[key]
            if not (value >= needed if is_number else value == needed):
                shown, got = (json.dumps(each) if not isinstance(each, str) else each for each in (needed, value))
                return key, f"must be {'at least ' if is_number else ''}{shown}, got {got}"
        return None

    @property
    def needs_nodes(self) -> bool:
        """Whether it trains on several nodes."""
        return any(override.startswith("launch.nodes=") for override in self.train)

    @property
    def plan(self) -> FaultPlan:
        return FaultPlan(seed=self.seed, faults=[self.fault])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def names() -> tuple[str, ...]:
    """Names of all scenarios."""
    return conf_files.options_of(GROUP)


def load_scenario(name: str, overrides: Sequence[str] = ()) -> Scenario:
    """Load a scenario by name, with the overrides that start with `drill.`; others are ignored."""
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(GROUP, f"no scenario {name!r}; choose one of {', '.join(names())}, or all{hint}")
    folder = conf_files.conf_dir() / GROUP
    base, own = (conf_files.read_tree(folder / f"{stem}.yaml") for stem in (conf_files.BASE, name))
    own["train"] = [*base.get("train", []), *own.get("train", [])]
    return compose.load_typed(Scenario, GROUP, [base, own], [text for text in overrides if changes_scenario(text)])


def changes_scenario(override: str) -> bool:
    """Whether an override changes the scenario rather than the training."""
    return override.lstrip("+~").startswith(f"{GROUP}.")


def scenario_from_tree(tree: Mapping[str, Any]) -> Scenario:
    """A scenario from its form in `drill.json`."""
    return compose.load_typed(Scenario, GROUP, [tree], [])
