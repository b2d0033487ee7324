"""Config section `data`: sources, mixture, phases, stratification."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from harness.config.errors import require


class DataKind(StrEnum):
    embedded = "embedded"
    synthetic = "synthetic"
    files = "files"


class TokenDtype(StrEnum):
    auto = "auto"
    uint8 = "uint8"
    uint16 = "uint16"
    uint32 = "uint32"
    int32 = "int32"
    int64 = "int64"


@dataclass(slots=True, kw_only=True)
class SyntheticConfig:
    num_samples: int
    """Training and held-out sequences in the corpus."""
    zipf_exponent: float
    """Frequency of the k-th common token falls as k ** -exponent."""
    repeat_probability: float
    """How often the next token is the fixed successor of the last one: what there is to learn beyond frequencies."""
    rare_tokens: int
    """Size of the tail: that many highest token ids never occur in the bulk."""
    rare_probability: float
    """How often a position holds a token of the tail."""

    def __post_init__(self) -> None:
        require(self.num_samples >= 3, "data.synthetic.num_samples", f"must be at least 3, got {self.num_samples}")
        require(self.zipf_exponent >= 0, "data.synthetic.zipf_exponent", f"must be 0 or more, got {self.zipf_exponent}")
        require(self.rare_tokens >= 0, "data.synthetic.rare_tokens", f"must be 0 or more, got {self.rare_tokens}")
        for name in ("repeat_probability", "rare_probability"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"data.synthetic.{name}", f"must be in 0 .. 1, got {value}")
        message = "must be at least 1 where data.synthetic.rare_probability is above 0, got 0"
        require(self.rare_tokens > 0 or self.rare_probability == 0, "data.synthetic.rare_tokens", message)


@dataclass(slots=True, kw_only=True)
class SourceConfig:
    kind: DataKind
    """embedded: English text that every Python installation carries; synthetic: a corpus with a controllable tail;
    files: tokens on disk."""
    weight: float = 1.0
    """How many samples this source gives, relative to the others."""
    seed: int | None = None
    """Order of the samples, and content of synthetic ones; null: from run.seed and the name of the source."""
    paths: list[str] = field(default_factory=list)
    """files only: Megatron prefixes, .bin or .npy files, globs."""
    dtype: TokenDtype = TokenDtype.auto
    """files only: what a flat .bin without a header holds; auto: what the file itself says, or uint16."""


@dataclass(slots=True, kw_only=True)
class PhaseConfig:
    from_batch: int
    """The first batch index with these weights."""
    weights: dict[str, float]
    """Source -> weight; 0: off. A source that is not named keeps the weight it had."""


@dataclass(slots=True, kw_only=True)
class StratifyConfig:
    rare_below: int
    """A token with fewer occurrences in the training data is rare; 0: off. Rank 0 scans the data at the first start."""
    max_per_batch: int
    """Most occurrences of any one rare token in one global batch."""

    def __post_init__(self) -> None:
        require(self.rare_below >= 0, "data.stratify.rare_below", f"must be 0 (off) or more, got {self.rare_below}")
        message = f"must be at least 1, got {self.max_per_batch}"
        require(self.max_per_batch >= 1, "data.stratify.max_per_batch", message)


@dataclass(slots=True, kw_only=True)
class DataConfig:
    eval_fraction: float
    """Share of each source's samples held out; disjoint from training by construction."""
    document_mask: bool
    """No attention and no target across documents; refused for files without document boundaries (flat .bin, .npy)."""
    sources: dict[str, SourceConfig]
    """Name -> where tokens come from."""
    phases: list[PhaseConfig]
    """Changes of the weights, in order; evaluation always mixes by the weights of the sources."""
    stratify: StratifyConfig
    synthetic: SyntheticConfig
    """Shared by all synthetic sources; they differ by their seeds."""

    def __post_init__(self) -> None:
        require(0 < self.eval_fraction < 1, "data.eval_fraction", f"must be between 0 and 1, got {self.eval_fraction}")
        require(bool(self.sources), "data.sources", "must name at least one source")
        for name, source in self.sources.items():
            check_source(name, source)
        check_phases(self.phases, self.sources)
        message = (
            f"must be 0 (off) for a mixture: it orders the batches of one source, and there are {len(self.sources)}"
        )
        require(self.stratify.rare_below == 0 or len(self.sources) == 1, "data.stratify.rare_below", message)


def check_source(name: str, source: SourceConfig) -> None:
    """Refuse what no source can be."""
    key = f"data.sources.{name}"
    message = f"names of sources are letters, digits, _ and -, got {name!r}"
    require(re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None, "data.sources", message)
    require(0 < source.weight < math.inf, f"{key}.weight", f"must be positive, got {source.weight}")
    valid = source.seed is None or 0 <= source.seed < 2**63
    require(valid, f"{key}.seed", f"must be in 0 .. 2**63 - 1 or null, got {source.seed}")
    if source.kind is DataKind.files:
        require(bool(source.paths), f"{key}.paths", "must name at least one file, prefix or glob for kind=files")
    else:
        require(not source.paths, f"{key}.paths", f"must be empty for kind={source.kind}, got {source.paths}")


def check_phases(phases: list[PhaseConfig], sources: dict[str, SourceConfig]) -> None:
    """Refuse phases out of order, of unknown sources, or that leave nothing to read."""
    weights = {name: source.weight for name, source in sources.items()}
    earlier = -1
    for number, phase in enumerate(phases):
        key = f"data.phases[{number}]"
        message = f"must be above {earlier}, where the phase before begins, got {phase.from_batch}"
        require(phase.from_batch >= 0, f"{key}.from_batch", f"must be 0 or more, got {phase.from_batch}")
        require(phase.from_batch > earlier, f"{key}.from_batch", message)
        earlier = phase.from_batch
        for name, weight in phase.weights.items():
            require(name in sources, f"{key}.weights", f"no source {name!r}; there are {', '.join(sources)}")
            require(0 <= weight < math.inf, f"{key}.weights.{name}", f"must be 0 (off) or more, got {weight}")
        weights |= phase.weights
        require(any(weights.values()), f"{key}.weights", "must leave a source with a weight above 0")
