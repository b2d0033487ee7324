"""Config section `data`: sources, mixture, phases, stratification."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from harness.config.errors import require, require_duration


class DataKind(StrEnum):
    """Where the tokens of a source come from."""

    embedded = "embedded"
    synthetic = "synthetic"
    files = "files"


class TokenDtype(StrEnum):
    """Integer type of a flat token file."""

    auto = "auto"
    uint8 = "uint8"
    uint16 = "uint16"
    uint32 = "uint32"
    int32 = "int32"
    int64 = "int64"


def may_change_next_batch(key: str) -> bool:
    """Whether a resume with another value of this key of `data` may give the next batch other tokens. Added files are
    read after the current pass, moved files contain the same, and `data.remote` is about a cache."""
    return key.startswith("data.") and not key.startswith("data.remote.") and not key.endswith((".paths", ".files"))


@dataclass(slots=True, kw_only=True)
class SyntheticConfig:
    """A generated corpus with Zipf-distributed tokens and a tail of rare tokens."""

    num_samples: int
    """Sequences in the corpus, training and held-out together."""
    zipf_exponent: float
    """The frequency of the k-th most common token is proportional to k ** -exponent."""
    repeat_probability: float
    """Probability, 0 to 1, that a token is the fixed successor of the one before: what a model can learn beyond
    frequencies."""
    rare_tokens: int
    """Size of the tail: this many highest token ids occur only as rare tokens."""
    rare_probability: float
    """Probability, 0 to 1, that a position holds a token of the tail."""

    def __post_init__(self) -> None:
        require(self.num_samples >= 3, "data.synthetic.num_samples", f"must be at least 3, got {self.num_samples}")
        require(self.zipf_exponent >= 0, "data.synthetic.zipf_exponent", f"must be 0 or more, got {self.zipf_exponent}")
        require(self.rare_tokens >= 0, "data.synthetic.rare_tokens", f"must be 0 or more, got {self.rare_tokens}")
        for name in ("repeat_probability", "rare_probability"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"data.synthetic.{name}", f"must be from 0 to 1, got {value}")
        message = "must be at least 1 if data.synthetic.rare_probability is above 0, got 0"
        require(self.rare_tokens > 0 or self.rare_probability == 0, "data.synthetic.rare_tokens", message)


@dataclass(slots=True, kw_only=True)
class SourceConfig:
    """One data source of the mixture."""

    kind: DataKind
    """embedded: English text from the Python installation; synthetic: a generated corpus; files: tokens on disk."""
    weight: float = 1.0
    """Share of the samples, relative to the other sources."""
    seed: int | None = None
    """Seed of the sample order, and of the content of a synthetic source; null: derived from run.seed and the name of
    the source."""
    paths: list[str] = field(default_factory=list)
    """files only: Megatron prefixes, .bin or .npy files, globs; on disk, or as URLs of an object store (s3://, gs://)."""
    dtype: TokenDtype = TokenDtype.auto
    """files only: integer type of a flat .bin without a header; auto: from the file's own header, else uint16."""


@dataclass(slots=True, kw_only=True)
class PhaseConfig:
    """A planned change of the mixture."""

    from_batch: int
    """The first batch index with these weights."""
    weights: dict[str, float]
    """Source -> weight; 0: off. A source that is not listed keeps its weight."""


@dataclass(slots=True, kw_only=True)
class StratifyConfig:
    """Spreads rare tokens over the batches."""

    rare_below: int
    """A token with fewer occurrences in the training data of all sources is rare; 0: off. Rank 0 scans the data at the
    first start."""
    max_per_batch: int
    """Maximum occurrences of one rare token in one global batch; a sequence that alone holds more is the only one with
    that token in its batch."""

    def __post_init__(self) -> None:
        require(self.rare_below >= 0, "data.stratify.rare_below", f"must be 0 (off) or more, got {self.rare_below}")
        message = f"must be at least 1, got {self.max_per_batch}"
        require(self.max_per_batch >= 1, "data.stratify.max_per_batch", message)


MIN_CACHE_BLOCKS = 16
"""Blocks that a limited cache must hold at least."""


@dataclass(slots=True, kw_only=True)
class RemoteDataConfig:
    """Cache of token files in an object store (paths such as s3://bucket/corpus/*.bin)."""

    cache_dir: str | None = None
    """Local directory of the cache, shared by all ranks and runs of a machine. null: pretraining-harness/corpora in
    $XDG_CACHE_HOME or ~/.cache."""
    cache_gb: float | None = None
    """Limit of the whole cache directory in GiB; the least recently used blocks are freed first. It should hold the
    blocks of data.remote.ahead_batches batches of all ranks of the machine. null: no limit, up to the size of the
    corpora."""
    block_kb: int = 1024
    """Size of a block in KiB: what one request fetches and one hash covers."""
    ahead_batches: int = 16
    """Batches whose blocks are fetched in advance, in the background."""
    retry_s: float = 120.0
    """Seconds for which a failed request is repeated, with growing pauses; after that the run exits with 75. Should be
    below launch.hang_after_s, because ranks that wait for data make no progress."""

    def __post_init__(self) -> None:
        message = f"must be 64 to 65536, got {self.block_kb}"
        require(64 <= self.block_kb <= 65536, "data.remote.block_kb", message)
        least = MIN_CACHE_BLOCKS * self.block_kb / 2**20
        message = (
            f"must hold at least {MIN_CACHE_BLOCKS} blocks of data.remote.block_kb ({least:g}), got {self.cache_gb}"
        )
        is_enough = self.cache_gb is None or least <= self.cache_gb < math.inf
        require(is_enough, "data.remote.cache_gb", message)
        message = f"must be 0 or more, got {self.ahead_batches}"
        require(self.ahead_batches >= 0, "data.remote.ahead_batches", message)
        valid = 0 <= self.retry_s < math.inf
        require(valid, "data.remote.retry_s", f"must be 0 or more, and finite, got {self.retry_s}")
        require_duration(self.retry_s, "data.remote.retry_s")

    def limit_bytes(self) -> int | None:
        """Limit of the cache directory in bytes; None: no limit."""
        return None if self.cache_gb is None else int(self.cache_gb * 2**30)


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """Sources of tokens and how they are mixed."""

    eval_fraction: float
    """Share of each source's samples that is held out, 0 to 1; never used for training."""
    document_mask: bool
    """Mask attention and targets across documents. Files without an .idx (flat .bin, .npy) need `data.eod_token`. The
    mask is block-sparse on a GPU, except in fp32 and for sequence lengths that are not multiples of 128."""
    eod_token: int | None = None
    """Id of the token that ends a document in files without an .idx, and belongs to it; null: each such file is one
    document. Sources with document boundaries of their own (.idx) ignore it."""
    sources: dict[str, SourceConfig]
    """Name -> source."""
    phases: list[PhaseConfig]
    """Changes of the weights, in order of batch index; evaluation always uses the weights of the sources."""
    stratify: StratifyConfig
    synthetic: SyntheticConfig
    """Settings of all synthetic sources, which differ only in their seeds."""
    remote: RemoteDataConfig = field(default_factory=RemoteDataConfig)

    def __post_init__(self) -> None:
        require(0 < self.eval_fraction < 1, "data.eval_fraction", f"must be between 0 and 1, got {self.eval_fraction}")
        require(bool(self.sources), "data.sources", "must name at least one source")
        for name, source in self.sources.items():
            check_source(name, source)
        check_phases(self.phases, self.sources)


def check_source(name: str, source: SourceConfig) -> None:
    """Check the name and the values of a source."""
    key = f"data.sources.{name}"
    message = f"the name of a source must consist of letters, digits, _ and -, got {name!r}"
    require(re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None, "data.sources", message)
    require(0 < source.weight < math.inf, f"{key}.weight", f"must be positive, got {source.weight}")
    valid = source.seed is None or 0 <= source.seed < 2**63
    require(valid, f"{key}.seed", f"must be from 0 to 2**63 - 1, or null, got {source.seed}")
    if source.kind is DataKind.files:
        require(bool(source.paths), f"{key}.paths", "must name at least one file, prefix or glob for kind=files")
    else:
        require(not source.paths, f"{key}.paths", f"must be empty for kind={source.kind}, got {source.paths}")


def check_phases(phases: list[PhaseConfig], sources: dict[str, SourceConfig]) -> None:
    """Check that phases are in order, name existing sources and leave a source with a weight."""
    weights = {name: source.weight for name, source in sources.items()}
    too_large = "the weights must have a finite sum; make them smaller, only their ratios count"
    require(sum(weights.values()) < math.inf, "data.sources", too_large)
    earlier = -1
    for number, phase in enumerate(phases):
        key = f"data.phases[{number}]"
        message = f"must be above {earlier}, the start of the phase before, got {phase.from_batch}"
        require(phase.from_batch >= 0, f"{key}.from_batch", f"must be 0 or more, got {phase.from_batch}")
        require(phase.from_batch > earlier, f"{key}.from_batch", message)
        earlier = phase.from_batch
        for name, weight in phase.weights.items():
            require(name in sources, f"{key}.weights", f"no source {name!r}; choose one of {', '.join(sources)}")
            require(0 <= weight < math.inf, f"{key}.weights.{name}", f"must be 0 (off) or more, got {weight}")
        weights |= phase.weights
        require(any(weights.values()), f"{key}.weights", "must leave at least one source with a weight above 0")
        require(sum(weights.values()) < math.inf, f"{key}.weights", too_large)
