"""Maps the model to Hugging Face's Llama and Qwen3: tensor names, folded weights and config.json.

Why: a model trained here must run wherever Llama runs, and a model trained elsewhere must be trainable here.
How: a model without q/k norm is a Llama, one with it a Qwen3, whose layout is otherwise the same. Features that those
models lack are folded into the weights, so that logits are equal: muP's attention scale into the queries (or their
norm), its output multiplier into the head, the norm after the embedding into the embedding rows. A tied head that would
need other weights than the embedding becomes a matrix of its own.
LayerNorm and post-LN cannot be folded: such a model is rejected.
Left out: unfolding. An exported model is imported as a plain model with the same logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.config.errors import ConfigError, require
from harness.config.model import ModelConfig, NormKind, NormPlacement
from harness.model.mup import attention_scale, output_multiplier
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import linear

EMBEDDING, EMBEDDING_NORM, HEAD = "embedding.weight", "embedding_norm.weight", "head.weight"

ONLY_FILE = "model.safetensors"

NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""Parameter, or module of a block -> its name in Hugging Face's layout."""

FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Keys of a config.json with the only supported value, which is also their default."""

LLAMA_ROPE_THETA = 10000.0
"""rope_theta of a Llama config without the key, which is older than the key."""
DEFAULT_NORM_EPS = 1e-6


class Architecture(StrEnum):
    llama = "LlamaForCausalLM"
    qwen3 = "Qwen3ForCausalLM"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """How a tensor of the exported model is computed from our parameters."""

    parameter: str
    norm: str | None = None
    """Weight of the RMSNorm that is applied to its rows."""
    factor: float = 1.0
    """Multiplies the result."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.parameter,) if self.norm is None else (self.parameter, self.norm)


def require_exportable(cfg: ModelConfig) -> None:
    """Raise `ConfigError` for a model that neither Llama nor Qwen3 can represent."""
    models = "Hugging Face's Llama and Qwen3 have no other"
    require(cfg.norm is NormKind.rms, "model.norm", f"must be rms for an export, got {cfg.norm}; {models}")
    is_pre = cfg.norm_placement is NormPlacement.pre
    require(is_pre, "model.norm_placement", f"must be pre for an export, got {cfg.norm_placement}; {models}")


def hf_name(parameter: str) -> str:
    """The Hugging Face name of a parameter of `Transformer`."""
    if not parameter.startswith("blocks."):
        return NAMES[parameter]
    _, index, module = parameter.removesuffix(".weight").split(".", 2)
    return f"model.layers.{index}.{NAMES[module]}.weight"


def parameter_shapes(cfg: ModelConfig) -> dict[str, torch.Size]:
    """Shape of every parameter, by its name in `Transformer`."""
    with torch.device("meta"):
        model = Transformer(cfg, sequence_length=1, linear=linear)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def exported_tensors(cfg: ModelConfig) -> dict[str, TensorSource]:
    """Every tensor of the exported model, by its Hugging Face name."""
    origins = {
        hf_name(parameter): TensorSource(parameter=parameter, factor=_factor(parameter, cfg))
        for parameter in parameter_shapes(cfg)
        if parameter != EMBEDDING_NORM
    }
    if cfg.embedding_norm:
        origins[hf_name(EMBEDDING)] = TensorSource(parameter=EMBEDDING, norm=EMBEDDING_NORM)
    if cfg.tied_head and not stays_tied(cfg):
        origins[hf_name(HEAD)] = TensorSource(parameter=EMBEDDING, factor=output_multiplier(cfg))
    return origins


def stays_tied(cfg: ModelConfig) -> bool:
    """Whether embedding and head stay one matrix in the exported model."""
    return cfg.tied_head and output_multiplier(cfg) == 1.0 and not cfg.embedding_norm


def fold(origin: TensorSource, parameters: Mapping[str, Tensor], *, cfg: ModelConfig) -> Tensor:
    """Compute a tensor of the exported model; if there is nothing to fold, the parameter itself, bit for bit."""
    weight = parameters[origin.parameter]
    if origin.norm is not None:
        weight = F.rms_norm(weight, weight.shape[-1:], parameters[origin.norm], cfg.norm_eps)
    return weight if origin.factor == 1.0 else weight * origin.factor


def _factor(parameter: str, cfg: ModelConfig) -> float:
    module = parameter.split(".")[-2]
    if module == "head":
        return output_multiplier(cfg)
    if module == ("query_norm" if cfg.qk_norm else "query"):
        return attention_scale(cfg) / attention_scale(replace(cfg, mup_base_width=None))
    return 1.0


def render_config(
    cfg: ModelConfig, *, sequence_length: int, dtype: torch.dtype, eos_token_id: int | None
) -> dict[str, Any]:
    """The content of config.json; `sequence_length` is that of training."""
    architecture = Architecture.qwen3 if cfg.qk_norm else Architecture.llama
    return {
        "architectures": [str(architecture)],
        "model_type": architecture.name,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.dim,
        "intermediate_size": cfg.ffn_dim,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": sequence_length,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": stays_tied(cfg),
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | ({"mlp_bias": False} if architecture is Architecture.llama else {"use_sliding_window": False})


def assign_files(sizes: Mapping[str, int], file_bytes: int) -> dict[str, list[str]]:
    """File name -> tensors in it, in order; a tensor larger than `file_bytes` gets its own file."""
    groups: list[list[str]] = [[]]
    free_bytes = file_bytes
    for name, size in sizes.items():
        if groups[-1] and size > free_bytes:
            groups.append([])
            free_bytes = file_bytes
        groups[-1].append(name)
        free_bytes -= size
    if len(groups) == 1:
        return {ONLY_FILE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": names for n, names in enumerate(groups, start=1)}


def parse_index(content: Mapping[str, Any]) -> dict[str, str]:
    """Tensor -> file, from model.safetensors.index.json; raises on a file name that leads out of the directory."""
    places = content.get("weight_map")
    if not isinstance(places, dict):
        raise ConfigError("weight_map", "is missing")
    for file in places.values():
        plain = isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
        require(plain, "weight_map", f"{file!r} is not a plain .safetensors file name")
    return places


def parse_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` that a config.json determines; raises with the key of an unsupported feature."""
    architecture = _architecture(content.get("architectures"))
    for key, only in FIXED.items():
        value = content.get(key, only)
        require(value == only, key, f"must be {only}, got {value!r}")
    layer_types = content.get("layer_types") or []
    plain = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    require(plain, "layer_types", f"must all be full_attention, got {layer_types}")
    dim, num_heads = _count(content, "hidden_size"), _count(content, "num_attention_heads")
    head_dim = _count(content, "head_dim", dim // num_heads)
    message = f"must be hidden_size / num_attention_heads = {dim / num_heads:g}, got {head_dim}"
    require(head_dim * num_heads == dim, "head_dim", message)
    tied_head = content.get("tie_word_embeddings", False)
    require(isinstance(tied_head, bool), "tie_word_embeddings", f"must be true or false, got {tied_head!r}")
    return {
        "vocab_size": _count(content, "vocab_size"),
        "dim": dim,
        "num_layers": _count(content, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": _count(content, "num_key_value_heads", num_heads),
        "ffn_dim": _count(content, "intermediate_size"),
        "rope_theta": _rope_theta(content, LLAMA_ROPE_THETA if architecture is Architecture.llama else None),
        "norm_eps": _positive("rms_norm_eps", content.get("rms_norm_eps", DEFAULT_NORM_EPS)),
        "tied_head": tied_head,
        "qk_norm": architecture is Architecture.qwen3,
    }


def _architecture(value: object) -> Architecture:
    for architecture in Architecture:
        if value == [architecture]:
            return architecture
    raise ConfigError("architectures", f"must be one of {', '.join(Architecture)}, got {value!r}")


def _rope_theta(content: Mapping[str, Any], default: float | None) -> float:
    """The RoPE base, from whichever key this version of config.json uses."""
    theta = content.get("rope_theta", default)
    for key in ("rope_scaling", "rope_parameters"):
        options = content.get(key) or {}
        require(isinstance(options, dict), key, f"must be a section, got {options!r}")
        kind = options.get("rope_type", options.get("type", "default"))
        require(kind == "default", key, f"must be of type default, got {kind!r}")
        factor = options.get("partial_rotary_factor", 1.0)
        require(factor == 1.0, f"{key}.partial_rotary_factor", f"must be 1.0, got {factor!r}")
        theta = options.get("rope_theta", theta)
    return _positive("rope_theta", theta)


def _count(content: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = content.get(key)
    value = default if value is None else value
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(valid, key, "is missing" if value is None else f"must be a whole number above 0, got {value!r}")
    assert isinstance(value, int)
    return value


def _positive(key: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ConfigError(key, "is missing" if value is None else f"must be a number above 0, got {value!r}")
