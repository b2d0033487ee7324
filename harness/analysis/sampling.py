"""Generates text from a checkpoint of a run, in one process and without FSDP.

How: the checkpoint is verified and its shards are read as whole tensors, whatever number of ranks saved them. Each new
token costs one forward pass over the last `train.sequence_length` tokens. The model computes in the precision of the
run on a GPU (fp8 runs in bf16), and in fp32 on the CPU. Random numbers are drawn on the CPU, so that a seed gives the
same draws on every device.
Left out: a KV cache, batches of prompts, beam search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from harness.checkpoint import integrity, store
from harness.checkpoint.catalog import Checkpoint
from harness.checkpoint.integrity import Damaged
from harness.config.data import DataKind
from harness.config.errors import ConfigError, require
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.data.batch_view import tokenizer_beside
from harness.data.corpus.remote_cache import use_cache
from harness.data.corpus.token_files import expand
from harness.data.prepare.prepared_files import CorpusFiles
from harness.data.prepare.tokenizer import ByteTokenizer, Tokenizer
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import DTYPES, linear


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen."""

    num_tokens: int
    """Tokens to generate, at most."""
    temperature: float
    """Divides the logits; 0: always the most likely token."""
    top_k: int
    """Number of most likely tokens to choose from; 0: all."""
    seed: int

    def __post_init__(self) -> None:
        require(self.num_tokens >= 1, "--tokens", f"must be at least 1, got {self.num_tokens}")
        require(
            self.temperature >= 0, "--temperature", f"must be 0 (most likely token) or more, got {self.temperature}"
        )
        require(self.top_k >= 0, "--top-k", f"must be 0 (all tokens) or more, got {self.top_k}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TextCodec:
    """The tokenizer of a run, and its end-of-document token."""

    tokenizer: Tokenizer
    end_token: int | None = None


def find_codec(cfg: Config) -> TextCodec:
    """The tokenizer of the data of a run; `ConfigError` if the data is not text."""
    files = [name for source in cfg.data.sources.values() for name in source.paths if source.kind is DataKind.files]
    if not files:
        is_text = any(source.kind is DataKind.embedded for source in cfg.data.sources.values())
        require(is_text, "data.sources", "must hold text for a prompt; this run trained on synthetic tokens")
        return TextCodec(tokenizer=ByteTokenizer())
    use_cache(cfg.data.remote)
    first = expand(files, key="data.sources")[0]
    tokenizer = tokenizer_beside(first)
    if tokenizer is None:
        beside = CorpusFiles(first.with_suffix("")).tokenizer
        raise ConfigError("data.sources", f"no tokenizer beside the data of this run; copy it to {beside}")
    meta = CorpusFiles(first.with_suffix("")).read_meta()
    name = None if meta is None else meta["options"].get("append_eod")
    return TextCodec(tokenizer=tokenizer, end_token=None if name is None else tokenizer.eod(name))


def encode_prompt(codec: TextCodec, prompt: str, *, cfg: Config) -> list[int]:
    """The tokens of a prompt; `ConfigError` if the model cannot take them."""
    tokens = [int(token) for token in codec.tokenizer.encode([prompt])[0]]
    length, vocab_size = cfg.train.sequence_length, cfg.model.vocab_size
    message = f"has {len(tokens)} tokens; the context of this model is {length} (train.sequence_length)"
    require(len(tokens) <= length, "--prompt", message)
    message = f"contains token {max(tokens)}; the vocabulary of this model ends at {vocab_size - 1}"
    require(max(tokens) < vocab_size, "--prompt", message)
    return tokens


def choose_device(name: str) -> torch.device:
    """The device of `--device`: auto is the first GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    require(name != "cuda" or has_gpu, "--device", "no CUDA device on this machine; choose cpu or auto")
    return torch.device("cuda" if name != "cpu" and has_gpu else "cpu")


def load_model(checkpoint: Path, cfg: Config, *, device: torch.device) -> Transformer:
    """The model with the weights of a checkpoint."""
    kind = cfg.precision.kind
    dtype = torch.float32 if device.type == "cpu" else DTYPES[PrecisionKind.bf16 if kind is PrecisionKind.fp8 else kind]
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=cfg.train.sequence_length, linear=linear)
    model.to_empty(device=device)
    model.init_buffers()
    parameters = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    try:
        integrity.verify(checkpoint)
        index = store.read_index(checkpoint, {name: parameter.shape for name, parameter in parameters.items()})
    except Damaged as error:
        raise ConfigError("", str(error)) from None
    with torch.no_grad():
        for name, parameter in parameters.items():
            weight = store.read_tensors(checkpoint, [name], index)[name]
            parameter.data = weight.to(device=device, dtype=dtype)
    return model.eval()


@torch.no_grad()
def generate(model: Transformer, prompt: Sequence[int], options: SamplingOptions) -> Iterator[int]:
    """New tokens after a prompt, one at a time; the model reads the last `sequence_length` tokens."""
    device = model.cos.device
    random = torch.Generator(device="cpu").manual_seed(options.seed)
    tokens = list(prompt)
    for _ in range(options.num_tokens):
        window = torch.tensor([tokens[-model.sequence_length :]], device=device)
        logits = model.logits(window)[0, -1].float().cpu()
        token = choose_token(logits, options, random)
        tokens.append(token)
        yield token


def choose_token(logits: Tensor, options: SamplingOptions, random: torch.Generator) -> int:
    """Draw the next token from its logits."""
    if not torch.isfinite(logits).all():
        raise ConfigError("", "the model computes NaN or Inf: the weights of this checkpoint are damaged")
    scaled = logits / options.temperature
    if not torch.isfinite(scaled).all():  # 0, or so low that fp32 overflows
        return int(logits.argmax())
    if 0 < options.top_k < scaled.numel():
        least = scaled.topk(options.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    return int(torch.multinomial(scaled.softmax(dim=-1), 1, generator=random))


def sample_text(
    checkpoint: Checkpoint, cfg: Config, prompt: str, options: SamplingOptions, *, device: torch.device
) -> str:
    """The text that the model writes after a prompt, up to the end of a document."""
    codec = find_codec(cfg)
    tokens = encode_prompt(codec, prompt, cfg=cfg)
    model = load_model(checkpoint.path, cfg, device=device)
    written: list[int] = []
    for token in generate(model, tokens, options):
        if token == codec.end_token:
            break
        written.append(token)
    return codec.tokenizer.decode(written)
