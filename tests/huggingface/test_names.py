"""Hugging Face names and config.json of a model; folding keeps the computation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.config.errors import ConfigError
from harness.config.model import ModelConfig
from harness.huggingface import names
from harness.huggingface.names import TensorSource
from harness.model.size import num_parameters

MakeConfig = Callable[..., ModelConfig]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"tied_head": True},
    {"qk_norm": True},
    {"mup_base_width": 16},
    {"mup_base_width": 16, "tied_head": True, "qk_norm": True},
    {"embedding_norm": True, "tied_head": True},
]


def describe(cfg: ModelConfig) -> dict[str, Any]:
    content = names.render_config(cfg, sequence_length=19, dtype=torch.bfloat16, eos_token_id=7)
    read = json.loads(json.dumps(content))
    assert isinstance(read, dict)
    return read


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_parameter_is_exported(make_config: MakeConfig, changes: dict[str, Any]) -> None:
    cfg = make_config(**changes)
    shapes, layout = names.parameter_shapes(cfg), names.exported_tensors(cfg)
    assert sum(shape.numel() for shape in shapes.values()) == num_parameters(cfg)
    assert {parameter for origin in layout.values() for parameter in origin.parameters} == set(shapes)
    assert ("lm_head.weight" in layout) == (not describe(cfg)["tie_word_embeddings"])


@pytest.mark.parametrize("head_dim", [2, 6, 10, 48, 96, 128])
def test_nothing_is_folded_in_standard_parametrization(make_config: MakeConfig, head_dim: int) -> None:
    cfg = make_config(dim=4 * head_dim)
    assert all(origin.factor == 1.0 and origin.norm is None for origin in names.exported_tensors(cfg).values())


def test_multipliers_are_folded_into_weights(make_config: MakeConfig) -> None:
    cfg = make_config(dim=64, mup_base_width=16)
    factors = {name: origin.factor for name, origin in names.exported_tensors(cfg).items() if origin.factor != 1.0}
    queries = {f"model.layers.{layer}.self_attn.q_proj.weight": 0.25 for layer in range(2)}
    assert factors == queries | {"lm_head.weight": 0.25}
    factors = {
        name: origin.factor
        for name, origin in names.exported_tensors(replace(cfg, qk_norm=True)).items()
        if origin.factor != 1.0
    }
    norms = {f"model.layers.{layer}.self_attn.q_norm.weight": 0.25 for layer in range(2)}
    assert factors == norms | {"lm_head.weight": 0.25}


def test_an_unfolded_weight_is_the_parameter_itself(make_config: MakeConfig) -> None:
    weight = torch.randn(3, 4)
    folded = names.fold(TensorSource(parameter="x"), {"x": weight}, cfg=make_config())
    assert folded is weight


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ({"a": 4, "b": 6, "c": 1}, [["a", "b"], ["c"]]),
        ({"a": 40, "b": 1, "c": 9}, [["a"], ["b", "c"]]),
        ({"a": 1, "b": 40, "c": 1}, [["a"], ["b"], ["c"]]),
        ({"a": 5, "b": 5}, [["a", "b"]]),
    ],
)
def test_files_are_filled_in_order(sizes: dict[str, int], groups: list[list[str]]) -> None:
    files = names.assign_files(sizes, 10)
    assert list(files.values()) == groups
    count = len(groups)
    numbered = [f"model-0000{number}-of-0000{count}.safetensors" for number in range(1, count + 1)]
    assert list(files) == (numbered if count > 1 else ["model.safetensors"])


@pytest.mark.parametrize(
    "changes", [{}, {"tied_head": True, "num_kv_heads": 1}, {"qk_norm": True, "rope_theta": 5e5}], ids=str
)
def test_config_round_trip(make_config: MakeConfig, changes: dict[str, Any]) -> None:
    cfg = make_config(**changes)
    assert replace(make_config(), **names.parse_config(describe(cfg))) == cfg


def test_older_configs_are_accepted(make_config: MakeConfig) -> None:
    content = describe(make_config())
    for key in ("head_dim", "num_key_value_heads", "rope_parameters", "rope_theta", "tie_word_embeddings"):
        del content[key]
    options = names.parse_config(content | {"rope_scaling": None, "pretraining_tp": 1, "torch_dtype": "float16"})
    assert options["rope_theta"] == 10000.0
    assert options["num_kv_heads"] == options["num_heads"] == 4
    assert not options["tied_head"]
    assert names.parse_config(content | {"rope_theta": 5e5})["rope_theta"] == 5e5
    with pytest.raises(ConfigError, match=r"^rope_theta: is missing$"):
        names.parse_config(content | {"architectures": ["Qwen3ForCausalLM"]})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures: must be one of LlamaForCausalLM, Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures: must be one of"),
        ({"attention_bias": True}, "attention_bias: must be False, got True"),
        ({"mlp_bias": True}, "mlp_bias: must be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act: must be silu, got 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window: must be False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: must all be full_attention"),
        ({"layer_types": 3}, "layer_types: must all be full_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: must be None"),
        ({"head_dim": 16}, "head_dim: must be hidden_size / num_attention_heads = 8, got 16"),
        ({"head_dim": {}}, "head_dim: must be a whole number above 0, got {}"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling: must be of type default, got 'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: must be of type default, got 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: must be of type default, got 'yarn'"),
        ({"rope_parameters": [1]}, "rope_parameters: must be a section"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor: must be 1.0"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"vocab_size": "many"}, "vocab_size: must be a whole number above 0, got 'many'"),
        ({"num_hidden_layers": True}, "num_hidden_layers: must be a whole number above 0, got True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: must be a number above 0, got 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: must be true or false, got 'no'"),
    ],
    ids=str,
)
def test_unsupported_features_are_rejected_by_key(
    make_config: MakeConfig, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        names.parse_config(describe(make_config()) | changes)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "model.bin", "", "..", None, 3]
)
def test_index_with_paths_outside_the_directory_is_rejected(file: object) -> None:
    with pytest.raises(ConfigError, match=r"is not a plain .safetensors file name"):
        names.parse_index({"weight_map": {"x": "fine.safetensors", "y": file}})
    with pytest.raises(ConfigError, match="weight_map: is missing"):
        names.parse_index({"weight_map": [file]})
